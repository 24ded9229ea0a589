"""AnDPro (NeurIPS 2025, OpenReview Tdl89SZItB): keep what points along the output that the full cache gives.

    score(i) = sum over the window's queries of  a_i yᵀ v_i        y: the anchor, an output before eviction

Tokens go in chunks of four; the chunks of all KV heads of a layer compete for one budget.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from kvcache.budget import ResolvedBudget
from kvcache.evict import PromptEvictor
from kvcache.method import Observations

if TYPE_CHECKING:
    from torch import Tensor

    from kvcache.prefill import Prefill


@dataclass(frozen=True)
class AnDPro(PromptEvictor):
    """Settings are the paper's: the last ``window`` queries score and are kept beside the first ``chunk``.

    As in the authors' code, a is pooled over ``kernel`` neighbours of all keys and not renormalised, and the anchor of
    a query is the pooled sum over the tokens that may go (``droppable``); ``full`` is the paper's text, the output over
    all keys, not pooled. Scores may be negative.

    Where the authors' code differs: it ranks per query head, in a cache for every query head, and its branch for
    grouped queries does not run; here the group's mean decides. One commit counts the budget in chunks of four as if
    they were tokens, a later one takes the window off the budget twice; here it is exact: a layer keeps the largest
    number of whole chunks, in the order of their scores, that fits into it, so up to ``chunk`` - 1 tokens of a layer's
    budget stay unused. Chunks are counted from the first token and the window is kept whole; the chunk that the window
    cuts short competes with the tokens it has.
    """

    name: ClassVar[str] = "andpro"
    version: ClassVar[int] = 1

    window: int = 32
    kernel: int = 7
    chunk: int = 4
    anchor: Literal["droppable", "full"] = "droppable"

    def __post_init__(self) -> None:
        if self.window < 1 or self.chunk < 1 or self.kernel < 1 or self.kernel % 2 == 0:
            raise ValueError(
                "window and chunk must be at least 1 and kernel odd, "
                f"not window={self.window}, chunk={self.chunk}, kernel={self.kernel}"
            )
        if self.anchor not in ("droppable", "full"):
            raise ValueError(f"anchor is 'droppable' or 'full', not {self.anchor!r}")

    @property
    def protected_ends(self) -> tuple[int, int]:
        return self.chunk, self.window

    def observes(self) -> Observations:
        return Observations(queries=self.window)

    def scores(self, prefill: Prefill, seed: str) -> list[Tensor]:
        """Token by token; chunks are formed when they are chosen. [H_kv, n] per growing layer"""
        import torch

        from kvcache.objectives import projection
        from kvcache.window import moving_maximum, window_attention

        droppable = (~self.protected(prefill)).float()
        scores = []
        for layer in prefill.layers:
            assert layer.queries is not None
            heads = layer.queries[:, -self.window :].unflatten(0, (len(layer.keys), -1))
            scored = []
            for queries, keys, values in zip(heads, layer.keys, layer.values.float(), strict=True):
                attention = window_attention(queries, keys, layer.scale)
                pooled = moving_maximum(attention, self.kernel)
                anchor = (pooled * droppable if self.anchor == "droppable" else attention) @ values
                scored.append(projection(pooled, values, anchor).sum(1).mean(0))
            scores.append(torch.stack(scored))
        return scores

    def keep(self, prefill: Prefill, budget: ResolvedBudget, examined: Any) -> list[list[Tensor]]:
        room, protected = self.room(prefill, budget), self.protected(prefill)
        return [_best_chunks(scores, protected, self.chunk, len(scores) * room) for scores in examined]


def _best_chunks(scores: Tensor, protected: Tensor, chunk: int, room: int) -> list[Tensor]:
    """The protected tokens and the best chunks of a layer, ``room`` tokens of them at most.

    scores [H, n]; the tokens that are not ``protected`` [n] lie together -> [H] of [k] int64, ascending
    """
    from torch.nn.functional import pad

    from kvcache.select import rank

    heads, open_tokens = len(scores), (~protected).nonzero().flatten()
    chunks = pad(scores[:, open_tokens], (0, -len(open_tokens) % chunk)).unflatten(1, (-1, chunk)).sum(-1)  # [H, c]
    sizes = open_tokens.new_full((chunks.shape[1],), chunk)
    sizes[-1:] -= -len(open_tokens) % chunk
    order = rank(chunks.T.flatten())  # ties by position, then head
    fits = sizes[order // heads].cumsum(0) <= room
    chosen = order.new_zeros(len(order), dtype=protected.dtype)
    chosen[order[fits]] = True
    kept = protected.repeat(heads, 1)
    kept[:, open_tokens] = chosen.view(-1, heads).T.repeat_interleave(chunk, 1)[:, : len(open_tokens)]
    return [own.nonzero().flatten() for own in kept]
