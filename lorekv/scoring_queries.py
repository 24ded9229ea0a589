"""The queries that LORE-KV charges deletion to (§3.5): the prompt's last ones, and all of its sampled futures.

Their weights are those of the default aggregation, means over a group's query heads: of the window's queries alike, of
a future's by its reliability. A future's attention to its own tokens is taken here, once for all prompt tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvcache.prefill import LayerPrefill
from lorekv.lookahead import Futures


@dataclass(frozen=True)
class ScoringQueries:
    """Queries of one layer: the prompt's last ``window`` ones, then those of the futures, one future after another.

    queries [H_q, Q, d], rotated; visible [Q], how many prompt tokens each attends to, at least one; weights [Q], fp32.
    own_log_sums [H_q, Q] and own_output [H_q, Q, d_v], fp32: of each query's attention to its own future, the natural
    log-sum-exp of the scaled scores, and the output over that alone; -inf and 0 where it attends to none.
    """

    queries: Tensor
    visible: Tensor
    weights: Tensor
    own_log_sums: Tensor
    own_output: Tensor
    window: int


def window_queries(layer: LayerPrefill, window: int) -> ScoringQueries:
    """The last ``window`` queries of a prompt, fewer where it is shorter."""
    assert layer.queries is not None
    queries, tokens = layer.queries[:, -window:], layer.keys.shape[1]
    heads, count = queries.shape[:2]
    group = heads // len(layer.keys)
    return ScoringQueries(
        queries,
        torch.arange(tokens - count + 1, tokens + 1, device=queries.device),
        torch.full((count,), 1 / (group * count), device=queries.device),
        torch.full((heads, count), -torch.inf, device=queries.device),
        torch.zeros(heads, count, layer.values.shape[-1], device=queries.device),
        count,
    )


def with_futures(
    asked: ScoringQueries, index: int, layer: LayerPrefill, futures: Futures, weights: Tensor, own: bool = True
) -> ScoringQueries:
    """The window's queries and those of all futures in growing layer ``index``.

    Args:
        weights: [M], of the futures; their steps count alike, and those not taken count nothing.
        own: whether a future's queries attend to its own tokens.
    """
    queries = _by_head(futures.queries[index])
    heads, count = queries.shape[:2]
    group = heads // len(layer.keys)
    by_query = (weights / futures.lengths.clamp_min(1))[:, None] * futures.steps()
    log_sums = asked.own_log_sums.new_full((heads, count), -torch.inf)
    output = asked.own_output.new_zeros(heads, count, layer.values.shape[-1])
    if own:
        log_sums, output = attend_own(futures.queries[index], futures.keys[index], futures.values[index], layer.scale)
    return ScoringQueries(
        torch.cat([asked.queries, queries], 1),
        torch.cat([asked.visible, asked.visible.new_full((count,), layer.keys.shape[1])]),
        torch.cat([asked.weights, by_query.flatten() / group]),
        torch.cat([asked.own_log_sums, log_sums], 1),
        torch.cat([asked.own_output, output], 1),
        asked.window,
    )


def attend_own(queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Causal attention of futures to their own tokens alone, in fp32.

    queries [M, H_q, T, d], keys [M, H_kv, T, d], values [M, H_kv, T, d_v] -> log-sum-exp [H_q, M * T], output
    [H_q, M * T, d_v]
    """
    grouped = queries.unflatten(1, (keys.shape[1], -1)).float()
    scores = (grouped @ keys[:, :, None].float().transpose(3, 4)) * scale
    steps = scores.shape[-1]
    scores.masked_fill_(torch.ones(steps, steps, dtype=torch.bool, device=scores.device).triu(1), -torch.inf)
    output = torch.softmax(scores, -1) @ values[:, :, None].float()
    return _by_head(scores.logsumexp(-1).flatten(1, 2)), _by_head(output.flatten(1, 2))


def _by_head(tensor: Tensor) -> Tensor:
    """[M, H_q, T, ...] -> [H_q, M * T, ...]"""
    return tensor.transpose(0, 1).flatten(1, 2)
