"""Two widths of codes in one cache (ZipCache, arXiv 2405.14256): how many tokens get which, and what they take.
Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal
from math import floor

from kvcache.layout import LayerLayout


@dataclass(frozen=True)
class Mix:
    """Bits of salient and of other tokens, the share that is salient, the share of queries that probe, and after how
    many new tokens a block of them is coded."""

    salient_bits: int
    other_bits: int
    salient: float
    probes: float
    interval: int

    def salient_tokens(self, tokens: int) -> int:
        """Of a block: all but floor((1 - share) * tokens)."""
        return tokens - floor((1 - Decimal(str(self.salient))) * tokens)

    def head_bytes(self, prompt_tokens: int, new_tokens: int, layer: LayerLayout, element_bytes: int) -> int:
        """What one KV head holds: the prompt's block, blocks of new tokens, recent tokens in full, and for these the
        fp32 sums that will rank them."""
        blocks, recent = divmod(new_tokens, self.interval)
        coded = self._block_bytes(prompt_tokens, layer) + blocks * self._block_bytes(self.interval, layer)
        return coded + recent * (layer.key_dim + layer.value_dim) * element_bytes + self.interval * 4

    def _block_bytes(self, tokens: int, layer: LayerLayout) -> int:
        """Codes, a scale and offset per key channel and width and per value, a factor per value channel."""
        salient = self.salient_tokens(tokens)
        size = tokens * 4 + layer.value_dim * 2
        for count, bits in ((salient, self.salient_bits), (tokens - salient, self.other_bits)):
            size += count * (layer.key_dim + layer.value_dim) * bits // 8 + (count > 0) * layer.key_dim * 4
        return size
