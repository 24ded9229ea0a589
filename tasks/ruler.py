"""RULER (Hsieh et al. 2024, arXiv:2404.06654): what its tasks share. One file per family beside this one.

A context length includes the tokens to generate, the answer prefix and the chat template. There are two generators:

    own       positions are drawn per sample where the official generator has one fixed arrangement for all of them
              (the gold document, the order of needles, of common words and of coded words), and a prompt is filled
              as far as its tokenizer allows. Sample i depends on (seed, task, context, i, recipe) alone.
    official  the same bytes as NVIDIA/RULER's own scripts; see :mod:`tasks.ruler_official`.

Neither lets a sample depend on how many are asked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count as indices
from itertools import islice
from typing import ClassVar, Literal

from tasks import metrics
from tasks.draws import Draws
from tasks.fit import Draft, Parts, fit
from tasks.ruler_official import REVISION, Run
from tasks.sample import Sample
from tasks.sources import DataSources, content_hash
from tasks.task import ContextTooSmall, TaskError, check_choice, check_context, check_limit, check_room, nearest
from tasks.tokens import TokenCounter, Tokenizer
from tasks.wording import WORDINGS, Wording, WordingChoice, load_wording
from tasks.words import word_recipe

GENERATORS = ("own", "official")

METRIC_OF = {
    "niah_single_1": "string_match_all",
    "niah_single_2": "string_match_all",
    "niah_single_3": "string_match_all",
    "niah_multikey_1": "string_match_all",
    "niah_multikey_2": "string_match_all",
    "niah_multikey_3": "string_match_all",
    "niah_multivalue": "string_match_all",
    "niah_multiquery": "string_match_all",
    "vt": "string_match_all",
    "cwe": "string_match_all",
    "fwe": "string_match_all",
    "qa_1": "string_match_part",
    "qa_2": "string_match_part",
}
"""The 13 tasks and their official metrics."""


def score(task: str, prediction: str, references: Sequence[str]) -> float:
    """RULER's own score of a prediction, 0 to 1: the share of references found; for qa_1 and qa_2 whether any is."""
    if task not in METRIC_OF:
        raise TaskError(f"RULER has no task {task!r}{nearest(task, METRIC_OF)}; it has {', '.join(METRIC_OF)}")
    return metrics.score(METRIC_OF[task], prediction, references)


@dataclass(frozen=True)
class Conditions:
    """What all samples of one run share. ``room``: tokens of a prompt, template and answer set aside."""

    words: Wording
    sources: DataSources
    counter: TokenCounter
    context: int
    room: int
    seed: int


@dataclass(frozen=True)
class RulerTask:
    """A family gives :attr:`parameters` and :meth:`draft`; :meth:`recipe` also says what else its samples rest on."""

    max_new_tokens: int | None = None
    wording: WordingChoice = "auto"
    generator: Literal["own", "official"] = "own"

    name: ClassVar[str]
    version: ClassVar[int] = 1
    summary: ClassVar[str]
    contextual: ClassVar[bool] = True
    seeded: ClassVar[bool] = True
    family: ClassVar[str]
    official_limit: ClassVar[int]

    def __post_init__(self) -> None:
        check_limit(self.name, self.max_new_tokens)
        check_choice(self.name, "wording", self.wording, WORDINGS)
        check_choice(self.name, "generator", self.generator, GENERATORS)
        if self.generator == "official" and self.wording == "own":
            raise TaskError(
                f"task {self.name}: the official generator writes the official wording: leave the setting wording out, "
                "or set generator: own"
            )

    @property
    def parameters(self) -> dict[str, object]:
        """The official numbers of this task."""
        raise NotImplementedError

    @property
    def chat(self) -> bool:
        return True

    @property
    def metric(self) -> str:
        return METRIC_OF[self.name]

    @property
    def generation_limit(self) -> int:
        return self.max_new_tokens or self.official_limit

    def recipe(self, sources: DataSources) -> dict[str, object]:
        words = self.words(sources)
        return {
            "task": self.name,
            "version": self.version,
            "parameters": self.parameters,
            "max_new_tokens": self.generation_limit,
            "generator": f"official {REVISION}" if self.generator == "official" else "own",
            "wording": words.recipe,
            "words": word_recipe(),
        }

    def check(self, sources: DataSources, context: int | None) -> None:
        check_context(self.name, self.contextual, context)
        check_room(self.name, context, self.generation_limit)
        self.recipe(sources)

    def available(self, sources: DataSources) -> int | None:
        return None

    def samples(
        self, tokenizer: Tokenizer, sources: DataSources, context: int | None, seed: int, count: int, overhead: int
    ) -> list[Sample]:
        self.check(sources, context)
        assert context is not None
        available = self.available(sources)
        wanted = count if available is None else min(count, available)
        words, counter = self.words(sources), TokenCounter(tokenizer)
        if self.generator == "official":
            run = Run(words, sources, counter, context, overhead, self.generation_limit, seed)
            made = self.official(run)
        else:
            room = context - self.generation_limit - overhead
            made = self._drawn(Conditions(words, sources, counter, context, room, seed))
        try:
            return [self._sample(index, parts, words) for index, parts in enumerate(islice(made, wanted))]
        except ContextTooSmall as error:
            raise ContextTooSmall(
                f"task {self.name}: a context of {context} tokens is too small: {error}, once {overhead} are set aside "
                f"for the chat template and {self.generation_limit} for the answer; ask for a longer context"
            ) from error

    def _drawn(self, conditions: Conditions) -> Iterator[Parts]:
        recipe = content_hash(self.recipe(conditions.sources))
        for index in indices():
            draws = Draws(conditions.seed, self.name, conditions.context, index, recipe)
            yield fit(self.draft(index, draws, conditions), conditions.counter, conditions.room)

    def _sample(self, index: int, parts: Parts, words: Wording) -> Sample:
        return Sample(
            task=self.name,
            index=index,
            context=parts.context,
            question=parts.question,
            answer_prefix=parts.answer_prefix,
            references=parts.references,
            max_new_tokens=self.generation_limit,
            metric=self.metric,
            chat=self.chat,
            meta={"generator": self.generator, **words.meta, **parts.meta},
        )

    def words(self, sources: DataSources) -> Wording:
        return load_wording(self.family, "official" if self.generator == "official" else self.wording, sources)

    def draft(self, index: int, draws: Draws, conditions: Conditions) -> Draft:
        """Sample ``index`` with all its random choices made, its length still open."""
        raise NotImplementedError

    def official(self, run: Run) -> Iterator[Parts]:
        """The samples of the official script, one after the other."""
        raise NotImplementedError
