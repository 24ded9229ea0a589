"""From attention to token scores (§3.5): the objective per query, over queries, futures and the group's query heads.

    score_i = (1 - λ_L) P_i + λ_L F_i       P: mean over the window's queries      F: weighted mean over futures

Both are means over the query heads that share a KV head. The default objective is the deletion cost; the others replace
it on the same queries.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import max_pool1d

from kvcache.objectives import Objective, token_worth
from kvcache.prefill import LayerPrefill, Prefill
from kvcache.select import protect_ends
from lorekv.deletion import (
    Attended,
    attend_futures,
    attend_prompt,
    attend_prompt_alone,
    deletion_cost,
    projection_grams,
    scaled_logits,
)
from lorekv.kernels.deletion_scores import deletion_scores
from lorekv.lookahead import Futures
from lorekv.reliability import effective_particles, particle_weights
from lorekv.scoring_queries import window_queries, with_futures

if TYPE_CHECKING:
    from lorekv.method import LoreKV

SHARED: dict[str, Objective] = {
    "attention": "attention",
    "value_norm": "value_norm",
    "andpro": "projection",
    "obcache": "prune_both",
}
"""Objectives that stand in for the deletion cost, by the names they have where all methods find them."""

TAIL = 0.1
"""The share of the queries that robust aggregation looks at besides the mean: those with the highest costs."""


@dataclass
class Scored:
    """A prompt's tokens, scored.

    scores [H_kv, n] and masses [H_kv], the future cost of all tokens that may go (the window's where there is no
    future), per growing layer; facts, for the result's row.
    """

    scores: list[Tensor]
    masses: list[Tensor]
    facts: dict[str, Any] = field(default_factory=dict)


def score_prompt(method: LoreKV, prefill: Prefill, futures: Futures | None = None) -> Scored:
    """Expected cost of losing each prompt token; without futures, the window's alone."""
    scored, weights = Scored([], []), None
    if futures is not None:
        weights = particle_weights(
            futures, method.atypicality, method.entropy, method.disagreement, method.typicality, method.hard_filter
        )
        scored.facts = {
            "particles": len(weights),
            "effective_particles": effective_particles(weights),
            "future_tokens": futures.lengths.tolist(),
        }
    ends = protect_ends(prefill.tokens, *method.protected_ends, prefill.logits.device)
    counting = weights is not None and bool(weights.any())
    for index, layer in enumerate(prefill.layers):
        cost, pending = layer_costs(method, index, layer, futures if counting else None, weights)
        if pending is None:
            pending = cost
        else:
            cost = (1 - method.mix) * cost + method.mix * pending
        scored.scores.append(cost if method.kernel == 1 else pooled(cost, method.kernel, ends))
        scored.masses.append(pending[:, ~ends].sum(1))
    return scored


def layer_costs(
    method: LoreKV, index: int, layer: LayerPrefill, futures: Futures | None, weights: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """P, and F where futures count: deletion costs and their means in one call, everything else query by query."""
    grams = projection_grams(layer.output_projection, len(layer.keys))
    if method.objective == "deletion" and not method.squared and not method.tail and layer.gates is None:
        asked = window_queries(layer, method.window)
        if futures is not None and weights is not None:
            asked = with_futures(asked, index, layer, futures, weights, own=method.support == "prompt_and_own")
        of_window, of_futures = deletion_scores(asked, layer.keys, layer.values, grams, layer.scale)
        return of_window, None if futures is None else of_futures
    of_window = window_cost(method, layer, grams)
    if futures is None or weights is None:
        return of_window, None
    return of_window, future_cost(method, index, layer, grams, futures, weights)


def window_cost(method: LoreKV, layer: LayerPrefill, grams: Tensor) -> Tensor:
    """P: mean over the group and the window's queries. [H_kv, n]"""
    assert layer.queries is not None
    queries = layer.queries[:, -method.window :].unflatten(0, (len(layer.keys), -1))
    costs = []
    for head, values in enumerate(layer.values):
        attended = attend_prompt(queries[head], layer.keys[head], values, layer.scale)
        if method.objective == "obcache":
            attended.logits = scaled_logits(queries[head], layer.keys[head], layer.scale)
        if layer.gates is not None:
            attended.gates = layer.gates[:, -method.window :].unflatten(0, (len(layer.keys), -1))[head]
        cost = query_costs(method, attended, values, grams[head])
        costs.append(cost.mean((0, 1)) if not method.tail else _aggregate(method, cost.mean(0)))
    return torch.stack(costs)


def future_cost(
    method: LoreKV, index: int, layer: LayerPrefill, grams: Tensor, futures: Futures, weights: Tensor
) -> Tensor:
    """F: weighted over futures, mean over the group and each future's queries. [H_kv, n]"""
    queries = futures.queries[index].unflatten(1, (len(layer.keys), -1))  # [M, H_kv, G, T, d]
    own_keys, own_values = futures.keys[index], futures.values[index]
    by_query = ((weights / futures.lengths.clamp_min(1))[:, None] * futures.steps()).flatten()
    costs = []
    for head, (keys, values) in enumerate(zip(layer.keys, layer.values, strict=True)):
        of_head = queries[:, head].transpose(0, 1)
        if method.support == "prompt":
            attended = attend_prompt_alone(of_head, keys, values, layer.scale)
        else:
            attended = attend_futures(of_head, keys, values, own_keys[:, head], own_values[:, head], layer.scale)
        if method.objective == "obcache":
            attended.logits = scaled_logits(of_head.flatten(1, 2), keys, layer.scale)
        if futures.gates:
            gates = futures.gates[index].unflatten(1, (len(layer.keys), -1))[:, head]
            attended.gates = gates.transpose(0, 1).flatten(1, 2)
        cost = query_costs(method, attended, values, grams[head]).mean(0)
        costs.append(_aggregate(method, cost, by_query))
    return torch.stack(costs)


def query_costs(method: LoreKV, attended: Attended, values: Tensor, gram: Tensor) -> Tensor:
    """The objective of each prompt token for every query. [G, Q, n]"""
    if method.objective != "deletion":
        shared = SHARED[method.objective]
        return token_worth(shared, attended.probabilities, values, attended.output, attended.logits)
    cost = deletion_cost(attended, values.float(), gram)
    return cost.square_() if method.squared else cost


def _aggregate(method: LoreKV, costs: Tensor, weights: Tensor | None = None) -> Tensor:
    """(1 - α) mean + α mean of the costliest queries. costs [Q, n], weights [Q] that sum to 1 (None: alike) -> [n]"""
    if weights is None:
        weights = costs.new_full((len(costs),), 1 / len(costs))
    mean = weights @ costs
    return (1 - method.tail) * mean + method.tail * tail_mean(costs, weights) if method.tail else mean


def tail_mean(costs: Tensor, weights: Tensor, share: float = TAIL) -> Tensor:
    """Mean over the costliest queries of each token, as many as have ``share`` of the weight (the last one in part).
    [Q, n], [Q] -> [n]"""
    ordered, order = costs.sort(0, descending=True)
    mass = weights[order]
    taken = torch.minimum(mass, (share - (mass.cumsum(0) - mass)).clamp_min(0))
    return (taken * ordered).sum(0) / taken.sum(0)


def pooled(scores: Tensor, kernel: int, protected: Tensor) -> Tensor:
    """The best score in a neighbourhood; protected tokens, which stay anyway, lend theirs to nobody. [H_kv, n]"""
    candidates = scores.masked_fill(protected, -torch.inf)
    best = max_pool1d(candidates[None], kernel, stride=1, padding=kernel // 2)[0]
    return torch.where(protected, scores, best)
