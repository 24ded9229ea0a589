"""Random prompts and tokens for pools of one row or several, fed step by step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from kvcache.budget import Budget
from kvcache.layout import CacheLayout, LayerLayout
from kvcache.method import Method
from kvcache.pool import FamilyPool, PoolShape
from kvcache.prefill import LayerPrefill, Prefill
from kvcache.probes import probe_positions

QUERY_HEADS, KV_HEADS, DIM, LAYERS, ROWS, SCALE = 4, 2, 8, 2, 4, 0.4
LAYOUT = CacheLayout((LayerLayout("growing", QUERY_HEADS, KV_HEADS, DIM, DIM),) * LAYERS, 4)


def no_model(*_: object) -> Any:
    pytest.fail("nothing is rotated or continued here")


def tensor(seed: int, *dims: int) -> Tensor:
    return torch.randn(*dims, generator=torch.Generator().manual_seed(seed)) * 2


@dataclass
class Tokens:
    """A stream of tokens in every layer. queries [L, H_q, n, d], keys, values [L, H_kv, n, d]"""

    queries: Tensor
    keys: Tensor
    values: Tensor

    @classmethod
    def random(cls, count: int, seed: int = 0) -> Tokens:
        return cls(
            tensor(seed, LAYERS, QUERY_HEADS, count, DIM),
            tensor(seed + 1, LAYERS, KV_HEADS, count, DIM),
            tensor(seed + 2, LAYERS, KV_HEADS, count, DIM),
        )

    def prompt(self, count: int) -> Prefill:
        layers = [
            LayerPrefill(keys[:, :count], values[:, :count], queries[:, :count], None, Tensor(), SCALE)
            for queries, keys, values in zip(self.queries, self.keys, self.values, strict=True)
        ]
        return Prefill(layers, LAYOUT, count, torch.zeros(3), no_model, no_model)


def shape(dtype: torch.dtype = torch.float32) -> PoolShape:
    return PoolShape(LAYOUT, ROWS, torch.device("cpu"), dtype, no_model)


def admit(method: Method, tokens: Tokens, count: int, row: int = 1, pool: FamilyPool | None = None) -> FamilyPool:
    """A pool that holds the first tokens of a stream in a row."""
    prefill = tokens.prompt(count)
    for share in method.observes().probes:
        positions = probe_positions(count, share)
        for layer, queries in zip(prefill.layers, tokens.queries, strict=True):
            layer.probes[share] = queries[:, positions]
    budget = Budget.parse("unlimited").resolve(count, 1000, "prompt", LAYOUT)
    pool = method.new_pool(shape()) if pool is None else pool
    pool.admit({row: method.compress(prefill, budget, method.examine([prefill], ["0"])[0])})
    return pool


def feed(pool: FamilyPool, streams: dict[int, tuple[Tokens, int, int]]) -> dict[int, Tensor]:
    """Feed each row tokens ``start`` to ``end`` of its stream in one step. -> by row [L, H_q, end - start, d]"""
    rows = pool.rows.tolist()
    widest = max(end - start for _, start, end in streams.values())
    counts = torch.tensor([streams[row][2] - streams[row][1] if row in streams else 0 for row in rows])
    positions = torch.zeros(len(rows), widest, dtype=torch.int64)
    outputs = []
    for layer in range(LAYERS):
        parts = [torch.zeros(len(rows), heads, widest, DIM) for heads in (QUERY_HEADS, KV_HEADS, KV_HEADS)]
        for place, row in enumerate(rows):
            if row in streams:
                stream, start, end = streams[row]
                positions[place] = torch.arange(start, start + widest)
                for part, source in zip(parts, (stream.queries, stream.keys, stream.values), strict=True):
                    part[place, :, : end - start] = source[layer, :, start:end]
        outputs.append(pool.attend(layer, *parts, positions, counts, SCALE))
    pool.after_step(positions, counts)
    return {
        row: torch.stack(outputs, 1)[rows.index(row)][..., : end - start, :] for row, (_, start, end) in streams.items()
    }


def one_by_one(pool: FamilyPool, tokens: Tokens, start: int, end: int, row: int = 1) -> Tensor:
    """[L, H_q, end - start, d]"""
    steps = [feed(pool, {row: (tokens, token, token + 1)})[row] for token in range(start, end)]
    return torch.cat(steps, 2)


def broken(count: int) -> Tokens:
    """What leaves NaN behind in the pages that it held."""
    tokens = Tokens.random(count)
    tokens.keys.fill_(torch.nan)
    tokens.values.fill_(torch.inf)
    return tokens


def assert_rows_do_not_see_each_other(
    put: Callable[[Tokens, int, int, FamilyPool | None], FamilyPool],
    streams: dict[int, Tokens],
    lengths: dict[int, int],
    left: tuple[Tokens, int],
    steps: int,
    empty: int = 0,
) -> None:
    """Rows of different lengths, some idle in a step, in a pool that another row has left; ``empty``: its bytes without
    any. ``put`` admits the first tokens of a stream to a row of a pool, or of a new one."""
    pool = put(*left, 2, None)
    pool.release(2)
    for row, length in lengths.items():
        put(streams[row], length, row, pool)
    alone = {row: put(streams[row], length, row, None) for row, length in lengths.items()}
    for step in range(1, steps):
        moving = {row: (streams[row], length, length + 1) for row, length in lengths.items() if step % (row + 1) == 0}
        found = feed(pool, moving)
        for row, one in moving.items():
            assert torch.equal(found[row], feed(alone[row], {row: one})[row])
            lengths[row] += 1
    for row in range(4):
        assert pool.memory(row) == alone[row].memory(row)
        assert pool.facts(row) == alone[row].facts(row)
        pool.release(row)
    assert pool.allocated_bytes() == empty


def assert_a_broken_row_ends_no_other(
    put: Callable[[Tokens, int, int, FamilyPool | None], FamilyPool], bad: Tokens, steps: int
) -> None:
    """A row that is not finite, from its prompt or from a later token on: nothing is raised, others do not notice."""
    whole = Tokens.random(40 + steps, seed=3)
    pool, alone = put(whole, 40, 1, None), put(whole, 40, 1, None)
    put(bad, 50, 2, pool)
    for step in range(steps):
        found = feed(pool, {1: (whole, 40 + step, 41 + step), 2: (bad, 50 + step, 51 + step)})
        assert torch.equal(found[1], feed(alone, {1: (whole, 40 + step, 41 + step)})[1])
    assert found[2].isnan().any()


def dense(tokens: Tokens, keys: Tensor, values: Tensor, position: int) -> Tensor:
    """Attention of the query at a position over keys and values [L, H_kv, n, d], in fp64. -> [L, H_q, d]"""
    group = QUERY_HEADS // KV_HEADS
    keys, values = (part.double().repeat_interleave(group, 1) for part in (keys, values))
    scores = torch.einsum("lhd,lhnd->lhn", tokens.queries[:, :, position].double(), keys) * SCALE
    return torch.einsum("lhn,lhnd->lhd", torch.softmax(scores, -1), values)
