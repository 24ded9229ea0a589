"""The attention function registered with transformers: the model's layers call it, a step object decides what it does.

A forward pass carries a *step* as the keyword argument ``kv_step``:

    PrefillStep        one chunk of one prompt: causal attention over what came before, observations on the way
    ContinuationStep   sampled futures over one shared prompt cache          (workers/continuation.py)
    DecodeStep         the rows of a decode batch, each through its pool     (workers/engine.py)

No mask function is registered under this name, so transformers builds no mask: every step builds its own, sliding
windows included, from true positions.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface

from kvcache.kernels.column_sums import add_column_sums
from kvcache.layout import CacheLayout, LayerLayout
from kvcache.method import Observations
from kvcache.moments import QueryMoments
from kvcache.prefill import Rotary
from kvcache.probes import probe_positions
from workers.flash import flash_attention, serves
from workers.partial_rotary import half_split_order
from workers.softmax import causal_attention

ATTENTION = "kvsweep"
UNSUPPORTED = ("softcap", "s_aux", "position_bias")
GATES, ORDER = "kvsweep_gates", "kvsweep_order"
"""Attributes of attention modules: the gates of the pass under way, the order of a head's dimensions."""


class UnsupportedAttention(RuntimeError):
    """The model asks for something that this engine does not compute."""


class Step(ABC):
    """What happens inside attention during one forward pass."""

    @abstractmethod
    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        """New tokens of all rows, rotated. queries [B, H_q, t, d], keys, values [B, H_kv, t, d] -> [B, H_q, t, d_v]"""

    def see_gates(self, layer: int, logits: Tensor) -> None:  # noqa: B027
        """Before ``attend``, in models that gate its output: by the sigmoid of these. [B, t, H_q, d_v]"""


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
    if (gates := module.__dict__.pop(GATES, None)) is not None:
        kv_step.see_gates(module.layer_idx, gates)
    if (order := getattr(module, ORDER, None)) is not None:
        query, key = query[..., order], key[..., order]
    output = kv_step.attend(module.layer_idx, query, key, value, scaling)
    return output.transpose(1, 2).contiguous(), None


AttentionInterface.register(ATTENTION, attention_forward)


def pass_gates_on(attention: Any) -> None:
    """Let a layer whose query projection makes output gates too, by head after the query, hand them to the step."""

    def keep(projection: Any, arguments: Any, projected: Tensor) -> None:
        _, gates = projected.unflatten(-1, (-1, 2 * attention.head_dim)).chunk(2, -1)
        setattr(attention, GATES, gates)

    attention.q_proj.register_forward_hook(keep)


def reorder_heads(attention: Any, rotated: int, dim: int) -> None:
    """Let queries and keys of a partly rotated layer reach the step in the order of :mod:`workers.partial_rotary`."""
    setattr(attention, ORDER, half_split_order(dim, rotated).to(attention.o_proj.weight.device))


class PrefillStep(Step):
    """Prefill of one prompt, chunk by chunk. Full precision, every layer's own attention.

    Growing layers keep all keys and values, sliding layers the last ``window - 1``.
    """

    def __init__(
        self, layout: CacheLayout, tokens: int, observations: Observations, rotary: Rotary, flash: bool = True
    ) -> None:
        """``flash``: attend by FlashAttention-2 where it serves, else by torch's own function."""
        self.layout = layout
        self.tokens = tokens
        self.observations = observations
        self.rotary = rotary
        self.flash = flash
        self.start = 0
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}
        self.queries: dict[int, Tensor] = {}
        self.gates: dict[int, Tensor] = {}
        self.column_sums: dict[int, Tensor] = {}
        self.query_moments: dict[int, dict[int, QueryMoments]] = {}
        self.probes: dict[int, dict[float, Tensor]] = {}
        self._probe_positions = {share: probe_positions(tokens, share) for share in observations.probes}
        self.scales: dict[int, float] = {}
        self._log_sums: Tensor | None = None
        """Of the queries of the layer under way, [H_q, c], where attention tells them."""

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        layout = self.layout.layers[layer]
        store = self._grow if layout.kind == "growing" else self._slide
        visible_keys = store(self.keys, layer, keys[0], layout)
        visible_values = store(self.values, layer, values[0], layout)
        self.scales[layer] = scale
        seen = queries, visible_keys[None], visible_values[None], scale, layout.window
        if self.flash and serves(queries, visible_values):
            output, log_sums = flash_attention(*seen)
            self._log_sums = log_sums[0]
        else:
            output, known = causal_attention(*seen)
            self._log_sums = None if known is None else known[0]
        if layout.kind == "growing":
            self._observe(layer, queries[0], visible_keys, scale)
        return output

    def see_gates(self, layer: int, logits: Tensor) -> None:
        if self.observations.queries:
            gates = logits[0, -self.observations.queries :].transpose(0, 1).sigmoid()
            self.gates[layer] = self._with_earlier(self.gates, layer, gates)

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
            self.queries[layer] = self._with_earlier(self.queries, layer, queries)
        if self.observations.column_sums:
            if layer not in self.column_sums:
                self.column_sums[layer] = torch.zeros(len(queries), self.tokens, device=queries.device)
            add_column_sums(self.column_sums[layer], queries, keys, self.start, scale, self._log_sums)
        if self.observations.query_moments:
            self._add_moments(layer, queries)
        for share, positions in self._probe_positions.items():
            self._keep_probes(layer, queries, share, positions)

    def _with_earlier(self, kept: dict[int, Tensor], layer: int, new: Tensor) -> Tensor:
        """The last ones of as many tokens as are observed. [H_q, c, d] -> [H_q, <= w, d]"""
        recent = torch.cat([kept[layer], new], 1) if layer in kept else new
        return recent[:, max(0, recent.shape[1] - self.observations.queries) :].clone()

    def _keep_probes(self, layer: int, queries: Tensor, share: float, positions: Tensor) -> None:
        """Those of the chunk's queries, [H_q, c, d], that are probes."""
        inside = (positions >= self.start) & (positions < self.start + queries.shape[1])
        own = queries[:, (positions[inside] - self.start).to(queries.device)]
        kept = self.probes.setdefault(layer, {})
        kept[share] = torch.cat([kept[share], own], 1) if share in kept else own

    def _add_moments(self, layer: int, queries: Tensor) -> None:
        """Of the chunk's queries, [H_q, c, d]: the model hands over rotated ones only."""
        positions = torch.arange(self.start, self.start + queries.shape[1], device=queries.device)
        cos, sin = self.rotary(self.layout.growing.index(layer), positions)
        kept = self.query_moments.setdefault(layer, {})
        for skipped in self.observations.query_moments:
            if skipped not in kept:
                kept[skipped] = QueryMoments.empty(len(queries), queries.shape[-1], queries.device)
            first = max(0, skipped - self.start)
            kept[skipped].add_rotated(queries[:, first:], cos[first:], sin[first:])
