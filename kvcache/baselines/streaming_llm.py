"""StreamingLLM (Xiao et al., arXiv 2309.17453): the first tokens, which act as attention sinks, and the most recent.

Two methods go by this name. What the compared papers call StreamingLLM compresses once, at the end of prefill, and keys
keep their original positions. The published one (§3.2, "Rolling KV Cache with Attention Sinks") evicts at every step
and counts positions inside the cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from kvcache.budget import ResolvedBudget
from kvcache.evict import PromptEvictor
from kvcache.layout import CacheLayout
from kvcache.method import Method

if TYPE_CHECKING:
    from torch import Tensor

    from kvcache.pool import Compressed, FamilyPool, PoolShape
    from kvcache.prefill import Prefill


@dataclass(frozen=True)
class StreamingLLM(PromptEvictor):
    """Keep ``sinks`` first tokens and fill the budget with the most recent ones."""

    name: ClassVar[str] = "streaming_llm"
    version: ClassVar[int] = 1

    sinks: int = 4

    def __post_init__(self) -> None:
        if self.sinks < 0:
            raise ValueError(f"sinks must be at least 0, not {self.sinks}")

    @property
    def protected_ends(self) -> tuple[int, int]:
        return self.sinks, 1

    def scores(self, prefill: Prefill, seed: str) -> list[Tensor]:
        """A token's score is its position. [H_kv, n]"""
        import torch

        recency = torch.arange(prefill.tokens, dtype=torch.float32, device=prefill.logits.device)
        return [recency.expand(len(layer.keys), -1) for layer in prefill.layers]


@dataclass(frozen=True)
class RollingStreamingLLM(Method):
    """``sinks`` first tokens and a rolling cache of the rest of the budget: generated tokens push the oldest ones out.

    Where this differs from the authors' code: the prompt is read in full, with one prefill for all methods, while
    theirs evicts inside the prompt as well. Keys are stored rotated, and the sinks are turned along: see
    :mod:`kvcache.rolling`.
    """

    name: ClassVar[str] = "streaming_llm_rolling"
    version: ClassVar[int] = 1
    bounded: ClassVar[bool] = True

    sinks: int = 4

    def __post_init__(self) -> None:
        if self.sinks < 1:
            raise ValueError(f"sinks must be at least 1, not {self.sinks}")

    @property
    def family(self) -> str:
        return f"rolling ({self.sinks} sinks)"

    def impossible(self, budget: ResolvedBudget, layout: CacheLayout) -> str | None:
        if budget.prompt_tokens <= self.sinks:
            return (
                f"{self.name} must have a prompt longer than its {self.sinks} sinks, not {budget.prompt_tokens} tokens"
            )
        if budget.tokens <= self.sinks:
            return f"{self.name} must keep {self.sinks + 1} tokens, and {budget.asked} leaves {budget.tokens}"
        return None

    def compress(self, prefill: Prefill, budget: ResolvedBudget, examined: Any) -> Compressed:
        from kvcache.rolling import RollingCompressed

        return RollingCompressed(prefill, budget.tokens)

    def new_pool(self, shape: PoolShape) -> FamilyPool:
        from kvcache.rolling import RollingPool

        return RollingPool(shape, self.sinks)
