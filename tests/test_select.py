"""Choosing what stays."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvcache.select import keep_top, protect_ends


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
