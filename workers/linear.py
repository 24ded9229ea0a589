"""Linear-attention layers: each row's state, and the form in which transformers' layers take it.

    inputs    [B, channels, width]      the last inputs of the convolution, in the model's dtype
    matrices  [B, H_v, d_k, d_v]        the state of the gated delta rule, fp32

A row's state is its own: it starts as the prompt left it, moves with the row's tokens alone, and is copied for
futures. The model's own code cannot feed rows different numbers of tokens, so decode batches go token by token, and
rows that read nothing keep what they have.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvcache.layout import CacheLayout
from kvcache.prefill import LinearState


class LinearRows:
    """The states of all linear layers for some rows; zero, the state before the first token, until written."""

    def __init__(self, layout: CacheLayout, rows: int, device: torch.device, dtype: torch.dtype) -> None:
        self.inputs: dict[int, Tensor] = {}
        self.matrices: dict[int, Tensor] = {}
        for index in layout.linear:
            layer = layout.layers[index]
            shape = (rows, layer.kv_heads, layer.key_dim, layer.value_dim)
            self.inputs[index] = torch.zeros(rows, layer.channels, layer.window or 0, dtype=dtype, device=device)
            self.matrices[index] = torch.zeros(shape, dtype=torch.float32, device=device)

    def write(self, rows: int | slice, states: dict[int, LinearState]) -> None:
        """Start rows from what a prompt left."""
        for index, (inputs, matrices) in states.items():
            self.inputs[index][rows], self.matrices[index][rows] = inputs, matrices

    def row(self, row: int) -> dict[int, LinearState]:
        return {index: (self.inputs[index][row], self.matrices[index][row]) for index in self.inputs}


class LinearCache:
    """What a forward pass gives its layers for a cache: linear ones read and replace the states of ``rows``, others
    get their new keys and values back, since attention keeps them elsewhere.

    ``counts`` [B] says how many of the pass's tokens each row reads: 1 or none. Without it, all rows read all tokens.
    """

    def __init__(self, rows: LinearRows, counts: Tensor | None = None) -> None:
        self._rows = rows
        self._reads = None if counts is None else counts > 0
        self._inputs = torch.empty(0)

    def get_conv_state(self, layer_idx: int, **options: Any) -> Tensor:
        """A copy: a pass of one token shifts the new input into it in place."""
        self._inputs = self._rows.inputs[layer_idx].clone()
        return self._inputs

    def update_conv_state(self, conv_states: Tensor, layer_idx: int, **options: Any) -> Tensor:
        """The inputs of a pass of several tokens, after those that came before."""
        assert self._reads is None, "rows cannot read different numbers of tokens in one pass"
        inputs = torch.cat([self._inputs, conv_states], -1)
        self._inputs = inputs[..., -self._inputs.shape[-1] :]
        return inputs

    def get_recurrent_state(self, layer_idx: int, **options: Any) -> Tensor:
        return self._rows.matrices[layer_idx]

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int) -> None:
        """The layer is done: rows that read a token keep its new state."""
        rows = self._rows
        self._replace(rows.inputs[layer_idx], self._inputs)
        self._replace(rows.matrices[layer_idx], recurrent_states)

    def is_recording_past(self, layer_idx: int) -> bool:
        return False

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, **options: Any) -> tuple[Tensor, Tensor]:
        return keys, values

    def _replace(self, old: Tensor, new: Tensor) -> None:
        if self._reads is None:
            old.copy_(new)
        else:
            old.copy_(torch.where(self._reads.view(-1, *[1] * (old.dim() - 1)), new, old))
