"""What the paper measures beside scores (arXiv 2610.07643, §4.5, App. F): pure functions on one layer of one prompt.

    true futures    the queries [H_q, T, d] of the answer that the full cache generates, one per answer token
    oracle          what the deletion cost keeps when the true futures stand in for the sampled ones
    counted [n]     prompt tokens that compete for a place: not those that every condition keeps anyway

The summary that was at hand names these measures without formulas. Each choice is in its docstring.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import normalize

BINS = 4
"""Of layers by depth, and of tokens by position."""


def kept_mask(kept: Sequence[Tensor], tokens: int) -> Tensor:
    """Kept positions of every head as a mask. [H] of [k] int64 -> [H, n] bool"""
    mask = torch.zeros(len(kept), tokens, dtype=torch.bool, device=kept[0].device)
    for own, positions in zip(mask, kept, strict=True):
        own[positions] = True
    return mask


# -- queries (F.2) -----------------------------------------------------------------------------------------------------


def query_coverage(future: Tensor, reference: Tensor) -> Tensor:
    """Mean over a head's future queries of the largest cosine to one of its reference queries. NaN without references.

    future [H, T, d], reference [H, R, d], both rotated, as attention sees them -> [H] fp32
    """
    if not reference.shape[1]:
        return torch.full((len(future),), torch.nan, device=future.device)
    cosines = normalize(future.float(), dim=-1) @ normalize(reference.float(), dim=-1).transpose(1, 2)
    return cosines.amax(-1).mean(-1)


# -- kept sets (F.3) ---------------------------------------------------------------------------------------------------


def recall(kept: Tensor, wanted: Tensor) -> Tensor:
    """The share of ``wanted`` that is kept: Recall@B where wanted is what the oracle keeps, overlap where it is
    what the control keeps. NaN where nothing is wanted. [..., n] bool -> [...]"""
    return (kept & wanted).sum(-1) / wanted.sum(-1)


def jaccard(first: Tensor, second: Tensor) -> Tensor:
    """Common tokens over all tokens of two sets; two empty ones are the same. [..., n] bool -> [...]"""
    either = (first | second).sum(-1)
    return torch.where(either > 0, (first & second).sum(-1) / either.clamp_min(1), 1.0)


def spearman(first: Tensor, second: Tensor) -> Tensor:
    """Rank correlation, ties at their mean rank. NaN where one side does not vary. [..., n] -> [...] fp64"""
    one, other = (ranks - ranks.mean(-1, keepdim=True) for ranks in (mean_ranks(first), mean_ranks(second)))
    return (one * other).sum(-1) / (one.square().sum(-1) * other.square().sum(-1)).sqrt()


def mean_ranks(values: Tensor) -> Tensor:
    """From 0 for the smallest; equal values share the mean of their ranks. [..., n] -> [..., n] fp64"""
    ordered = values.sort(-1).values.contiguous()
    below = torch.searchsorted(ordered, values.contiguous())
    upto = torch.searchsorted(ordered, values.contiguous(), right=True)
    return (below + upto - 1).double() / 2


# -- outputs (§4.5, F.3, F.7) ------------------------------------------------------------------------------------------


def output_error(
    queries: Tensor, keys: Tensor, values: Tensor, own_keys: Tensor, own_values: Tensor, kept: Tensor, scale: float
) -> Tensor:
    """|| o_kept - o || / || o || of each query head, mean over the true futures: o attends to the whole prompt, o_kept
    to the kept tokens of it, both to the answer's own tokens so far. Before gate and projection. fp32

    Args:
        queries: [G, T, d] of one KV head's group.
        keys, values: [n, d], [n, d_v] of the prompt.
        own_keys, own_values: [T, d], [T, d_v] of the answer.
        kept: [K, n] bool, the sets to compare.

    Returns:
        [K, G]
    """
    steps, tokens = len(own_keys), len(keys)
    logits = queries.float() @ torch.cat([keys, own_keys]).float().T * scale
    later = torch.ones(steps, steps, dtype=torch.bool, device=keys.device).triu(1)
    logits[..., tokens:].masked_fill_(later, -torch.inf)
    everything = torch.cat([values, own_values]).float()
    full = logits.softmax(-1) @ everything
    errors = []
    for mask in kept:
        hidden = torch.cat([~mask, mask.new_zeros(steps)])
        output = logits.masked_fill(hidden, -torch.inf).softmax(-1) @ everything
        errors.append(((output - full).norm(dim=-1) / full.norm(dim=-1)).mean(-1))
    return torch.stack(errors)


def equivalent_budget(budgets: Tensor, fidelity: Tensor, target: Tensor) -> Tensor:
    """The least budget at which a curve reaches a fidelity, interpolated between measured points (F.7).

    budgets [K] ascending, fidelity [..., K], target [...] -> [...]: the first budget where it is reached there already,
    and infinity where the curve never does.
    """
    reached = fidelity >= target[..., None]
    after = reached.int().argmax(-1, keepdim=True)
    before = (after - 1).clamp_min(0)
    low, high = fidelity.gather(-1, before)[..., 0], fidelity.gather(-1, after)[..., 0]
    start, end = budgets[before[..., 0]], budgets[after[..., 0]]
    part = torch.where(after[..., 0] > 0, (target - low) / (high - low), 0.0)
    return torch.where(reached.any(-1), start + part * (end - start), torch.inf)


# -- what is kept (F.5, F.6) -------------------------------------------------------------------------------------------


def answer_places(prompt: Sequence[int], answers: Sequence[Sequence[int]]) -> Tensor:
    """Where the prompt holds one of these answers, token id by token id. [n] bool

    Other spellings and other cuts into tokens are not found, for any condition (F.1).
    """
    places = torch.zeros(len(prompt), dtype=torch.bool)
    for answer in answers:
        length = len(answer)
        for start in range(len(prompt) - length + 1 if length else 0):
            if list(prompt[start : start + length]) == list(answer):
                places[start : start + length] = True
    return places


def answer_enrichment(kept: Tensor, answer: Tensor, counted: Tensor) -> tuple[Tensor, Tensor]:
    """Of the competing tokens: the share of the answer's that is kept, and the share of all. Enrichment is the first
    over the second, 1 for a choice that is blind to the answer. kept [H, n], answer, counted [n] bool -> [H], [H]"""
    return recall(kept, answer & counted), recall(kept, counted)


def energy_by_position(scores: Tensor, counted: Tensor, bins: int = BINS) -> Tensor:
    """The shares of the competing tokens' score that parts of the prompt hold, from its first to its last. NaN where
    there is no score. scores [H, n], counted [n] bool -> [bins]"""
    tokens = scores.shape[-1]
    part = torch.arange(tokens, device=scores.device) * bins // tokens
    of_tokens = scores.masked_fill(~counted, 0).double().sum(0)
    found = of_tokens.new_zeros(bins).index_add(0, part, of_tokens)
    return found / found.sum()


def energy_by_depth(masses: Tensor, bins: int = BINS) -> Tensor:
    """The shares of the total score that the layers hold, from the first layers to the last. masses [L] -> [bins]"""
    part = torch.arange(len(masses), device=masses.device) * bins // len(masses)
    return masses.new_zeros(bins).index_add(0, part, masses / masses.sum())
