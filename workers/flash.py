"""FlashAttention-2 (Dao, arXiv 2307.08691) for prefill: on an Ampere GPU or newer, in 16 bits, where ``flash_attn`` is.

It is called by its own function: transformers' wrapper keeps the log-sum-exp to itself, and column sums need that.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

WIDEST_HEAD = 256
AMPERE = (8, 0)


@cache
def flash_attn_func() -> Callable[..., Any] | None:
    """The function, or None where it cannot be imported."""
    try:
        from flash_attn import flash_attn_func as function
    except ImportError:  # not installed, or built for another torch
        return None
    found: Callable[..., Any] = function
    return found


def serves(queries: Tensor, values: Tensor) -> bool:
    """Whether these may be attended to by it. [..., d] and [..., d_v]"""
    dim = queries.shape[-1]
    fits = queries.is_cuda and queries.dtype in (torch.float16, torch.bfloat16) and dim == values.shape[-1]
    fits = fits and dim <= WIDEST_HEAD and torch.cuda.get_device_capability(queries.device) >= AMPERE
    return fits and flash_attn_func() is not None


def flash_attention(
    queries: Tensor, keys: Tensor, values: Tensor, scale: float, window: int | None
) -> tuple[Tensor, Tensor]:
    """Attention of the last t of n tokens over all n, and no further back than ``window``; log-sum-exp of the scores.

    queries [B, H_q, t, d], keys, values [B, H_kv, n, d] -> [B, H_q, t, d], [B, H_q, t] fp32
    """
    function = flash_attn_func()
    assert function is not None
    # The last query sees the last key: where there are fewer queries than keys, so does ``causal``.
    output, log_sums, _ = function(
        *(part.transpose(1, 2) for part in (queries, keys, values)),
        softmax_scale=scale,
        causal=True,
        window_size=(-1, -1) if window is None else (window - 1, 0),
        return_attn_probs=True,
    )
    return output.transpose(1, 2), log_sums


def prefill_attention() -> str:
    """What attends in a prefill of a model in 16 bits, in words."""
    if not torch.cuda.is_available():
        return "torch SDPA (FlashAttention-2 needs a CUDA device)"
    if torch.cuda.get_device_capability() < AMPERE:
        return "torch SDPA (FlashAttention-2 needs an Ampere GPU or newer)"
    return "FlashAttention-2" if flash_attn_func() else "torch SDPA (flash_attn cannot be imported)"
