"""Attention that every key receives from all queries of a causal prefill: the scores of H2O and QEvict.

The dense matrix is never held: queries are taken in blocks, each with its full row of keys, in fp32. On a GPU the
kernels of :mod:`kvcache.kernels.triton_column_sums` do the same in blocks of keys too. On a CPU torch's fused attention
serves bf16 with the roles swapped: a key attends to the queries that see it, each less its own log-sum-exp, and the
log-sum-exp of that is the logarithm of what the key receives.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kvcache.kernels import cpu_flash, dispatch

QUERY_BLOCK = 128
WARPS, STAGES = 4, 2
FUSED_QUERIES, FUSED_KEYS = 64, 128
BIAS_DIMENSIONS = 8
"""Added to a head for a bias that goes in as a product: three bf16 numbers hold an fp32 one, and eight keep rows of
numbers aligned. As a mask, the operator would take six times longer over it."""


def add_column_sums(
    sums: Tensor, queries: Tensor, keys: Tensor, start: int, scale: float, log_sums: Tensor | None = None
) -> None:
    """Add the attention of queries at positions ``start ...`` to ``sums``, in place.

    Args:
        sums: [H_q, n] fp32, n at least ``start + c``.
        queries: [H_q, c, d], rotated.
        keys: [H_kv, start + c, d], rotated.
        log_sums: [H_q, c] fp32, the natural log-sum-exp of the scaled scores of each query, where attention saved it:
            spares one of two products.
    """
    if dispatch.use_triton(queries.device) and queries.shape[-1] & (queries.shape[-1] - 1) == 0:
        _add_fused(sums, queries, keys, start, scale, log_sums)
    elif log_sums is not None and queries.device.type == "cpu" and queries.dtype == torch.bfloat16:
        _add_swapped(sums, queries, keys, start, scale, log_sums)
    else:
        _add_plain(sums, queries, keys, start, scale)


def _add_plain(sums: Tensor, queries: Tensor, keys: Tensor, start: int, scale: float) -> None:
    group, count = len(queries) // len(keys), queries.shape[1]
    future = torch.ones(QUERY_BLOCK, QUERY_BLOCK, dtype=torch.bool, device=keys.device).triu(1)
    for head, by_column in enumerate(keys.float().transpose(1, 2).contiguous()):
        heads = slice(head * group, (head + 1) * group)
        for first in range(0, count, QUERY_BLOCK):
            block = queries[heads, first : first + QUERY_BLOCK].float() * scale
            rows, visible = block.shape[1], start + first + block.shape[1]
            scores = (block.flatten(0, 1) @ by_column[:, :visible]).unflatten(0, (group, rows))
            scores[..., visible - rows :].masked_fill_(future[:rows, :rows], -torch.inf)
            sums[heads, :visible] += torch.softmax(scores, -1).sum(1)


def _add_swapped(sums: Tensor, queries: Tensor, keys: Tensor, start: int, scale: float, log_sums: Tensor) -> None:
    group, count = len(queries) // len(keys), queries.shape[1]
    asked = _widened(queries, _in_three(-log_sums / scale)).unflatten(0, (-1, group))
    asking = _widened(keys, keys.new_ones(*keys.shape[:2], 3))[:, None]
    # Those of the chunk are seen by later ones only: in reverse order, by earlier ones.
    reverse, own = asked.flip(2), asking[:, :, start:].flip(2).expand(-1, group, -1, -1)
    received = cpu_flash.flash_attention(own, reverse, reverse, scale, causal=True)[1]
    sums[:, start : start + count] += received.exp_().flip(2).flatten(0, 1)
    if start:
        earlier = asking[:, :, :start].expand(-1, group, -1, -1)
        received = cpu_flash.flash_attention(earlier, asked, asked, scale)[1]
        sums[:, :start] += received.exp_().flatten(0, 1)


def _widened(x: Tensor, more: Tensor) -> Tensor:
    """[..., d] and [..., 3] -> [..., d + BIAS_DIMENSIONS]"""
    return torch.cat([x, more, x.new_zeros(*x.shape[:-1], BIAS_DIMENSIONS - 3)], -1)


def _in_three(x: Tensor) -> Tensor:
    """Three bf16 numbers that add up to an fp32 one. [...] -> [..., 3]"""
    parts = []
    for _ in range(3):
        parts.append(x.bfloat16())
        x = x - parts[-1]
    return torch.stack(parts, -1)


def _add_fused(sums: Tensor, queries: Tensor, keys: Tensor, start: int, scale: float, log_sums: Tensor | None) -> None:
    from kvcache.kernels import triton_column_sums as kernels

    heads, count, dim = queries.shape
    queries, keys = queries.contiguous(), keys if keys.stride()[1:] == (dim, 1) else keys.contiguous()
    base_2 = scale * math.log2(math.e)
    constants = {
        "G": heads // len(keys),
        "D": dim,
        "QUERIES": FUSED_QUERIES,
        "KEYS": FUSED_KEYS,
        "COMPUTE": dispatch.triton_dtype(queries.dtype),
        "num_warps": WARPS,
        "num_stages": STAGES,
    }
    if log_sums is None:
        log_sums = torch.empty(heads, count, device=queries.device)
        kernels.row_log_sums[-(-count // FUSED_QUERIES), heads](
            queries, keys, log_sums, count, keys.stride(0), start, base_2, **constants
        )
    else:
        log_sums = (log_sums * math.log2(math.e)).contiguous()
    kernels.column_sums[-(-(start + count) // FUSED_KEYS), heads](
        queries, keys, log_sums, sums, count, keys.stride(0), sums.stride(0), start, base_2, **constants
    )
