"""torch's fused attention for CPUs, with the log-sum-exp that its public function keeps to itself.

It reads keys and values in their own dtype and multiplies in fp32, so nothing is copied to fp32. Each batch entry and
head is attended to alone: its bits do not depend on what else is in the call.
"""

from __future__ import annotations

import torch
from torch import Tensor


def serves(keys: Tensor, values: Tensor) -> bool:
    """Whether these may be attended to by it. [..., d] and [..., d_v]"""
    return keys.device.type == "cpu" and keys.shape[-1] == values.shape[-1]


def flash_attention(
    queries: Tensor, keys: Tensor, values: Tensor, scale: float, causal: bool = False, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Attention, and the natural log-sum-exp of each query's scaled scores.

    Args:
        queries: [B, H, q, d].
        keys, values: [B, H, n, d], n at least 1.
        mask: [B, H, q, n], any of its sizes 1 instead, in the queries' dtype, added to scores.

    Returns:
        [B, H, q, d] in the queries' dtype; [B, H, q] fp32
    """
    # The operator takes for granted that a head's numbers lie one after another, and does not check.
    together = (part if part.stride(-1) == 1 else part.contiguous() for part in (queries, keys, values))
    found: tuple[Tensor, Tensor] = _operator(*together, is_causal=causal, attn_mask=mask, scale=scale)
    return found


_operator = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
