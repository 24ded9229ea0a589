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
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvcache.method import Method
from kvcache.pool import Compressed, FamilyPool, PoolShape
from workers.attention import Step
from workers.fork import Generation, Prompt, PromptForks, Ready
from workers.job import PREFILLED_BYTES, PROMPTS_AT_ONCE, EngineSpec
from workers.models import LoadedModel
from workers.untouched import UntouchedLayers

QUESTION_CHUNK = 16
"""Appended tokens fed at once; a row's chunks start at its question, so they never depend on other rows."""


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
        self._forks = PromptForks(model, spec.prefill_chunk)
        self._pools: dict[str, FamilyPool] = {}
        self._rows: list[_Row | None] = [None] * spec.row_width
        self._leaving: dict[FamilyPool, list[int]] = {}
        self._untouched = UntouchedLayers(model.layout, spec.row_width, model.device, model.dtype)
        # Linear layers cannot feed rows different numbers of tokens: such models read questions as they write answers.
        self._question_chunk = 1 if model.layout.linear else QUESTION_CHUNK

    @torch.inference_mode()
    def run(self, prompts: Iterable[Prompt]) -> Iterator[Generation]:
        """Finished forks, in the order in which they finish. A prompt that raises fails its forks, not the run."""
        waiting = iter(prompts)
        ready: deque[Ready] = deque()
        exhausted = False
        while not exhausted or ready or any(self._rows):
            if not exhausted and not ready and not all(self._rows):
                next_prompts = self._enough(waiting)
                exhausted = not next_prompts
                yield from self._fork(next_prompts, ready)
            yield from self._admit_all(ready)
            yield from self._step()

    def _enough(self, waiting: Iterator[Prompt]) -> list[Prompt]:
        """Prompts whose forks fill the free rows, within what may be held. They come in groups, so that methods
        which run the model again can do so once for several."""
        free, held = self._rows.count(None), 0
        prompts: list[Prompt] = []
        while (free > 0 or len(prompts) % PROMPTS_AT_ONCE) and held < PREFILLED_BYTES:
            if (prompt := next(waiting, None)) is None:
                break
            prompts.append(prompt)
            free -= len(prompt.forks)
            held += self.model.layout.full_bytes(len(prompt.ids))
        return prompts

    def _fork(self, prompts: list[Prompt], ready: deque[Ready]) -> Iterator[Generation]:
        """Compress all forks; what failed is finished. A function of its own, so that no name outlives the admission
        of a fork: it would keep a whole prefill."""
        for fork in self._forks.fork(prompts):
            if isinstance(fork, Generation):
                yield fork
            else:
                ready.append(fork)

    def _admit_all(self, ready: deque[Ready]) -> Iterator[Generation]:
        """Fill the free rows. A row whose first token is its last frees itself at once, hence the loop."""
        while ready and (free := [number for number, row in enumerate(self._rows) if row is None]):
            coming = {number: ready.popleft() for number in free[: len(ready)]}
            by_pool: dict[FamilyPool, dict[int, Compressed]] = {}
            for number, fork in coming.items():
                by_pool.setdefault(self._pool(fork.generation.fork.method), {})[number] = fork.compressed
            for pool, caches in by_pool.items():
                pool.admit(caches)
            for number, fork in coming.items():
                yield from self._begin(number, fork)
            self._let_go()

    def _pool(self, method: Method) -> FamilyPool:
        if method.family not in self._pools:
            self._pools[method.family] = method.new_pool(self._pool_shape())
        return self._pools[method.family]

    def _begin(self, number: int, fork: Ready) -> Iterator[Generation]:
        """A row whose cache is in place. Its first token comes from the prompt's logits, unless a question follows."""
        generation, prefill = fork.generation, fork.compressed.prefill
        pool, prompt = self._pool(generation.fork.method), generation.prompt
        self._untouched.write(number, prefill)
        generation.at_prefill = pool.memory(number)
        generation.method_facts = dict(fork.compressed.facts)
        self._rows[number] = row = _Row(generation, pool, deque(prompt.appended), prefill.tokens, time.perf_counter())
        if not row.pending:
            logits = prefill.logits.clone()
            self._suppress_stops(row, logits)
            yield from self._speak(number, int(logits.argmax()))

    def _step(self) -> Iterator[Generation]:
        """One forward pass of the batch: a chunk of questions if any row has one to read, else one token per row."""
        chunked = self._question_chunk > 1
        reading = [number for number, row in enumerate(self._rows) if chunked and row and len(row.pending) > 1]
        active = reading or [number for number, row in enumerate(self._rows) if row]
        if not active:
            return
        width = self._question_chunk if reading else 1
        tokens = torch.zeros(len(self._rows), width, dtype=torch.int64)
        positions = torch.zeros_like(tokens)
        counts = torch.zeros(len(self._rows), dtype=torch.int64)
        for number in active:
            row = self._row(number)
            # The last token of a question is fed alone: answers always begin in a step of one token.
            count = min(width, len(row.pending) - 1) if reading else 1
            tokens[number, :count] = torch.tensor([row.pending.popleft() for _ in range(count)])
            positions[number] = torch.arange(row.position, row.position + width)
            counts[number] = count
            row.position += count
            row.generation.batch_rows = max(row.generation.batch_rows, len(active))
        logits = self._forward(tokens, positions, counts)
        if not reading:
            speaking = [number for number in active if not self._row(number).pending]
            for number in speaking:
                self._suppress_stops(self._row(number), logits[number])
            for number, token in zip(speaking, logits.max(-1).indices[speaking].tolist(), strict=True):
                yield from self._speak(number, token)
            self._let_go()

    def _let_go(self) -> None:
        """Free what the rows held that ended: those of one step together, which costs little more than one."""
        for pool, numbers in self._leaving.items():
            pool.release(*numbers)
        self._leaving.clear()

    def _forward(self, tokens: Tensor, positions: Tensor, counts: Tensor) -> Tensor:
        """Logits [R, V] of the last column; tokens, positions [R, t], counts [R], on the host."""
        pools = [pool for pool in self._pools.values() if len(pool.rows)]
        logits = decode_step(self.model, pools, self._untouched, tokens, positions, counts)
        for pool in pools:
            pool.after_step(positions[pool.rows], counts[pool.rows])
        return logits

    def _speak(self, number: int, token: int) -> Iterator[Generation]:
        """Take a row's next token: it ends the row, or is fed in the next step."""
        row = self._row(number)
        generation, prompt = row.generation, row.generation.prompt
        if token in self.model.stop_ids:
            yield self._finish(number, "stop")
            return
        generation.tokens.append(token)
        if generation.stopped(self.model.tokenizer):
            yield self._finish(number, "stop")
        elif len(generation.tokens) == prompt.max_new_tokens:
            yield self._finish(number, "length")
        else:
            row.pending.append(token)

    def _suppress_stops(self, row: _Row, logits: Tensor) -> None:
        """Before ``min_new_tokens``: no stop id, no token that is a stop text by itself. ``logits`` [V], in place."""
        prompt = row.generation.prompt
        if len(row.generation.tokens) < prompt.min_new_tokens:
            logits[list(self.model.stop_ids)] = -torch.inf
            for text in prompt.stop:
                last = self.model.tokenizer(text, add_special_tokens=False)["input_ids"][-1]
                if self.model.tokenizer.decode([last]) == text:
                    logits[last] = -torch.inf

    def _finish(self, number: int, reason: str) -> Generation:
        row = self._row(number)
        generation = row.generation
        generation.finish_reason = reason
        generation.at_end = row.pool.memory(number)
        generation.method_facts |= row.pool.facts(number)
        generation.held_tokens = row.position
        generation.peak_held = max(row.pool.peak_held(number), generation.at_prefill.held)
        generation.decode_s = self.model.elapsed(row.started)
        self._leaving.setdefault(row.pool, []).append(number)
        self._rows[number] = None
        return generation

    def _row(self, number: int) -> _Row:
        row = self._rows[number]
        assert row is not None
        return row

    def _pool_shape(self) -> PoolShape:
        model = self.model
        return PoolShape(model.layout, len(self._rows), model.device, model.dtype, model.rotary)


def decode_step(
    model: LoadedModel,
    pools: Sequence[FamilyPool],
    untouched: UntouchedLayers,
    tokens: Tensor,
    positions: Tensor,
    counts: Tensor,
) -> Tensor:
    """Logits [R, V] of the last column; tokens, positions [R, t], counts [R], all three on the host."""
    device = model.device
    step = DecodeStep(model, pools, untouched, positions, counts)
    there = tokens.to(device, non_blocking=True), positions.to(device, non_blocking=True)
    return model.read(*there, step, untouched.cache(counts.to(device, non_blocking=True)))


class DecodeStep(Step):
    """Attention of a decode batch: each pool for its own rows, sliding layers for all. ``positions`` [R, t] and
    ``counts`` [R] are on the host."""

    def __init__(
        self,
        model: LoadedModel,
        pools: Sequence[FamilyPool],
        untouched: UntouchedLayers,
        positions: Tensor,
        counts: Tensor,
    ) -> None:
        self._growing = {index: place for place, index in enumerate(model.layout.growing)}
        self._sliding = untouched.sliding
        device = model.device
        self._positions, self._counts = positions.to(device, non_blocking=True), counts
        self._pools = [
            (pool, pool.rows.to(device, non_blocking=True), positions[pool.rows], counts[pool.rows]) for pool in pools
        ]

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        if layer in self._sliding:
            return self._sliding[layer].attend(queries, keys, values, self._positions, self._counts, scale)
        output = values.new_zeros(*queries.shape[:3], values.shape[-1])
        for pool, rows, positions, counts in self._pools:
            new = queries[rows], keys[rows], values[rows]
            output[rows] = pool.attend(self._growing[layer], *new, positions, counts, scale)
        return output
