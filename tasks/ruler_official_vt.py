"""The official generator's variable tracking script; see :mod:`tasks.ruler_official`.

Its solved example is made once, by the same search with 500 tokens to fill, and given other names and another value in
every sample. Values come from numpy's stream, all else from python's.
"""

from __future__ import annotations

import string
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

from tasks.fit import Parts
from tasks.ruler_official import Run
from tasks.task import ContextTooSmall, TaskError

EXAMPLE_LENGTH = 500
EXAMPLE_STEP = 5
EXAMPLE_VALUE = "12345"
LINES_PER_STEP = 10
LINES_PER_SHORT_STEP = 5


@dataclass
class VariableTrackingScript:
    run: Run
    hops: int
    name_letters: int
    example_name_letters: int

    def samples(self) -> Iterator[Parts]:
        run, step = self.run, LINES_PER_SHORT_STEP if self.run.short else LINES_PER_STEP
        example, names = self._example()
        upper = run.three_times(run.tokens(self._draw(step)), step)
        beside = run.counter.count(example) + run.new_tokens
        units = run.most_units(lambda units: run.tokens(self._draw(units)) + beside, step, upper)

        def after_the_example(units: int) -> Parts:
            parts = self._draw(units)
            return replace(parts, context=f"{self._renamed(example, names)}\n{parts.context}")

        while True:
            yield run.fitted(after_the_example, units, step)

    def _example(self) -> tuple[str, tuple[str, ...]]:
        """The solved example, and the names in it."""
        run = replace(self.run, context=EXAMPLE_LENGTH, new_tokens=0)
        upper = run.three_times(run.tokens(self._draw(EXAMPLE_STEP, example=True)), EXAMPLE_STEP)
        units = run.most_units(lambda units: run.tokens(self._draw(units, example=True)), EXAMPLE_STEP, upper)
        try:
            parts = run.fitted(lambda units: self._draw(units, example=True), units, EXAMPLE_STEP)
        except ContextTooSmall as error:
            raise TaskError(
                f"task vt: the official generator makes its solved example in {EXAMPLE_LENGTH} tokens less the chat "
                f"template's {run.overhead}, at any context length, and that is too little: set generator: own"
            ) from error
        text = f"{parts.context}{parts.question}{parts.answer_prefix} {' '.join(parts.references)}\n"
        return text, parts.references

    def _draw(self, units: int, example: bool = False) -> Parts:
        """A prompt of ``units`` lines of noise and one chain."""
        rng, words = self.run.rng, self.run.words
        names = self._names(self.example_name_letters if example else self.name_letters)
        value = EXAMPLE_VALUE if example else self._value()
        chain = [words.text("assign", variable=names[0], value=value)]
        chain += [words.text("copy", variable=name, source=source) for source, name in pairwise(names)]
        lines = [words.text("noise")] * units
        places = sorted(rng.sample(range(units), len(chain)))
        for above, (place, line) in enumerate(zip(places, chain, strict=True)):
            lines.insert(place + above, line)
        text = "\n".join(lines).replace(". \n", ".\n")
        before, after, prefix = words.prompt(query=value, num_v=len(names))
        meta: dict[str, object] = {"haystack": "noise", "depths": [round(100 * place / units) for place in places]}
        return Parts(before + text, after, prefix, tuple(names), meta)

    def _names(self, letters: int) -> list[str]:
        # The scripts fail where two names are the same; here they are drawn again.
        while True:
            count = self.hops + 1
            names = ["".join(self.run.rng.choices(string.ascii_uppercase, k=letters)) for _ in range(count)]
            if len(set(names)) == count:
                return names

    def _renamed(self, example: str, names: tuple[str, ...]) -> str:
        for name in names:
            drawn = "".join(self.run.rng.choices(string.ascii_uppercase, k=len(name)))
            example = example.replace(name, drawn)
        return example.replace(EXAMPLE_VALUE, self._value())

    def _value(self) -> str:
        return str(self._numpy.randint(10_000, 99_999))

    @cached_property
    def _numpy(self) -> Any:
        from numpy.random import RandomState

        return RandomState(self.run.seed)
