"""What stays, from token scores (§3.5, App. D): protected tokens, budgets of layers and heads, the best of the rest.

Budgets are tokens per KV head and always add up to the same total: ``B`` times heads times layers.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvcache.prefill import Prefill
from kvcache.rotary import unrotate
from kvcache.select import apportion, keep_counts, protect_ends, rank
from lorekv.diversity import keep_diverse
from lorekv.scoring import Scored

if TYPE_CHECKING:
    from lorekv.method import LoreKV


def keep_tokens(method: LoreKV, prefill: Prefill, budget: int, scored: Scored) -> list[list[Tensor]]:
    """Kept positions of every KV head, ascending. [layers][H_kv] of [k]"""
    protected = protected_tokens(method, prefill, budget)
    fixed = int(protected.sum())
    kept = []
    for layer, counts in enumerate(free_counts(method, prefill, budget - fixed, scored, protected)):
        scores, limits = scored.scores[layer], [fixed + count for count in counts]
        if method.key_diversity or method.value_diversity:
            keys = unrotated_keys(prefill, layer)
            values = prefill.layers[layer].values.float()
            penalties = method.key_diversity, method.value_diversity
            kept.append(keep_diverse(scores, keys, values, limits, protected, *penalties))
        else:
            kept.append(keep_counts(scores, limits, protected))
    return kept


def protected_tokens(method: LoreKV, prefill: Prefill, budget: int) -> Tensor:
    """[n] bool: first token and window; then, while there is room, structural tokens, the most recent first."""
    protected = protect_ends(prefill.tokens, *method.protected_ends, prefill.logits.device)
    if method.structural and prefill.structural is not None:
        room = max(budget - int(protected.sum()), 0)
        places = (prefill.structural.to(protected.device) & ~protected).nonzero().flatten()
        protected[places[max(len(places) - room, 0) :]] = True
    return protected


def free_counts(method: LoreKV, prefill: Prefill, room: int, scored: Scored, protected: Tensor) -> list[list[int]]:
    """How many unprotected tokens each head keeps, where ``room`` is the mean. [layers][H_kv]"""
    most = int((~protected).sum())
    room = min(room, most)
    rooms = [room] * len(scored.scores)
    if method.layer_budgets == "global":
        rooms = layer_rooms(prefill, room, scored, protected)
    counts = []
    for of_layer, masses in zip(rooms, scored.masses, strict=True):
        heads = len(masses)
        if not method.head_exponent:
            counts.append([of_layer] * heads)
        else:
            shares = masses.double().clamp_min(0).pow(method.head_exponent).tolist()
            counts.append(apportion(shares, of_layer * heads, most))
    return counts


def layer_rooms(prefill: Prefill, room: int, scored: Scored, protected: Tensor) -> list[int]:
    """Free tokens per head of each layer, ``room`` on average over layers of one shape.

    All candidates of these layers compete in one ranking, each with its share of its layer's total score: raw costs
    grow with depth. A layer's share of the winners is its share of the room.
    """
    alike: dict[object, list[int]] = defaultdict(list)
    for layer, index in enumerate(prefill.layout.growing):
        alike[prefill.layout.layers[index]].append(layer)
    rooms = [room] * len(scored.scores)
    for layers in alike.values():
        scores = torch.stack([scored.scores[layer][:, ~protected].clamp_min(0) for layer in layers])
        shares = (scores / scores.sum((1, 2), keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)).flatten(1)
        winners = rank(shares.flatten())[: room * len(layers) * scores.shape[1]]
        won = torch.zeros_like(shares).flatten().index_fill(0, winners, 1).view_as(shares) * (shares > 0)
        found = apportion(won.sum(1).tolist(), room * len(layers), scores.shape[-1])
        for layer, own in zip(layers, found, strict=True):
            rooms[layer] = own
    return rooms


def unrotated_keys(prefill: Prefill, layer: int) -> Tensor:
    """The keys before rotation, which mixes distance into their directions. [H_kv, n, d] fp32"""
    keys = prefill.layers[layer].keys
    cos, sin = prefill.rotary(layer, torch.arange(prefill.tokens, device=keys.device))
    return unrotate(keys, cos, sin)
