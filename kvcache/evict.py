"""Methods that score prompt tokens once, at the end of prefill, and keep the best of every KV head."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from kvcache.budget import ResolvedBudget
from kvcache.layout import CacheLayout
from kvcache.method import Method

if TYPE_CHECKING:
    from torch import Tensor

    from kvcache.pool import Compressed, FamilyPool, PoolShape
    from kvcache.prefill import Prefill


@dataclass(frozen=True)
class PromptEvictor(Method):
    """Uniform budget per layer and head, protected tokens counted inside it. Generated tokens are added (``grow``)."""

    chooses_once: ClassVar[str] = ""
    """Why it cannot choose again among what a head holds, as ``growth: bounded`` asks; empty where it can."""

    @property
    def family(self) -> str:
        return "ragged"

    @property
    @abstractmethod
    def protected_ends(self) -> tuple[int, int]:
        """How many of the first and of the last prompt tokens are always kept."""

    @abstractmethod
    def scores(self, prefill: Prefill, seed: str) -> list[Tensor]:
        """Utility of every prompt token: one [H_kv, n] fp32 tensor per growing layer, higher = keep."""

    def impossible(self, budget: ResolvedBudget, layout: CacheLayout) -> str | None:
        needed = min(max(sum(self.protected_ends), 1), budget.prompt_tokens)
        if budget.prompt_budget >= needed:
            return None
        reserved = f" after {budget.new_tokens} new ones" if budget.base == "prompt+max_new" else ""
        left = f"{budget.asked} leaves {budget.prompt_budget}{reserved}"
        return f"{self.name} must keep {needed} protected tokens, and {left}"

    def examine(self, prefills: Sequence[Prefill], seeds: Sequence[str]) -> list[Any]:
        """The ``scores`` of each prompt, unless a method needs to find more."""
        return [self.scores(prefill, seed) for prefill, seed in zip(prefills, seeds, strict=True)]

    def utilities(self, prefills: Sequence[Prefill], seeds: Sequence[str]) -> list[list[Tensor]]:
        """The ``scores`` of each prompt, for those who rank with them; methods that run the model again score prompts
        together."""
        return [self.scores(prefill, seed) for prefill, seed in zip(prefills, seeds, strict=True)]

    def compress(self, prefill: Prefill, budget: ResolvedBudget, examined: Any) -> Compressed:
        from kvcache.ragged import RaggedCompressed

        return RaggedCompressed(prefill, self.keep(prefill, budget, examined))

    def keep(self, prefill: Prefill, budget: ResolvedBudget, examined: Any) -> list[list[Tensor]]:
        """Kept positions of every KV head, ascending: [layers][H_kv] of [k] int64. The best of every head, the same
        number in all; methods with budgets per head or layer choose otherwise, and keep the total."""
        from kvcache.select import keep_top

        protected = self.protected(prefill)
        return [list(keep_top(scores, budget.prompt_budget, protected)) for scores in examined]

    def room(self, prefill: Prefill, budget: ResolvedBudget) -> int:
        """Tokens that a KV head may keep on average beside the protected ones.

        Raises:
            ValueError: these alone exceed the budget.
        """
        ends = min(sum(self.protected_ends), prefill.tokens)
        if ends > budget.prompt_budget:
            raise ValueError(f"{ends} protected tokens do not fit into {budget.prompt_budget}")
        return budget.prompt_budget - ends

    def protected(self, prefill: Prefill) -> Tensor:
        """[n] bool: the tokens that every head keeps."""
        from kvcache.select import protect_ends

        return protect_ends(prefill.tokens, *self.protected_ends, prefill.logits.device)

    def new_pool(self, shape: PoolShape) -> FamilyPool:
        from kvcache.ragged import RaggedPool

        return RaggedPool(shape)


@dataclass(frozen=True)
class EndsEvictor(PromptEvictor):
    """Keeps ``sinks`` first and ``recent`` last tokens beside its choice; by default it protects nothing."""

    sinks: int = 0
    recent: int = 0

    def __post_init__(self) -> None:
        if self.sinks < 0 or self.recent < 0:
            raise ValueError(f"sinks and recent must be at least 0, not sinks={self.sinks}, recent={self.recent}")

    @property
    def protected_ends(self) -> tuple[int, int]:
        return self.sinks, self.recent
