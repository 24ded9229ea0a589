"""Adaptive lookahead: more futures only while they still change what would be kept. Not in the paper, which names it as
future work (§5).

    keep(window) -> keep(4 futures) -> keep(8 futures) -> ...     until a step moves no more than a share of the tokens

The comparison is made at one budget, since futures are sampled once for all budgets.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvcache.prefill import PARTICLES, Prefill
from kvcache.select import keep_top, protect_ends
from lorekv.lookahead import Futures, join_futures, sample_futures
from lorekv.scoring import Scored, score_prompt

if TYPE_CHECKING:
    from lorekv.method import LoreKV

REFERENCE_BUDGET = 128
"""Tokens per KV head: the tightest budget of the paper. For shorter prompts, half of them."""


def score_until_stable(method: LoreKV, prefills: Sequence[Prefill], seeds: Sequence[str]) -> list[Scored]:
    """Scores of each prompt with as many futures as it took; ``particles`` is the most."""
    scored = [score_prompt(method, prefill) for prefill in prefills]
    kept = [_kept(method, *both) for both in zip(prefills, scored, strict=True)]
    sampled: list[list[Futures]] = [[] for _ in prefills]
    unstable = list(range(len(prefills)))
    for first in range(0, method.particles, PARTICLES):
        count = min(PARTICLES, method.particles - first)
        prompts, streams = [prefills[place] for place in unstable], [seeds[place] for place in unstable]
        new = sample_futures(prompts, count, method.tokens, method.temperature, streams, first=first)
        still = []
        for place, futures in zip(unstable, new, strict=True):
            sampled[place].append(futures)
            scored[place] = score_prompt(method, prefills[place], join_futures(sampled[place], first + count))
            before, kept[place] = kept[place], _kept(method, prefills[place], scored[place])
            if changed_share(before, kept[place]) > method.stop_change:
                still.append(place)
        unstable = still
        if not unstable:
            break
    return scored


def changed_share(before: Tensor, after: Tensor) -> float:
    """The share of the kept tokens that were not kept before. [L, H_kv, n] bool each"""
    return float((after & ~before).sum() / after.sum().clamp_min(1))


def _kept(method: LoreKV, prefill: Prefill, scored: Scored) -> Tensor:
    """Which of the unprotected tokens a reference budget keeps. [layers, H_kv, n] bool"""
    ends = protect_ends(prefill.tokens, *method.protected_ends, prefill.logits.device)
    budget = max(min(REFERENCE_BUDGET, prefill.tokens // 2), int(ends.sum()))
    kept = [torch.zeros_like(scores, dtype=torch.bool) for scores in scored.scores]
    for mask, scores in zip(kept, scored.scores, strict=True):
        mask.scatter_(1, keep_top(scores, budget, ends), True)
    return torch.cat(kept) & ~ends
