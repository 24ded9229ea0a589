"""Choosing what stays: ranking with a defined tie rule, protected entries, one result on every device.

``torch.topk`` has no tie rule and devices differ; after max-pooling ties are the norm. Here a higher score wins, then
the lower position.
"""

from __future__ import annotations

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
    return rank(scores)[..., :count].sort(-1).values


def protect_ends(tokens: int, first: int, last: int, device: torch.device | None = None) -> Tensor:
    """[n] bool: the first and the last tokens of a prompt."""
    positions = torch.arange(tokens, device=device)
    return (positions < first) | (positions >= tokens - last)
