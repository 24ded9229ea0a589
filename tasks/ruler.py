"""RULER (Hsieh et al. 2024, arXiv:2404.06654): what its tasks share. One file per family beside this one.

A context length includes the tokens to generate, the answer prefix and the chat template. Where the official generator
has one fixed position for all samples (the order of needles and of common words), positions are drawn per sample.
Sample i depends on (seed, task, context length, i, recipe) alone, never on how many samples are asked for; its
length is fitted with the tokenizer at hand.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from tasks.draws import Draws
from tasks.fit import Draft, fit
from tasks.sample import Sample
from tasks.sources import DataSources, content_hash
from tasks.task import ContextTooSmall, check_choice, check_context, check_limit
from tasks.tokens import TokenCounter, Tokenizer
from tasks.wording import WORDINGS, Wording, WordingChoice, load_wording
from tasks.words import word_recipe


@dataclass(frozen=True)
class Conditions:
    """What all samples of one run share. ``room``: tokens of a prompt, template and answer set aside."""

    words: Wording
    sources: DataSources
    counter: TokenCounter
    context: int
    room: int


@dataclass(frozen=True)
class RulerTask:
    """A family gives :attr:`parameters` and :meth:`draft`; :meth:`recipe` also says what else its samples rest on."""

    max_new_tokens: int | None = None
    wording: WordingChoice = "auto"

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

    @property
    def parameters(self) -> dict[str, object]:
        """The official numbers of this task."""
        raise NotImplementedError

    @property
    def chat(self) -> bool:
        return True

    @property
    def metric(self) -> str:
        return "string_match_all"

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
            "wording": {"source": words.source, "sha256": words.sha256},
            "words": word_recipe(),
        }

    def check(self, sources: DataSources, context: int | None) -> None:
        check_context(self.name, self.contextual, context)
        if context is not None and context <= self.generation_limit:
            raise ContextTooSmall(
                f"task {self.name}: a context of {context} tokens has no room for a prompt beside the "
                f"{self.generation_limit} tokens to generate; ask for a longer context"
            )
        self.recipe(sources)

    def available(self, sources: DataSources) -> int | None:
        return None

    def samples(
        self, tokenizer: Tokenizer, sources: DataSources, context: int | None, seed: int, count: int, overhead: int
    ) -> list[Sample]:
        self.check(sources, context)
        assert context is not None
        recipe = content_hash(self.recipe(sources))
        room = context - self.generation_limit - overhead
        conditions = Conditions(self.words(sources), sources, TokenCounter(tokenizer), context, room)
        try:
            return [
                self._sample(index, Draws(seed, self.name, context, index, recipe), conditions)
                for index in range(count)
            ]
        except ContextTooSmall as error:
            raise ContextTooSmall(
                f"task {self.name}: a context of {context} tokens is too small: {error}, once {overhead} are set aside "
                f"for the chat template and {self.generation_limit} for the answer; ask for a longer context"
            ) from error

    def _sample(self, index: int, draws: Draws, conditions: Conditions) -> Sample:
        parts = fit(self.draft(draws, conditions), conditions.counter, conditions.room)
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
            meta={"wording": conditions.words.source, **parts.meta},
        )

    def words(self, sources: DataSources) -> Wording:
        return load_wording(self.family, self.wording, sources)

    def draft(self, draws: Draws, conditions: Conditions) -> Draft:
        """One sample with all its random choices made, its length still open."""
        raise NotImplementedError
