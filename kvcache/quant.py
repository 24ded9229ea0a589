"""Asymmetric min/max quantisation of groups, and bit packing.

    scale = (max - min) / (2^bits - 1)     code = round((x - min) / scale)     x ~ code * scale + min

Scale and offset are rounded to fp16 *before* the codes are computed, so that encoding and decoding see the same
numbers. A constant group has scale 1 and codes 0: it is exact up to the rounding of its offset.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import embedding


@dataclass
class Quantized:
    """``codes`` uint8, packed along the last dimension; ``scale`` and ``offset`` fp16, one per group."""

    codes: Tensor
    scale: Tensor
    offset: Tensor


def quantize(x: Tensor, bits: int) -> Quantized:
    """Quantise along the last dimension: every [..., n] slice is one group. Arithmetic in fp32, halves to even.

    Returns codes [..., n * bits / 8], scale and offset [...].
    """
    x = x.float()
    low, high = x.amin(-1), x.amax(-1)  # faster on a CPU than both at once
    offset = low.half()
    scale = ((high - low) / (2**bits - 1)).half()
    scale = torch.where(scale == 0, 1.0, scale)
    codes = ((x - offset.float()[..., None]) / scale.float()[..., None]).round_().clamp_(0, 2**bits - 1)
    return Quantized(pack(codes.to(torch.uint8), bits), scale, offset)


def dequantize(quantized: Quantized, bits: int) -> Tensor:
    """[..., n] fp32"""
    codes = unpack(quantized.codes, bits)
    return torch.addcmul(quantized.offset.float()[..., None], codes, quantized.scale.float()[..., None])


def pack(codes: Tensor, bits: int) -> Tensor:
    """Several codes per byte, the first in the lowest bits. [..., n] uint8 -> [..., n * bits / 8]"""
    per_byte = 8 // bits
    parts = codes.unflatten(-1, (-1, per_byte))
    shifts = torch.arange(per_byte, dtype=torch.uint8, device=codes.device) * bits
    return (parts << shifts).sum(-1, dtype=torch.uint8)


def unpack(packed: Tensor, bits: int) -> Tensor:
    """[..., n * bits / 8] uint8 -> [..., n] fp32, through a table: one lookup gives all codes of a byte."""
    return embedding(packed.int(), _table(bits, packed.device)).flatten(-2)


def unpack_planes(packed: Tensor, bits: int) -> Tensor:
    """[...] uint8 -> [8 / bits, ...] fp32: the first plane has the first code of every byte."""
    planes = torch.stack([(packed >> shift) & (2**bits - 1) for shift in range(0, 8, bits)])
    return planes.float()


_TABLES: dict[tuple[int, torch.device], Tensor] = {}


def _table(bits: int, device: torch.device) -> Tensor:
    """[256, 8 / bits] fp32: the codes in every possible byte."""
    if (bits, device) not in _TABLES:
        shifts = torch.arange(8 // bits) * bits
        _TABLES[bits, device] = ((torch.arange(256)[:, None] >> shifts) % 2**bits).float().to(device)
    return _TABLES[bits, device]
