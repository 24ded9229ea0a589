"""RULER's variable tracking (section 3 of the paper): a chain of assignments scattered through noise.

A solved example with names and a value of its own stands before the text, as in the official generator.
"""

from __future__ import annotations

import string
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from random import Random

from tasks.draws import Draws
from tasks.fit import Draft, Parts
from tasks.haystack import DEPTHS, Piece, Stack, haystack_draft, noise
from tasks.ruler import Conditions, RulerTask
from tasks.ruler_official import Run
from tasks.ruler_official_vt import VariableTrackingScript
from tasks.wording import Wording

HOPS = 4
EXAMPLE_LINES = 15
NAME_LETTERS = 5
EXAMPLE_NAME_LETTERS = 3


class VariableTracking(RulerTask):
    name = "vt"
    summary = "all names of a chain of five assignments in repeated noise"
    family = "variable_tracking"
    official_limit = 30

    @property
    def parameters(self) -> dict[str, object]:
        return {"chains": 1, "hops": HOPS, "example_lines": EXAMPLE_LINES}

    def draft(self, index: int, draws: Draws, conditions: Conditions) -> Draft:
        words = conditions.words
        value, example_value = draws.stream("values").sample(range(10_000, 100_000), 2)
        frame, needles = _chain(words, draws.stream("chain"), value, NAME_LETTERS)
        solved = _example(words, draws.stream("example"), example_value)
        return haystack_draft(
            replace(frame, context=f"{solved}\n\n{frame.context}"),
            needles,
            noise(words.text("noise")),
            draws.stream("haystack"),
            conditions.counter,
            conditions.room,
        )

    def official(self, run: Run) -> Iterator[Parts]:
        return VariableTrackingScript(run, HOPS, NAME_LETTERS, EXAMPLE_NAME_LETTERS).samples()


def _chain(words: Wording, rng: Random, value: int, letters: int) -> tuple[Parts, list[tuple[int, str]]]:
    """A prompt without its noise, and the chain's lines with their depths, in order."""
    names: list[str] = []
    while len(names) <= HOPS:
        name = "".join(rng.choices(string.ascii_uppercase, k=letters))
        names += [name] if name not in names else []
    statements = [words.text("assign", variable=names[0], value=value)]
    statements += [words.text("copy", variable=name, source=source) for source, name in pairwise(names)]
    depths = sorted(rng.sample(DEPTHS, len(statements)))
    before, after, prefix = words.prompt(query=value, num_v=len(names))
    meta: dict[str, object] = {"haystack": "noise", "depths": depths}
    return Parts(before, after, prefix, tuple(names), meta), list(zip(depths, statements, strict=True))


def _example(words: Wording, rng: Random, value: int) -> str:
    frame, needles = _chain(words, rng, value, EXAMPLE_NAME_LETTERS)
    lines = [Piece(words.text("noise"), True)] * EXAMPLE_LINES
    text = Stack(lines, (), "\n").text(EXAMPLE_LINES, needles)
    return f"{frame.context}{text}{frame.question}{frame.answer_prefix} {' '.join(frame.references)}"
