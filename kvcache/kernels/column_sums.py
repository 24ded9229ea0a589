"""Attention that every key receives from all queries of a causal prefill: the scores of H2O and QEvict.

The dense matrix is never held: queries are taken in blocks, each with its full row of keys, in fp32.
"""

from __future__ import annotations

import torch
from torch import Tensor

QUERY_BLOCK = 128


def add_column_sums(sums: Tensor, queries: Tensor, keys: Tensor, start: int, scale: float) -> None:
    """Add the attention of queries at positions ``start ...`` to ``sums``, in place.

    Args:
        sums: [H_q, n] fp32, n at least ``start + c``.
        queries: [H_q, c, d], rotated.
        keys: [H_kv, start + c, d], rotated.
    """
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
