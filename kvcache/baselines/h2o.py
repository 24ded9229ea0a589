"""H2O (Zhang et al., arXiv 2306.14048): keep the heavy hitters, the tokens that all queries attended to most.

    score(i) = mean over the group of  sum over all prompt queries q of  softmax(q K^T / sqrt(d))_i

The sums are not divided by the number of queries that could see a token, so early tokens start higher; that is the
method's own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from kvcache.budget import ResolvedBudget
from kvcache.evict import PromptEvictor
from kvcache.method import Observations

if TYPE_CHECKING:
    from torch import Tensor

    from kvcache.prefill import Prefill


@dataclass(frozen=True)
class H2O(PromptEvictor):
    """``heavy_share`` of the budget, rounded down, goes to heavy hitters and the rest to the most recent tokens.

    Where this differs from the authors' code: it has one query head per KV head, here the mean of a group decides,
    which ranks as its sum does; its two parts are equal shares of the prompt, here they are shares of the budget; it
    sums over the batch and masks what it evicts, here a row is alone and evicting frees. The choice is made once, at
    the end of prefill.
    """

    name: ClassVar[str] = "h2o"
    version: ClassVar[int] = 1

    heavy_share: float = 0.5

    def __post_init__(self) -> None:
        if not 0 <= self.heavy_share < 1:
            raise ValueError(f"heavy_share is at least 0 and below 1, not {self.heavy_share}")

    @property
    def protected_ends(self) -> tuple[int, int]:
        """Of the smallest budget: one recent token."""
        return 0, 1

    def observes(self) -> Observations:
        return Observations(column_sums=True)

    def scores(self, prefill: Prefill, seed: str) -> list[Tensor]:
        """[H_kv, n] per layer, of column sums [H_q, n]"""
        scores = []
        for layer in prefill.layers:
            assert layer.column_sums is not None
            scores.append(layer.column_sums.unflatten(0, (len(layer.keys), -1)).mean(1))
        return scores

    def recent(self, kept: int) -> int:
        """How many of ``kept`` tokens are the most recent ones."""
        from fractions import Fraction

        return kept - int(Fraction(str(self.heavy_share)) * kept)

    def keep(self, prefill: Prefill, budget: ResolvedBudget, examined: Any) -> list[list[Tensor]]:
        from kvcache.select import keep_top, protect_ends

        kept = budget.prompt_budget
        recent = protect_ends(prefill.tokens, 0, self.recent(kept), prefill.logits.device)
        return [list(keep_top(scores, kept, recent)) for scores in examined]
