"""Attention of a prompt's last queries over all its keys: what SnapKV, LORE-KV and their relatives score with."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import avg_pool1d, max_pool1d, pad

from kvcache.prefill import LayerPrefill


def pooled_window_scores(
    layer: LayerPrefill, tokens: int, window: int, kernel: int, pooling: Literal["max", "avg"]
) -> Tensor:
    """SnapKV's score: what the last ``window`` queries attend to, and its neighbours.

    score(i) = mean over the group of  pool_i( sum over the window's queries of  softmax(q K^T / sqrt(d))_i )

    Border positions: maximum pooling ignores what lies outside, average pooling counts it as zero. The layer remembers
    what was found, for all methods with the same settings.

    Returns:
        [H_kv, n] fp32, 0 for the window itself, which is not scored. Not to be written to.
    """
    settings = tokens, window, kernel, pooling
    if settings not in layer.window_scores:
        layer.window_scores[settings] = _pooled(layer, *settings)
    return layer.window_scores[settings]


def _pooled(layer: LayerPrefill, tokens: int, window: int, kernel: int, pooling: str) -> Tensor:
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
    """Causal softmax of the last w queries of a prompt, for one KV head, in fp32: of :func:`window_logits`."""
    return torch.softmax(window_logits(queries, keys, scale), -1)


def window_logits(queries: Tensor, keys: Tensor, scale: float) -> Tensor:
    """Scaled scores of the last w queries of a prompt, for one KV head, in fp32; -inf where a query does not see.

    Args:
        queries: [G, w, d], the query heads of one group.
        keys: [n, d], w <= n; query j sits at position n - w + j.

    Returns:
        [G, w, n]
    """
    count, tokens = queries.shape[1], len(keys)
    scores = (queries.float() @ keys.float().T).mul_(scale)
    scores[..., tokens - count :].masked_fill_(unseen(count, keys.device), -torch.inf)
    return scores


def unseen(count: int, device: torch.device) -> Tensor:
    """Which of the last keys come after each of as many last queries. [w, w] bool"""
    return torch.ones(count, count, dtype=torch.bool, device=device).triu_(1)


def moving_average(x: Tensor, kernel: int) -> Tensor:
    """Over ``kernel`` neighbours, outside counts as zero, as ``avg_pool1d`` has it, which a CPU takes ten times longer
    for. [..., n]"""
    tokens, padded = x.shape[-1], pad(x, (kernel // 2, kernel // 2))
    average = padded[..., :tokens].clone()
    for place in range(1, kernel):
        average += padded[..., place : place + tokens]
    return average.div_(kernel)


def moving_maximum(x: Tensor, kernel: int) -> Tensor:
    """Over ``kernel`` neighbours, as ``max_pool1d`` has it: of two overlapping maxima at a time. [..., n]"""
    best, width = pad(x, (kernel // 2, kernel // 2), value=-torch.inf), 1
    while width < kernel:
        step = min(width, kernel - width)
        best, width = torch.maximum(best[..., :-step], best[..., step:]), width + step
    return best
