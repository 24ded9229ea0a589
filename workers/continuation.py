"""Sampled futures over the prompts' own caches: particles attend to their prompt's keys, which are never copied, and to
their own few tokens. Each part has a softmax of its own, and their log-sum-exps join them as one.

Particles come in blocks of four, one prompt to a block, and the dense products always have all rows of four blocks: a
particle's tokens do not depend on how many others are sampled beside it, or for which prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kvcache.prefill import BLOCKS, PARTICLES, Prefill
from workers.attention import Step
from workers.linear import LinearCache, LinearRows
from workers.models import LoadedModel
from workers.softmax import attend_everything

ROWS = BLOCKS * PARTICLES
PARTS = 4
"""Of a prompt, attended to side by side: a model with few heads leaves a processor's cores idle otherwise."""


class ContinuationStep(Step):
    """Attention of up to four blocks; also what methods get as their :class:`~kvcache.prefill.Continuation`."""

    def __init__(self, model: LoadedModel, prefills: Sequence[Prefill]) -> None:
        self._model = model
        self._prefills = prefills
        self._growing = {index: place for place, index in enumerate(model.layout.growing)}
        self._first = torch.tensor([prefill.tokens for prefill in prefills], device=model.device)
        self._length = 0
        self._keys: dict[int, Tensor] = {}
        self._values: dict[int, Tensor] = {}
        self._queries: dict[int, Tensor] = {}
        self._gates: dict[int, Tensor] = {}
        states = LinearRows(model.layout, ROWS, model.device, model.dtype)  # of one size: a copy for each particle
        for block, prefill in enumerate(prefills):
            states.write(_rows(block), prefill.linear)
        self._cache = LinearCache(states)

    @torch.inference_mode()
    def step(self, tokens: Tensor) -> Tensor:
        blocks = len(self._prefills)
        padded, positions = tokens.new_zeros(BLOCKS, PARTICLES), tokens.new_zeros(BLOCKS, PARTICLES)
        padded[:blocks] = tokens
        positions[:blocks] = (self._first + self._length)[:, None]
        logits = self._model.read(padded.view(ROWS, 1), positions.view(ROWS, 1), self, self._cache)
        self._length += 1
        return logits.unflatten(0, (BLOCKS, PARTICLES))[:blocks].float()

    def queries(self, block: int, layer: int) -> Tensor:
        return self._queries[self._model.layout.growing[layer]][_rows(block)]

    def suffix(self, block: int, layer: int) -> tuple[Tensor, Tensor]:
        index = self._model.layout.growing[layer]
        return self._keys[index][_rows(block)], self._values[index][_rows(block)]

    def gates(self, block: int, layer: int) -> Tensor | None:
        index = self._model.layout.growing[layer]
        return self._gates[index][_rows(block)] if index in self._gates else None

    def see_gates(self, layer: int, logits: Tensor) -> None:
        self._extend(self._gates, layer, logits.transpose(1, 2).sigmoid())

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        self._extend(self._keys, layer, keys)
        self._extend(self._values, layer, values)
        if layer in self._growing:
            self._extend(self._queries, layer, queries)
        output = torch.zeros_like(queries[..., : values.shape[-1]])
        for block, prefill in enumerate(self._prefills):
            rows = _rows(block)
            seen = self._seen(prefill, layer, rows)
            output[rows] = shared_prefix_attention(queries[rows], *seen, scale)
        return output

    def _seen(self, prefill: Prefill, layer: int, rows: slice) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Shared keys and values of the prompt, and the block's own, as far as the layer's window reaches."""
        keys, values = self._keys[layer][rows], self._values[layer][rows]
        if layer in self._growing:
            shared = prefill.layers[self._growing[layer]]
            return shared.keys, shared.values, keys, values
        window = self._model.layout.layers[layer].window
        assert window is not None
        own = min(keys.shape[2], window)
        tail_keys, tail_values = prefill.sliding[layer]
        first = max(0, tail_keys.shape[1] - (window - own))
        return tail_keys[:, first:], tail_values[:, first:], keys[:, :, -own:], values[:, :, -own:]

    def _extend(self, kept: dict[int, Tensor], layer: int, new: Tensor) -> None:
        new = new[: len(self._prefills) * PARTICLES]  # the others only fill the batch up
        kept[layer] = torch.cat([kept[layer], new], 2) if layer in kept else new.clone()


def _rows(block: int) -> slice:
    return slice(block * PARTICLES, (block + 1) * PARTICLES)


def shared_prefix_attention(
    queries: Tensor, shared_keys: Tensor, shared_values: Tensor, own_keys: Tensor, own_values: Tensor, scale: float
) -> Tensor:
    """One new token per row over a prefix that all rows share and their own suffix.

    queries [M, H_q, 1, d]; shared [H_kv, n, d]; own [M, H_kv, t, d], the new token included -> [M, H_q, 1, d_v]
    """
    rows, kv_heads = len(queries), len(shared_keys)
    grouped = queries.squeeze(2).unflatten(1, (kv_heads, -1))  # [M, H_kv, G, d]
    in_parts = shared_keys.shape[1] // PARTS * PARTS
    if in_parts < shared_keys.shape[1]:
        rest_keys, rest_values = (part[:, in_parts:].expand(rows, -1, -1, -1) for part in (shared_keys, shared_values))
        own_keys, own_values = torch.cat([rest_keys, own_keys], 2), torch.cat([rest_values, own_values], 2)
    attended = [attend_everything(grouped, own_keys, own_values, scale)]
    if in_parts:
        by_head = grouped.transpose(0, 1).flatten(1, 2).expand(PARTS, -1, -1, -1)  # [S, H_kv, M * G, d]
        keys, values = (_parts(shared[:, :in_parts]) for shared in (shared_keys, shared_values))
        of_parts = (part.unflatten(2, (rows, -1)) for part in attend_everything(by_head, keys, values, scale))
        attended += zip(*(part.transpose(1, 2) for part in of_parts), strict=True)
    outputs, sums = (torch.stack(part) for part in zip(*attended, strict=True))
    joined = (outputs * torch.softmax(sums, 0)[..., None]).sum(0)
    return joined.flatten(1, 2).unsqueeze(2).to(queries.dtype)


def _parts(shared: Tensor) -> Tensor:
    """[H_kv, n, d] -> [S, H_kv, n / S, d]"""
    return shared.unflatten(1, (PARTS, -1)).transpose(0, 1)


def continuations(model: LoadedModel) -> Callable[[Sequence[Prefill]], ContinuationStep]:
    """``Prefill.continue_prompts`` of this model's prompts."""
    return lambda prefills: ContinuationStep(model, prefills)
