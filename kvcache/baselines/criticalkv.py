"""CriticalKV (Feng et al., arXiv 2502.03805): attention alone does not bound what eviction does to the output.

Of b tokens beside the window, the first ⌊p b⌋ are the best by SnapKV's score; the rest are the best of what is left by

    (s_i + ε) || W_O v_i ||_1

s is the attention of one query of the window, pooled; the norm is the mean over the group's query heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any, ClassVar

from kvcache.budget import ResolvedBudget
from kvcache.window_evictor import AdaptiveHeads, WindowEvictor

if TYPE_CHECKING:
    from torch import Tensor

    from kvcache.prefill import LayerPrefill, Prefill


@dataclass(frozen=True)
class CriticalKV(WindowEvictor):
    """``first_stage`` is p, ``epsilon`` is ε, the setting that matters most. All heads have the same budget.

    Where this differs from kvpress, the public code of the method: the window takes nothing of the first stage's quota,
    and the first stage's choice and the window rank strictly above all else.
    """

    name: ClassVar[str] = "criticalkv"
    version: ClassVar[int] = 2

    first_stage: float = 0.5
    epsilon: float = 1e-4

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.first_stage <= 1:
            raise ValueError(f"first_stage is between 0 and 1, not {self.first_stage}")
        if self.epsilon < 0:
            raise ValueError(f"epsilon must be at least 0, not {self.epsilon}")

    def keep(self, prefill: Prefill, budget: ResolvedBudget, examined: Any) -> list[list[Tensor]]:
        import torch

        from kvcache.select import best_of_rows, keep_counts

        protected = self.protected(prefill)
        window = min(self.window, prefill.tokens)
        each, prefix = budget.prompt_budget - window, prefill.tokens - window
        kept = []
        for layer, scores in zip(prefill.layers, examined, strict=True):
            budgets = self.head_budgets(scores[:, :prefix], each, window)
            first = [int(Fraction(str(self.first_stage)) * own) for own in budgets]
            chosen = best_of_rows(scores, torch.tensor(first, device=scores.device))
            worth = self.second_stage(layer, scores, window).masked_fill(chosen, float("inf"))
            kept.append(keep_counts(worth, [window + own for own in budgets], protected))
        return kept

    def second_stage(self, layer: LayerPrefill, scores: Tensor, window: int) -> Tensor:
        """[H_kv, n], of the sums over the window's queries that ``scores`` are."""
        return (scores / window + self.epsilon) * layer.projected_value_norms

    def utilities(self, prefills: Sequence[Prefill], seeds: Sequence[str]) -> list[list[Tensor]]:
        """The second stage's: without a budget there is no first one."""
        return [
            [
                self.second_stage(layer, scores, min(self.window, prefill.tokens))
                for layer, scores in zip(prefill.layers, found, strict=True)
            ]
            for prefill, found in zip(prefills, self.examine(prefills, seeds), strict=True)
        ]


@dataclass(frozen=True)
class CriticalAdaKV(AdaptiveHeads, CriticalKV):
    """AdaKV's head budgets, from SnapKV's score; then both stages inside every head.

    kvpress sums head budgets over the batch and lets the tokens of AdaKV's safeguard through both stages; here a prompt
    is alone, and the safeguard only sets budgets.
    """

    name: ClassVar[str] = "critical_adakv"
    version: ClassVar[int] = 2
