"""RULER's official generator (NVIDIA/RULER, commit c3f5e3b4), reproduced to the byte: what its five scripts share.

A script has one stream of random numbers for a whole file. It looks for the largest number of haystack units with a
binary search, each step on a draft drawn anew, then draws sample after sample with that number, taking units away in
steps while a sample is too long. So bytes depend on every draw that was made before, those of the search included.

    seed           42 + data seed; numpy's stream, where a script has one, has the same seed
    shuffles       each with a generator of its own, seeded alike: one arrangement for all samples of a file
    model tokens   what the chat template takes is subtracted from the length, as the scripts' model_template_token is

Where even the fewest units do not fit, the scripts would go on drawing for ever; here :class:`ContextTooSmall` ends it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

from tasks.fit import Parts
from tasks.sample import Sample
from tasks.sources import DataSources
from tasks.task import ContextTooSmall
from tasks.tokens import TokenCounter
from tasks.wording import Wording

REVISION = "c3f5e3b4"
FIRST_SEED = 42
SHORT_BELOW = 4096
"""Below this context length some steps are smaller."""
TRIES_AT_THE_LEAST = 50
"""Drafts of the fewest units that are drawn before a context is called too small: their lengths differ a little."""


@dataclass(frozen=True)
class Run:
    """What one run of a script starts from, and its stream of random numbers."""

    words: Wording
    sources: DataSources
    counter: TokenCounter
    context: int
    overhead: int
    new_tokens: int
    data_seed: int
    rng: Random = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "rng", Random(self.seed))

    @property
    def seed(self) -> int:
        return FIRST_SEED + self.data_seed

    @property
    def length(self) -> int:
        """Tokens of a prompt and its answer."""
        return self.context - self.overhead

    @property
    def short(self) -> bool:
        return self.context < SHORT_BELOW

    def shuffle(self, entries: list[Any]) -> None:
        """Into the one arrangement that lists of this length have in this run."""
        Random(self.seed).shuffle(entries)

    def tokens(self, parts: Parts) -> int:
        return self.counter.count(f"{parts.context}{parts.question}{parts.answer_prefix}")

    def three_times(self, tokens: int, units: int) -> int:
        """Where most searches begin from above, given the length of one draft."""
        return int(self.length / (tokens / units) * 3)

    def most_units(self, total: Callable[[int], int], step: int, upper: int) -> int:
        """The binary search. ``total`` draws a draft and gives its length with its answer; ``step`` where none fits."""
        lower, upper, found = step, max(upper, 2 * step), step
        while lower <= upper:
            middle = (lower + upper) // 2
            if total(middle) <= self.length:
                found, lower = middle, middle + 1
            else:
                upper = middle - 1
        return found

    def fitted(self, draw: Callable[[int], Parts], units: int, step: int) -> Parts:
        """A sample of ``units``, or of as many steps fewer as it takes."""
        for _ in range(units // step + TRIES_AT_THE_LEAST):
            try:
                parts = draw(units)
            except (ValueError, IndexError):  # fewer units than needles or documents: the scripts try again as well
                parts = None
            if parts is not None:
                length = self.tokens(parts) + self.new_tokens
                if length <= self.length:
                    return self.described(parts, length)
            units -= step if units > step else 0
        raise ContextTooSmall(
            f"the official generator's least haystack ({units} units) does not fit {self.length} tokens"
        )

    def described(self, parts: Parts, length: int) -> Parts:
        facts = {"random_seed": self.seed, "length": length, "length_w_model_temp": length + self.overhead}
        return replace(parts, meta={**parts.meta, **facts})


def record(sample: Sample) -> dict[str, object]:
    """A sample of the official generator as a line of its file."""
    text, references = sample.context + sample.question, list(sample.references)
    needle = "token_position_answer" in sample.meta
    line: dict[str, object] = {
        # In needle tasks the scripts overwrite the index with the place of the answer.
        "index": text.find(references[0]) if needle else sample.index,
        "input": text,
        "outputs": references,
        "length": sample.meta["length"],
        "length_w_model_temp": sample.meta["length_w_model_temp"],
        "answer_prefix": sample.answer_prefix,
    }
    return line | ({"token_position_answer": sample.meta["token_position_answer"]} if needle else {})
