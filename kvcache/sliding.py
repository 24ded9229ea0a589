"""Sliding-window layers of a decode batch: the last ``window`` tokens per row, in a ring.

No method touches these layers, but rows of different prompts are at different positions, so each row has a ring of its
own, attended in one fixed shape.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvcache.kernels.paged_attention import attend_pages
from kvcache.layout import LayerLayout


class SlidingRing:
    """One sliding layer for all rows. The token at position p lies in slot p modulo the window."""

    def __init__(self, layout: LayerLayout, rows: int, device: torch.device, dtype: torch.dtype) -> None:
        assert layout.window is not None
        self.window, self.heads, self.group = layout.window, layout.kv_heads, layout.group
        self.keys = torch.zeros(rows, self.heads, self.window, layout.key_dim, dtype=dtype, device=device)
        self.values = torch.zeros(rows, self.heads, self.window, layout.value_dim, dtype=dtype, device=device)
        self.positions = torch.full((rows, self.window), -1, dtype=torch.int64, device=device)

    def write(self, row: int, keys: Tensor, values: Tensor, tokens: int) -> None:
        """The tail of a prompt of ``tokens`` tokens. keys [H_kv, k, d], the last k of them."""
        positions = torch.arange(tokens - keys.shape[1], tokens, device=self.positions.device)
        slots = positions % self.window
        self.positions[row] = -1
        self.keys[row], self.values[row] = 0, 0  # what another row left might be NaN, and 0 times that is NaN
        self.positions[row, slots] = positions
        self.keys[row][:, slots] = keys
        self.values[row][:, slots] = values

    def attend(
        self, queries: Tensor, keys: Tensor, values: Tensor, positions: Tensor, counts: Tensor, scale: float
    ) -> Tensor:
        """Append and attend, token by token: a token overwrites the one that leaves its window.

        queries [R, H_q, t, d] of all rows, positions [R, t], counts [R] on the host -> [R, H_q, t, d_v]
        """
        output = values.new_zeros(*queries.shape[:3], values.shape[-1])
        for token in range(queries.shape[2]):
            rows = (counts > token).nonzero().flatten().to(positions.device, non_blocking=True)
            slots = positions[rows, token] % self.window
            self.positions[rows, slots] = positions[rows, token]
            self.keys[rows, :, slots] = keys[rows, :, token]
            self.values[rows, :, slots] = values[rows, :, token]
            output[:, :, token] = self._attend(queries[:, :, token], scale)
        return output

    def _attend(self, queries: Tensor, scale: float) -> Tensor:
        grouped = queries.unflatten(1, (self.heads, self.group)).flatten(0, 1)
        valid = (self.positions >= 0).repeat_interleave(self.heads, 0)
        partials = attend_pages(grouped, self.keys.flatten(0, 1), self.values.flatten(0, 1), valid, scale)
        mass = partials.mass.sum(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
        return (partials.output / mass).to(queries.dtype).view(*queries.shape[:2], -1)
