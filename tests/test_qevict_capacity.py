"""How many windows fit: the paper's worked numbers, and that strict accounting covers what is held."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvcache.budget import Budget
from kvcache.layout import CacheLayout, LayerLayout
from qevict.capacity import Capacities, window_bytes
from qevict.method import QEvict
from qevict.routing import EVICTED, FULL, QUANTIZED, UNTOUCHED, assign_tiers


def layout(kv_heads: int, dim: int, element_bytes: int = 2) -> CacheLayout:
    return CacheLayout((LayerLayout("growing", 4 * kv_heads, kv_heads, dim, dim),) * 2, element_bytes)


def resolve(budget: str, prompt: int, new: int, of: CacheLayout, **settings: Any) -> Capacities | None:
    resolved = Budget.parse(budget).resolve(prompt, new, "prompt+max_new", of)
    return QEvict(**settings).capacities(resolved, of)


@pytest.mark.parametrize(
    ("kv_heads", "dim", "quantized"),
    [
        (8, 128, {4: 6272, 8: 8448, 16: 12800, 32: 21504}),
        (4, 128, {4: 3136, 8: 4224, 16: 6400, 32: 10752}),
        (8, 64, {4: 3200, 8: 4352, 16: 6656, 32: 11264}),
        (2, 64, {4: 800, 8: 1088, 16: 1664, 32: 2816}),
        (1, 128, {4: 784, 8: 1056, 16: 1600, 32: 2688}),
    ],
)
def test_bytes_of_a_window(kv_heads: int, dim: int, quantized: dict[int, int]) -> None:
    """M_f and M_q per layer, in 16-bit models, for every window size of the paper's ablation."""
    for window, expected in quantized.items():
        size = window_bytes(window, 2, layout(kv_heads, dim).layers[0], 2)
        assert (size.full, size.quantized) == (window * kv_heads * 2 * dim * 2, expected)


def test_bytes_of_a_four_bit_window() -> None:
    assert window_bytes(8, 4, layout(8, 128).layers[0], 2).quantized == 12544


@pytest.mark.parametrize(
    ("window", "share", "full", "quantized"), [(8, 0.5, 7, 28), (32, 0.5, 1, 11), (8, 0.7, 4, 39), (32, 0.7, 1, 15)]
)
def test_capacities_of_the_papers_diagnostics(window: int, share: float, full: int, quantized: int) -> None:
    """App. I: 512 prompt tokens, 256 new ones, 20 %, five sinks, 32 recent tokens."""
    room = resolve("20%", 512, 256, layout(8, 128), window=window, quantized_share=share, accounting="paper")
    assert room is not None
    assert (room.full, room.quantized) == (full, quantized)


@pytest.mark.parametrize(
    ("prompt", "new", "budget", "recent", "full", "quantized"),
    [
        (8000, 128, "20%", 128, 55, 506),
        (8000, 128, "10%", 128, 25, 230),
        (8000, 128, "5%", 32, 13, 125),
        (32000, 128, "20%", 64, 238, 2157),
        (256, 1024, "20%", 32, 8, 74),
        (157, 512, "40%", 72, 7, 64),
        (157, 512, "20%", 40, 3, 29),
        (157, 512, "10%", 24, 1, 12),
    ],
)
def test_capacities_of_the_papers_settings(
    prompt: int, new: int, budget: str, recent: int, full: int, quantized: int
) -> None:
    """q = 0.7 on an 8B Llama's heads, as the authors' released configuration resolves them."""
    room = resolve(budget, prompt, new, layout(8, 128), recent=recent, accounting="paper")
    assert room is not None
    windows = -(-(prompt + new) // 8)
    assert (room.full, room.quantized) == (full, min(quantized, windows))


def test_fp32_windows_cost_twice_and_codes_the_same() -> None:
    half, single = (window_bytes(8, 2, layout(2, 64, size).layers[0], size) for size in (2, 4))
    assert single.full == 2 * half.full
    assert single.quantized == half.quantized


def test_a_budget_below_the_protected_tokens_is_impossible() -> None:
    of = layout(2, 64)
    tiny = Budget.parse("32 tokens").resolve(512, 16, "prompt", of)
    reason = QEvict().impossible(tiny, of)
    assert reason is not None
    assert "5 sinks and 32 recent tokens" in reason
    assert QEvict().impossible(Budget.parse("64 tokens").resolve(512, 16, "prompt", of), of) is None


@pytest.mark.parametrize(
    "wrong", [{"bits": 3}, {"quantized_share": 1.5}, {"window": 2}, {"accounting": "loose"}, {"recent": 0}], ids=str
)
def test_settings_that_mean_nothing_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"not|must|does"):
        QEvict(**wrong)


def tiers_of(scores: list[float], coded: list[bool], full: int, quantized: int, strict: bool = True) -> list[int]:
    room = Capacities(full, quantized, 0, strict, 0)
    windows = torch.arange(len(scores))[None]
    candidate = torch.ones_like(windows, dtype=torch.bool)
    return assign_tiers(torch.tensor([scores], dtype=torch.float32), windows, candidate, torch.tensor([coded]), room)[
        0
    ].tolist()


def test_the_best_windows_are_full_the_next_quantised_the_rest_evicted() -> None:
    assert tiers_of([1, 5, 3, 4, 2], [False] * 5, 1, 2) == [EVICTED, FULL, QUANTIZED, QUANTIZED, EVICTED]


def test_ties_go_to_the_earlier_window() -> None:
    assert tiers_of([2, 2, 2, 2], [False] * 4, 1, 1) == [FULL, QUANTIZED, EVICTED, EVICTED]


def test_a_promoted_window_takes_a_quantised_slot_too() -> None:
    coded = [True, False, False, False]
    assert tiers_of([9, 5, 4, 3], coded, 1, 2) == [FULL, QUANTIZED, EVICTED, EVICTED]
    assert tiers_of([9, 5, 4, 3], coded, 1, 2, strict=False) == [FULL, QUANTIZED, QUANTIZED, EVICTED]


def test_windows_that_are_no_candidates_are_left_alone() -> None:
    room, windows = Capacities(1, 1, 0, True, 0), torch.tensor([[3, 1, 2, 0]])
    candidate = torch.tensor([[True, False, True, True]])
    tiers = assign_tiers(torch.tensor([[1.0, 9.0, 2.0, 2.0]]), windows, candidate, ~candidate, room)
    assert tiers.tolist() == [[EVICTED, UNTOUCHED, QUANTIZED, FULL]]


@given(st.data())
def test_strict_routing_never_needs_more_records_than_there_is_room(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 12))
    scores = data.draw(st.lists(st.integers(0, 4).map(float), min_size=count, max_size=count))
    full, quantized = data.draw(st.integers(0, 12)), data.draw(st.integers(0, 12))
    coded = data.draw(st.lists(st.booleans(), min_size=count, max_size=count).filter(lambda x: sum(x) <= quantized))
    tiers = tiers_of(scores, coded, full, quantized)
    promoted = sum(tier == FULL and code for tier, code in zip(tiers, coded, strict=True))
    assert tiers.count(FULL) <= full
    assert tiers.count(QUANTIZED) + promoted <= quantized
    if tiers.count(EVICTED):
        assert tiers.count(QUANTIZED) + promoted == quantized


@given(
    st.integers(1, 8), st.sampled_from([16, 64, 128]), st.integers(64, 5000), st.integers(1, 512), st.integers(1, 100)
)
def test_capacities_fit_their_budget(kv_heads: int, dim: int, prompt: int, new: int, share: int) -> None:
    of = layout(kv_heads, dim)
    budget = Budget.parse(f"{share}%").resolve(prompt, new, "prompt+max_new", of)
    for accounting in ("strict", "paper"):
        method = QEvict(accounting=accounting)  # type: ignore[arg-type]
        room = method.capacities(budget, of)
        if room is not None:
            size = window_bytes(8, 2, of.layers[0], 2)
            assert room.full * size.full + room.quantized * size.quantized <= min(budget.layer_bytes)
    assert Decimal(str(QEvict().quantized_share)) == Decimal("0.7")
