"""What one prefill of a prompt leaves for every method: read-only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

from torch import Tensor

from kvcache.layout import CacheLayout
from kvcache.moments import HiddenMoments, QueryMoments
from kvcache.projection import projected_norms

Rotary = Callable[[int, Tensor], tuple[Tensor, Tensor]]
"""(growing layer, positions [n]) -> cos, sin [n, d]: the model's own tables, in its dtype, scaling included. Where only
a part of the head is rotated, they and all queries and keys have its dimensions in an order of pairs i and i + d/2."""

LinearState = tuple[Tensor, Tensor]
"""What a linear layer keeps of one row: its convolution's last inputs [channels, width], its matrices [H_v, d_k, d_v]
fp32."""


@dataclass
class LayerPrefill:
    """One growing layer after prefill of n tokens.

    keys [H_kv, n, d] rotated, values [H_kv, n, d_v], in the model's dtype; queries [H_q, w, d], the last w rotated
    ones; column_sums [H_q, n] fp32, the attention each key received from all prompt queries; output_projection
    [hidden, H_q, d_v], the columns of ``o_proj`` by query head; scale, the factor of the scores; query_moments, of the
    un-rotated queries without the first k, for every k asked for.
    """

    keys: Tensor
    values: Tensor
    queries: Tensor | None
    column_sums: Tensor | None
    output_projection: Tensor
    scale: float
    query_moments: dict[int, QueryMoments] = field(default_factory=dict)
    gates: Tensor | None = None
    """[H_q, w, d_v], what each of ``queries`` multiplies its output by before the projection, in models that do."""
    hidden: HiddenMoments | None = None
    """Of the states that enter attention, after the layer's input norm."""
    probes: dict[float, Tensor] = field(default_factory=dict)
    """Rotated probe queries of every share asked for, [H_q, k, d]."""
    window_scores: dict[tuple[int, int, int, str], Tensor] = field(default_factory=dict, init=False, repr=False)
    """What :func:`kvcache.window.pooled_window_scores` found, by its settings: once for all methods and budgets."""

    @cached_property
    def projected_value_norms(self) -> Tensor:
        """``|| W_O v ||_1`` of every value, mean over its group's query heads: once for all methods and budgets.
        [H_kv, n] fp32"""
        return projected_norms(self.values, self.output_projection)


PARTICLES = 4
BLOCKS = 4
"""A continuation carries up to four blocks of four particles each, padded: particles have the same tokens whatever
continues beside them."""


class Continuation(Protocol):
    """Blocks of particles that continue prompts over the prompts' own caches: nothing of a prompt is copied.

    Block b continues the bth prompt that was given; two blocks may continue the same one.
    """

    def step(self, tokens: Tensor) -> Tensor:
        """Feed one token to each particle. [B, 4] -> next-token logits [B, 4, V] fp32"""

    def queries(self, block: int, layer: int) -> Tensor:
        """Rotated queries of all steps so far in growing layer ``layer``. [4, H_q, t, d]"""

    def suffix(self, block: int, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of the particles' own tokens. [4, H_kv, t, d], [4, H_kv, t, d_v]"""

    def gates(self, block: int, layer: int) -> Tensor | None:
        """Output gates of these queries, as in :class:`LayerPrefill`. [4, H_q, t, d_v]"""


@dataclass
class Prefill:
    """A prompt's cache and what was observed on the way.

    ``logits`` [V] fp32 are those of the last prompt token. ``continue_prompts`` starts a continuation with a block for
    each prompt in its list, at the position after its last token; all prompts of a model share this function.
    """

    layers: list[LayerPrefill]
    layout: CacheLayout
    tokens: int
    logits: Tensor
    rotary: Rotary
    continue_prompts: Callable[[Sequence[Prefill]], Continuation]
    sliding: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """What the prompt left in the sliding layers: model layer -> keys and values [H_kv, < window, d]."""
    stop_ids: frozenset[int] = frozenset()
    structural: Tensor | None = None
    """[n] bool: markers of chats and tool calls, separators of documents; None where nobody knows."""
    linear: dict[int, LinearState] = field(default_factory=dict)
    """What the prompt left in the linear layers, by model layer."""
    project_queries: Callable[[int, Tensor, Tensor], Tensor] | None = None
    """(growing layer, hidden states [s, hidden], positions [s]) -> the rotated queries [H_q, s, d] that the layer makes
    of them."""
