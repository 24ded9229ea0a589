"""Softmax attention in torch, where no kernel of FlashAttention's serves: causal, and over parts that are joined.

A part of the keys is attended to by itself, and its log-sum-exp says what it weighs beside the others.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kvcache.kernels import cpu_flash


def causal_attention(
    queries: Tensor, keys: Tensor, values: Tensor, scale: float, window: int | None
) -> tuple[Tensor, Tensor | None]:
    """Attention of the last t of n tokens over all n, and no further back than ``window``; and the natural log-sum-exp
    of each query's scaled scores, where it is known. [B, H_q, t, d] -> [B, H_q, t, d_v], [B, H_q, t] fp32"""
    new, visible = queries.shape[2], keys.shape[2]
    group = queries.shape[1] // keys.shape[1]
    if window is None and cpu_flash.serves(queries, values):
        return _causal_in_parts(queries, keys, values, scale)
    keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
    if new == visible and (window is None or visible <= window):
        return scaled_dot_product_attention(queries, keys, values, is_causal=True, scale=scale), None
    position = torch.arange(visible, device=queries.device)
    query = position[visible - new :, None]
    mask = position <= query
    if window is not None:
        mask &= position > query - window
    return scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=scale), None


def _causal_in_parts(queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """All earlier tokens without a mask, query heads of a group as one head's queries; then the new tokens."""
    new, kv_heads = queries.shape[2], keys.shape[1]
    earlier, group = keys.shape[2] - new, queries.shape[1] // kv_heads
    own_keys, own_values = (part[:, :, earlier:].repeat_interleave(group, 1) for part in (keys, values))
    own, own_sums = cpu_flash.flash_attention(queries, own_keys, own_values, scale, causal=True)
    if not earlier:
        return own, own_sums
    grouped = queries.unflatten(1, (kv_heads, -1)).flatten(2, 3)  # [B, H_kv, G * t, d]
    of_earlier = attend_everything(grouped, keys[:, :, :earlier], values[:, :, :earlier], scale)
    before, before_sums = (part.unflatten(2, (-1, new)).flatten(1, 2) for part in of_earlier)
    joined = torch.lerp(own.float(), before.float(), torch.sigmoid(before_sums - own_sums)[..., None])
    return joined.to(queries.dtype), torch.logaddexp(before_sums, own_sums)


def attend_everything(queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Attention without a mask, and the natural log-sum-exp of each query's scaled scores, in fp32.

    queries [B, H, q, d], keys [B, H, n, d], values [B, H, n, d_v] -> [B, H, q, d_v], [B, H, q]
    """
    if keys.shape[2] and cpu_flash.serves(keys, values):
        return cpu_flash.flash_attention(queries, keys, values, scale)
    scores = (queries.float() @ keys.float().transpose(2, 3)) * scale
    return torch.softmax(scores, -1).to(values.dtype) @ values, scores.logsumexp(-1)
