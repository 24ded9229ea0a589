"""From a sample to token ids.

    chat       <template> context question </template><assistant header> answer prefix
    plain      context question answer prefix

In a chat the answer prefix follows the assistant's header: ``stripped`` of the blank that separates it in plain text,
or ``verbatim``, as RULER's own scripts join it. There is exactly one beginning-of-sequence token where the tokenizer
has one: a template that writes it gets no second, one that does not gets it from the tokenizer.

With the question ``appended``, a method compresses the ids up to the end of the context, and the rest is read by the
model afterwards, through the compressed cache.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from tasks.sample import Sample
from tasks.task import TaskError
from tasks.tokens import Tokenizer

Question = Literal["compressed", "appended"]
ChatTemplate = Literal["auto", "always", "never"]
AnswerPrefix = Literal["stripped", "verbatim"]


class PromptError(TaskError):
    """A sample that cannot be put to this tokenizer in the way asked for."""


@dataclass(frozen=True)
class Prompt:
    """``ids`` are compressed; ``appended`` follow after compression."""

    ids: list[int]
    appended: list[int] = field(default_factory=list)


def render(
    sample: Sample,
    tokenizer: Tokenizer,
    question: Question = "compressed",
    chat_template: ChatTemplate = "auto",
    answer_prefix: AnswerPrefix = "stripped",
) -> Prompt:
    text, split = prompt_text(sample, tokenizer, uses_chat(sample.chat, chat_template), answer_prefix)
    opening = _opening(tokenizer)
    if question == "compressed":
        return Prompt(_opened(opening, _ids(tokenizer, text)))
    if not sample.context.strip():
        why = ": truncation left no border between them, give more room" if sample.meta.get("truncated") else ""
        raise PromptError(
            f"{sample.task}, sample {sample.index}: it has no context to compress without its question{why}"
        )
    return Prompt(_opened(opening, _ids(tokenizer, text[:split])), _ids(tokenizer, text[split:]))


def prompt_text(
    sample: Sample, tokenizer: Tokenizer, chat: bool, answer_prefix: AnswerPrefix = "stripped"
) -> tuple[str, int]:
    """The whole prompt, and where its context ends."""
    content = sample.context + sample.question
    if not chat:
        return content + sample.answer_prefix, len(sample.context)
    text = _templated(tokenizer, content)
    start = text.rfind(content.strip())
    if start < 0:
        raise PromptError(
            f"the chat template changes the text of {sample.task}, sample {sample.index}: {content[:60]!r}"
        )
    # Templates may strip the user's turn.
    end = start + min(len(sample.context.lstrip()), len(content.strip()))
    return text + (sample.answer_prefix.lstrip() if answer_prefix == "stripped" else sample.answer_prefix), end


def prompt_overhead(tokenizer: Tokenizer, chat: bool) -> int:
    """Tokens that a prompt has besides its parts: the chat template's, or the special ones of plain text."""
    opening = _opening(tokenizer)
    if not chat:
        return len(opening)
    turn = "Hello"
    return len(_opened(opening, _ids(tokenizer, _templated(tokenizer, turn)))) - len(_ids(tokenizer, turn))


def uses_chat(sample_chat: bool, chat_template: ChatTemplate) -> bool:
    """``auto``: as the task's own protocol says."""
    return sample_chat if chat_template == "auto" else chat_template == "always"


def _templated(tokenizer: Tokenizer, content: str) -> str:
    if getattr(tokenizer, "chat_template", None) is None:
        raise PromptError(
            f"the tokenizer {getattr(tokenizer, 'name_or_path', '') or type(tokenizer).__name__} has no chat template: "
            "use an instruction-tuned model, or set chat_template: never"
        )
    turn = [{"role": "user", "content": content}]
    import jinja2  # templates are its language; nothing before the first prompt needs it

    try:
        text: str = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
    except jinja2.TemplateError as error:
        raise PromptError(f"the chat template refuses the prompt {content[:60]!r}: {error}") from error
    return text


def _opening(tokenizer: Tokenizer) -> list[int]:
    """What the tokenizer itself puts before a text; what it may put behind (an end token) never ends a prompt."""
    probe = "Hello"
    plain = _ids(tokenizer, probe)
    marked: list[int] = tokenizer(probe, add_special_tokens=True)["input_ids"]
    for start in range(len(marked) - len(plain) + 1):
        if marked[start : start + len(plain)] == plain:
            return marked[:start]
    raise PromptError(f"the tokenizer {type(tokenizer).__name__} changes a text when it adds its special tokens")


def _opened(opening: list[int], ids: list[int]) -> list[int]:
    return ids if ids[: len(opening)] == opening else opening + ids


def _ids(tokenizer: Tokenizer, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"] if text else []
    return ids
