"""Codebooks of one number: the points that quantised values may have (KVQuant, arXiv 2401.18079, §3.3).

    minimise  sum_i w_i (x_i - c(x_i))^2      c(x): the nearest of K points

In one dimension clusters are intervals, so the best K points are found exactly: the loss of every interval from prefix
sums, then the best way to cut a prefix into m intervals from the best ways to cut shorter ones into m - 1.
"""

from __future__ import annotations

import torch
from torch import Tensor

BINS = 2048
"""Of a histogram of [-1, 1]: what lies in one bin shares a cluster."""


class Histogram:
    """Weighted values within [-1, 1], of any number: each bin keeps the weight and the mean of what fell into it."""

    def __init__(self) -> None:
        self.weight = torch.zeros(BINS, dtype=torch.float64)
        self._sum = torch.zeros_like(self.weight)

    def add(self, values: Tensor, weights: Tensor | None = None) -> None:
        """values, weights [n]. Counted on the CPU: a GPU adds in any order."""
        values = values.cpu().double()
        weights = torch.ones_like(values) if weights is None else weights.cpu().double()
        bins = ((values + 1) / 2 * BINS).long().clamp(0, BINS - 1)
        self.weight += torch.bincount(bins, weights, BINS)
        self._sum += torch.bincount(bins, weights * values, BINS)

    def codebook(self, size: int) -> Tensor:
        """The best points for all that was added. [size] fp32"""
        used = self.weight > 0
        return best_codebook(self._sum[used] / self.weight[used], self.weight[used], size)


def uniform_codebook(size: int) -> Tensor:
    """Equal steps from -1 to 1: what integer codes with a scale and an offset mean. [size] fp32"""
    return torch.linspace(-1, 1, size)


def best_codebook(points: Tensor, weights: Tensor, size: int) -> Tensor:
    """The codebook of least loss; points and weights [n], n up to a few thousand, points ascending. [size] fp32

    Fewer distinct points than codes: the last code is repeated. None at all: equal steps.
    """
    if not len(points):
        return uniform_codebook(size)
    mass, first, second = (
        torch.nn.functional.pad((weights * points**power).double().cumsum(0), (1, 0)) for power in range(3)
    )
    inside = (mass - mass[:, None]).clamp_min(torch.finfo(torch.float64).tiny)
    loss = (second - second[:, None]) - (first - first[:, None]).square() / inside
    empty = torch.ones_like(loss, dtype=torch.bool).tril()
    loss = loss.clamp_min(0).masked_fill(empty, torch.inf)  # [a, b]: of the points a to b - 1
    best, cuts = loss[0], []
    for _ in range(min(size, len(points)) - 1):
        best, cut = (best[:, None] + loss).min(0)
        cuts.append(cut)
    ends = [len(points)]
    for cut in reversed(cuts):
        ends.append(int(cut[ends[-1]]))
    edges = torch.tensor([0, *reversed(ends)])
    centres = (first[edges[1:]] - first[edges[:-1]]) / (mass[edges[1:]] - mass[edges[:-1]])
    return torch.cat([centres, centres[-1:].expand(size - len(centres))]).float()


def nearest(values: Tensor, codebook: Tensor) -> Tensor:
    """The code of the nearest point, the lower one half-way. [...] fp32 -> [...] uint8; codebook ascending"""
    return torch.bucketize(values, (codebook[1:] + codebook[:-1]) / 2).to(torch.uint8)
