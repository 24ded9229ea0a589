"""ROUGE-L as the PyPI package ``rouge`` 1.0.1 computes it with its defaults, which is what LongBench reports.

It is a flavour of its own. Texts are cut at every ".", words at blanks, case is kept and nothing is stemmed. Each
sentence of the reference is aligned with each sentence of the prediction; the words of all alignments together make
one *set*, and so do the words of either text:

    recall = |aligned| / |reference|    precision = |aligned| / |prediction|    f = 2 p r / (p + r + 1e-8)

so identical texts give 0.999999995. Which of several longest alignments is taken decides the set: from the end, equal
words are paired, else a word of the reference is skipped where that alone keeps the length, else one of the prediction.

Two things make a score 0: a text without sentences (empty, or nothing but dots), and an alignment that takes too many
steps. The package walks recursively, LongBench counts any exception as 0, and with CPython's limit of 1000 frames its
script gets through 990 steps. So an identical sentence of 991 words without a full stop scores 0, and does here, on
any interpreter and from any depth of calls.
"""

from __future__ import annotations

from collections.abc import Sequence

LONGEST_WALK = 990
"""Pairings and skips of one alignment, above which LongBench's script ends in a RecursionError."""


def rouge_l(prediction: str, reference: str) -> float:
    said, wanted = _sentences(prediction), _sentences(reference)
    if not said or not wanted:
        return 0.0
    aligned: set[str] = set()
    for sentence in wanted:
        for candidate in said:
            words, steps = align(sentence, candidate)
            if steps > LONGEST_WALK:
                return 0.0
            aligned.update(words)
    recall = len(aligned) / len(set().union(*wanted))
    precision = len(aligned) / len(set().union(*said))
    return 2.0 * ((precision * recall) / (precision + recall + 1e-8))


def align(reference: Sequence[str], prediction: Sequence[str]) -> tuple[list[str], int]:
    """A longest common subsequence, and the pairings and skips that lead to the end of either sequence."""
    lengths = _lengths(reference, prediction)
    row, column = len(reference), len(prediction)
    words: list[str] = []
    steps = 0
    while row and column:
        steps += 1
        if reference[row - 1] == prediction[column - 1]:
            row, column = row - 1, column - 1
            words.append(reference[row])
        elif lengths[row - 1][column] > lengths[row][column - 1]:
            row -= 1
        else:
            column -= 1
    return words[::-1], steps


def _lengths(reference: Sequence[str], prediction: Sequence[str]) -> list[list[int]]:
    """``[i][j]``: how long a common subsequence of the first i and the first j words can be."""
    above = [0] * (len(prediction) + 1)
    table = [above]
    for word in reference:
        row = [0]
        for column, candidate in enumerate(prediction):
            row.append(above[column] + 1 if word == candidate else max(above[column + 1], row[column]))
        table.append(row)
        above = row
    return table


def _sentences(text: str) -> list[list[str]]:
    # A sentence of nothing but blanks has one word, the empty one, as it has in the package.
    return [" ".join(sentence.split()).split(" ") for sentence in text.split(".") if sentence]
