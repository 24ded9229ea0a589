"""Stage 2 of LORE-KV: how much each sampled future counts (§3.3, App. C.3).

Under sampling at temperature 1 the expected surprise of a step is its entropy, so a future's mean excess of surprise
over entropy is centred at zero. Far from zero in either direction it is atypical: a degenerate loop, or an outlier.

    A_m = | 1/T_m sum_t (-log p(y_t) - H_t) |      E_m = 1/T_m sum_t H_t
    w_m ∝ exp( -(lambda_A A_m + lambda_E E_m) )

The form of the weights is our choice: soft, positive, exactly 1/M at lambda = 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lorekv.lookahead import Futures


def particle_weights(futures: Futures, atypicality: float, entropy: float) -> Tensor:
    """[M] fp32, summing to 1 over the futures that have a token, 0 elsewhere; all 0 when none has."""
    steps, lengths = futures.steps(), futures.lengths.clamp_min(1)
    excess = (-futures.log_probability - futures.entropy).masked_fill(~steps, 0).sum(1) / lengths
    mean_entropy = futures.entropy.masked_fill(~steps, 0).sum(1) / lengths
    energy = atypicality * excess.abs() + entropy * mean_entropy
    energy = energy.masked_fill(futures.lengths == 0, torch.inf)
    if bool((futures.lengths == 0).all()):
        return torch.zeros_like(energy)
    return torch.softmax(-energy, -1)


def effective_particles(weights: Tensor) -> float:
    """Kish's effective sample size, 1 / sum w^2; 0 when no future counts."""
    squares = float(weights.square().sum())
    return 1 / squares if squares else 0.0
