"""The paper's measures on traces made by hand, and what holds for any trace."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from qevict.diagnostics import (
    EVICTED,
    FULL,
    LOCAL,
    QUANTIZED,
    complete,
    existing,
    future_missed_mass,
    inactive_episodes,
    lagged_transitions,
    oracle_selection,
    reference_scores,
    score_agreement,
    selection_churn,
    tier_mass,
    tier_transitions,
    to_positions,
)


def bits(*rows: str) -> Tensor:
    """``"010"`` a row."""
    return torch.tensor([[mark == "1" for mark in row] for row in rows])


def attention(prompt: int, *steps: list[float]) -> Tensor:
    """One head; step t sees the prompt and t tokens. [1, T, P + T]"""
    made = torch.zeros(1, len(steps), prompt + len(steps), dtype=torch.float64)
    for place, weights in enumerate(steps):
        made[0, place, : len(weights)] = torch.tensor(weights, dtype=torch.float64)
    return made


# -- windows -----------------------------------------------------------------------------------------------------------


def test_windows_count_from_the_end_of_the_sinks() -> None:
    assert to_positions(bits("01"), 1, 2, 6).tolist() == [[False, False, False, True, True, False]]


def test_the_last_window_may_be_incomplete() -> None:
    assert to_positions(bits("11"), 1, 2, 4).tolist() == [[False, True, True, True]]


# -- future missed mass ------------------------------------------------------------------------------------------------

TWO_STEPS = attention(2, [0.5, 0.25, 0.25], [0.125, 0.375, 0.25, 0.25])
"""Prompt of two tokens, two steps."""


def test_missed_mass_counts_only_states_that_existed_at_the_event() -> None:
    held, missed = torch.tensor([2]), bits("1000")
    found = future_missed_mass(TWO_STEPS, held, missed, existing(held, 4), horizon=2)
    assert found.tolist() == [[(0.5 + 0.125) / (0.75 + 0.5)]]


def test_the_horizon_ends_after_its_steps() -> None:
    held, missed = torch.tensor([2]), bits("1000")
    assert future_missed_mass(TWO_STEPS, held, missed, existing(held, 4), horizon=1).tolist() == [[0.5 / 0.75]]


def test_the_horizon_is_cut_at_the_last_step_and_such_events_are_told_apart() -> None:
    held, missed = torch.tensor([2, 3, 4]), bits("1000", "1000", "1000")
    found = future_missed_mass(TWO_STEPS, held, missed, existing(held, 4), horizon=2)
    assert found[0, 1].item() == 0.125 / 0.75  # of two steps one is left
    assert found[0, 2].isnan()  # none is
    assert complete(held, 4, horizon=2).tolist() == [True, False, False]


def test_without_sinks_their_mass_is_in_no_denominator() -> None:
    held, missed = torch.tensor([2]), bits("0100")
    found = future_missed_mass(TWO_STEPS, held, missed, existing(held, 4, sinks=1), horizon=2)
    assert found.tolist() == [[1.0]]


def test_heads_are_measured_apart() -> None:
    heads = torch.cat([TWO_STEPS, attention(2, [0.25, 0.5, 0.25], [0.5, 0.5, 0.0, 0.0])])
    held, missed = torch.tensor([2]), bits("1000")
    assert future_missed_mass(heads, held, missed, existing(held, 4), horizon=1).tolist() == [[2 / 3], [1 / 3]]


# -- churn -------------------------------------------------------------------------------------------------------------


def test_churn_is_the_jaccard_distance_of_neighbours() -> None:
    assert selection_churn(bits("1100", "0110", "0110")).tolist() == [pytest.approx(2 / 3), 0.0]


def test_two_empty_selections_are_the_same() -> None:
    assert selection_churn(bits("00", "00", "01")).tolist() == [0.0, 1.0]


# -- tier mass, agreement ----------------------------------------------------------------------------------------------


def test_reference_scores_begin_with_the_prompts_and_grow_by_every_step() -> None:
    sums, held = torch.tensor([[1.5, 0.5]]), torch.tensor([2, 3, 4])
    whole, decoded = reference_scores(sums, TWO_STEPS, held, sinks=1, window=2)
    assert decoded.tolist() == [[[0.0, 0.0], [0.5, 0.0], [1.125, 0.25]]]
    assert whole.tolist() == [[[0.5, 0.0], [1.0, 0.0], [1.625, 0.25]]]


def test_tier_mass_is_the_share_of_the_windows_scores() -> None:
    scores = torch.tensor([[[4.0, 3.0, 2.0, 1.0]]])
    tiers = torch.tensor([[EVICTED, FULL, QUANTIZED, LOCAL]])
    local, full, quantized, evicted = tier_mass(scores, tiers).flatten().tolist()
    assert [local, full, quantized, evicted] == pytest.approx([0.1, 0.3, 0.2, 0.4])


def test_agreement_is_over_quantised_windows_alone() -> None:
    policy, full = torch.tensor([[3.0, 4.0, 9.0]]), torch.tensor([[4.0, 3.0, 1.0]])
    cosine, ratio = score_agreement(policy, full, bits("110"))
    assert (cosine.item(), ratio.item()) == (pytest.approx(24 / 25), 1.0)


def test_attenuation_changes_the_ratio_and_not_the_cosine() -> None:
    full = torch.tensor([[4.0, 3.0, 1.0]])
    cosine, ratio = score_agreement(full / 2, full, bits("111"))
    assert (cosine.item(), ratio.item()) == (pytest.approx(1.0), pytest.approx(0.5))


def test_nothing_quantised_agrees_with_nothing() -> None:
    cosine, ratio = score_agreement(torch.ones(1, 2), torch.ones(1, 2), bits("00"))
    assert cosine.isnan().all()
    assert ratio.isnan().all()


# -- revival -----------------------------------------------------------------------------------------------------------


def column(text: str) -> tuple[Tensor, Tensor]:
    """One window's events: ``1`` selected, ``0`` not, ``.`` not yet routed."""
    return torch.tensor([[mark == "1"] for mark in text]), torch.tensor([[mark != "."] for mark in text])


@pytest.mark.parametrize(
    ("events", "least", "expected"),
    [
        ("1001", 1, (1, 1)),
        ("1001", 2, (1, 1)),
        ("1001", 3, (0, 0)),
        ("1000", 1, (0, 1)),  # open at the end: eligible, not rescued
        ("1000", 4, (0, 0)),
        ("0001", 3, (1, 1)),  # inactive from the first event on
        ("..01", 1, (1, 1)),
        ("..01", 3, (0, 0)),  # a window that is not yet routed is not inactive
        ("10110001", 1, (2, 2)),
        ("10110001", 2, (1, 1)),  # each maximal episode counts once
        ("0100", 1, (1, 2)),
        ("1111", 1, (0, 0)),
        ("....", 1, (0, 0)),
    ],
)
def test_global_lir_counts_episodes(events: str, least: int, expected: tuple[int, int]) -> None:
    assert inactive_episodes(*column(events)).lir(least) == expected


def test_episodes_of_several_windows_do_not_run_into_each_other() -> None:
    selected = bits("10", "01", "01")
    episodes = inactive_episodes(selected, torch.ones_like(selected))
    assert (episodes.length.tolist(), episodes.returned.tolist()) == ([2, 1], [False, True])


def test_the_oracle_takes_the_best_and_the_earlier_of_equals() -> None:
    scores = torch.tensor([[5.0, 7.0, 7.0, 9.0]])
    assert oracle_selection(scores, bits("1110"), 1).tolist() == [[False, True, False, False]]
    assert oracle_selection(scores, bits("1010"), 3).tolist() == [[True, False, True, False]]


def test_lagged_transitions_are_counted_between_events_that_far_apart() -> None:
    selected, routed = column("0110")
    assert lagged_transitions(selected, routed, 1).tolist() == [[0, 1], [1, 1]]
    assert lagged_transitions(selected, routed, 3).tolist() == [[1, 0], [0, 0]]
    assert lagged_transitions(selected, routed, 4).tolist() == [[0, 0], [0, 0]]


def test_promotions_are_moves_from_quantised_to_full() -> None:
    tiers = torch.tensor([[QUANTIZED, FULL, LOCAL], [FULL, QUANTIZED, LOCAL], [FULL, EVICTED, QUANTIZED]])
    moved = tier_transitions(tiers)
    assert moved[QUANTIZED].tolist() == [0, 1, 0, 1]
    assert moved[FULL].tolist() == [0, 1, 1, 0]
    assert moved[LOCAL].tolist() == [1, 0, 1, 0]


# -- any trace ---------------------------------------------------------------------------------------------------------


@st.composite
def traces(draw: st.DrawFn) -> tuple[Tensor, Tensor, Tensor, int, int]:
    """attention [H, T, N], prompt sums [H, P], tiers [E, W] that only ever evict, sinks, window."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    prompt, steps, heads = draw(st.integers(3, 12)), draw(st.integers(1, 12)), draw(st.integers(1, 3))
    sinks, window = draw(st.integers(0, 2)), draw(st.integers(1, 4))
    scores = torch.randn(heads, prompt + steps, prompt + steps, generator=generator) * 2
    causal = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf).softmax(-1)
    held = range(prompt, prompt + steps + 1, window)
    windows = -(-(prompt + steps - sinks) // window)
    tiers = torch.randint(1, 4, (len(held), windows), generator=generator)
    tiers = torch.where(torch.cummax(tiers == EVICTED, 0).values, EVICTED, tiers)
    for event, tokens in enumerate(held):
        tiers[event, max(0, (tokens - 1 - sinks) // window) :] = LOCAL
    return causal[:, prompt:], causal[:, :prompt, :prompt].sum(1), tiers, sinks, window


def events(attention: Tensor, prompt: int, window: int) -> Tensor:
    return torch.arange(prompt, attention.shape[2] + 1, window)


@settings(max_examples=60)
@given(traces(), st.integers(1, 40))
def test_missed_mass_is_a_share_and_grows_with_what_is_missed(
    trace: tuple[Tensor, Tensor, Tensor, int, int], horizon: int
) -> None:
    attention, sums, tiers, sinks, window = trace
    total = attention.shape[2]
    held = events(attention, sums.shape[1], window)
    there = existing(held, total)
    evicted = to_positions(tiers == EVICTED, sinks, window, total)
    more = evicted | to_positions(tiers == QUANTIZED, sinks, window, total)
    nothing = torch.zeros_like(evicted)
    found = [future_missed_mass(attention, held, part, there, horizon) for part in (nothing, evicted, more, there)]
    followed = held < total
    assert all((one[:, ~followed]).isnan().all() for one in found)
    none, some, most, everything = (one[:, followed] for one in found)
    assert (none == 0).all()
    assert (some >= 0).all()
    assert (some <= most + 1e-6).all()
    torch.testing.assert_close(everything, torch.ones_like(everything))


@settings(max_examples=60)
@given(traces())
def test_tiers_share_all_of_the_mass_and_scores_all_of_the_attention(
    trace: tuple[Tensor, Tensor, Tensor, int, int],
) -> None:
    attention, sums, tiers, sinks, window = trace
    held = events(attention, sums.shape[1], window)
    whole, decoded = reference_scores(sums, attention, held, sinks, window)
    shares = tier_mass(whole, tiers)
    torch.testing.assert_close(shares.sum(0), torch.ones(shares.shape[1:]))
    given_to_sinks = sums[:, :sinks].sum(1)
    torch.testing.assert_close(whole[:, 0].sum(-1), sums.shape[1] - given_to_sinks)
    assert (decoded[:, 1:] >= decoded[:, :-1] - 1e-6).all()
    if sinks == 0:
        torch.testing.assert_close(whole.sum(-1), held.float().expand(len(sums), -1))


@settings(max_examples=60)
@given(traces())
def test_churn_is_a_distance(trace: tuple[Tensor, Tensor, Tensor, int, int]) -> None:
    _, _, tiers, sinks, window = trace
    retained = to_positions((tiers == FULL) | (tiers == QUANTIZED), sinks, window, sinks + window * tiers.shape[1])
    churn = selection_churn(retained)
    assert ((churn >= 0) & (churn <= 1)).all()
    assert torch.equal(churn, selection_churn(retained.flip(0)).flip(0))
    assert torch.equal(churn == 0, (retained[1:] == retained[:-1]).all(-1))


@settings(max_examples=60)
@given(traces())
def test_episodes_and_moves_account_for_every_event(trace: tuple[Tensor, Tensor, Tensor, int, int]) -> None:
    _, _, tiers, _, _ = trace
    selected, routed = tiers == FULL, tiers != LOCAL
    episodes = inactive_episodes(selected, routed)
    assert int(episodes.length.sum()) == int((routed & ~selected).sum())
    shares = [episodes.lir(least) for least in (1, 2, 3, 4, 8)]
    assert all(returned <= eligible for returned, eligible in shares)
    assert [eligible for _, eligible in shares] == sorted((eligible for _, eligible in shares), reverse=True)
    moved = tier_transitions(tiers)
    assert int(moved.sum()) == tiers[1:].numel()
    assert moved[EVICTED].tolist()[:EVICTED] == [0, 0, 0]
    came_back = int(lagged_transitions(selected, routed, 1)[0, 1])
    assert came_back == int(moved[QUANTIZED, FULL]) == int(episodes.returned.sum())


@settings(max_examples=60)
@given(st.integers(0, 2**31), st.floats(0.125, 8))
def test_agreement_with_itself_is_whole_at_any_scale(seed: int, factor: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    full = torch.rand(3, 5, generator=generator) + 0.1
    quantized = torch.rand(3, 5, generator=generator) > 0.3
    quantized[:, 0] = True
    cosine, ratio = score_agreement(full * factor, full, quantized)
    torch.testing.assert_close(cosine, torch.ones(3, dtype=torch.float64))
    torch.testing.assert_close(ratio, torch.full((3,), factor, dtype=torch.float64), rtol=1e-5, atol=0)
