"""What a model keeps per token, layer by layer: all that budgets, planning and pools need to know of it. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

STATE_ELEMENT_BYTES = 4


@dataclass(frozen=True)
class LayerLayout:
    """The cache of one attention layer.

    ``growing`` layers keep every token (these are compressed); ``sliding`` layers keep the last ``window`` tokens;
    ``linear`` ones keep a state of one size: a matrix [key_dim, value_dim] for each of ``kv_heads`` value heads, and
    the last ``window`` inputs of a convolution over the channels of all queries (of ``query_heads``), keys and values.
    """

    kind: Literal["growing", "sliding", "linear"]
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

    @property
    def channels(self) -> int:
        """Of a linear layer's convolution: as many keys as queries, and the values."""
        return 2 * self.query_heads * self.key_dim + self.kv_heads * self.value_dim

    def state_bytes(self, element_bytes: int) -> int:
        """Bytes of a linear layer's state: its matrices are fp32."""
        matrices = self.kv_heads * self.key_dim * self.value_dim * STATE_ELEMENT_BYTES
        return matrices + self.channels * (self.window or 0) * element_bytes


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

    @property
    def linear(self) -> tuple[int, ...]:
        """Indices of the layers that keep a state of one size."""
        return tuple(index for index, layer in enumerate(self.layers) if layer.kind == "linear")

    def full_bytes(self, tokens: int) -> int:
        """Bytes of the uncompressed growing layers for ``tokens`` tokens (QEvict, Eq. 7)."""
        return tokens * sum(self.layers[index].token_bytes(self.element_bytes) for index in self.growing)

    def sliding_bytes(self, tokens: int) -> int:
        """Bytes of the sliding layers, which no method touches."""
        return sum(
            min(tokens, layer.window or tokens) * layer.token_bytes(self.element_bytes)
            for layer in (self.layers[index] for index in self.sliding)
        )

    @property
    def linear_bytes(self) -> int:
        """Bytes of the linear layers' states, which no method touches either."""
        return sum(self.layers[index].state_bytes(self.element_bytes) for index in self.linear)
