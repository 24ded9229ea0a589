"""Sampled futures of one prompt over its one cache: M continuations attend to the prompt's keys, which are never
copied, and to their own few tokens. One softmax over both parts.

The rows of every dense product are padded to a multiple of eight, so that a future's tokens do not depend on how many
others are sampled beside it: particles of eight are a prefix of sixteen.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kvcache.prefill import LayerPrefill
from workers.models import LoadedModel

ROWS = 8

SlidingTail = dict[int, tuple[Tensor, Tensor]]
"""Sliding layer -> the keys and values [H_kv, <= window - 1, d] that the prompt left there."""


class ContinuationStep:
    """Attention of M continuations; also what methods get as ``Prefill.continue_with(M)``."""

    def __init__(
        self, model: LoadedModel, layers: dict[int, LayerPrefill], sliding: SlidingTail, tokens: int, particles: int
    ) -> None:
        self._model = model
        self._layers = layers
        self._sliding = sliding
        self._tokens = tokens
        self._particles = particles
        self._rows = -(-particles // ROWS) * ROWS
        self._length = 0
        self._keys: dict[int, Tensor] = {}
        self._values: dict[int, Tensor] = {}
        self._queries: dict[int, Tensor] = {}

    @torch.inference_mode()
    def step(self, tokens: Tensor) -> Tensor:
        """Feed one token to each continuation. [M] -> logits [M, V] fp32"""
        padded = tokens.new_zeros(self._rows)
        padded[: self._particles] = tokens
        positions = torch.full_like(padded, self._tokens + self._length)
        output = self._model.forward(
            input_ids=padded[:, None], position_ids=positions[:, None], use_cache=False, kv_step=self
        )
        self._length += 1
        return output.logits[: self._particles, -1].float()

    def queries(self, layer: int) -> Tensor:
        return self._queries[self._model.layout.growing[layer]]

    def suffix(self, layer: int) -> tuple[Tensor, Tensor]:
        index = self._model.layout.growing[layer]
        return self._keys[index][: self._particles], self._values[index][: self._particles]

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        own_keys = self._extend(self._keys, layer, keys)
        own_values = self._extend(self._values, layer, values)
        if layer in self._layers:
            self._extend(self._queries, layer, queries[: self._particles])
            shared = self._layers[layer].keys, self._layers[layer].values
        else:
            shared, own_keys, own_values = self._within_window(layer, own_keys, own_values)
        return shared_prefix_attention(queries, *shared, own_keys, own_values, scale)

    def _extend(self, kept: dict[int, Tensor], layer: int, new: Tensor) -> Tensor:
        kept[layer] = torch.cat([kept[layer], new], 2) if layer in kept else new
        return kept[layer]

    def _within_window(self, layer: int, keys: Tensor, values: Tensor) -> tuple[tuple[Tensor, Tensor], Tensor, Tensor]:
        window = self._model.layout.layers[layer].window
        assert window is not None
        own = min(keys.shape[2], window)
        tail_keys, tail_values = self._sliding[layer]
        first = max(0, tail_keys.shape[1] - (window - own))
        return (tail_keys[:, first:], tail_values[:, first:]), keys[:, :, -own:], values[:, :, -own:]


def shared_prefix_attention(
    queries: Tensor, shared_keys: Tensor, shared_values: Tensor, own_keys: Tensor, own_values: Tensor, scale: float
) -> Tensor:
    """One new token per row over a prefix that all rows share and their own suffix.

    queries [M, H_q, 1, d]; shared [H_kv, n, d]; own [M, H_kv, t, d], the new token included -> [M, H_q, 1, d_v]
    """
    rows, heads = queries.shape[:2]
    kv_heads, prefix = shared_keys.shape[:2]
    grouped = queries.unflatten(1, (kv_heads, heads // kv_heads)).squeeze(3).float()  # [M, H_kv, G, d]
    by_head = grouped.transpose(0, 1).flatten(1, 2)  # [H_kv, M * G, d]
    shared = torch.bmm(by_head, shared_keys.float().transpose(1, 2)).unflatten(1, (rows, -1)).transpose(0, 1)
    own = grouped @ own_keys.float().transpose(2, 3)
    weights = torch.softmax(torch.cat([shared, own], -1) * scale, -1).to(queries.dtype)
    shared_weights = weights[..., :prefix].transpose(0, 1).flatten(1, 2)
    output = torch.bmm(shared_weights, shared_values).unflatten(1, (rows, -1)).transpose(0, 1).float()
    output = output + (weights[..., prefix:] @ own_values).float()
    return output.flatten(1, 2).unsqueeze(2).to(queries.dtype)


def continuations(
    model: LoadedModel, layers: dict[int, LayerPrefill], sliding: SlidingTail, tokens: int
) -> Callable[[int], ContinuationStep]:
    """``Prefill.continue_with`` of one prompt."""
    return lambda particles: ContinuationStep(model, layers, sliding, tokens, particles)
