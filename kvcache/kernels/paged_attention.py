"""Decode attention over pages: keys and values of many rows in blocks of a fixed number of tokens.

    owner 0: [page 4][page 1][page 7..]      owner = one (row, KV head), or a row whose pages hold all its heads
    owner 1: [page 0][page 2..]              ".." = last page, partly filled

Every page is attended alone, in the same shape whatever else is in the pool; then an owner's pages are merged by their
log-sum-exp in page order. A row's output therefore has the same bits alone and beside any other rows. This is the
reference: it is written to be read, and fast enough on a CPU because each step is one batched product.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvcache.kernels import cpu_flash

PAGES_PER_PRODUCT = 512
"""Pages in one batched product: bounds the fp32 workspace; results do not depend on it."""


@dataclass
class PagePartials:
    """Attention of one group of queries inside each page, unnormalised.

    ``peak`` [P, G] largest score, ``mass`` [P, G, S] sums of ``exp(score - peak)`` over S equal segments of the page,
    ``output`` [P, G, d_v] sum of ``exp(score - peak) * value``; all fp32.
    """

    peak: Tensor
    mass: Tensor
    output: Tensor


def attend_pages(
    queries: Tensor, keys: Tensor, values: Tensor, valid: Tensor, scale: float, segments: int = 1
) -> PagePartials:
    """Attention inside each page.

    Args:
        queries: [P, G, d], the queries of the page's owner.
        keys, values: [P, b, d], [P, b, d_v].
        valid: [P, b] bool, which slots hold a token. A page may be empty.
    """
    if segments == 1 and keys.dtype == queries.dtype == torch.bfloat16 and cpu_flash.serves(keys, values):
        return _attend_fused(queries, keys, values, valid, scale)
    peaks, masses, outputs = [], [], []
    for start in range(0, len(keys), PAGES_PER_PRODUCT):
        page = slice(start, start + PAGES_PER_PRODUCT)
        # Scores in fp32: a bf16 product would round them to 8 bits.
        scores = torch.bmm(queries[page].float(), keys[page].float().transpose(1, 2)).mul_(scale)
        scores.masked_fill_(~valid[page, None, :], -torch.inf)
        peak = scores.amax(-1)
        weights = scores.sub_(peak.clamp_min(torch.finfo(torch.float32).min)[..., None]).exp_()
        peaks.append(peak)
        masses.append(weights.unflatten(-1, (segments, -1)).sum(-1))
        outputs.append(torch.bmm(weights.to(values.dtype), values[page]).float())
    return PagePartials(torch.cat(peaks), torch.cat(masses), torch.cat(outputs))


def _attend_fused(queries: Tensor, keys: Tensor, values: Tensor, valid: Tensor, scale: float) -> PagePartials:
    """A page's log-sum-exp for its peak, and so a mass of 1."""
    mask = torch.zeros_like(valid, dtype=queries.dtype).masked_fill_(~valid, -torch.inf)[:, None, None]
    mask = mask.expand(-1, -1, queries.shape[1], -1)
    found = cpu_flash.flash_attention(queries[:, None], keys[:, None], values[:, None], scale, mask=mask)
    output, log_sums = (part[:, 0] for part in found)
    empty = ~valid.any(-1)[:, None]
    peak = log_sums.masked_fill(empty, -torch.inf)
    return PagePartials(peak, torch.ones_like(peak)[..., None], output.float().masked_fill_(empty[..., None], 0))


def join_partials(parts: Sequence[PagePartials]) -> PagePartials:
    """Partials of several products over pages, as if of one."""
    return PagePartials(
        torch.cat([part.peak for part in parts]),
        torch.cat([part.mass for part in parts]),
        torch.cat([part.output for part in parts]),
    )


@dataclass
class Merged:
    """``output`` [O, G, d_v] normalised, fp32; ``share`` [P, G]: what a page's unnormalised sums are multiplied by to
    become probabilities, so ``share[..., None] * mass`` is the attention each segment of a page received."""

    output: Tensor
    share: Tensor


def merge_pages(partials: PagePartials, owners: Tensor, order: Tensor, owner_count: int) -> Merged:
    """Join the pages of each owner.

    Args:
        owners: [P], the owner of each page; of a free page, any.
        order: the used pages, owner by owner, each owner's in a fixed order: the order in which sums are taken.
    """
    peak = torch.full((owner_count, partials.peak.shape[1]), -torch.inf, device=owners.device)
    peak.scatter_reduce_(0, owners[:, None].expand_as(partials.peak), partials.peak, "amax")
    rescale = (partials.peak - peak.clamp_min(torch.finfo(torch.float32).min)[owners]).exp_()
    ordered = owners[order]
    total = torch.zeros_like(peak).index_add_(0, ordered, (rescale * partials.mass.sum(-1))[order])
    output = torch.zeros((*peak.shape, partials.output.shape[-1]), device=owners.device)
    output.index_add_(0, ordered, (rescale[..., None] * partials.output)[order])
    return Merged(output / total[..., None], rescale / total[owners])
