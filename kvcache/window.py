"""Attention of a prompt's last queries over all its keys: what SnapKV, LORE-KV and their relatives score with."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import avg_pool1d, max_pool1d

from kvcache.prefill import LayerPrefill


def pooled_window_scores(
    layer: LayerPrefill, tokens: int, window: int, kernel: int, pooling: Literal["max", "avg"]
) -> Tensor:
    """SnapKV's score: what the last ``window`` queries attend to, and its neighbours.

    score(i) = mean over the group of  pool_i( sum over the window's queries of  softmax(q K^T / sqrt(d))_i )

    Border positions: maximum pooling ignores what lies outside, average pooling counts it as zero.

    Returns:
        [H_kv, n] fp32, 0 for the window itself, which is not scored.
    """
    assert layer.queries is not None
    pool = max_pool1d if pooling == "max" else avg_pool1d
    prefix = max(tokens - window, 0)
    scored = torch.zeros(len(layer.keys), tokens, device=layer.keys.device)
    heads = layer.queries[:, -window:].unflatten(0, (len(layer.keys), -1))
    for head, queries in enumerate(heads if prefix else ()):
        received = window_attention(queries, layer.keys[head], layer.scale)[..., :prefix].sum(1)
        scored[head, :prefix] = pool(received, kernel, stride=1, padding=kernel // 2).mean(0)
    return scored


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
