"""AdaKV (Feng et al., arXiv 2407.11550): SnapKV's score, with more room for the heads of a layer that spread attention.

    c_h = tokens of head h among the H (B - w) best of the layer      b_h = (1 - α) c_h + α (B - w)

Head h keeps its b_h best tokens and the window of w. At α = 0 the layer as a whole keeps the most attention it can; α
is what every head is sure of.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from kvcache.budget import ResolvedBudget
from kvcache.window_evictor import AdaptiveHeads

if TYPE_CHECKING:
    from torch import Tensor

    from kvcache.prefill import Prefill


@dataclass(frozen=True)
class AdaKV(AdaptiveHeads):
    """Uneven budgets inside every layer; all layers have the same total.

    Where this differs from the authors' code: budgets belong to KV heads and a group's mean scores, while by default it
    gives them to query heads; rounding keeps the total of a layer exact; its floor (B - w) α is not rounded down first;
    the window's sum ranks, as in SnapKV, where it takes the mean, which ranks alike.
    """

    name: ClassVar[str] = "adakv"
    version: ClassVar[int] = 1

    def keep(self, prefill: Prefill, budget: ResolvedBudget, examined: Any) -> list[list[Tensor]]:
        from kvcache.select import keep_counts

        protected = self.protected(prefill)
        window = min(self.window, prefill.tokens)
        each, prefix = budget.prompt_budget - window, prefill.tokens - window
        kept = []
        for scores in examined:
            budgets = self.head_budgets(scores[:, :prefix], each, window)
            kept.append(keep_counts(scores, [window + own for own in budgets], protected))
        return kept
