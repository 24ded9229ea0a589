"""What one token is worth to one query: the objectives that evictors rank by, for the query heads of one KV head.

    attention     a                         SnapKV, H2O, AdaKV
    value_norm    a ||v||                   value-aware attention
    projection    a yᵀv                     AnDPro: what the token adds along the output y; its anchor may be another
    prune_value   ||a v||²                  OBCache: the output's change when the value, the key, or both go,
    prune_key     ||a z (v - o)||²          to first order inside the norm; z is the scaled logit
    prune_both    ||a v + a z (v - o)||²

Shapes: probabilities a and logits z [G, Q, n], values v [n, d_v], output o [G, Q, d_v] -> [G, Q, n], fp32 (fp64 stays
fp64). The logits of tokens that a query may not see have to be finite: their probability is zero, so they cost nothing.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

Objective = Literal["attention", "value_norm", "projection", "prune_value", "prune_key", "prune_both"]
OBJECTIVES: tuple[Objective, ...] = get_args(Objective)
NEED_LOGITS: frozenset[Objective] = frozenset({"prune_key", "prune_both"})


def token_worth(
    objective: Objective, probabilities: Tensor, values: Tensor, output: Tensor, logits: Tensor | None = None
) -> Tensor:
    """``objective`` of every token for every query; only those in ``NEED_LOGITS`` read ``logits``."""
    values = values.to(probabilities)
    if objective == "attention":
        return probabilities
    if objective == "value_norm":
        return probabilities * values.norm(dim=-1)
    if objective == "projection":
        return projection(probabilities, values, output)
    if objective == "prune_value":
        return prune_value(probabilities, values)
    assert logits is not None, f"the objective {objective!r} needs logits"
    if objective == "prune_key":
        return prune_key(probabilities, values, output, logits)
    return prune_both(probabilities, values, output, logits)


def projection(probabilities: Tensor, values: Tensor, anchor: Tensor) -> Tensor:
    """a yᵀv, with an anchor y [G, Q, d_v]. Of either sign; with the output as anchor a query's sum is ||o||²."""
    return probabilities * (anchor @ values.T)


def prune_value(probabilities: Tensor, values: Tensor) -> Tensor:
    """S_V: exactly the squared change of the output when v becomes zero."""
    return probabilities.square() * values.square().sum(-1)


def prune_key(probabilities: Tensor, values: Tensor, output: Tensor, logits: Tensor) -> Tensor:
    """S_K: dropping the key moves its logit by -z, and the output by -a z (v - o) to first order."""
    of_output = output.square().sum(-1, keepdim=True)
    distance = (values.square().sum(-1) - 2 * (output @ values.T) + of_output).clamp_min(0)
    return (probabilities * logits).square() * distance


def prune_both(probabilities: Tensor, values: Tensor, output: Tensor, logits: Tensor) -> Tensor:
    """S_VK, as a² ||(1 + z) v - z o||² = S_V + S_K + 2 a² z (||v||² - vᵀo)."""
    of_output = output.square().sum(-1, keepdim=True)
    with_value = 1 + logits
    both = with_value.square().mul_(values.square().sum(-1))
    crossed = (2 * logits).mul_(with_value).mul_(output @ values.T)
    both -= crossed
    both += torch.square(logits, out=with_value).mul_(of_output)
    return both.clamp_min_(0).mul_(torch.square(probabilities, out=crossed))
