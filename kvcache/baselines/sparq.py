"""SparQ (Ribar et al., arXiv 2312.04985): the whole cache is kept; a step reads a few channels of all keys, then the
tokens that these say matter, and stands in for the others with the mean of all values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from kvcache.budget import ResolvedBudget
from kvcache.fixed import FixedMethod
from kvcache.layout import LayerLayout

if TYPE_CHECKING:
    from kvcache.pool import Compressed, FamilyPool, PoolShape
    from kvcache.prefill import Prefill


@dataclass(frozen=True)
class SparQ(FixedMethod):
    """``channels`` r and ``tokens`` k of the paper's Algorithm 1; the last ``local`` tokens are always among the k, the
    current one comes besides. The group's query heads share channels and tokens."""

    name: ClassVar[str] = "sparq"
    version: ClassVar[int] = 1

    channels: int = 16
    tokens: int = 64
    local: int = 16

    def __post_init__(self) -> None:
        if self.channels < 1 or not 0 <= self.local <= self.tokens:
            raise ValueError(
                f"channels is at least 1, local between 0 and tokens, not channels={self.channels},"
                f" local={self.local}, tokens={self.tokens}"
            )

    @property
    def family(self) -> str:
        return f"channel reads ({self.channels} channels, {self.tokens} tokens, {self.local} local)"

    def unsuited(self, layer: LayerLayout) -> str | None:
        if self.channels > layer.key_dim:
            return f"sparq reads {self.channels} channels, and keys have {layer.key_dim}: set channels"
        return None

    def layer_bytes(self, prompt_tokens: int, new_tokens: int, layer: LayerLayout, element_bytes: int) -> int:
        """All tokens, and the sum of their values in fp32."""
        tokens = (prompt_tokens + new_tokens) * layer.token_bytes(element_bytes)
        return tokens + layer.kv_heads * layer.value_dim * 4

    def compress(self, prefill: Prefill, budget: ResolvedBudget, examined: Any) -> Compressed:
        from kvcache.pool import Compressed

        return Compressed(prefill)

    def new_pool(self, shape: PoolShape) -> FamilyPool:
        from kvcache.channel_reads import ChannelReadPool

        return ChannelReadPool(shape, self.channels, self.tokens, self.local)
