"""The attention function registered with transformers: the model's layers call it, a step object decides what it does.

A forward pass carries a *step* as the keyword argument ``kv_step``:

    PrefillStep        one chunk of one prompt: causal attention over what came before, observations on the way
    ContinuationStep   sampled futures over one shared prompt cache          (workers/continuation.py)
    DecodeStep         the rows of a decode batch, each through its pool     (workers/engine.py)

No mask function is registered under this name, so transformers builds no mask: every step builds its own, sliding
windows included, from true positions.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from kvcache.kernels.column_sums import add_column_sums
from kvcache.layout import CacheLayout, LayerLayout
from kvcache.method import Observations

ATTENTION = "kvsweep"
UNSUPPORTED = ("softcap", "s_aux", "position_bias")


class UnsupportedAttention(RuntimeError):
    """The model asks for something that this engine does not compute."""


class Step(Protocol):
    """What happens inside attention during one forward pass."""

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        """New tokens of all rows, rotated. queries [B, H_q, t, d], keys, values [B, H_kv, t, d] -> [B, H_q, t, d_v]"""


def attention_forward(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    kv_step: Step | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface."""
    asked = [name for name in UNSUPPORTED if options.get(name) is not None]
    if asked or kv_step is None:
        what = f"attention with {', '.join(asked)}" if asked else "a forward pass outside the engine"
        raise UnsupportedAttention(f"{what} is not supported")
    output = kv_step.attend(module.layer_idx, query, key, value, scaling)
    return output.transpose(1, 2).contiguous(), None


AttentionInterface.register(ATTENTION, attention_forward)


class PrefillStep:
    """Prefill of one prompt, chunk by chunk. Full precision, every layer's own attention.

    Growing layers keep all keys and values, sliding layers the last ``window - 1``.
    """

    def __init__(self, layout: CacheLayout, tokens: int, observations: Observations) -> None:
        self.layout = layout
        self.tokens = tokens
        self.observations = observations
        self.start = 0
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}
        self.queries: dict[int, Tensor] = {}
        self.column_sums: dict[int, Tensor] = {}
        self.scales: dict[int, float] = {}

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        layout = self.layout.layers[layer]
        store = self._grow if layout.kind == "growing" else self._slide
        visible_keys = store(self.keys, layer, keys[0], layout)
        visible_values = store(self.values, layer, values[0], layout)
        self.scales[layer] = scale
        if layout.kind == "growing":
            self._observe(layer, queries[0], visible_keys, scale)
        return causal_attention(queries, visible_keys[None], visible_values[None], scale, layout.window)

    def advance(self, tokens: int) -> None:
        """The chunk has passed all layers."""
        self.start += tokens

    def _grow(self, kept: dict[int, Tensor], layer: int, new: Tensor, layout: LayerLayout) -> Tensor:
        if layer not in kept:
            kept[layer] = new.new_empty(len(new), self.tokens, new.shape[-1])
        end = self.start + new.shape[1]
        kept[layer][:, self.start : end] = new
        return kept[layer][:, :end]

    def _slide(self, kept: dict[int, Tensor], layer: int, new: Tensor, layout: LayerLayout) -> Tensor:
        assert layout.window is not None
        visible = torch.cat([kept[layer], new], 1) if layer in kept else new
        kept[layer] = visible[:, max(0, visible.shape[1] - layout.window + 1) :].clone()
        return visible

    def _observe(self, layer: int, queries: Tensor, keys: Tensor, scale: float) -> None:
        if self.observations.queries:
            earlier = [self.queries[layer]] if layer in self.queries else []
            recent = torch.cat([*earlier, queries], 1)
            self.queries[layer] = recent[:, max(0, recent.shape[1] - self.observations.queries) :].clone()
        if self.observations.column_sums:
            if layer not in self.column_sums:
                self.column_sums[layer] = torch.zeros(len(queries), self.tokens, device=queries.device)
            add_column_sums(self.column_sums[layer], queries, keys, self.start, scale)


def causal_attention(queries: Tensor, keys: Tensor, values: Tensor, scale: float, window: int | None) -> Tensor:
    """Attention of the last t of n tokens over all n, and no further back than ``window``. [B, H_q, t, d]"""
    new, visible = queries.shape[2], keys.shape[2]
    group = queries.shape[1] // keys.shape[1]
    keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
    if new == visible and (window is None or visible <= window):
        return scaled_dot_product_attention(queries, keys, values, is_causal=True, scale=scale)
    position = torch.arange(visible, device=queries.device)
    query = position[visible - new :, None]
    mask = position <= query
    if window is not None:
        mask &= position > query - window
    return scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=scale)
