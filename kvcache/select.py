"""Choosing what stays: ranking with a defined tie rule, protected entries, one result on every device.

``torch.topk`` has no tie rule and devices differ; after max-pooling ties are the norm. Here a higher score wins, then
the lower position. Only its values are taken, to find the last score that is kept: what is above it stays, and of
those level with it the first.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from math import floor

import torch
from torch import Tensor


def rank(scores: Tensor) -> Tensor:
    """Positions by falling score, ties by rising position. [..., n] -> [..., n]"""
    return torch.sort(scores, dim=-1, descending=True, stable=True).indices


def keep_top(scores: Tensor, count: int, protected: Tensor | None = None) -> Tensor:
    """The ``count`` best positions of each head in ascending order.

    Args:
        scores: [H, n].
        protected: [n] bool, positions that are kept whatever their score; they count.

    Returns:
        [H, min(count, n)] int64.

    Raises:
        ValueError: more positions are protected than may be kept.
    """
    count = min(count, scores.shape[-1])
    if protected is not None:
        if int(protected.sum()) > count:
            raise ValueError(f"{int(protected.sum())} protected tokens do not fit into {count}")
        scores = scores.masked_fill(protected, torch.inf)
    best = best_of_rows(scores, torch.full(scores.shape[:1], count, device=scores.device))
    return best.nonzero()[:, 1].view(len(scores), count)


def keep_counts(scores: Tensor, counts: Sequence[int], protected: Tensor | None = None) -> list[Tensor]:
    """Like :func:`keep_top`, with a number of its own for every head. -> [H] of [min(count, n)] int64, ascending"""
    if protected is not None and len(counts) and int(protected.sum()) > min(counts):
        raise ValueError(f"{int(protected.sum())} protected tokens do not fit into {min(counts)}")
    ranked = scores if protected is None else scores.masked_fill(protected, torch.inf)
    best = best_of_rows(ranked, torch.tensor(counts, device=scores.device))
    return [own.nonzero().flatten() for own in best]


def best_of_rows(scores: Tensor, counts: Tensor) -> Tensor:
    """Which are the ``counts`` best of each row, without sorting it; ties to the lower position.

    scores [H, n], counts [H] int64 -> [H, n] bool

    Raises:
        ValueError: a score is not a number, and so is no rank.
    """
    counts = counts.clamp_max(scores.shape[-1])[:, None]
    most = int(counts.max()) if len(counts) else 0
    if not most:
        return torch.zeros_like(scores, dtype=torch.bool)
    best = scores.topk(most).values
    if best[:, 0].isnan().any():  # it would come first
        raise ValueError("a score is not a number: keys, values or attention are not finite")
    last = best.gather(-1, (counts - 1).clamp_min(0))
    above, level = scores > last, scores == last
    return above | level & (level.cumsum(-1) <= counts - above.sum(-1, keepdim=True))


def apportion(shares: Sequence[float | Fraction], total: int, most: int) -> list[int]:
    """Whole numbers in proportion to ``shares`` that add up to ``total``, none above ``most``.

    Largest remainder, ties to the lower place; what a full place cannot take goes to the others, in proportion. Shares
    that are all zero count as equal.

    Raises:
        ValueError: the places cannot hold ``total``.
    """
    if total > most * len(shares):
        raise ValueError(f"{total} do not fit into {len(shares)} places of {most}")
    exact = [Fraction(share) for share in shares]
    given, left = [0] * len(shares), total
    while left:
        open_places = [place for place, count in enumerate(given) if count < most]
        weights = {place: exact[place] for place in open_places}
        if not any(weights.values()):
            weights = dict.fromkeys(open_places, Fraction(1))
        parts = {place: weight * left / sum(weights.values()) for place, weight in weights.items()}
        overfull = [place for place in open_places if given[place] + parts[place] >= most]
        if overfull:
            for place in overfull:
                left -= most - given[place]
                given[place] = most
            continue
        for place, part in parts.items():
            given[place] += floor(part)
            left -= floor(part)
        for place in sorted(parts, key=lambda place: (floor(parts[place]) - parts[place], place))[:left]:
            given[place] += 1
            left -= 1
    return given


def protect_ends(tokens: int, first: int, last: int, device: torch.device | None = None) -> Tensor:
    """[n] bool: the first and the last tokens of a prompt."""
    positions = torch.arange(tokens, device=device)
    return (positions < first) | (positions >= tokens - last)
