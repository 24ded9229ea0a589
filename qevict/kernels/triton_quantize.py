"""Quantise windows into ledger slots: one program per window and KV head (Triton).

Keys are un-rotated first. The arithmetic is that of :mod:`kvcache.quant` step by step, each rounded to fp32: division
is exact, and nothing is contracted into a fused multiply-add (the launcher says so), hence the same codes bit for bit.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

ROUND = tl.constexpr(12582912.0)
"""1.5 * 2^23: adding and subtracting it rounds small numbers to integers, halves to even."""


@triton.jit(do_not_specialize=["table_windows", "layer_pages"])
def quantize_windows(
    keys,  # [K, H, Ω, D]
    values,  # [K, H, Ω, DV]
    rotary,  # [2, W, D / 2, Ω] fp32: cos and sin
    windows,  # [K] int32
    layers,  # [K] int32: where each window goes
    pages,
    places,
    key_codes,  # [L, P, H, s, D, Ω * bits / 8] uint8
    key_scale,  # [L, P, H, s, D] fp16
    key_offset,
    value_codes,  # [L, P, H, s, Ω, DV * bits / 8] uint8
    value_scale,  # [L, P, H, s, Ω] fp16
    value_offset,
    table_windows,  # W
    layer_pages,  # pages between two layers of the ledger
    H: tl.constexpr,
    SLOTS: tl.constexpr,
    OMEGA: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    BITS: tl.constexpr,
):
    HALF: tl.constexpr = D // 2
    index, head = tl.program_id(0), tl.program_id(1)
    page = tl.load(layers + index).to(tl.int64) * layer_pages + tl.load(pages + index)
    slot = (page * H + head) * SLOTS + tl.load(places + index)
    source = (index * H + head).to(tl.int64) * OMEGA

    channel, omega = tl.arange(0, HALF)[:, None], tl.arange(0, OMEGA)[None, :]
    at = source * D + (omega * D + channel)
    first, second = tl.load(keys + at).to(tl.float32), tl.load(keys + HALF + at).to(tl.float32)
    angle = tl.load(windows + index).to(tl.int64) * (HALF * OMEGA) + (channel * OMEGA + omega)
    cos = tl.load(rotary + angle)
    sin = tl.load(rotary + table_windows.to(tl.int64) * (HALF * OMEGA) + angle)
    length = cos * cos + sin * sin
    target = slot * D + tl.arange(0, HALF)
    _store_groups(
        tl.div_rn(first * cos + second * sin, length), key_codes, key_scale, key_offset, target, HALF, OMEGA, BITS
    )
    _store_groups(
        tl.div_rn(second * cos - first * sin, length),
        key_codes,
        key_scale,
        key_offset,
        target + HALF,
        HALF,
        OMEGA,
        BITS,
    )

    token, value_channel = tl.arange(0, OMEGA)[:, None], tl.arange(0, DV)[None, :]
    value = tl.load(values + source * DV + (token * DV + value_channel)).to(tl.float32)
    _store_groups(value, value_codes, value_scale, value_offset, slot * OMEGA + tl.arange(0, OMEGA), OMEGA, DV, BITS)


@triton.jit
def _store_groups(x, codes, scales, offsets, groups, COUNT: tl.constexpr, LENGTH: tl.constexpr, BITS: tl.constexpr):
    """Quantise the rows of x [count, length] and store them as the groups of these numbers [count]."""
    PER_BYTE: tl.constexpr = 8 // BITS
    BYTES: tl.constexpr = LENGTH // PER_BYTE
    LEVELS: tl.constexpr = 2**BITS - 1
    low, high = tl.min(x, 1), tl.max(x, 1)
    offset = low.to(tl.float16)
    scale = tl.div_rn(high - low, tl.full([COUNT], LEVELS, tl.float32)).to(tl.float16)
    scale = tl.where(scale == 0, 1.0, scale).to(tl.float16)
    tl.store(scales + groups, scale)
    tl.store(offsets + groups, offset)
    steps = tl.div_rn(
        x - offset.to(tl.float32)[:, None], tl.broadcast_to(scale.to(tl.float32)[:, None], [COUNT, LENGTH])
    )
    rounded = tl.minimum(tl.maximum((steps + ROUND) - ROUND, 0.0), LEVELS).to(tl.uint32)
    shift = (tl.arange(0, PER_BYTE) * BITS).to(tl.uint32)
    packed = tl.sum(tl.reshape(rounded, [COUNT, BYTES, PER_BYTE]) << shift[None, None, :], 2)
    at = groups[:, None] * BYTES + tl.arange(0, BYTES)[None, :]
    tl.store(codes + at, packed.to(tl.uint8))
