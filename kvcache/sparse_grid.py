"""Dense codes with a few outliers beside them (KVQuant, arXiv 2401.18079): how many outliers a token has room for, and
what it takes. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal
from math import ceil

from kvcache.layout import LayerLayout

MOST_SINKS = 64
"""First tokens in full precision: no more than a page has."""


@dataclass(frozen=True)
class SparseGrid:
    """Bits per code, the share of elements that are outliers, half of it at either end, and the number of first tokens
    in full precision."""

    bits: int
    outliers: float
    sinks: int

    def tail(self, channels: int) -> int:
        """Outliers at either end of a token's channels: the share of them, rounded up."""
        return min(ceil(Decimal(str(self.outliers)) / 2 * channels), channels // 2)

    def token_bytes(self, layer: LayerLayout) -> int:
        """Of a coded token over all KV heads: codes, the value's scale and offset in fp16, and for every outlier an
        index and a value of 16 bits each."""
        keys, values = layer.kv_heads * layer.key_dim, layer.kv_heads * layer.value_dim
        return (keys + values) * self.bits // 8 + 4 + 2 * (self.tail(keys) + self.tail(values)) * 4
