"""What a model keeps per token, layer by layer: all that budgets, planning and pools need to know of it. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class LayerLayout:
    """The cache of one attention layer.

    ``growing`` layers keep every token (these are compressed); ``sliding`` layers keep the last ``window`` tokens.
    """

    kind: Literal["growing", "sliding"]
    query_heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None = None

    @property
    def group(self) -> int:
        """Query heads that share one KV head."""
        return self.query_heads // self.kv_heads

    def token_bytes(self, element_bytes: int) -> int:
        """Bytes of one token's keys and values over all KV heads."""
        return self.kv_heads * (self.key_dim + self.value_dim) * element_bytes


@dataclass(frozen=True)
class CacheLayout:
    """The cache of a whole model: its layers in order, and the size of one element in bytes."""

    layers: tuple[LayerLayout, ...]
    element_bytes: int

    @property
    def growing(self) -> tuple[int, ...]:
        """Indices of the layers whose cache grows with the context: the ones that methods compress."""
        return tuple(index for index, layer in enumerate(self.layers) if layer.kind == "growing")

    @property
    def sliding(self) -> tuple[int, ...]:
        """Indices of the layers that keep a window only."""
        return tuple(index for index, layer in enumerate(self.layers) if layer.kind == "sliding")

    def full_bytes(self, tokens: int) -> int:
        """Bytes of the uncompressed growing layers for ``tokens`` tokens (QEvict, Eq. 7)."""
        return tokens * sum(self.layers[index].token_bytes(self.element_bytes) for index in self.growing)

    def sliding_bytes(self, tokens: int) -> int:
        """Bytes of the sliding layers, which no method touches."""
        return sum(
            min(tokens, layer.window or tokens) * layer.token_bytes(self.element_bytes)
            for layer in (self.layers[index] for index in self.sliding)
        )
