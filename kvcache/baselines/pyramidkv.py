"""PyramidKV (Cai et al., arXiv 2406.02069): SnapKV's choice, with budgets that shrink with depth.

    k_l = k_0 - l (k_0 - k_{L-1}) / (L - 1)      k_{L-1} = (B - w) / β      k_0 = 2 (B - w) - k_{L-1}

k_l is what layer l keeps beside the window of w tokens; the mean over layers is B - w.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from kvcache.budget import ResolvedBudget
from kvcache.window_evictor import WindowEvictor

if TYPE_CHECKING:
    from torch import Tensor

    from kvcache.prefill import Prefill


@dataclass(frozen=True)
class PyramidKV(WindowEvictor):
    """``beta`` is how many times less than the mean the last layer keeps beside the window.

    As in the authors' code: (B - w) / β is rounded down; the first layer keeps no more than the prompt has, and the
    last one then keeps more; a prompt of fewer than 2 (B - w) tokens is compressed as SnapKV would.

    Where this differs from it: the total is exact, by largest remainder, while its rounded steps give up to 5 % more
    than L B tokens; its window of 8 is SnapKV's 32 here; group means decide, as for SnapKV. In models whose layers
    differ in size, layers of one size share a line.
    """

    name: ClassVar[str] = "pyramidkv"
    version: ClassVar[int] = 1

    beta: int = 20

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.beta < 1:
            raise ValueError(f"beta must be at least 1, not {self.beta}")

    def keep(self, prefill: Prefill, budget: ResolvedBudget, examined: Any) -> list[list[Tensor]]:
        from kvcache.select import keep_top

        protected = self.protected(prefill)
        counts = self.layer_budgets(prefill, budget)
        return [list(keep_top(scores, count, protected)) for scores, count in zip(examined, counts, strict=True)]

    def layer_budgets(self, prefill: Prefill, budget: ResolvedBudget) -> list[int]:
        """What every head of each growing layer keeps, the window included."""
        from kvcache.allocate import layers_of_one_size, pyramid

        window = min(self.window, prefill.tokens)
        mean = budget.prompt_budget - window
        budgets = [budget.prompt_budget] * len(prefill.layers)
        if prefill.tokens < 2 * mean:
            return budgets
        for group in layers_of_one_size(prefill.layout):
            line = pyramid(len(group), mean, self.beta, prefill.tokens - window)
            for layer, beside_window in zip(group, line, strict=True):
                budgets[layer] = window + beside_window
        return budgets
