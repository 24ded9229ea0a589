"""Rotary position embedding, applied and undone with the model's own tables.

The tables of scaled variants (YaRN) carry a factor s: cos² + sin² = s². A rotation multiplies lengths by s, so undoing
it divides by s².
"""

from __future__ import annotations

import torch
from torch import Tensor


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate half-split pairs. x [..., d], cos and sin broadcastable to it."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], -1) * sin


def rotate_into(output: Tensor, x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """The same, to rounding, in half as many passes over memory. ``output`` [..., d] does not overlap ``x``."""
    first, second = x.chunk(2, dim=-1)
    halves = (table.chunk(2, dim=-1) for table in (output, cos, sin))
    (to_first, to_second), (cos_first, cos_second), (sin_first, sin_second) = halves
    torch.mul(first, cos_first, out=to_first).addcmul_(second, sin_first, value=-1)
    torch.mul(second, cos_second, out=to_second).addcmul_(first, sin_second)


def unrotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The inverse of :func:`rotate` in fp32."""
    cos, sin = cos.float(), sin.float()
    return rotate(x.float(), cos, -sin) / (cos.square() + sin.square())


def inverse(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Tables in fp32 by which :func:`rotate` undoes what these did, to rounding what :func:`unrotate` gives."""
    cos, sin = cos.float(), sin.float()
    squared = cos.square() + sin.square()
    return cos / squared, -sin / squared
