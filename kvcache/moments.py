"""Mean and covariance of queries that come in chunks (Chan, Golub and LeVeque's update): one pass, nothing kept.

Two parts of a and b vectors whose means differ by δ join to

    mean + δ b / (a + b)        scatter_a + scatter_b + δ δᵀ a b / (a + b)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvcache.rotary import inverse, rotate_into


@dataclass
class QueryMoments:
    """``count`` queries so far; mean [H_q, d]; scatter [H_q, d, d], the sum of (q - mean)(q - mean)ᵀ. fp32."""

    count: int
    mean: Tensor
    scatter: Tensor

    @classmethod
    def empty(cls, heads: int, dim: int, device: torch.device) -> QueryMoments:
        return cls(0, torch.zeros(heads, dim, device=device), torch.zeros(heads, dim, dim, device=device))

    def add(self, queries: Tensor) -> None:
        """queries [H_q, c, d]; c may be 0."""
        if queries.shape[1]:
            self._join(queries.shape[1], *_of_chunk(queries.clone()))

    def add_rotated(self, queries: Tensor, cos: Tensor, sin: Tensor) -> None:
        """Of queries [H_q, c, d] as attention sees them, rotated by tables [c, d]; c may be 0.

        On a CPU head by head: a head's queries stay in the cache for all that is done to them.
        """
        if not queries.shape[1]:
            return
        undone = inverse(cos, sin)
        heads_at_once = 1 if queries.device.type == "cpu" else len(queries)
        parts = []
        for own in queries.split(heads_at_once):
            unrotated = torch.empty(own.shape, device=own.device)
            rotate_into(unrotated, own.float(), *undone)
            parts.append(_of_chunk(unrotated))
        self._join(queries.shape[1], *(torch.cat(part) for part in zip(*parts, strict=True)))

    def _join(self, added: int, mean: Tensor, scatter: Tensor) -> None:
        total = self.count + added
        apart = mean - self.mean
        self.scatter += scatter + apart[:, :, None] * apart[:, None, :] * (self.count * added / total)
        self.mean += apart * (added / total)
        self.count = total

    @property
    def covariance(self) -> Tensor:
        """Of the ``count`` queries, not an estimate beyond them: divided by their number. [H_q, d, d]"""
        return self.scatter / max(self.count, 1)


def _of_chunk(queries: Tensor) -> tuple[Tensor, Tensor]:
    """Mean [H, d] and scatter [H, d, d] of queries [H, c, d], which are overwritten."""
    mean = queries.mean(1)
    queries -= mean[:, None]
    return mean, queries.transpose(1, 2) @ queries


@dataclass
class HiddenMoments:
    """``count`` hidden states so far; mean [hidden]; scatter [hidden], the sum of (h - mean)² by channel. fp32."""

    count: int
    mean: Tensor
    scatter: Tensor

    @classmethod
    def empty(cls, channels: int, device: torch.device) -> HiddenMoments:
        return cls(0, torch.zeros(channels, device=device), torch.zeros(channels, device=device))

    def add(self, hidden: Tensor) -> None:
        """hidden [c, hidden], c at least 1"""
        added, total = len(hidden), self.count + len(hidden)
        mean = hidden.float().mean(0)
        apart = mean - self.mean
        self.scatter += (hidden.float() - mean).square().sum(0) + apart.square() * (self.count * added / total)
        self.mean += apart * (added / total)
        self.count = total

    @property
    def variance(self) -> Tensor:
        """Of the ``count`` states themselves. [hidden]"""
        return self.scatter / max(self.count, 1)
