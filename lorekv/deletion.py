"""Stage 3 of LORE-KV: what deleting one token does to the residual stream (§3.4), in closed form.

Deleting token i and renormalising moves a head's output o by a_i / (1 - a_i) (o - v_i), so for query head h

    cost_i = a_i / (1 - a_i) · || W_O^h (o - v_i) ||

The norm needs no projected values: with G = W_O^hᵀ W_O^h, [d, d], it is oᵀGo - 2 (Go)ᵀv + vᵀGv. Where a model gates
its outputs before the projection, the gate of each query stretches o - v first.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvcache.window import window_attention

SURVIVING = 1e-4
"""Least 1 - a_i: a token that takes all attention has a finite cost."""


@dataclass
class Attended:
    """Queries of one KV head with what they attend to: the prompt, and for lookahead their own continuation.

    probabilities [G, Q, n] of the prompt's tokens; output [G, Q, d_v], over everything attended; logits [G, Q, n],
    scaled and finite, where they are asked for; gates [G, Q, d_v] of the outputs, where the model has them.
    """

    probabilities: Tensor
    output: Tensor
    logits: Tensor | None = None
    gates: Tensor | None = None


def deletion_cost(attended: Attended, values: Tensor, gram: Tensor) -> Tensor:
    """Cost of deleting each prompt token, for every query. fp32 (fp64 stays fp64).

    Args:
        values: [n, d_v] of this KV head.
        gram: [G, d_v, d_v], ``W_Oᵀ W_O`` of each query head in the group.

    Returns:
        [G, Q, n]
    """
    if attended.gates is None:
        distance = _distance(attended, values, gram)
    else:
        distance = _gated_distance(attended.output, values, gram, attended.gates)
    odds = attended.probabilities / (1 - attended.probabilities).clamp_min_(SURVIVING)
    return distance.mul_(odds)


def _distance(attended: Attended, values: Tensor, gram: Tensor) -> Tensor:
    output = attended.output
    projected = output @ gram
    of_output = (projected * output).sum(-1, keepdim=True)
    of_values = ((values @ gram) * values).sum(-1)[:, None]
    by_column = values.T.expand(len(gram), -1, -1)
    squares = torch.baddbmm(of_output + of_values, projected, by_column, alpha=-2)
    # Where one token takes nearly all attention o is nearly v and the terms cancel: its norm is taken from o - v.
    most = attended.probabilities.argmax(-1)
    apart = output - values[most]
    squares.scatter_(-1, most[..., None], ((apart @ gram) * apart).sum(-1, keepdim=True))
    return squares.clamp_min_(0).sqrt_()


def _gated_distance(output: Tensor, values: Tensor, gram: Tensor, gates: Tensor) -> Tensor:
    """Query by query: with its gate each of them has a projection of its own."""
    squares = []
    for query, gate in zip(output.unbind(1), gates.to(output).unbind(1), strict=True):
        moved = (query[:, None] - values) * gate[:, None]  # [G, n, d_v]
        squares.append(((moved @ gram) * moved).sum(-1))
    return torch.stack(squares, 1).clamp_min_(0).sqrt_()


def projection_grams(output_projection: Tensor, kv_heads: int) -> Tensor:
    """[hidden, H_q, d_v] -> [H_kv, G, d_v, d_v] fp32"""
    columns = output_projection.float().permute(1, 2, 0)
    return (columns @ columns.transpose(1, 2)).unflatten(0, (kv_heads, -1))


def attend_prompt(queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> Attended:
    """Causal attention of a prompt's last queries. queries [G, w, d], keys [n, d], values [n, d_v]"""
    probabilities = window_attention(queries, keys, scale)
    return Attended(probabilities, probabilities @ values.to(probabilities))


def attend_prompt_alone(queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> Attended:
    """Attention of futures over the prompt as if they had no tokens of their own. queries [G, M, T, d], keys [n, d]"""
    probabilities = torch.softmax(scaled_logits(queries.flatten(1, 2), keys, scale), -1)
    return Attended(probabilities, probabilities @ values.float())


def attend_futures(
    queries: Tensor, keys: Tensor, values: Tensor, own_keys: Tensor, own_values: Tensor, scale: float
) -> Attended:
    """Attention of M futures of T tokens over the whole prompt and, causally, their own tokens.

    queries [G, M, T, d], keys [n, d], own_keys [M, T, d] -> probabilities [G, M * T, n], output [G, M * T, d_v]
    """
    steps, prompt = queries.shape[2], len(keys)
    queries = queries.float()
    own = queries @ own_keys.float().transpose(1, 2)
    own.masked_fill_(torch.ones(steps, steps, dtype=torch.bool, device=own.device).triu(1), -torch.inf)
    shared = queries.flatten(1, 2) @ keys.float().T
    weights = torch.softmax(torch.cat([shared.view(*queries.shape[:3], prompt), own], -1) * scale, -1)
    of_prompt = weights[..., :prompt].flatten(1, 2)
    of_own = (weights[..., prompt:] @ own_values.float()).flatten(1, 2)
    return Attended(of_prompt, of_prompt @ values.float() + of_own)


def scaled_logits(queries: Tensor, keys: Tensor, scale: float) -> Tensor:
    """queries [G, Q, d], keys [n, d] -> [G, Q, n] fp32, tokens that come after a query included"""
    return (queries.float() @ keys.float().T) * scale
