"""One prefill, many caches, one decode batch.

    prefill(prompt) ──> compress per (method, budget) ──> one row each in the pool of its storage family
                                                          │
    rows of many prompts ── one batch of fixed width ── dense layers once, attention per pool ── greedy tokens
                                                          │
    a row that stops leaves; the next fork takes its place

Every dense product has ``row_width`` rows, padded, and attention works in fixed blocks. A row's tokens therefore have
the same bits alone, beside any others, and after a restart.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kvcache.budget import Base, Budget, ResolvedBudget
from kvcache.method import Method, Observations
from kvcache.pool import Compressed, FamilyPool, MemoryBreakdown, PoolShape
from kvcache.prefill import LayerPrefill, Prefill
from kvcache.sliding import SlidingRing
from workers.attention import PrefillStep
from workers.continuation import continuations
from workers.job import EngineSpec
from workers.models import LoadedModel

QUESTION_CHUNK = 16
"""Appended tokens fed at once; a row's chunks start at its question, so they never depend on other rows."""


@dataclass(frozen=True)
class Fork:
    """One cell of one prompt. ``key`` is the caller's; ``seed`` is that of the method's own randomness."""

    key: Any
    method: Method
    budget: Budget
    seed: str


@dataclass(frozen=True)
class Prompt:
    """Token ids to compress, ids that follow uncompressed, and what is to be generated for each fork."""

    key: Any
    ids: list[int]
    appended: list[int]
    max_new_tokens: int
    forks: list[Fork]
    stop: tuple[str, ...] = ()
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
    held_tokens: int = 0
    prefill_s: float = 0.0
    compress_s: float = 0.0
    decode_s: float = 0.0
    batch_rows: int = 0


@dataclass
class _Ready:
    """A fork that is compressed and waits for a row."""

    generation: Generation
    compressed: Compressed
    sliding: dict[int, tuple[Tensor, Tensor]]
    logits: Tensor


@dataclass
class _Row:
    """A fork in the decode batch. ``pending`` are tokens to feed before the model speaks; ``position`` is the true
    token count so far."""

    generation: Generation
    pool: FamilyPool
    pending: deque[int]
    position: int
    started: float


class Engine:
    """Decodes all forks of a stream of prompts on one model."""

    def __init__(self, model: LoadedModel, spec: EngineSpec) -> None:
        self.model = model
        self.spec = spec
        self._pools: dict[str, FamilyPool] = {}
        self._rows: list[_Row | None] = [None] * spec.row_width
        layers = model.layout.layers
        self._sliding = {
            index: SlidingRing(layer, spec.row_width, model.device, model.dtype)
            for index, layer in enumerate(layers)
            if layer.kind == "sliding"
        }

    @torch.inference_mode()
    def run(self, prompts: Iterable[Prompt]) -> Iterator[Generation]:
        """Finished forks, in the order in which they finish. A prompt that raises fails its forks, not the run."""
        waiting = iter(prompts)
        ready: deque[_Ready] = deque()
        exhausted = False
        while not exhausted or ready or any(self._rows):
            while not exhausted and not ready and not all(self._rows):
                prompt = next(waiting, None)
                exhausted = prompt is None
                if prompt is not None:
                    yield from self._fork(prompt, ready)
            while ready and not all(self._rows):
                yield from self._admit(ready.popleft())
            yield from self._step()

    def _fork(self, prompt: Prompt, ready: deque[_Ready]) -> Iterator[Generation]:
        """Prefill once and compress for every fork; forks that fail come back at once."""
        generations = [Generation(prompt, fork) for fork in prompt.forks]
        began = time.perf_counter()
        try:
            prefill, sliding = self._prefill(prompt)
        except (RuntimeError, ValueError) as error:
            yield from (_failed(generation, error) for generation in generations)
            return
        prefill_s = self._elapsed(began)
        examined: dict[tuple[Method, str], tuple[Any, float]] = {}
        for generation in generations:
            fork, began = generation.fork, time.perf_counter()
            generation.prefill_s = prefill_s
            try:
                budget = fork.budget.resolve(prefill.tokens, prompt.max_new_tokens, prompt.base, self.model.layout)
                if reason := fork.method.impossible(budget, self.model.layout):
                    raise ValueError(reason)
                if (fork.method, fork.seed) not in examined:
                    analysis = fork.method.examine(prefill, fork.seed)
                    examined[fork.method, fork.seed] = analysis, self._elapsed(began)
                    began = time.perf_counter()
                analysis, examine_s = examined[fork.method, fork.seed]
                compressed = fork.method.compress(prefill, budget, analysis)
            except (RuntimeError, ValueError) as error:
                yield _failed(generation, error)
                continue
            generation.budget, generation.compress_s = budget, examine_s + self._elapsed(began)
            ready.append(_Ready(generation, compressed, sliding, prefill.logits))

    def _prefill(self, prompt: Prompt) -> tuple[Prefill, dict[int, tuple[Tensor, Tensor]]]:
        """Full precision, in chunks; logits of the last token only."""
        total = len(prompt.ids) + len(prompt.appended) + prompt.max_new_tokens
        if total > self.model.max_positions:
            raise ValueError(f"{total} tokens exceed the model's {self.model.max_positions}")
        if not prompt.ids or prompt.max_new_tokens < 1:
            raise ValueError("a prompt needs at least one token and one new token")
        observations = Observations()
        for fork in prompt.forks:
            observations |= fork.method.observes()
        step = PrefillStep(self.model.layout, len(prompt.ids), observations)
        ids = torch.tensor([prompt.ids], device=self.model.device)
        for start in range(0, len(prompt.ids), self.spec.prefill_chunk):
            chunk = ids[:, start : start + self.spec.prefill_chunk]
            positions = torch.arange(start, start + chunk.shape[1], device=ids.device)[None]
            output = self.model.forward(
                input_ids=chunk, position_ids=positions, use_cache=False, logits_to_keep=1, kv_step=step
            )
            step.advance(chunk.shape[1])
        layers = {
            index: LayerPrefill(
                step.keys[index],
                step.values[index],
                step.queries.get(index),
                step.column_sums.get(index),
                self.model.output_projection(index),
                step.scales[index],
            )
            for index in self.model.layout.growing
        }
        sliding = {index: (step.keys[index], step.values[index]) for index in self._sliding}
        tokens = len(prompt.ids)
        prefill = Prefill(
            list(layers.values()),
            tokens,
            output.logits[0, -1].float(),
            self.model.rotary,
            continuations(self.model, layers, sliding, tokens),
            self.model.stop_ids,
        )
        return prefill, sliding

    def _admit(self, fork: _Ready) -> Iterator[Generation]:
        """Give a compressed fork a row. Its first token comes from the prompt's logits, unless a question follows."""
        generation, number = fork.generation, self._rows.index(None)
        method, prompt = generation.fork.method, generation.prompt
        if method.family not in self._pools:
            self._pools[method.family] = method.new_pool(self._pool_shape())
        pool, tokens = self._pools[method.family], fork.compressed.prefill.tokens
        pool.admit(number, fork.compressed)
        for layer, (keys, values) in fork.sliding.items():
            self._sliding[layer].write(number, keys, values, tokens)
        generation.at_prefill = pool.memory(number)
        row = _Row(generation, pool, deque(prompt.appended), tokens, time.perf_counter())
        self._rows[number] = row
        if not row.pending:
            yield from self._speak(number, int(fork.logits.argmax()))

    def _step(self) -> Iterator[Generation]:
        """One forward pass of the batch: a chunk of questions if any row has one to read, else one token per row."""
        reading = [number for number, row in enumerate(self._rows) if row and len(row.pending) > 1]
        active = reading or [number for number, row in enumerate(self._rows) if row]
        if not active:
            return
        width = QUESTION_CHUNK if reading else 1
        tokens = torch.zeros(len(self._rows), width, dtype=torch.int64)
        positions = torch.zeros_like(tokens)
        counts = torch.zeros(len(self._rows), dtype=torch.int64)
        for number in active:
            row = self._row(number)
            count = min(width, len(row.pending) - 1) if reading else 1
            tokens[number, :count] = torch.tensor([row.pending.popleft() for _ in range(count)])
            positions[number] = torch.arange(row.position, row.position + width)
            counts[number] = count
            row.position += count
            row.generation.batch_rows = max(row.generation.batch_rows, len(active))
        logits = self._forward(tokens, positions, counts)
        if not reading:
            for number, token in zip(active, logits.argmax(-1)[active].tolist(), strict=True):
                yield from self._speak(number, token)

    def _forward(self, tokens: Tensor, positions: Tensor, counts: Tensor) -> Tensor:
        """Logits [R, V] of the last column; tokens, positions [R, t], counts [R]."""
        device = self.model.device
        tokens, positions, counts = tokens.to(device), positions.to(device), counts.to(device)
        pools = [pool for pool in self._pools.values() if len(pool.rows)]
        step = DecodeStep(self.model, pools, self._sliding, positions, counts)
        output = self.model.forward(
            input_ids=tokens, position_ids=positions, use_cache=False, logits_to_keep=1, kv_step=step
        )
        for pool in pools:
            pool.after_step(positions[pool.rows], counts[pool.rows])
        return output.logits[:, -1]

    def _speak(self, number: int, token: int) -> Iterator[Generation]:
        """Take a row's next token: it ends the row, or is fed in the next step."""
        row = self._row(number)
        generation, prompt = row.generation, row.generation.prompt
        if token in self.model.stop_ids:
            yield self._finish(number, "stop")
            return
        generation.tokens.append(token)
        if prompt.stop and any(text in self.model.tokenizer.decode(generation.tokens) for text in prompt.stop):
            yield self._finish(number, "stop")
        elif len(generation.tokens) == prompt.max_new_tokens:
            yield self._finish(number, "length")
        else:
            row.pending.append(token)

    def _finish(self, number: int, reason: str) -> Generation:
        row = self._row(number)
        generation = row.generation
        generation.finish_reason = reason
        generation.at_end = row.pool.memory(number)
        generation.held_tokens = row.position
        generation.peak_held = max(row.pool.peak_held(number), generation.at_prefill.held)
        generation.decode_s = self._elapsed(row.started)
        row.pool.release(number)
        self._rows[number] = None
        return generation

    def _row(self, number: int) -> _Row:
        row = self._rows[number]
        assert row is not None
        return row

    def _pool_shape(self) -> PoolShape:
        model = self.model
        return PoolShape(model.layout, self.spec.row_width, model.device, model.dtype, model.rotary)

    def _elapsed(self, began: float) -> float:
        if self.model.device.type == "cuda":
            torch.cuda.synchronize(self.model.device)
        return time.perf_counter() - began


class DecodeStep:
    """Attention of a decode batch: each pool for its own rows, sliding layers for all."""

    def __init__(
        self,
        model: LoadedModel,
        pools: list[FamilyPool],
        sliding: dict[int, SlidingRing],
        positions: Tensor,
        counts: Tensor,
    ) -> None:
        self._growing = {index: place for place, index in enumerate(model.layout.growing)}
        self._pools, self._sliding = pools, sliding
        self._positions, self._counts = positions, counts

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        if layer in self._sliding:
            return self._sliding[layer].attend(queries, keys, values, self._positions, self._counts, scale)
        output = values.new_zeros(*queries.shape[:3], values.shape[-1])
        for pool in self._pools:
            rows = pool.rows
            new = queries[rows], keys[rows], values[rows], self._positions[rows], self._counts[rows]
            output[rows] = pool.attend(self._growing[layer], *new, scale)
        return output


def _failed(generation: Generation, error: Exception) -> Generation:
    generation.error = f"{type(error).__name__}: {error}"
    return generation
