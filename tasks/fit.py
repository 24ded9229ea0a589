"""Fitting a prompt to a length: search on the counts of its pieces, then verify on the text itself.

Lengths of pieces do not quite add up to the length of their text (tokens merge over the seams), so the estimate is
corrected by what the text shows, until one more unit would be too long. That takes one or two true counts per sample.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from typing import Protocol

from tasks.task import ContextTooSmall
from tasks.tokens import TokenCounter


@dataclass(frozen=True)
class Parts:
    """A prompt's parts with its answer; see :class:`tasks.sample.Sample`."""

    context: str
    question: str
    answer_prefix: str
    references: tuple[str, ...]
    meta: dict[str, object] = field(default_factory=dict)


class Draft(Protocol):
    """A prompt as a function of its number of haystack units; all random choices are made already."""

    @property
    def least(self) -> int:
        """The smallest number of units that still asks a question."""

    @property
    def most(self) -> int:
        """The number of units at hand."""

    def tokens(self, units: int) -> int:
        """An estimate of the whole prompt's length that grows with ``units``."""

    def parts(self, units: int) -> Parts: ...


def fit(draft: Draft, counter: TokenCounter, room: int) -> Parts:
    """The prompt with the most units that has at most ``room`` tokens."""
    fits, too_long = draft.least - 1, draft.most + 1
    best: Parts | None = None
    shortest = drift = 0
    while too_long - fits > 1:
        candidates = range(fits + 1, too_long)
        promising = bisect_right(candidates, room - drift, key=draft.tokens)
        if promising == 0 and best is not None:
            break
        units = fits + max(promising, 1)
        parts = draft.parts(units)
        length = prompt_length(parts, counter)
        drift = length - draft.tokens(units)
        if length <= room:
            fits, best = units, parts
        else:
            too_long, shortest = units, length
    if best is None:
        raise ContextTooSmall(f"the smallest prompt has {shortest} tokens, and there is room for {max(room, 0)}")
    return best


def prompt_length(parts: Parts, counter: TokenCounter) -> int:
    # Part by part: a protocol may tokenise them apart, which gives the longer prompt of the two.
    return counter.count(parts.context) + counter.count(parts.question) + counter.count(parts.answer_prefix)
