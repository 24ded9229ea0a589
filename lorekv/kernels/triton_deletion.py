"""Deletion costs in blocks of tokens (Triton): no tensor larger than [H_q, n], no atomics.

    attend_prompt    program (queries of a head, KV head, split)   log-sum-exp, output, most attended token of a split
    value_norms      program (block of tokens, query head)         vᵀGv
    deletion_costs   program (block of tokens, KV head)            walks the group's queries, adds what deletion costs

A product of the model's own numbers with fp32 ones takes the latter in two halves, the second holding what the first
rounds off, so that scores keep the precision of fp32. All logarithms are to base 2.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _product(exact, given, COMPUTE: tl.constexpr):
    """exact [M, K] in COMPUTE times given [K, N] fp32."""
    first = given.to(COMPUTE)
    product = tl.dot(exact, first, input_precision="ieee")
    if COMPUTE is tl.float32:
        return product
    return tl.dot(exact, (given - first.to(tl.float32)).to(COMPUTE), product)


@triton.jit
def _tile(start, row, column, stride, mask):
    return tl.load(start + (row[:, None] * stride + column[None, :]), mask=mask[:, None], other=0)


@triton.jit(do_not_specialize=["count", "tokens", "split_tokens"])
def attend_prompt(
    queries,  # [H_q, Q, D]
    keys,  # [H_kv, n, D]
    values,  # [H_kv, n, DV]
    visible,  # [Q] int32
    log_sums,  # [splits, H_q, Q] fp32
    output,  # [splits, H_q, Q, DV] fp32
    peaks,  # [splits, H_q, Q] fp32: the highest score
    most,  # [splits, H_q, Q] int32: whose it is
    count,  # Q
    tokens,  # n
    split_tokens,  # a multiple of KEYS
    key_stride,  # elements between two KV heads
    value_stride,
    scale,  # times log2(e)
    G: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    blocks = tl.cdiv(count, QUERIES)
    head = tl.program_id(1) * G + tl.program_id(0) // blocks
    row = tl.program_id(0) % blocks * QUERIES + tl.arange(0, QUERIES)
    channel, value_channel = tl.arange(0, D), tl.arange(0, DV)
    at = head.to(tl.int64) * count + row
    query = tl.load(queries + (at[None, :] * D + channel[:, None]), mask=(row < count)[None, :], other=0).to(COMPUTE)
    seen = tl.load(visible + row, mask=row < count, other=0)
    own_keys = keys + tl.program_id(1).to(tl.int64) * key_stride
    own_values = values + tl.program_id(1).to(tl.int64) * value_stride
    peak = tl.full([QUERIES], -1e30, tl.float32)
    highest = tl.zeros([QUERIES], tl.int32)
    total = tl.zeros([QUERIES], tl.float32)
    received = tl.zeros([DV, QUERIES], tl.float32)
    low = tl.program_id(2) * split_tokens
    for first in range(low, tl.minimum(low + split_tokens, tokens), KEYS):
        column = first + tl.arange(0, KEYS)
        key = _tile(own_keys, column, channel, D, column < tokens).to(COMPUTE)
        score = tl.dot(key, query, input_precision="ieee") * scale
        score = tl.where(column[:, None] < seen[None, :], score, -float("inf"))
        of_block, place = tl.max(score, 0, return_indices=True)
        highest = tl.where(of_block > peak, first + place, highest)
        now = tl.maximum(peak, of_block)
        weight = tl.exp2(score - now[None, :])
        rescale = tl.exp2(peak - now)
        total = total * rescale + tl.sum(weight, 0)
        value = _tile(own_values, column, value_channel, DV, column < tokens).to(COMPUTE)
        received = received * rescale[None, :] + _product(tl.trans(value), weight, COMPUTE)
        peak = now
    at += tl.program_id(2).to(tl.int64) * tl.num_programs(1) * G * count
    # A split of which a query sees nothing has no output, and minus infinity as its log-sum-exp.
    tl.store(log_sums + at, peak + tl.log2(total), mask=row < count)
    tl.store(peaks + at, peak, mask=row < count)
    tl.store(most + at, highest, mask=row < count)
    normal = received / tl.maximum(total, 1e-30)[None, :]
    tl.store(output + (at[None, :] * DV + value_channel[:, None]), normal, mask=(row < count)[None, :])


@triton.jit(do_not_specialize=["tokens"])
def value_norms(
    values,  # [H_kv, n, DV]
    grams,  # [H_q, DV, DV] fp32
    norms,  # [H_q, n] fp32
    tokens,  # n
    value_stride,
    G: tl.constexpr,
    DV: tl.constexpr,
    CHANNELS: tl.constexpr,
    KEYS: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    head = tl.program_id(1).to(tl.int64)
    column, channel = tl.program_id(0) * KEYS + tl.arange(0, KEYS), tl.arange(0, DV)
    own_values = values + head // G * value_stride
    value = _tile(own_values, column, channel, DV, column < tokens).to(COMPUTE)
    norm = tl.zeros([KEYS], tl.float32)
    for first in range(0, DV, CHANNELS):
        some = first + tl.arange(0, CHANNELS)
        gram = tl.load(grams + head * DV * DV + (channel[:, None] * DV + some[None, :]))
        moved = _product(value, gram, COMPUTE)
        norm += tl.sum(moved * _tile(own_values, column, some, DV, column < tokens).to(tl.float32), 1)
    tl.store(norms + head * tokens + column, norm, mask=column < tokens)


@triton.jit(do_not_specialize=["count", "window", "tokens"])
def deletion_costs(
    queries,  # [H_q, Q, D]
    keys,  # [H_kv, n, D]
    values,  # [H_kv, n, DV]
    visible,  # [Q] int32
    weights,  # [H_q, Q] fp32
    log_sums,  # [H_q, Q] fp32
    projected,  # [H_q, Q, DV] fp32: Go
    output_norms,  # [H_q, Q] fp32: oᵀGo
    most,  # [H_q, Q] int32: a query's most attended token
    most_distance,  # [H_q, Q] fp32: its squared norm, from o - v
    norms,  # [H_q, n] fp32: vᵀGv
    of_window,  # [H_kv, n] fp32
    of_futures,
    count,  # Q
    window,  # how many of them are the window's
    tokens,  # n
    key_stride,
    value_stride,
    scale,  # times log2(e)
    surviving,
    G: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    kv_head = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * KEYS + tl.arange(0, KEYS)
    inside, channel, value_channel = column < tokens, tl.arange(0, D), tl.arange(0, DV)
    key = _tile(keys + kv_head * key_stride, column, channel, D, inside).to(COMPUTE)
    value = _tile(values + kv_head * value_stride, column, value_channel, DV, inside).to(COMPUTE)
    window_cost = tl.zeros([KEYS], tl.float32)
    future_cost = tl.zeros([KEYS], tl.float32)
    blocks = tl.cdiv(count, QUERIES)
    for block in range(0, G * blocks):
        head = kv_head * G + block // blocks
        row = block % blocks * QUERIES + tl.arange(0, QUERIES)
        mask, at = row < count, head * count + row
        at_channel = at[None, :] * DV + value_channel[:, None]
        moved = tl.load(projected + at_channel, mask=mask[None, :], other=0)
        distance = tl.load(norms + head * tokens + column, mask=inside, other=0)[:, None]
        distance += tl.load(output_norms + at, mask=mask, other=0)[None, :]
        distance -= 2 * _product(value, moved, COMPUTE)
        nearest = tl.load(most + at, mask=mask, other=-1)
        distance_there = tl.load(most_distance + at, mask=mask, other=0)
        distance = tl.where(column[:, None] == nearest[None, :], distance_there[None, :], distance)
        query = tl.load(queries + (at[None, :] * D + channel[:, None]), mask=mask[None, :], other=0).to(COMPUTE)
        score = tl.dot(key, query, input_precision="ieee") * scale
        log_sum = tl.load(log_sums + at, mask=mask, other=float("inf"))
        seen = tl.load(visible + row, mask=mask, other=0)
        attention = tl.where(column[:, None] < seen[None, :], tl.exp2(score - log_sum[None, :]), 0.0)
        cost = attention / tl.maximum(1 - attention, surviving) * tl.sqrt(tl.maximum(distance, 0.0))
        weight = tl.load(weights + at, mask=mask, other=0)
        window_cost += tl.sum(cost * tl.where(row < window, weight, 0.0)[None, :], 1)
        future_cost += tl.sum(cost * tl.where(row < window, 0.0, weight)[None, :], 1)
    at = kv_head * tokens + column
    tl.store(of_window + at, window_cost, mask=inside)
    tl.store(of_futures + at, future_cost, mask=inside)
