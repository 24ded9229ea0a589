"""The uncompressed cache: the reference of every comparison (QEvict, Eq. 7)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from kvcache.budget import ResolvedBudget
from kvcache.method import Method

if TYPE_CHECKING:
    from kvcache.pool import Compressed, FamilyPool, PoolShape
    from kvcache.prefill import Prefill


@dataclass(frozen=True)
class Full(Method):
    """Keep every token."""

    name: ClassVar[str] = "full"
    version: ClassVar[int] = 1

    @property
    def family(self) -> str:
        return "ragged"

    def compress(self, prefill: Prefill, budget: ResolvedBudget, examined: Any) -> Compressed:
        import torch

        from kvcache.ragged import RaggedCompressed

        everything = torch.arange(prefill.tokens, device=prefill.logits.device)
        return RaggedCompressed(prefill, [[everything] * len(layer.keys) for layer in prefill.layers])

    def new_pool(self, shape: PoolShape) -> FamilyPool:
        from kvcache.ragged import RaggedPool

        return RaggedPool(shape)
