"""Methods with an operating point instead of a budget: quantisers, whose bits say what they hold, and methods that keep
the whole cache and read a part of it.

A sweep has one cell of such a method, without a budget, whatever its budgets are.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from dataclasses import dataclass
from typing import ClassVar

from kvcache.budget import ResolvedBudget
from kvcache.layout import CacheLayout, LayerLayout
from kvcache.method import Method


@dataclass(frozen=True)
class FixedMethod(Method):
    """What a row holds follows from the lengths of its prompt and of what came since."""

    fixed: ClassVar[bool] = True

    @abstractmethod
    def layer_bytes(self, prompt_tokens: int, new_tokens: int, layer: LayerLayout, element_bytes: int) -> int:
        """Bytes that one layer holds of so many tokens, by the formula of the method's paper."""

    def unsuited(self, layer: LayerLayout) -> str | None:
        """Why this method cannot serve a growing layer of this shape, or None."""
        return None

    def impossible(self, budget: ResolvedBudget, layout: CacheLayout) -> str | None:
        for index in layout.growing:
            if reason := self.unsuited(layout.layers[index]):
                return reason
        held = self._most_held(budget, layout, 0 if budget.base == "prompt" else budget.new_tokens)
        if budget.unlimited or held <= budget.total_bytes:
            return None
        return (
            f"{self.name} has an operating point, not a budget: its settings make it hold {held} bytes, and"
            f" {budget.asked} leaves {budget.total_bytes}; give it the budget 'unlimited'"
        )

    def peak_bytes(self, budget: ResolvedBudget, layout: CacheLayout) -> int:
        return self._most_held(budget, layout, budget.new_tokens)

    def held_bytes(self, prompt_tokens: int, new_tokens: int, layout: CacheLayout) -> int:
        """Bytes that a row holds."""
        alike = Counter(layout.layers[index] for index in layout.growing)
        lengths = prompt_tokens, new_tokens
        return sum(count * self.layer_bytes(*lengths, one, layout.element_bytes) for one, count in alike.items())

    def _most_held(self, budget: ResolvedBudget, layout: CacheLayout, new_tokens: int) -> int:
        """A row that codes its newest tokens becomes smaller, so the end is not always the peak. The token that makes
        it due is there in full before."""
        held = [self.held_bytes(budget.prompt_tokens, new, layout) for new in range(new_tokens + 1)]
        return max(*(one + layout.full_bytes(1) for one in held[:-1]), held[-1], held[0])
