"""Decode attention of (row, KV head) owners over their pages on a GPU: two launches whatever the batch.

How many pages a split has depends on the pool alone, so a row's output does not depend on the rows beside it. Nothing
here waits for the device: how long owners are is known on the host.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kvcache.kernels import dispatch

HEAD_SIZES = (32, 64, 128)
WARPS, STAGES = 4, 3
SPLIT = 8
"""Pages of a split where a pool has rows enough to fill a GPU: 512 tokens."""


def fuses(key_dim: int, value_dim: int, device: torch.device) -> bool:
    """Whether the kernels serve heads of these sizes here; where not, the plain path does."""
    return dispatch.use_triton(device) and {key_dim, value_dim} <= set(HEAD_SIZES)


def pages_per_split(rows: int) -> int:
    """Small pools are split finer, or most of the device would wait."""
    return max(1, SPLIT * min(rows, 8) // 8)


def attend_owned(
    queries: Tensor,
    owners: Tensor,
    tables: Tensor,
    lengths: Tensor,
    keys: Tensor,
    values: Tensor,
    scale: float,
    longest: int,
    split: int,
) -> Tensor:
    """Attention of one new token per row.

    Args:
        queries: [o, G, d], a group of each owner.
        owners: [o] int32, which of the tables' rows they are.
        tables: [owners, width] int32, the pages of each owner in the order of its tokens.
        lengths: [owners] int32, its tokens; of ``owners`` at least 1.
        keys, values: [P, 64, d], [P, 64, d_v].
        longest: pages of the longest owner.
        split: pages that one program walks.

    Returns:
        [o, G, d_v] in the dtype of the queries.
    """
    from kvcache.kernels import triton_owned_pages as kernels

    (count, group, dim), value_dim, splits = queries.shape, values.shape[-1], -(-longest // split)
    partial = queries.new_empty(count, splits, group, value_dim, dtype=torch.float32)
    stats = queries.new_empty(count, splits, 2, group, dtype=torch.float32)
    output = queries.new_empty(count, group, value_dim)
    kernels.attend_owned[count, splits](
        queries.contiguous(), owners, tables, lengths, keys, values, partial, stats,
        scale * math.log2(math.e), tables.shape[1], splits,
        G=group, HEADS=padded(group), D=dim, DV=value_dim, PAGES=split, COMPUTE=dispatch.triton_dtype(keys.dtype),
        num_warps=WARPS, num_stages=STAGES,
    )  # fmt: skip
    kernels.join_splits[(count * group,)](
        partial, stats, owners, lengths, output, splits, G=group, DV=value_dim, PAGES=split, num_warps=1
    )
    return output


def padded(group: int) -> int:
    """Query heads of a group as the columns of a tensor-core product, at least 8."""
    return max(8, 1 << (group - 1).bit_length())
