"""KIVI (Liu et al., arXiv 2402.02750): keys quantised per channel, values per token, the newest tokens kept in full.

bytes per coded element = bits / 8 + 4 / group      scale and offset in fp16: 3 bits at bits 2, 5 at bits 4
"""

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
class KIVI(FixedMethod):
    """``group`` tokens of a channel, or channels of a token, share a scale; ``residual`` is the length R of §4.2: the
    last R values, and the keys since the last multiple of R, are in full. Defaults are those of the authors' LongBench
    runs."""

    name: ClassVar[str] = "kivi"
    version: ClassVar[int] = 2

    bits: int = 2
    group: int = 32
    residual: int = 128

    def __post_init__(self) -> None:
        if self.bits not in (2, 4):
            raise ValueError(f"bits is 2 or 4, not {self.bits}")
        if self.group < 1 or self.group * self.bits % 8:
            raise ValueError(f"a group of {self.group} codes of {self.bits} bits does not fill whole bytes")
        if self.residual < 1 or self.residual % self.group:
            raise ValueError(f"residual is a multiple of the group of {self.group}, not {self.residual}")

    @property
    def family(self) -> str:
        return f"low-bit ({self.bits} bits, groups of {self.group}, residual {self.residual})"

    def unsuited(self, layer: LayerLayout) -> str | None:
        if layer.value_dim % self.group:
            return f"kivi's groups of {self.group} channels do not divide the {layer.value_dim} of a value: set group"
        return None

    def layer_bytes(self, prompt_tokens: int, new_tokens: int, layer: LayerLayout, element_bytes: int) -> int:
        tokens = prompt_tokens + new_tokens
        keys, values = tokens // self.residual * self.residual, max(0, tokens - self.residual)
        coded = layer.kv_heads * (keys * layer.key_dim + values * layer.value_dim)
        full = layer.kv_heads * ((tokens - keys) * layer.key_dim + (tokens - values) * layer.value_dim)
        return coded * self.bits // 8 + coded // self.group * 4 + full * element_bytes

    def compress(self, prefill: Prefill, budget: ResolvedBudget, examined: Any) -> Compressed:
        from kvcache.pool import Compressed

        return Compressed(prefill)

    def new_pool(self, shape: PoolShape) -> FamilyPool:
        from kvcache.lowbit import Grid, LowBitPool

        return LowBitPool(shape, Grid(self.bits, self.group, self.residual))
