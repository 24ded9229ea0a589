"""Budgets: what they parse from, and what they resolve to, exactly."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcache.budget import Budget, BudgetError
from kvcache.layout import CacheLayout, LayerLayout

LAYOUT = CacheLayout(
    (
        LayerLayout("growing", 8, 2, 64, 64),
        LayerLayout("sliding", 8, 2, 64, 64, 32),
        LayerLayout("growing", 8, 1, 64, 32),
    ),
    2,
)


@pytest.mark.parametrize(
    ("text", "shown"),
    [("10%", "10%"), (0.1, "10%"), ("0.05", "5%"), ("12.5%", "12.5%"), ("128 tokens", "128 tokens"), (1, "100%")],
)
def test_what_a_budget_may_be_written_as(text: object, shown: str) -> None:
    assert str(Budget.parse(text)) == shown
    assert Budget.parse(shown) == Budget.parse(text)


@pytest.mark.parametrize(
    "text", [0, "0%", "-5%", "130%", 1.3, "1.5 tokens", "0 tokens", "ten", "", None, "nan%", "inf"]
)
def test_what_is_no_budget(text: object) -> None:
    with pytest.raises(BudgetError):
        Budget.parse(text)


@given(st.integers(1, 10000), st.integers(1, 200_000))
def test_shares_lose_no_token_to_floating_point(basis_points: int, tokens: int) -> None:
    resolved = Budget.parse(f"{basis_points / 100}%").resolve(tokens, 7, "prompt", LAYOUT)
    assert resolved.tokens == Fraction(basis_points, 10000) * tokens // 1


def test_the_base_says_what_a_share_is_of() -> None:
    budget = Budget.parse("20%")
    assert budget.resolve(512, 256, "prompt+max_new", LAYOUT).tokens == 153
    assert budget.resolve(512, 256, "prompt", LAYOUT).tokens == 102


def test_generated_tokens_must_fit_where_the_base_counts_them() -> None:
    assert Budget.parse("20%").resolve(1000, 100, "prompt", LAYOUT).prompt_budget == 200
    assert Budget.parse("20%").resolve(1000, 100, "prompt+max_new", LAYOUT).prompt_budget == 120
    assert Budget.parse("unlimited").resolve(1000, 100, "prompt+max_new", LAYOUT).prompt_budget == 1000
    assert Budget.parse("2000 tokens").resolve(1000, 100, "prompt", LAYOUT).prompt_budget == 1000


def test_only_growing_layers_have_a_budget() -> None:
    resolved = Budget.parse("50%").resolve(100, 10, "prompt", LAYOUT)
    assert resolved.layer_bytes == (50 * 512, 50 * 192)
    assert LAYOUT.full_bytes(100) == 100 * (512 + 192)
    assert LAYOUT.sliding_bytes(100) == 32 * 512
