"""Attention of a prompt's last queries over all its keys: what SnapKV, LORE-KV and their relatives score with."""

from __future__ import annotations

import torch
from torch import Tensor


def window_attention(queries: Tensor, keys: Tensor, scale: float) -> Tensor:
    """Causal softmax of the last w queries of a prompt, for one KV head, in fp32.

    Args:
        queries: [G, w, d], the query heads of one group.
        keys: [n, d], w <= n; query j sits at position n - w + j.

    Returns:
        [G, w, n]
    """
    count, tokens = queries.shape[1], len(keys)
    scores = (queries.float() @ keys.float().T).mul_(scale)
    future = torch.ones(count, count, dtype=torch.bool, device=keys.device).triu_(1)
    scores[..., tokens - count :].masked_fill_(future, -torch.inf)
    return torch.softmax(scores, -1)
