"""Column sums of causal attention from the log-sum-exp of its rows, in blocks (Triton): no n x n tensor, no atomics.

    row_log_sums    program (block of queries, query head)   walks the keys it sees
    column_sums     program (block of keys, query head)      walks the queries that see it, adds exp(score - log-sum)

Where attention itself has saved its log-sum-exp the first is not needed. All logarithms are to base 2.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["count", "start"])
def row_log_sums(
    queries,  # [H_q, c, D]
    keys,  # [H_kv, n, D]
    log_sums,  # [H_q, c] fp32
    count,  # c
    key_stride,  # elements between two KV heads
    start,  # position of the first query
    scale,  # times log2(e)
    G: tl.constexpr,
    D: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    head = tl.program_id(1)
    row, channel = tl.program_id(0) * QUERIES + tl.arange(0, QUERIES), tl.arange(0, D)
    at = head.to(tl.int64) * count * D + row[:, None] * D + channel[None, :]
    query = tl.load(queries + at, mask=(row < count)[:, None], other=0).to(COMPUTE)
    own = keys + (head // G).to(tl.int64) * key_stride
    peak = tl.full([QUERIES], -1e30, tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    visible = start + tl.minimum(count, tl.program_id(0) * QUERIES + QUERIES)
    for first in range(0, visible, KEYS):
        column = first + tl.arange(0, KEYS)
        key = tl.load(own + (column[None, :] * D + channel[:, None]), mask=(column < visible)[None, :], other=0)
        score = tl.dot(query, key.to(COMPUTE), input_precision="ieee") * scale
        score = tl.where(column[None, :] <= start + row[:, None], score, -float("inf"))
        now = tl.maximum(peak, tl.max(score, 1))
        total = total * tl.exp2(peak - now) + tl.sum(tl.exp2(score - now[:, None]), 1)
        peak = now
    tl.store(log_sums + head.to(tl.int64) * count + row, peak + tl.log2(total), mask=row < count)


@triton.jit(do_not_specialize=["count", "sum_stride", "start"])
def column_sums(
    queries,
    keys,
    log_sums,
    sums,  # [H_q, n or more] fp32
    count,
    key_stride,
    sum_stride,
    start,
    scale,
    G: tl.constexpr,
    D: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    head = tl.program_id(1)
    low = tl.program_id(0) * KEYS
    column, channel = low + tl.arange(0, KEYS), tl.arange(0, D)
    own = keys + (head // G).to(tl.int64) * key_stride
    key = tl.load(own + (column[:, None] * D + channel[None, :]), mask=(column < start + count)[:, None], other=0)
    key = key.to(COMPUTE)
    received = tl.zeros([KEYS, QUERIES], tl.float32)
    # Queries before the block's first key see none of it; from its last key on they see all of it.
    first = tl.maximum(low - start, 0) // QUERIES * QUERIES
    whole = tl.minimum(
        tl.cdiv(tl.maximum(low + KEYS - 1 - start, 0), QUERIES) * QUERIES, tl.cdiv(count, QUERIES) * QUERIES
    )
    for begin in range(first, whole, QUERIES):
        weight = _weights(queries, log_sums, key, head, begin, count, scale, D, QUERIES, COMPUTE)
        row = begin + tl.arange(0, QUERIES)
        received += tl.where(column[:, None] <= start + row[None, :], weight, 0.0)
    for begin in range(whole, count, QUERIES):
        received += _weights(queries, log_sums, key, head, begin, count, scale, D, QUERIES, COMPUTE)
    at = sums + head.to(tl.int64) * sum_stride + column
    mask = column < start + count
    tl.store(at, tl.load(at, mask=mask, other=0) + tl.sum(received, 1), mask=mask)


@triton.jit
def _weights(
    queries, log_sums, key, head, begin, count, scale, D: tl.constexpr, QUERIES: tl.constexpr, COMPUTE: tl.constexpr
):
    """Attention of a block of queries to a block of keys, [keys, queries]; nothing from rows past the last."""
    row, channel = begin + tl.arange(0, QUERIES), tl.arange(0, D)
    mask = row < count
    at = head.to(tl.int64) * count * D + row[None, :] * D + channel[:, None]
    query = tl.load(queries + at, mask=mask[None, :], other=0).to(COMPUTE)
    log_sum = tl.load(log_sums + head.to(tl.int64) * count + row, mask=mask, other=float("inf"))
    return tl.exp2(tl.dot(key, query, input_precision="ieee") * scale - log_sum[None, :])
