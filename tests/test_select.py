"""Choosing what stays."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kvcache.select import apportion, keep_counts, keep_top, protect_ends


def test_ties_break_by_lower_position_and_positions_ascend() -> None:
    assert keep_top(torch.tensor([[1.0, 3, 3, 3, 0]]), 2).tolist() == [[1, 2]]
    assert keep_top(torch.tensor([[0.0, 1, 0, 5]]), 3).tolist() == [[0, 1, 3]]


def test_protected_entries_rank_above_any_score() -> None:
    scores = torch.tensor([[9.0, 9, 9, 9, 0, 0]])
    assert keep_top(scores, 3, protect_ends(6, 1, 2)).tolist() == [[0, 4, 5]]


def test_protected_entries_must_fit() -> None:
    with pytest.raises(ValueError, match="3 protected tokens do not fit into 2"):
        keep_top(torch.zeros(1, 6), 2, protect_ends(6, 1, 2))


@given(
    st.lists(st.lists(st.integers(0, 3).map(float), min_size=7, max_size=7), min_size=1, max_size=3), st.integers(1, 9)
)
def test_kept_are_the_best_without_repeats(rows: list[list[float]], count: int) -> None:
    scores = torch.tensor(rows)
    for kept, row in zip(keep_top(scores, count).tolist(), rows, strict=True):
        assert kept == sorted(set(kept))
        assert len(kept) == min(count, 7)
        best = sorted(range(7), key=lambda position: (-row[position], position))[:count]
        assert kept == sorted(best)


def test_heads_with_counts_of_their_own() -> None:
    scores = torch.tensor([[3.0, 1, 2, 0], [0, 0, 0, 5]])
    assert [head.tolist() for head in keep_counts(scores, [3, 1])] == [[0, 1, 2], [3]]
    assert [head.tolist() for head in keep_counts(scores, [1, 2], protect_ends(4, 0, 1))] == [[3], [0, 3]]
    with pytest.raises(ValueError, match="1 protected tokens do not fit into 0"):
        keep_counts(scores, [0, 2], protect_ends(4, 0, 1))


def test_apportioned_by_largest_remainder() -> None:
    assert apportion([1, 1, 1], 4, 9) == [2, 1, 1]
    assert apportion([0.5, 0.3, 0.2], 10, 9) == [5, 3, 2]
    assert apportion([9, 1, 1], 12, 6) == [6, 3, 3], "what the first cannot take goes to the others"
    assert apportion([0, 0, 5], 6, 4) == [1, 1, 4]
    with pytest.raises(ValueError, match="9 do not fit into 2 places of 4"):
        apportion([1, 1], 9, 4)


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=6), st.integers(0, 60), st.integers(10, 20))
def test_apportioned_is_exact_capped_and_in_order(shares: list[float], total: int, most: int) -> None:
    total = min(total, most * len(shares))
    given_ = apportion(shares, total, most)
    assert sum(given_) == total
    assert all(0 <= count <= most for count in given_)
    for one, count in zip(shares, given_, strict=True):
        for other, fewer in zip(shares, given_, strict=True):
            assert one <= other or count >= fewer, "a larger share never gets less"


@pytest.mark.parametrize("choose", [lambda scores: keep_top(scores, 2), lambda scores: keep_counts(scores, [1, 2])])
def test_a_score_that_is_no_number_is_no_rank(choose: Callable[[Tensor], object]) -> None:
    scores = torch.tensor([[1.0, 2.0, 3.0], [1.0, torch.nan, 3.0]])
    with pytest.raises(ValueError, match="a score is not a number"):
        choose(scores)
