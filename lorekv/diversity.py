"""Diversity-aware selection (App. D): a token counts less where tokens that are kept already look like it.

    next = argmax_i  s_i / s_max  -  λ_k max_{j kept} cos(k_i, k_j)  -  λ_v max_{j kept} cos(v_i, v_j)

Greedy, over twice as many of the best candidates as there is room for.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import normalize

from kvcache.select import rank

CANDIDATES = 2


def keep_diverse(
    scores: Tensor,
    keys: Tensor,
    values: Tensor,
    counts: Sequence[int],
    protected: Tensor,
    key_penalty: float,
    value_penalty: float,
) -> list[Tensor]:
    """Kept positions of each head, ascending: the protected ones and the greedy choice.

    Args:
        scores: [H, n].
        keys, values: [H, n, d] fp32; keys before rotation.
        counts: [H], how many each head keeps, protected ones included.
        protected: [n] bool, kept from the start.

    Returns:
        [H] of [min(count, n)] int64; without penalties those of :func:`kvcache.select.keep_counts`.
    """
    fixed = protected.nonzero().flatten()
    free = len(protected) - len(fixed)
    room = torch.tensor([min(count - len(fixed), free) for count in counts], device=scores.device)
    most = int(room.max())
    if not most:
        return [fixed for _ in counts]
    order = rank(scores.masked_fill(protected, -torch.inf))[:, : min(CANDIDATES * most, free)]  # [H, C]
    place = torch.arange(order.shape[1], device=order.device)
    utility = scores.gather(1, order)
    utility = utility / utility.abs().amax(1, keepdim=True).clamp_min(torch.finfo(utility.dtype).tiny)
    utility = utility.masked_fill(place >= CANDIDATES * room[:, None], -torch.inf)
    likeness = [_Likeness(keys, order, fixed, key_penalty), _Likeness(values, order, fixed, value_penalty)]
    likeness = [one for one in likeness if one.penalty]
    chosen = torch.zeros(len(scores), most, dtype=torch.int64, device=scores.device)
    for step in range(most):
        gain = utility
        for one in likeness:
            gain = gain - one.penalty * one.nearest
        best = gain.amax(1, keepdim=True)
        pick = torch.where(gain == best, place, len(place)).amin(1, keepdim=True)  # ties: the better score
        chosen[:, step : step + 1] = pick
        utility = utility.scatter(1, pick, -torch.inf)
        for one in likeness:
            one.keep(pick)
    positions = order.gather(1, chosen)
    return [torch.cat([fixed, own[:count]]).sort().values for own, count in zip(positions, room.tolist(), strict=True)]


class _Likeness:
    """The largest cosine between each candidate and what is kept."""

    def __init__(self, vectors: Tensor, order: Tensor, fixed: Tensor, penalty: float) -> None:
        self.penalty = penalty
        directions = normalize(vectors, dim=-1)
        self._candidates = directions.gather(1, order[..., None].expand(-1, -1, vectors.shape[-1]))
        self.nearest = torch.full_like(self._candidates[..., 0], -1)
        if len(fixed):
            self.nearest = (self._candidates @ directions[:, fixed].transpose(1, 2)).amax(-1)

    def keep(self, pick: Tensor) -> None:
        """``pick`` [H, 1], a place among the candidates of each head."""
        kept = self._candidates.gather(1, pick[..., None].expand(-1, -1, self._candidates.shape[-1]))
        self.nearest = torch.maximum(self.nearest, (self._candidates @ kept.transpose(1, 2))[..., 0])
