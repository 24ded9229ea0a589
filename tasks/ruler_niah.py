"""RULER's needle-in-a-haystack tasks (section 3 of the paper): sentences that give a key its value, in a haystack.

A task is a choice of haystack, of the kinds of keys and values, and of how many keys there are, how many values each
key has, and how many keys are asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import ClassVar, Literal

from tasks.draws import Draws
from tasks.fit import Draft, Parts
from tasks.haystack import (
    DEPTHS,
    OFFICIAL_ESSAYS,
    Haystack,
    essay_files,
    essay_text,
    essays,
    haystack_draft,
    lines,
    noise,
    word_list_sentences,
)
from tasks.ruler import Conditions, RulerTask
from tasks.ruler_official import Run
from tasks.ruler_official_niah import NiahScript
from tasks.ruler_official_sentences import sentence_recipe
from tasks.sources import DataError, DataSources, fingerprint
from tasks.task import TaskError
from tasks.wording import Wording
from tasks.words import compound, listed, number, uuid

_DRAW: dict[str, Callable[[Random], str]] = {
    "words": compound,
    "numbers": lambda rng: number(rng, 7),
    "uuids": uuid,
}


@dataclass(frozen=True)
class Niah(RulerTask):
    """``haystack`` concerns the tasks on essays: see :func:`tasks.haystack.essay_files`."""

    haystack: str = "auto"

    family: ClassVar[str] = "niah"
    official_limit: ClassVar[int] = 128
    around: ClassVar[Literal["noise", "essays", "needles"]]
    unused: ClassVar[tuple[str, ...]] = ()
    """Settings that mean nothing to this task: a group's do not reach it."""
    key_kind: ClassVar[str] = "words"
    value_kind: ClassVar[str] = "numbers"
    keys: ClassVar[int] = 1
    values: ClassVar[int] = 1
    queries: ClassVar[int] = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.haystack not in ("auto", "files", "word-lists") and not str(self.haystack).endswith((".txt", ".json")):
            raise TaskError(
                f"task {self.name}: haystack must be 'auto', 'files', 'word-lists' or the name of a .txt or .json file "
                f"below haystack/, not {self.haystack!r}"
            )
        if self.around != "essays" and self.haystack != "auto":
            raise TaskError(f"task {self.name} has a haystack of {self.around}: leave the setting haystack out")
        if self.generator == "official" and self.haystack == "word-lists":
            raise TaskError(f"task {self.name}: the official generator hides its needles in essays, not in word lists")

    @property
    def parameters(self) -> dict[str, object]:
        return {
            "haystack": self.around,
            "key": self.key_kind,
            "value": self.value_kind,
            "keys": self.keys,
            "values": self.values,
            "queries": self.queries,
        }

    def recipe(self, sources: DataSources) -> dict[str, object]:
        recipe = super().recipe(sources)
        if self.around == "essays":
            files = self._essay_files(sources)
            recipe["haystack"] = {file.name: fingerprint(file) for file in files} or "word-lists"
            if self.generator == "official":
                recipe["sentences"] = sentence_recipe()
        return recipe

    def check(self, sources: DataSources, context: int | None) -> None:
        super().check(sources, context)
        if files := self._essay_files(sources):
            essay_text(files)

    def draft(self, index: int, draws: Draws, conditions: Conditions) -> Draft:
        words, rng = conditions.words, draws.stream("needles")
        taken: set[str] = set()
        entries = [
            (_fresh(self.key_kind, rng, taken), [_fresh(self.value_kind, rng, taken) for _ in range(self.values)])
            for _ in range(self.keys)
        ]
        asked = entries[: self.queries]
        needles = [self._needle(words, key, value) for key, values in entries for value in values]
        depths = draws.stream("depths").sample(DEPTHS, len(needles))
        haystack = self._haystack(conditions, taken)
        single = self.queries * self.values == 1
        before, after, prefix = words.prompt(
            singular=single,
            query=listed([key for key, _ in asked]),
            type_needle_v=self.value_kind[:-1] if single else self.value_kind,
        )
        references = tuple(value for _, values in asked for value in values)
        # Needles that are asked for come first.
        meta: dict[str, object] = {"haystack": haystack.label, "depths": depths[: len(references)]}
        return haystack_draft(
            Parts(before, after, prefix, references, meta),
            list(zip(depths, needles, strict=True)),
            haystack,
            draws.stream("haystack"),
            conditions.counter,
            conditions.room,
        )

    def _needle(self, words: Wording, key: str, value: str) -> str:
        return words.text("needle", key=key, value=value, type_needle_v=self.value_kind)

    def _haystack(self, conditions: Conditions, taken: set[str]) -> Haystack:
        words = conditions.words
        if self.around == "noise":
            return noise(words.text("noise"))
        if self.around == "needles":
            return lines("needles", lambda rng: self._distractors(words, rng, set(taken)))
        files = self._essay_files(conditions.sources)
        return essays(files) if files else word_list_sentences()

    def _distractors(self, words: Wording, rng: Random, taken: set[str]) -> Iterator[str]:
        while True:
            yield self._needle(words, _fresh(self.key_kind, rng, taken), _fresh(self.value_kind, rng, taken))

    def official(self, run: Run) -> Iterator[Parts]:
        files = self._essay_files(run.sources)
        return NiahScript(
            run,
            around=self.around,
            key_kind=self.key_kind,
            value_kind=self.value_kind,
            keys=self.keys,
            values=self.values,
            queries=self.queries,
            haystack=", ".join(file.name for file in files) or self.around,
            essays=essay_text(files) if files else "",
        ).samples()

    def _essay_files(self, sources: DataSources) -> list[Path]:
        if self.around != "essays":
            return []
        files = essay_files(self.haystack, sources, f"task {self.name}")
        if self.generator == "official" and not files:
            raise DataError(
                f"task {self.name}: the official generator needs essays: put haystack/{OFFICIAL_ESSAYS} or texts as "
                "haystack/*.txt into the data folder"
            )
        return files


def _fresh(kind: str, rng: Random, taken: set[str]) -> str:
    """A key or a value that no other needle of this prompt has."""
    while (drawn := _DRAW[kind](rng)) in taken:
        pass
    taken.add(drawn)
    return drawn


class NiahSingle1(Niah):
    name = "niah_single_1"
    summary = "one number in repeated noise"
    around = "noise"
    unused = ("haystack",)


class NiahSingle2(Niah):
    name = "niah_single_2"
    summary = "one number in essays"
    around = "essays"


class NiahSingle3(Niah):
    name = "niah_single_3"
    summary = "one uuid in essays"
    around = "essays"
    value_kind = "uuids"


class NiahMultikey1(Niah):
    name = "niah_multikey_1"
    summary = "one of four numbers in essays"
    around = "essays"
    keys = 4


class NiahMultikey2(Niah):
    name = "niah_multikey_2"
    summary = "one number among nothing but needles"
    around = "needles"
    unused = ("haystack",)


class NiahMultikey3(Niah):
    name = "niah_multikey_3"
    summary = "one uuid by its uuid among nothing but needles"
    around = "needles"
    unused = ("haystack",)
    key_kind = "uuids"
    value_kind = "uuids"


class NiahMultivalue(Niah):
    name = "niah_multivalue"
    summary = "the four numbers of one key in essays"
    around = "essays"
    values = 4


class NiahMultiquery(Niah):
    name = "niah_multiquery"
    summary = "the numbers of four keys in essays"
    around = "essays"
    keys = 4
    queries = 4
