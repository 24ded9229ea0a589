"""A tiered pool that runs on the kernels against one on the plain path. Run by test_triton_interpreter.py."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvcache.budget import Budget
from kvcache.kernels import dispatch
from kvcache.kernels.column_sums import add_column_sums
from kvcache.layout import CacheLayout, LayerLayout
from kvcache.pool import PoolShape
from kvcache.prefill import LayerPrefill, Prefill
from qevict.method import QEvict
from qevict.pool import TieredCompressed, TieredPool

QUERY_HEADS, KV_HEADS, DIM, NEW = 4, 2, 32, 20
SCALE = DIM**-0.5
LAYOUT = CacheLayout((LayerLayout("growing", QUERY_HEADS, KV_HEADS, DIM, DIM),), 4)


def rotary(layer: int, positions: Tensor) -> tuple[Tensor, Tensor]:
    angles = positions[:, None] / 100 ** (torch.arange(0, DIM, 2) / DIM)
    return torch.cat([angles.cos()] * 2, -1), torch.cat([angles.sin()] * 2, -1)


def prompt(tokens: int, g: torch.Generator) -> Prefill:
    layers = []
    for _ in LAYOUT.layers:
        keys, values = torch.randn(2, KV_HEADS, tokens, DIM, generator=g).mul_(2).unbind()
        queries, sums = torch.randn(QUERY_HEADS, tokens, DIM, generator=g), torch.zeros(QUERY_HEADS, tokens)
        add_column_sums(sums, queries, keys, 0, SCALE)
        layers.append(LayerPrefill(keys, values, None, sums, torch.zeros(1, QUERY_HEADS, DIM), SCALE))
    return Prefill(layers, LAYOUT, tokens, torch.zeros(3), rotary, lambda _: pytest.fail("no lookahead here"))


def pool_of(method: QEvict, lengths: tuple[int, ...]) -> TieredPool:
    pool = method.new_pool(PoolShape(LAYOUT, 4, torch.device("cpu"), torch.float32, rotary))
    assert isinstance(pool, TieredPool)
    g = torch.Generator().manual_seed(0)
    for row, tokens in enumerate(lengths):
        prefill = prompt(tokens, g)
        budget = Budget.parse("45%").resolve(tokens, NEW, "prompt+max_new", LAYOUT)
        compressed = method.compress(prefill, budget, method.examine([prefill], ["0"])[0])
        assert isinstance(compressed, TieredCompressed)
        pool.admit({row: compressed})
    return pool


@pytest.mark.parametrize(
    ("method", "steps"),
    [
        (QEvict(recent=8), 17),
        (QEvict(recent=8, window=4, bits=4, accounting="paper"), 9),
        (QEvict(recent=8, ranker="key_norm"), 9),
    ],
    ids=["defaults", "window 4, 4 bits", "key norm"],
)
def test_outputs_tiers_and_scores_equal_those_of_the_plain_path(
    method: QEvict, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two rows of different lengths through routing events; windows are coded on the way."""

    def on_triton(yes: bool) -> None:
        monkeypatch.setattr(dispatch, "use_triton", lambda device: yes)

    lengths = 130, 77
    plain = pool_of(method, lengths)
    on_triton(True)
    fused = pool_of(method, lengths)
    assert fused._fused
    assert not plain._fused
    at_first = set(fused.ledger["window"].flatten().tolist())
    g = torch.Generator().manual_seed(1)
    for step in range(steps):
        positions, counts = torch.tensor(lengths)[:, None] + step, torch.ones(2, dtype=torch.int64)
        queries = torch.randn(2, QUERY_HEADS, 1, DIM, generator=g)
        keys, values = torch.randn(2, 2, KV_HEADS, 1, DIM, generator=g).unbind()
        outputs = []
        for pool in (plain, fused):
            on_triton(pool is fused)
            outputs.append(pool.attend(0, queries, keys, values, positions, counts, SCALE))
            pool.after_step(positions, counts)
        torch.testing.assert_close(*outputs, rtol=1e-4, atol=1e-5)
        for row in range(2):
            one, other = fused._held[row], plain._held[row]
            for tier, pages, pages_of_plain in (
                ("full", one.full_pages, other.full_pages),
                ("ledger", one.code_pages, other.code_pages),
            ):
                windows, scores = getattr(fused, tier).table(pages)
                expected_windows, expected_scores = getattr(plain, tier).table(pages_of_plain)
                assert torch.equal(windows, expected_windows)
                torch.testing.assert_close(scores, expected_scores, rtol=1e-4, atol=1e-5)
        for name in ("key_codes", "key_scale", "key_offset", "value_codes", "value_scale", "value_offset", "promoted"):
            assert torch.equal(fused.ledger[name], plain.ledger[name]), name
    assert set(fused.ledger["window"].flatten().tolist()) - at_first, "nothing was coded while decoding"
