"""Probe queries: the few queries of a prompt that stand for all of them when tokens are scored (ZipCache, arXiv
2405.14256, §4.3): half of them the latest, half at random positions.

The random positions come from a generator seeded by the length alone, so they are the same beside other methods, in
other batches and for every seed of a sweep.
"""

from __future__ import annotations

from decimal import Decimal
from math import ceil

import torch
from torch import Tensor


def probe_positions(tokens: int, share: float) -> Tensor:
    """Ascending positions of the probes among n queries: ceil(n * share / 2) latest, floor(n * share / 2) others."""
    half = Decimal(str(share)) / 2 * tokens
    latest = min(tokens, ceil(half))
    generator = torch.Generator().manual_seed(tokens)
    others = torch.randperm(tokens - latest, generator=generator)[: int(half)]
    return torch.cat([others.sort().values, torch.arange(tokens - latest, tokens)])


def witnesses(tokens: int, share: float) -> Tensor:
    """How many probes see each token, at least 1. [n]"""
    probes = torch.zeros(tokens, dtype=torch.int64)
    probes[probe_positions(tokens, share)] = 1
    return probes.flip(0).cumsum(0).flip(0)


def probed_attention(queries: Tensor, positions: Tensor, keys: Tensor, scale: float) -> Tensor:
    """Causal attention that each key receives from probes, summed over probes and the group. In fp32, probe by probe
    of few heads at once: the matrix of one KV head is held.

    queries [H_q, k, d] at positions [k], keys [H_kv, n, d] -> [H_kv, n]
    """
    group = len(queries) // len(keys)
    future = torch.arange(keys.shape[1], device=keys.device) > positions.to(keys.device)[:, None]
    received = []
    for head, own in enumerate(keys.float()):
        of_group = queries[head * group : (head + 1) * group].float()
        scores = (of_group @ own.T).mul_(scale).masked_fill_(future, -torch.inf)
        received.append(torch.softmax(scores, -1).sum((0, 1)))
    return torch.stack(received)
