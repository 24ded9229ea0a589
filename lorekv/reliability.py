"""Stage 2 of LORE-KV: how much each sampled future counts (§3.3, App. C.3).

Under sampling at temperature 1 the expected surprise of a step is its entropy, so a future's mean excess of surprise
over entropy, its gap, is centred at zero. Far from zero in either direction it is atypical: a degenerate loop, or an
outlier.

    gap_m = 1/T_m sum_t (-log p(y_t) - H_t)     A_m = |gap_m|     E_m = 1/T_m sum_t H_t
    D_m = 1 - mean over layers and query heads of cos(q_m, mean of the other futures' q), q_m its mean query
    w_m ∝ exp( -(lambda_A A_m + lambda_E E_m + lambda_D D_m) )

The form of the weights is our choice: soft, positive, exactly 1/M at lambda = 0.
"""

from __future__ import annotations

from fractions import Fraction
from math import floor
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from lorekv.lookahead import Futures

if TYPE_CHECKING:
    from lorekv.method import Typicality

LEAST_ERROR = 1e-6
"""Added to a gap's standard error: a future whose every step was certain has none."""


def particle_weights(
    futures: Futures,
    atypicality: float,
    entropy: float,
    disagreement: float = 0.0,
    typicality: Typicality = "gap",
    hard_filter: float = 0.0,
) -> Tensor:
    """[M] fp32, summing to 1 over the futures that have a token, 0 elsewhere; all 0 when none has.

    ``hard_filter`` drops that share of the futures, the ones of highest energy, and counts the others alike.
    """
    steps, lengths = futures.steps(), futures.lengths.clamp_min(1)
    mean_entropy = futures.entropy.masked_fill(~steps, 0).sum(1) / lengths
    energy = atypicality * typicality_energy(futures, typicality) + entropy * mean_entropy
    if disagreement:
        energy = energy + disagreement * query_disagreement(futures)
    energy = energy.masked_fill(futures.lengths == 0, torch.inf)
    alive = int((futures.lengths > 0).sum())
    if not alive:
        return torch.zeros_like(energy)
    if hard_filter:
        kept = energy.argsort(stable=True)[: alive - floor(Fraction(str(hard_filter)) * alive)]
        return torch.zeros_like(energy).index_fill(0, kept, 1 / len(kept))
    return torch.softmax(-energy, -1)


def typicality_energy(futures: Futures, typicality: Typicality = "gap") -> Tensor:
    """A [M]: the size of the gap; in standard errors of it (``normalized``), whose square is the sum of the steps'
    varentropies over T_m², or around the mean gap of the futures (``centred``)."""
    steps, lengths = futures.steps(), futures.lengths.clamp_min(1)
    gap = (-futures.log_probability - futures.entropy).masked_fill(~steps, 0).sum(1) / lengths
    if typicality == "normalized":
        error = futures.varentropy.masked_fill(~steps, 0).sum(1).sqrt() / lengths
        return gap.abs() / (error + LEAST_ERROR)
    if typicality == "centred":
        return (gap - gap.sum() / (futures.lengths > 0).sum().clamp_min(1)).abs()
    return gap.abs()


def query_disagreement(futures: Futures) -> Tensor:
    """D [M]: how far a future's mean query points away from the others' mean. 0 for one that has no others."""
    alive = futures.lengths > 0
    others = (alive.sum() - alive.long()).clamp_min(1)
    steps = futures.steps()[:, None, :, None]
    agreements = []
    for queries in futures.queries:
        own = queries.float().masked_fill(~steps, 0).sum(2) / futures.lengths.clamp_min(1)[:, None, None]
        reference = (own.sum(0) - own) / others[:, None, None]
        agreements.append(cosine_similarity(own, reference, dim=-1))
    disagreement = 1 - torch.cat(agreements, 1).mean(1)
    return disagreement.masked_fill(~alive | (alive.sum() - alive.long() == 0), 0)


def effective_particles(weights: Tensor) -> float:
    """Kish's effective sample size, 1 / sum w^2; 0 when no future counts."""
    squares = float(weights.square().sum())
    return 1 / squares if squares else 0.0
