"""Scores of windows: what a prompt leaves them with, and how they go on (§4.2, App. J).

Windows count from the end of the sinks; the last one of a prompt may be incomplete and is scored as far as it goes.
Everything is per layer, one score for all heads.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvcache.evict import PromptEvictor
from kvcache.method import Method
from kvcache.prefill import Prefill


def attention_scores(prefill: Prefill, sinks: int, window: int) -> Tensor:
    """Each window's column sums, mean over query heads: prompt attention initialises the scores (§4.2). [L, W]"""
    sums = torch.stack([layer.column_sums.mean(0) for layer in prefill.layers if layer.column_sums is not None])
    return _by_window(sums[:, sinks:], window)


def key_norm_scores(prefill: Prefill, sinks: int, window: int) -> Tensor:
    """Minus the mean key norm of each window (Eq. 24). Of the incomplete last one, its tokens' share. [L, W]"""
    norms = torch.stack([key_norms(layer.keys.transpose(0, 1)) for layer in prefill.layers])
    return -_by_window(norms[:, sinks:], window) / window


def key_norms(keys: Tensor) -> Tensor:
    """L2 norm, mean over KV heads; rotation does not change it. [..., H_kv, d] -> [...]"""
    return torch.linalg.vector_norm(keys.float(), dim=-1).mean(-1)


def utilities(ranker: Method, prefills: Sequence[Prefill], seeds: Sequence[str]) -> list[list[Tensor]]:
    """What a method thinks of the tokens of each prompt: one [H_kv, n] per layer. Prompts are scored together where the
    method can."""
    if isinstance(ranker, PromptEvictor):
        return ranker.utilities(prefills, seeds)
    return [ranker.scores(prefill, seed) for prefill, seed in zip(prefills, seeds, strict=True)]  # type: ignore[attr-defined]


def utility_scores(prefill: Prefill, of_tokens: list[Tensor], ends: tuple[int, int], sinks: int, window: int) -> Tensor:
    """A method's utilities as first scores: mean over heads, sum over the window, scaled so that a layer's windows
    share what n queries give. Decode attention then adds on the scale of Eq. 1. [L, W]

    Args:
        of_tokens: [H_kv, n] per layer; where some are negative they are raised to begin at 0.
        ends: how many first and last tokens the method keeps whatever their utility; windows that hold such a token
            rank with its best one.
    """
    tokens = torch.stack([layer.float().mean(0) for layer in of_tokens])[:, sinks:]
    if not bool(tokens.isfinite().all()):
        raise ValueError("the ranker's utilities are not all finite")
    scores = _by_window(tokens - tokens.amin(-1, keepdim=True).clamp_max(0), window)
    position = torch.arange(sinks, prefill.tokens, device=tokens.device)
    kept = (position < ends[0]) | (position >= prefill.tokens - ends[1])
    scores = torch.where(_by_window(kept[None].float(), window) > 0, scores.amax(-1, keepdim=True), scores)
    return scores / scores.sum(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny) * prefill.tokens


def p_norm(first: Tensor, second: Tensor, p: float) -> Tensor:
    """(first^p + second^p)^(1/p) of what is not negative, whatever its size: the larger one is taken out first."""
    largest = torch.maximum(first, second).clamp_min(torch.finfo(torch.float32).tiny)
    return largest * ((first / largest).pow(p) + (second / largest).pow(p)).pow(1 / p)


def _by_window(of_tokens: Tensor, window: int) -> Tensor:
    """[L, n] -> [L, W]"""
    return pad(of_tokens, (0, -of_tokens.shape[1] % window)).unflatten(1, (-1, window)).sum(-1)
