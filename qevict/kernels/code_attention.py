"""Attention over low-bit windows without reconstructing their values; and their reconstruction, for those who keep it.

    k_t = R_t (s_k ∘ c_t + o_k)      keys per channel, rotated to their true positions
    v_t = s_v,t c_t + o_v,t          values per token, so   Σ p_t v_t = Σ (p_t s_v,t) c_t + Σ p_t o_v,t

In place, values stay codes, their scales go into the probabilities. Keys are dequantised and rotated in fp32, never
rounded to a model's bf16, for the pages at hand, and forgotten.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvcache.kernels.paged_attention import PagePartials
from kvcache.quant import Quantized, dequantize, unpack


@dataclass
class CodePages:
    """Pages of s window slots of Ω tokens. Codes uint8, scales and offsets fp16.

    key_codes [P, H_kv, s, d, Ω * bits / 8], key_scale and key_offset [P, H_kv, s, d];
    value_codes [P, H_kv, s, Ω, d_v * bits / 8], value_scale and value_offset [P, H_kv, s, Ω].
    """

    key_codes: Tensor
    key_scale: Tensor
    key_offset: Tensor
    value_codes: Tensor
    value_scale: Tensor
    value_offset: Tensor


def attend_code_pages(
    queries: Tensor, pages: CodePages, windows: Tensor, rotary: Tensor, bits: int, scale: float
) -> PagePartials:
    """Attention inside each page, one segment per window.

    Args:
        queries: [P, H_kv, G, d].
        windows: [P, s] the window in each slot, negative where the slot is free.
        rotary: [2, W, d / 2, Ω] fp32, the model's cos and sin at the positions of each window.
    """
    heads, slots = pages.key_codes.shape[1], windows.shape[1]
    keys = rotated_keys(pages, windows, rotary, bits).flatten(0, 1)
    scores = torch.bmm(queries.flatten(0, 1).float(), keys).mul_(scale)
    free = (windows < 0).repeat_interleave(rotary.shape[-1], 1).repeat_interleave(heads, 0)
    scores.masked_fill_(free[:, None], -torch.inf)
    peak = scores.amax(-1)
    weights = scores.sub_(peak.clamp_min(torch.finfo(torch.float32).min)[..., None]).exp_()
    codes = unpack(pages.value_codes, bits).flatten(0, 1).flatten(1, 2)
    by_token = (part.float().flatten(2).flatten(0, 1) for part in (pages.value_scale, pages.value_offset))
    value_scale, value_offset = by_token
    output = torch.bmm(weights * value_scale[:, None], codes)
    output += torch.bmm(weights, value_offset[..., None])
    return PagePartials(peak, weights.unflatten(-1, (slots, -1)).sum(-1), output)


def rotated_keys(pages: CodePages, windows: Tensor, rotary: Tensor, bits: int) -> Tensor:
    """[P, H_kv, d, T] fp32: dequantised, then rotated half-split at their positions."""
    parts = (pages.key_codes, pages.key_scale, pages.key_offset)
    codes, scale, offset = (part.transpose(2, 3).contiguous() for part in parts)  # [P, H_kv, d, s, ...]
    keys = torch.addcmul(offset.float()[..., None], unpack(codes, bits), scale.float()[..., None]).flatten(3)
    # Windows are gathered whole: a gather by token would cost as much as all the rest.
    tables = rotary.index_select(1, windows.clamp_min(0).flatten()).unflatten(1, windows.shape)
    cos, sin = tables.transpose(2, 3).flatten(3)[:, :, None]
    half = keys.shape[2] // 2
    first, second = keys[:, :, :half], keys[:, :, half:]
    rotated = torch.empty_like(keys)
    torch.mul(first, cos, out=rotated[:, :, :half]).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=rotated[:, :, half:]).addcmul_(first, sin)
    return rotated


def dequantized(pages: CodePages, windows: Tensor, rotary: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Keys and values of pages of one slot, keys rotated. [P, H_kv, Ω, d], [P, H_kv, Ω, d_v] fp32"""
    keys = rotated_keys(pages, windows, rotary, bits).transpose(2, 3)
    values = Quantized(pages.value_codes, pages.value_scale, pages.value_offset)
    return keys, dequantize(values, bits).squeeze(2)
