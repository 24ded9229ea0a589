"""Stage 1 of LORE-KV: short futures sampled from the model itself (§3.2), all over one shared prompt cache.

    y_1 ~ p(. | prompt)      feed y_t at position n + t - 1 -> its queries, and p(y_{t+1} | ...)

A future ends before a stop token: the stop token is not fed, and the draw that chose it does not count. Draws are
inverse-CDF samples in fp64 from a generator of each particle's own, so they do not depend on the device, on the number
of particles or on the number of steps: fewer are a prefix of more.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

from kvcache.prefill import Continuation, Prefill


@dataclass
class Futures:
    """M sampled continuations of up to T tokens.

    tokens [M, T]; lengths [M], how many of them were fed; log_probability, entropy, varentropy [M, T] fp32 of the
    distribution each fed token was drawn from, at temperature 1.
    """

    tokens: Tensor
    lengths: Tensor
    log_probability: Tensor
    entropy: Tensor
    varentropy: Tensor
    continuation: Continuation

    def steps(self) -> Tensor:
        """[M, T] bool: the tokens that were fed."""
        return torch.arange(self.tokens.shape[1], device=self.lengths.device) < self.lengths[:, None]


def sample_futures(
    prefill: Prefill, particles: int, tokens: int, temperature: float, seed: str, given: Tensor | None = None
) -> Futures:
    """Sample M futures of T tokens as one batch.

    Args:
        given: [M, T] token ids to feed instead of sampled ones (comparisons with other implementations).
    """
    device = prefill.logits.device
    draws = torch.stack([_draws(seed, particle, tokens) for particle in range(particles)]).to(device)
    stops = torch.tensor(sorted(prefill.stop_ids), device=device)
    continuation = prefill.continue_with(particles)
    logits = prefill.logits.expand(particles, -1)
    alive = torch.ones(particles, dtype=torch.bool, device=device)
    fed: list[Tensor] = []
    statistics: list[Tensor] = []
    for step in range(tokens):
        chosen = _inverse_cdf(logits, draws[:, step], temperature) if given is None else given[:, step].to(device)
        alive = alive & ~torch.isin(chosen, stops)
        statistics.append(_surprise(logits, chosen))
        fed.append(torch.where(alive, chosen, 0))
        if step == 0:
            counts = torch.zeros_like(chosen)
        counts += alive
        logits = continuation.step(fed[-1])
    log_probability, entropy, varentropy = torch.stack(statistics, -1)
    return Futures(torch.stack(fed, 1), counts, log_probability, entropy, varentropy, continuation)


def _draws(seed: str, particle: int, tokens: int) -> Tensor:
    """[T] uniform fp64, a stream of each (seed, particle)."""
    digest = hashlib.sha256(f"{seed}/{particle}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
    return torch.rand(tokens, generator=generator, dtype=torch.float64)


def _inverse_cdf(logits: Tensor, draws: Tensor, temperature: float) -> Tensor:
    """[M, V], [M] -> [M]"""
    cumulative = torch.softmax(logits.double() / temperature, -1).cumsum(-1)
    target = draws[:, None] * cumulative[:, -1:]
    return torch.searchsorted(cumulative, target, right=True)[:, 0].clamp_max(logits.shape[-1] - 1)


def _surprise(logits: Tensor, chosen: Tensor) -> Tensor:
    """log p of the chosen token, entropy and varentropy of its distribution. [M, V], [M] -> [3, M]"""
    log_p = torch.log_softmax(logits.float(), -1)
    p = log_p.exp()
    entropy = -(p * log_p).sum(-1)
    varentropy = (p * (log_p + entropy[:, None]).square()).sum(-1)
    return torch.stack([log_p.gather(-1, chosen[:, None])[:, 0], entropy, varentropy])
