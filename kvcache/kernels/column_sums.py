"""Attention that every key receives from all queries of a causal prefill: the scores of H2O and QEvict.

The dense matrix is never held: queries are taken in blocks, each with its full row of keys, in fp32. On a GPU the
kernels of :mod:`kvcache.kernels.triton_column_sums` do the same in blocks of keys too.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kvcache.kernels import dispatch

QUERY_BLOCK = 128
WARPS, STAGES = 4, 2
FUSED_QUERIES, FUSED_KEYS = 64, 128


def add_column_sums(
    sums: Tensor, queries: Tensor, keys: Tensor, start: int, scale: float, log_sums: Tensor | None = None
) -> None:
    """Add the attention of queries at positions ``start ...`` to ``sums``, in place.

    Args:
        sums: [H_q, n] fp32, n at least ``start + c``.
        queries: [H_q, c, d], rotated.
        keys: [H_kv, start + c, d], rotated.
        log_sums: [H_q, c] fp32, the natural log-sum-exp of the scaled scores of each query, where attention saved it:
            spares the kernels one of two products.
    """
    if dispatch.use_triton(queries.device) and queries.shape[-1] & (queries.shape[-1] - 1) == 0:
        _add_fused(sums, queries, keys, start, scale, log_sums)
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


def _add_fused(sums: Tensor, queries: Tensor, keys: Tensor, start: int, scale: float, log_sums: Tensor | None) -> None:
    import triton.language as tl

    from kvcache.kernels import triton_column_sums as kernels

    heads, count, dim = queries.shape
    queries, keys = queries.contiguous(), keys if keys.stride()[1:] == (dim, 1) else keys.contiguous()
    base_2 = scale * math.log2(math.e)
    dtypes = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
    constants = {
        "G": heads // len(keys),
        "D": dim,
        "QUERIES": FUSED_QUERIES,
        "KEYS": FUSED_KEYS,
        "COMPUTE": dtypes[queries.dtype],
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
