"""Middle truncation in LongBench's order, on a prompt whose context and question stay apart.

    whole prompt -> ids, special tokens counted -> first half and last half -> text without special tokens, joined

The chat template is put around the result afterwards and is never cut. Decoding and tokenising again may merge or part
tokens at the seam, so the length that a model sees is about ``max_length``, and so it is officially; an odd
``max_length`` keeps one token less.

The prompt's text is the official one whatever happens to its parts. A cut inside the context leaves the question whole
at the end, where it is found again. A cut inside the question leaves no border that would mean anything: then the
whole text is the question and the context is empty, so that a protocol which compresses the context alone refuses the
sample, and all others read the prompt as it is.
"""

from __future__ import annotations

from dataclasses import dataclass

from tasks.tokens import Tokenizer


@dataclass(frozen=True)
class CutPrompt:
    """``tokens``: of the whole prompt before any cut. ``truncated``: something is missing between the halves."""

    context: str
    question: str
    tokens: int
    truncated: bool
    question_cut: bool = False


def cut_prompt(context: str, question: str, tokenizer: Tokenizer, max_length: int) -> CutPrompt:
    """The parts of the official prompt; joined they are exactly its text."""
    ids: list[int] = tokenizer(context + question, add_special_tokens=True)["input_ids"]
    if len(ids) <= max_length:
        return CutPrompt(context, question, len(ids), truncated=False)
    head, tail = halves(ids, tokenizer, max_length)
    border = find_question(tail, question)
    if border is None:
        return CutPrompt("", head + tail, len(ids), truncated=True, question_cut=True)
    return CutPrompt(head + tail[:border], tail[border:], len(ids), truncated=True)


def halves(ids: list[int], tokenizer: Tokenizer, max_length: int) -> tuple[str, str]:
    """The texts of the first and of the last ``max_length // 2`` ids."""
    half = max_length // 2
    return (
        tokenizer.decode(ids[:half], skip_special_tokens=True),
        tokenizer.decode(ids[-half:], skip_special_tokens=True),
    )


def find_question(tail: str, question: str) -> int | None:
    """Where the question begins that ``tail`` ends with; None where it is not whole.

    Some tokenizers do not give back every blank (they tidy up before punctuation), so blanks may differ.
    """
    if tail.endswith(question):
        return len(tail) - len(question)
    place = len(tail)
    for letter in reversed("".join(question.split())):
        place = len(tail[:place].rstrip()) - 1
        if place < 0 or tail[place] != letter:
            return None
    blanks = len(question) - len(question.lstrip())
    while blanks and place and tail[place - 1].isspace():
        place, blanks = place - 1, blanks - 1
    return place
