"""From a prompt to compressed caches: one prefill, and a fork of it for each (method, budget).

Prompts are taken a few at a time, so that methods which run the model again (lookahead) can share their products.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from kvcache.budget import Base, Budget, ResolvedBudget
from kvcache.method import Method, Observations
from kvcache.pool import Compressed, MemoryBreakdown
from kvcache.prefill import LayerPrefill, Prefill
from workers.attention import PrefillStep
from workers.continuation import continuations
from workers.hidden import hidden_moments, query_projector
from workers.linear import LinearCache, LinearRows
from workers.memory import lacks_memory
from workers.models import LoadedModel

FAULTS = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""What code may raise on one sample. It costs that sample's rows and no others."""


@dataclass(frozen=True)
class Fork:
    """One cell of one prompt. ``key`` is the caller's; ``seed`` is that of the method's own randomness."""

    key: Any
    method: Method
    budget: Budget
    seed: str


@dataclass(frozen=True)
class Prompt:
    """Token ids to compress, ids that follow uncompressed, and what is to be generated for each fork.

    Nothing ends the first ``min_new_tokens``: neither the model's stop ids nor a text of ``stop``.
    """

    key: Any
    ids: list[int]
    appended: list[int]
    max_new_tokens: int
    forks: list[Fork]
    stop: tuple[str, ...] = ()
    min_new_tokens: int = 0
    base: Base = "prompt"


@dataclass
class Generation:
    """The outcome of one fork. ``error`` is set, and the rest is what was known, when it failed.

    ``held_tokens``: prompt and generated tokens that were fed, those that a full cache would hold at the end.
    """

    prompt: Prompt
    fork: Fork
    tokens: list[int] = field(default_factory=list)
    finish_reason: str = ""
    error: str = ""
    budget: ResolvedBudget | None = None
    at_prefill: MemoryBreakdown = field(default_factory=MemoryBreakdown)
    at_end: MemoryBreakdown = field(default_factory=MemoryBreakdown)
    peak_held: int = 0
    method_facts: dict[str, Any] = field(default_factory=dict)
    held_tokens: int = 0
    prefill_s: float = 0.0
    compress_s: float = 0.0
    decode_s: float = 0.0
    batch_rows: int = 0

    def stopped(self, tokenizer: Any) -> bool:
        """Whether a stop text has been generated."""
        if not self.prompt.stop:
            return False
        return self._stop_at(tokenizer.decode(self.tokens, skip_special_tokens=True), tokenizer) >= 0

    def text(self, tokenizer: Any) -> str:
        """What was generated, cut off before the first stop text."""
        text: str = tokenizer.decode(self.tokens, skip_special_tokens=True)
        end = self._stop_at(text, tokenizer)
        return text if end < 0 else text[:end]

    def _stop_at(self, text: str, tokenizer: Any) -> int:
        spared = len(tokenizer.decode(self.tokens[: self.prompt.min_new_tokens], skip_special_tokens=True))
        ends = [text.find(stop, spared) for stop in self.prompt.stop]
        return min((end for end in ends if end >= 0), default=-1)


@dataclass
class Ready:
    """A fork that is compressed and waits for a row."""

    generation: Generation
    compressed: Compressed


@dataclass(frozen=True)
class _Open:
    """A fork of a prefilled prompt."""

    generation: Generation
    prefill: Prefill


class PromptForks:
    """Prefills prompts and compresses their forks."""

    def __init__(self, model: LoadedModel, prefill_chunk: int) -> None:
        self._model = model
        self._chunk = prefill_chunk

    def fork(self, prompts: Sequence[Prompt]) -> Iterator[Ready | Generation]:
        """Every fork of these prompts: ready for a row, or failed."""
        opened: list[_Open] = []
        for prompt in prompts:
            began = time.perf_counter()
            generations = [Generation(prompt, fork) for fork in prompt.forks]
            try:
                prefill = self.prefill(prompt)
            except FAULTS as error:
                yield from (failed(generation, error) for generation in generations)
                continue
            for generation in generations:
                generation.prefill_s = self._model.elapsed(began)
                try:
                    generation.budget = self._resolve(generation, prefill)
                except ValueError as error:
                    yield failed(generation, error)
                else:
                    opened.append(_Open(generation, prefill))
        for method in dict.fromkeys(one.generation.fork.method for one in opened):
            yield from self._compress(method, [one for one in opened if one.generation.fork.method == method])

    def prefill(self, prompt: Prompt) -> Prefill:
        """Full precision, in chunks; logits of the last token only."""
        model, tokens = self._model, len(prompt.ids)
        total = tokens + len(prompt.appended) + prompt.max_new_tokens
        if total > model.max_positions:
            raise ValueError(f"{total} tokens exceed the model's {model.max_positions}")
        if not prompt.ids or prompt.max_new_tokens < 1:
            raise ValueError("a prompt needs at least one token and one new token")
        observations = Observations()
        for fork in prompt.forks:
            observations |= fork.method.observes()
        flash = model.spec.attention == "auto"
        step = PrefillStep(model.layout, tokens, observations, model.rotary, flash)
        states = LinearRows(model.layout, 1, model.device, model.dtype)
        ids = torch.tensor([prompt.ids], device=model.device)
        with hidden_moments(model, observations.hidden_moments) as hidden:
            for start in range(0, tokens, self._chunk):
                chunk = ids[:, start : start + self._chunk]
                positions = torch.arange(start, start + chunk.shape[1], device=ids.device)[None]
                logits = model.read(chunk, positions, step, LinearCache(states))
                step.advance(chunk.shape[1])
        if not logits.isfinite().all():
            wider = "" if model.spec.dtype == "float32" else ": try models.dtype float32"
            raise ValueError(f"the model's logits are not finite in {model.spec.dtype}{wider}")
        layers = [
            LayerPrefill(
                step.keys[index],
                step.values[index],
                step.queries.get(index),
                step.column_sums.get(index),
                model.output_projection(index),
                step.scales[index],
                step.query_moments.get(index, {}),
                step.gates.get(index),
                hidden.get(index),
                step.probes.get(index, {}),
            )
            for index in model.layout.growing
        ]
        sliding = {index: (step.keys[index], step.values[index]) for index in model.layout.sliding}
        structural = torch.tensor(model.structure.places(prompt.ids), device=model.device)
        return Prefill(
            layers,
            model.layout,
            tokens,
            logits[0].float(),
            model.rotary,
            continuations(model),
            sliding,
            model.stop_ids,
            structural,
            states.row(0),
            query_projector(model),
        )

    def _resolve(self, generation: Generation, prefill: Prefill) -> ResolvedBudget:
        prompt, fork = generation.prompt, generation.fork
        new_tokens = len(prompt.appended) + prompt.max_new_tokens
        budget = fork.budget.resolve(prefill.tokens, new_tokens, prompt.base, self._model.layout)
        if reason := fork.method.impossible(budget, self._model.layout):
            raise ValueError(reason)
        return budget

    def _compress(self, method: Method, opened: list[_Open]) -> Iterator[Ready | Generation]:
        """All forks of one method: what is common to budgets is done once per prompt and seed."""
        subjects = {(id(one.prefill), one.generation.fork.seed): one.prefill for one in opened}
        began = time.perf_counter()
        try:
            examined = method.examine(list(subjects.values()), [seed for _, seed in subjects])
        except FAULTS as error:
            if len(subjects) == 1:
                yield from (failed(one.generation, error) for one in opened)
            else:  # one of the prompts is to blame: each by itself
                for subject in subjects:
                    yield from self._compress(method, [one for one in opened if _subject(one) == subject])
            return
        examine_s = self._model.elapsed(began) / len(subjects)
        findings = dict(zip(subjects, examined, strict=True))
        for one in opened:
            began, budget = time.perf_counter(), one.generation.budget
            assert budget is not None
            try:
                compressed = method.compress(one.prefill, budget, findings[_subject(one)])
            except FAULTS as error:
                yield failed(one.generation, error)
            else:
                one.generation.compress_s = examine_s + self._model.elapsed(began)
                yield Ready(one.generation, compressed)


def _subject(one: _Open) -> tuple[int, str]:
    return id(one.prefill), one.generation.fork.seed


def failed(generation: Generation, error: Exception) -> Generation:
    """A sample's own fault. A lack of memory is not: what else is held at the time has its share in it."""
    if lacks_memory(error):
        raise error
    generation.error = f"{type(error).__name__}: {error}"
    return generation
