"""A ragged pool that runs on the kernels against one on the plain path. Run by test_triton_interpreter.py."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvcache.kernels import dispatch
from kvcache.layout import CacheLayout, LayerLayout
from kvcache.pool import PoolShape
from kvcache.prefill import LayerPrefill, Prefill
from kvcache.ragged import RaggedCompressed, RaggedPool

SCALE = 0.2


def no_rotary(layer: int, positions: Tensor) -> tuple[Tensor, Tensor]:
    raise AssertionError("a ragged pool turns nothing")


def keeping(layout: LayerLayout, lengths: list[int], dtype: torch.dtype, seed: int) -> RaggedCompressed:
    """A prompt of which every head keeps so many tokens."""
    g, tokens = torch.Generator().manual_seed(seed), max(lengths)
    keys = torch.randn(layout.kv_heads, tokens, layout.key_dim, generator=g).to(dtype)
    values = torch.randn(layout.kv_heads, tokens, layout.value_dim, generator=g).to(dtype)
    one = LayerPrefill(keys, values, None, None, torch.zeros(1, layout.query_heads, layout.value_dim), SCALE)
    logits = torch.zeros(3)
    prefill = Prefill(
        [one], CacheLayout((layout,), 4), tokens, logits, no_rotary, lambda _: pytest.fail("no lookahead")
    )
    return RaggedCompressed(
        prefill, [[torch.randperm(tokens, generator=g)[:length].sort().values for length in lengths]]
    )


@pytest.mark.parametrize("rows", [4, 16], ids=["splits of 4 pages", "splits of 8 pages"])
@pytest.mark.parametrize("heads", [(6, 2, 32, 32), (2, 2, 32, 64), (9, 1, 64, 32)], ids=str)
@pytest.mark.parametrize(("dtype", "near"), [(torch.float32, 1e-5), (torch.float16, 3e-3)], ids=str)
def test_outputs_equal_those_of_the_plain_path(
    rows: int, heads: tuple[int, int, int, int], dtype: torch.dtype, near: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Heads of one page and of many, one full to its last slot; pages are added on the way, a row leaves, and another
    takes its pages. Not every row reads a token in every step."""
    query_heads, kv_heads, key_dim, value_dim = heads
    layout, g = LayerLayout("growing", query_heads, kv_heads, key_dim, value_dim), torch.Generator().manual_seed(0)
    pools = []
    for fused in (False, True):
        monkeypatch.setattr(dispatch, "use_triton", lambda device, yes=fused: yes)
        pool = RaggedPool(PoolShape(CacheLayout((layout,), 4), rows, torch.device("cpu"), dtype, no_rotary))
        lengths = {0: [1, 64], 2: [63, 1], 3: [700, 120]}
        pool.admit({row: keeping(layout, own[:kv_heads], dtype, row) for row, own in lengths.items()})
        assert pool.stores[0]._fused == fused  # type: ignore[attr-defined]
        pools.append(pool)
    for step in range(5):
        if step == 3:
            for pool in pools:
                pool.release(2)
                pool.admit({1: keeping(layout, [130, 7][:kv_heads], dtype, 1)})
        counts = torch.ones(len(pools[0].rows), dtype=torch.int64)
        counts[0] = step % 2
        queries = torch.randn(len(counts), query_heads, 1, key_dim, generator=g).to(dtype)
        keys = torch.randn(len(counts), kv_heads, 1, key_dim, generator=g).to(dtype)
        values = torch.randn(len(counts), kv_heads, 1, value_dim, generator=g).to(dtype)
        positions = torch.full((len(counts), 1), 700 + step)
        outputs = (pool.attend(0, queries, keys, values, positions, counts, SCALE) for pool in pools)
        plain, found = (output[counts > 0].double() for output in outputs)
        assert (found - plain).norm() / plain.norm() < near
