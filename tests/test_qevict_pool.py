"""The tiered pool against the paper's algorithm, token by token."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from qevict_cases import (
    LAYERS,
    LAYOUT,
    SCALE,
    admitted,
    assert_chunks_equal_single_tokens,
    assert_every_step_equals,
    compress,
    feed,
    new_token,
    prompt,
    state,
)
from torch import Tensor

from kvcache.budget import Budget
from kvcache.quant import Quantized, dequantize
from qevict.kernels.code_attention import CodePages, rotated_keys
from qevict.method import QEvict
from qevict.pool import TieredPool
from qevict.slots import FREE

SETTINGS: list[dict[str, Any]] = [
    {"recent": 8},
    {"recent": 12, "quantized_share": 0.3},
    {"recent": 8, "quantized_share": 0.0},
    {"recent": 8, "quantized_share": 1.0},
    {"recent": 16, "bits": 4, "sinks": 3},
    {"recent": 9, "sinks": 0, "window": 4},
    {"recent": 6, "window": 16, "sinks": 17},
    {"recent": 8, "window": 1, "quantized_share": 0.0},
    {"recent": 8, "accounting": "paper"},
    {"recent": 8, "window": 4, "accounting": "paper", "quantized_share": 0.5},
]


@pytest.mark.parametrize("changes", SETTINGS, ids=str)
@pytest.mark.parametrize(("tokens", "budget"), [(150, "40%"), (97, "75%"), (61, "unlimited")])
def test_every_step_equals_the_papers_algorithm(changes: dict[str, Any], tokens: int, budget: str) -> None:
    """Outputs, tiers and scores (Eq. 1 at every step), over several routing events."""
    assert_every_step_equals(QEvict(**changes), tokens, budget, new=50)


def test_codes_survive_demotion_promotion_and_demotion() -> None:
    """Written once: bit-identical through every migration, and really promoted and demoted in between."""
    method = QEvict(recent=8, quantized_share=0.6)
    pool, _, _ = admitted(method, 200, "40%", 200, seed=5)
    first: dict[tuple[int, int], dict[str, Tensor]] = {}
    flags: dict[tuple[int, int], list[bool]] = {}
    held = pool._held[1]
    names = [name for name in ("key_codes", "key_scale", "key_offset", "value_codes", "value_scale", "value_offset")]
    for token in range(200):
        feed(pool, token, 200 + token, seed=5)
        windows, _ = pool.ledger.table(held.code_pages)
        for layer, slot in (windows != FREE).nonzero().tolist():
            page, place = int(held.code_pages[slot // pool.ledger.per_page]), slot % pool.ledger.per_page
            codes = {name: pool.ledger[name][layer, page, :, place] for name in names}
            key = layer, int(windows[layer, slot])
            known = first.setdefault(key, {name: code.clone() for name, code in codes.items()})
            assert all(torch.equal(code, known[name]) for name, code in codes.items())
            flags.setdefault(key, []).append(bool(pool.ledger["promoted"][layer, page, place]))
    there_and_back = [history for history in flags.values() if "1,0" in ",".join(str(int(f)) for f in history)]
    assert there_and_back, "no window was promoted and demoted again: the test shows nothing"


@settings(max_examples=25)
@given(
    tokens=st.integers(30, 160),
    new=st.integers(1, 60),
    share=st.integers(8, 100),
    window=st.sampled_from([1, 4, 8, 16]),
    sinks=st.integers(0, 9),
    recent=st.integers(1, 40),
    quantized=st.sampled_from([0.0, 0.3, 0.7, 1.0]),
    seed=st.integers(0, 1000),
)
def test_bytes_stay_in_budget_and_no_token_is_lost_or_doubled(
    tokens: int, new: int, share: int, window: int, sinks: int, recent: int, quantized: float, seed: int
) -> None:
    if window == 1:
        quantized = 0.0
    method = QEvict(window=window, sinks=sinks, recent=recent, quantized_share=quantized)
    budget = Budget.parse(f"{share}%").resolve(tokens, new, "prompt+max_new", LAYOUT)
    if method.impossible(budget, LAYOUT):
        return
    pool, _, room = admitted(method, tokens, f"{share}%", new, seed)
    for token in range(new):
        assert pool.memory(1).held <= budget.total_bytes
        assert pool.memory(1).held <= pool.memory(1).charged <= budget.total_bytes
        feed(pool, token, tokens + token, seed)
        assert_working_copy_is_that_of_the_codes(pool)
        boundary = pool._boundary(1, tokens + token + 1)
        for layer in range(LAYERS):
            windows = set(state(pool, layer))
            everything = range(-(-(tokens + token + 1 - sinks) // window))
            assert {number for number in everything if number >= boundary} <= windows, "a recent window is gone"
            assert len([w for w in windows if w < boundary]) <= room.full + room.quantized + 1
    assert pool.peak_held(1) <= budget.total_bytes
    used = pool.memory(1)
    assert used.workspace == len(pool._held[1].code_pages) * pool.full.arena.page_bytes
    assert used.held + used.slack == sum(
        slots.arena.page_bytes * len(pages)
        for slots, pages in ((pool.full, pool._held[1].full_pages), (pool.ledger, pool._held[1].code_pages))
    )


@pytest.mark.parametrize(
    "changes", [{}, {"promotion": "exact"}, {"first_eviction": "after_window"}, {"accounting": "paper"}], ids=str
)
def test_attention_is_the_same_without_a_working_copy(changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where codes are dequantised at every step: devices without the fused kernels."""
    method, tokens, new = QEvict(recent=8, **changes), 150, 40
    with_copy, _, _ = admitted(method, tokens, "40%", new, seed=3)
    monkeypatch.setattr("qevict.pool.keeps_working_copy", lambda device: False)
    without, _, _ = admitted(method, tokens, "40%", new, seed=3)
    assert without.memory(1).workspace == 0
    budget = Budget.parse("40%").resolve(tokens, new, "prompt+max_new", LAYOUT)
    assert with_copy.memory(1).workspace == method.workspace_bytes(budget, LAYOUT) > 0
    for token in range(new):
        expected, outputs = (feed(pool, token, tokens + token, seed=3) for pool in (with_copy, without))
        torch.testing.assert_close(outputs, expected, rtol=1e-4, atol=1e-5)
        for layer in range(LAYERS):
            states = state(with_copy, layer), state(without, layer)
            assert {window: tier for window, (tier, _) in states[0].items()} == {
                window: tier for window, (tier, _) in states[1].items()
            }


def assert_working_copy_is_that_of_the_codes(pool: TieredPool) -> None:
    """Bit for bit, of every record and of nothing else: what attention reads on a CPU is nothing but the codes."""
    held = pool._held[1]
    assert pool.tiers.keeps_copy
    for layer in range(LAYERS):
        codes = CodePages(*(pool.ledger[name][layer, held.code_pages] for name in CodePages.__dataclass_fields__))
        windows = pool.ledger["window"][layer, held.code_pages] - 1
        assert torch.equal(pool.full["fill"][layer, held.working_pages], (windows >= 0) * pool.window)
        if windows.numel():
            keys = rotated_keys(codes, windows, pool.tiers.rotary, pool.bits).unflatten(3, (-1, pool.window))
            values = dequantize(Quantized(codes.value_codes, codes.value_scale, codes.value_offset), pool.bits)
            for name, made in (("keys", keys.permute(0, 1, 3, 4, 2)), ("values", values)):
                kept = pool.full[name][layer, held.working_pages]
                record = (windows >= 0)[:, None, :, None, None].expand_as(kept)
                assert torch.equal(kept[record], made[record])


def test_several_tokens_at_once_equal_one_by_one() -> None:
    """Routing falls due inside the chunk, at the same token in every layer."""
    method, tokens, new = QEvict(recent=8), 120, 48
    assert_chunks_equal_single_tokens(method, tokens, new)


def test_attention_mass_is_conserved() -> None:
    """Scores of live windows grow by one per query, less what sinks receive."""
    method, tokens = QEvict(recent=8, sinks=0), 100
    pool, _, _ = admitted(method, tokens, "60%", 40, seed=9)
    for token in range(40):
        before = [sum(score for _, score in state(pool, layer).values()) for layer in range(LAYERS)]
        routed = (token + 1) % method.window == 0
        feed(pool, token, tokens + token, seed=9)
        if not routed:
            for layer in range(LAYERS):
                after = sum(score for _, score in state(pool, layer).values())
                assert after - before[layer] == pytest.approx(1.0, abs=1e-4)


def test_a_rows_neighbours_change_nothing() -> None:
    method, tokens = QEvict(recent=8), 100
    alone, _, _ = admitted(method, tokens, "50%", 30, seed=11, row=2)
    crowded, _, _ = admitted(method, tokens, "50%", 30, seed=11, row=2)
    other = prompt(140, 77)
    for row in (0, 3):
        crowded.admit({row: compress(method, other, "80%", 30)})
    for token in range(30):
        expected = feed(alone, token, tokens + token, seed=11)
        rows = crowded.rows.tolist()
        positions = torch.tensor([[tokens + token if row == 2 else 140 + token] for row in rows])
        counts = torch.ones(len(rows), dtype=torch.int64)
        for layer in range(LAYERS):
            seeds = [11 if row == 2 else 77 for row in rows]
            parts = zip(*(new_token(token, layer, seed) for seed in seeds), strict=True)
            query, key, value = (torch.stack(part)[:, :, None] for part in parts)
            output = crowded.attend(layer, query, key, value, positions, counts, SCALE)
            assert torch.equal(output[rows.index(2), :, 0], expected[layer])
        crowded.after_step(positions, counts)
        if token == 15:
            crowded.release(0)
