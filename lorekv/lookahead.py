"""Stage 1 of LORE-KV: short futures sampled from the model itself (§3.2), all over one shared prompt cache.

    y_1 ~ p(. | prompt)      feed y_t at position n + t - 1 -> its queries, and p(y_{t+1} | ...)

A future ends before a stop token: the stop token is not fed, and the draw that chose it does not count. Draws are
inverse-CDF samples in fp64 from a generator of each particle's own, so they do not depend on the device, on the number
of particles or on the number of steps: fewer are a prefix of more.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvcache.prefill import BLOCKS, PARTICLES, Continuation, Prefill
from kvcache.streams import stream


@dataclass
class Futures:
    """M sampled continuations of up to T tokens of one prompt.

    tokens [M, T]; lengths [M], how many of them were fed; log_probability, entropy, varentropy [M, T] fp32 of the
    distribution each token was drawn from, at temperature 1. Per growing layer: queries [M, H_q, T, d], rotated, and
    the futures' own keys [M, H_kv, T, d] and values [M, H_kv, T, d_v], output gates [M, H_q, T, d_v] where the model
    has them (else none).
    """

    tokens: Tensor
    lengths: Tensor
    log_probability: Tensor
    entropy: Tensor
    varentropy: Tensor
    queries: list[Tensor]
    keys: list[Tensor]
    values: list[Tensor]
    gates: list[Tensor]

    def steps(self) -> Tensor:
        """[M, T] bool: the tokens that were fed."""
        return torch.arange(self.tokens.shape[1], device=self.lengths.device) < self.lengths[:, None]


@dataclass
class _Block:
    """Four particles of a prompt on their way; the last block of a prompt may have some to spare."""

    prompt: int
    prefill: Prefill
    draws: Tensor
    given: Tensor | None
    fed: list[Tensor] = field(default_factory=list)
    statistics: list[Tensor] = field(default_factory=list)
    alive: list[Tensor] = field(default_factory=list)

    def choose(self, logits: Tensor, temperature: float) -> Tensor:
        """The next token of each particle; 0 where it has ended. logits [4, V] -> [4]"""
        step = len(self.fed)
        if self.given is None:
            chosen = _inverse_cdf(logits, self.draws[:, step], temperature)
        else:
            chosen = self.given[:, step].to(logits.device)
        stops = torch.tensor(sorted(self.prefill.stop_ids), device=logits.device)
        going = ~torch.isin(chosen, stops)
        self.alive.append(self.alive[-1] & going if self.alive else going)
        self.statistics.append(_surprise(logits, chosen))
        self.fed.append(torch.where(self.alive[-1], chosen, 0))
        return self.fed[-1]


def sample_futures(
    prefills: Sequence[Prefill],
    particles: int,
    tokens: int,
    temperature: float,
    seeds: Sequence[str],
    given: Tensor | None = None,
    first: int = 0,
) -> list[Futures]:
    """Sample M futures of T tokens for each prompt, as few batches as possible.

    Args:
        given: [M, T] token ids to feed instead of sampled ones (comparisons with other implementations).
        first: the number of the first particle: with those before it, these are what one call would have sampled.
    """
    blocks = [
        _block(prompt, prefill, seed, start, tokens, given)
        for prompt, (prefill, seed) in enumerate(zip(prefills, seeds, strict=True))
        for start in range(first, first + particles, PARTICLES)
    ]
    found: list[list[Futures]] = [[] for _ in prefills]
    for start in range(0, len(blocks), BLOCKS):
        together = blocks[start : start + BLOCKS]
        continuation = _continue(together, tokens, temperature)
        for place, block in enumerate(together):
            found[block.prompt].append(_futures(block, place, continuation))
    return [join_futures(parts, particles) for parts in found]


def _block(prompt: int, prefill: Prefill, seed: str, first: int, tokens: int, given: Tensor | None) -> _Block:
    draws = torch.stack([_draws(seed, first + place, tokens) for place in range(PARTICLES)])
    if given is not None:
        places = torch.arange(first, first + PARTICLES).clamp_max(len(given) - 1)
        given = given[places]
    return _Block(prompt, prefill, draws.to(prefill.logits.device), given)


def _continue(blocks: list[_Block], tokens: int, temperature: float) -> Continuation:
    continuation = blocks[0].prefill.continue_prompts([block.prefill for block in blocks])
    logits = torch.stack([block.prefill.logits.expand(PARTICLES, -1) for block in blocks])
    for _ in range(tokens):
        chosen = [block.choose(one, temperature) for block, one in zip(blocks, logits, strict=True)]
        logits = continuation.step(torch.stack(chosen))
    return continuation


def _futures(block: _Block, place: int, continuation: Continuation) -> Futures:
    log_probability, entropy, varentropy = torch.stack(block.statistics, -1)
    layers = range(len(block.prefill.layers))
    suffixes = [continuation.suffix(place, layer) for layer in layers]
    return Futures(
        torch.stack(block.fed, 1),
        torch.stack(block.alive).sum(0),
        log_probability,
        entropy,
        varentropy,
        [continuation.queries(place, layer) for layer in layers],
        [keys for keys, _ in suffixes],
        [values for _, values in suffixes],
        [gates for layer in layers if (gates := continuation.gates(place, layer)) is not None],
    )


def join_futures(parts: Sequence[Futures], particles: int) -> Futures:
    """Futures of one prompt that were sampled one after another: the first ``particles`` of them."""

    def join(tensors: Iterable[Tensor]) -> Tensor:
        return torch.cat(list(tensors))[:particles]

    def by_layer(tensors: Iterable[list[Tensor]]) -> list[Tensor]:
        return [join(layer) for layer in zip(*tensors, strict=True)]

    return Futures(
        join(part.tokens for part in parts),
        join(part.lengths for part in parts),
        join(part.log_probability for part in parts),
        join(part.entropy for part in parts),
        join(part.varentropy for part in parts),
        by_layer(part.queries for part in parts),
        by_layer(part.keys for part in parts),
        by_layer(part.values for part in parts),
        by_layer(part.gates for part in parts),
    )


def _draws(seed: str, particle: int, tokens: int) -> Tensor:
    """[T] uniform fp64, a stream of each (seed, particle)."""
    return torch.rand(tokens, generator=stream(f"{seed}/{particle}"), dtype=torch.float64)


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
