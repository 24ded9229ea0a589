"""Scissorhands (Liu et al., arXiv 2305.17118): what was not important lately will not be important again.

    score(i) = - number of (query, head) in the history window and group with  softmax(q K^T / sqrt(d))_i < 1 / t

t is the number of keys that the query sees, so 1 / t is what it would give to each if it did not choose.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from kvcache.evict import PromptEvictor
from kvcache.method import Observations

if TYPE_CHECKING:
    from torch import Tensor

    from kvcache.prefill import Prefill


@dataclass(frozen=True)
class Scissorhands(PromptEvictor):
    """``history`` last queries count how often a token got less than its share; ``recent`` tokens are kept anyway.

    Where this differs from the paper: the buffer is cut to the budget once, at the end of prefill, instead of a part of
    it at a time whenever it is full; 32 recent tokens rather than about ten, for long prompts; a group's query heads
    count together; all layers have the same budget. A token counts only for queries that see it, and one with exactly
    1 / t is not below it.
    """

    name: ClassVar[str] = "scissorhands"
    version: ClassVar[int] = 1

    history: int = 400
    recent: int = 32

    def __post_init__(self) -> None:
        if self.history < 1 or self.recent < 1:
            raise ValueError(f"history and recent must be at least 1, not history={self.history}, recent={self.recent}")

    @property
    def protected_ends(self) -> tuple[int, int]:
        return 0, self.recent

    def observes(self) -> Observations:
        return Observations(queries=self.history)

    def scores(self, prefill: Prefill, seed: str) -> list[Tensor]:
        """Whole numbers, 0 at most. [H_kv, n] per layer"""
        import torch

        scores = []
        for layer in prefill.layers:
            assert layer.queries is not None
            groups = layer.queries[:, -self.history :].unflatten(0, (len(layer.keys), -1))
            counts = [
                times_below_uniform(group, keys, layer.scale) for group, keys in zip(groups, layer.keys, strict=True)
            ]
            scores.append(-torch.stack(counts))
        return scores


def times_below_uniform(queries: Tensor, keys: Tensor, scale: float, block: int = 32) -> Tensor:
    """How often each key got less than 1 / t, of the last w queries of a prompt, a block of queries at a time.

    queries [G, w, d], keys [n, d] of one KV head -> [n] fp32
    """
    import torch

    from kvcache.window import unseen, window_attention

    first, keys = len(keys) - queries.shape[1], keys.float()
    counts = torch.zeros(len(keys), device=keys.device)
    for start in range(0, queries.shape[1], block):
        own = queries[:, start : start + block]
        count = own.shape[1]
        seen = first + start + torch.arange(1, count + 1, device=keys.device)[:, None]
        attention = window_attention(own, keys[: first + start + count], scale)
        below = attention.lt_(1 / seen)  # ones and zeros: a product adds them up
        below[..., -count:].masked_fill_(unseen(count, keys.device), 0)
        below = below.flatten(0, 1)
        counts[: below.shape[-1]] += below.new_ones(len(below)) @ below
    return counts
