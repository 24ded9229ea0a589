"""What one prefill of a prompt leaves for every method: read-only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

Rotary = Callable[[int, Tensor], tuple[Tensor, Tensor]]
"""(growing layer, positions [n]) -> cos, sin [n, d]: the model's own tables, in its dtype, scaling included."""


@dataclass
class LayerPrefill:
    """One growing layer after prefill of n tokens.

    keys [H_kv, n, d] rotated, values [H_kv, n, d_v], in the model's dtype; queries [H_q, w, d], the last w rotated
    ones; column_sums [H_q, n] fp32, the attention each key received from all prompt queries; output_projection
    [hidden, H_q, d_v], the columns of ``o_proj`` by query head; scale, the factor of the scores.
    """

    keys: Tensor
    values: Tensor
    queries: Tensor | None
    column_sums: Tensor | None
    output_projection: Tensor
    scale: float


class Continuation(Protocol):
    """Several continuations of one prompt that share its cache: nothing of the prompt is copied."""

    def step(self, tokens: Tensor) -> Tensor:
        """Feed one token to each continuation. [M] -> next-token logits [M, V] fp32"""

    def queries(self, layer: int) -> Tensor:
        """Rotated queries of all steps so far in growing layer ``layer``. [M, H_q, t, d]"""

    def suffix(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of the continuations' own tokens. [M, H_kv, t, d], [M, H_kv, t, d_v]"""


@dataclass
class Prefill:
    """A prompt's cache and what was observed on the way.

    ``logits`` [V] fp32 are those of the last prompt token. ``continue_with(M)`` starts M continuations at position n.
    """

    layers: list[LayerPrefill]
    tokens: int
    logits: Tensor
    rotary: Rotary
    continue_with: Callable[[int], Continuation]
    stop_ids: frozenset[int] = frozenset()
