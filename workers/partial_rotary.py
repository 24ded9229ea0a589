"""Partly rotated heads, kept in the order that wholly rotated ones have.

A model that rotates the first r of d dimensions pairs dimension i with i + r/2. Dimensions of queries and keys are
reordered alike before anything is kept, which changes no score, so that pairs are i and i + d/2 in all models:

    rotated first half | half of the rest || rotated second half | other half of the rest

The rest turns by no angle: cosine 1, sine 0. Whoever un-rotates keys needs to know no more.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad


def half_split_order(dim: int, rotated: int) -> Tensor:
    """Where each dimension of the new order was. [d]"""
    first, second = torch.arange(rotated).chunk(2)
    rest = torch.arange(rotated, dim).chunk(2)
    return torch.cat([first, rest[0], second, rest[1]]) if rotated < dim else torch.arange(dim)


def widened(table: Tensor, dim: int, value: float) -> Tensor:
    """A table of cosines or sines in the new order, the rest filled with ``value``. [n, r] -> [n, d]"""
    half = table[..., : table.shape[-1] // 2]
    return pad(half, (0, dim // 2 - half.shape[-1]), value=value).repeat(1, 2)
