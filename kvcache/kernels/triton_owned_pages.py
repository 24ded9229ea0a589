"""Decode attention over pages that belong to one (row, KV head) each, of any number (Triton).

    program (owner, split)     a split is a run of an owner's pages; it serves the query heads of the group
    page of 64 tokens          online softmax in fp32, query heads padded to the columns of a tensor-core product

    attend_owned -> partial outputs          join_splits -> output

:mod:`kvcache.kernels.paged_attention` is the reference.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

PAGE = tl.constexpr(64)
LOWEST = tl.constexpr(-1e30)


@triton.jit(do_not_specialize=["width", "splits"])
def attend_owned(
    queries,  # [o, G, D]
    owners,  # [o] int32
    tables,  # [owners, width] int32: the pages of each owner, in the order of its tokens
    lengths,  # [owners] int32: its tokens
    keys,  # [P, 64, D]
    values,  # [P, 64, DV]
    partial,  # [o, S, G, DV] fp32
    stats,  # [o, S, 2, G] fp32: peak and sum
    scale,  # of the scores, times log2(e)
    width,
    splits,  # S
    G: tl.constexpr,
    HEADS: tl.constexpr,  # G padded
    D: tl.constexpr,
    DV: tl.constexpr,
    PAGES: tl.constexpr,  # of a split
    COMPUTE: tl.constexpr,
):
    """One split of one owner; a split beyond its pages writes nothing, and is not read."""
    index, split = tl.program_id(0), tl.program_id(1)
    owner = tl.load(owners + index)
    length = tl.load(lengths + owner)
    first = split * PAGES
    last = tl.minimum(tl.cdiv(length, PAGE), first + PAGES)
    if first >= last:
        return
    pages = tables + owner.to(tl.int64) * width
    g, token = tl.arange(0, HEADS), tl.arange(0, PAGE)
    channel, value_channel = tl.arange(0, D), tl.arange(0, DV)
    of_query = index.to(tl.int64) * G * D + (g[None, :] * D + channel[:, None])
    query = tl.load(queries + of_query, mask=(g < G)[None, :], other=0).to(COMPUTE)
    peak = tl.full([HEADS], LOWEST, tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    output = tl.zeros([DV, HEADS], tl.float32)
    page = tl.load(pages + first)
    for ordinal in range(first, last):
        block = page.to(tl.int64) * PAGE
        k = tl.load(keys + block * D + (token[:, None] * D + channel[None, :])).to(COMPUTE)
        v = tl.load(values + block * DV + (token[:, None] * DV + value_channel[None, :])).to(COMPUTE)
        page = tl.load(pages + tl.minimum(ordinal + 1, last - 1))
        score = tl.dot(k, query, input_precision="ieee") * scale
        score = tl.where((token + ordinal * PAGE < length)[:, None], score, -float("inf"))
        now = tl.maximum(peak, tl.max(score, 0))
        weight, rescale = tl.exp2(score - now[None, :]), tl.exp2(peak - now)
        total = total * rescale + tl.sum(weight, 0)
        output = tl.dot(tl.trans(v), weight.to(COMPUTE), output * rescale[None, :], input_precision="ieee")
        peak = now
    part = index.to(tl.int64) * splits + split
    mask = g < G
    tl.store(partial + part * G * DV + (g[None, :] * DV + value_channel[:, None]), output, mask=mask[None, :])
    tl.store(stats + part * 2 * G + g, peak, mask=mask)
    tl.store(stats + part * 2 * G + G + g, total, mask=mask)


@triton.jit(do_not_specialize=["splits"])
def join_splits(
    partial,
    stats,
    owners,
    lengths,
    output,  # [o, G, DV]
    splits,
    G: tl.constexpr,
    DV: tl.constexpr,
    PAGES: tl.constexpr,
):
    """The output of one query head: program (owner, query head)."""
    index, g = (tl.program_id(0) // G).to(tl.int64), tl.program_id(0) % G
    length = tl.load(lengths + tl.load(owners + index))
    channel = tl.arange(0, DV)
    peak, total = tl.full([], LOWEST, tl.float32), tl.full([], 0.0, tl.float32)
    merged = tl.zeros([DV], tl.float32)
    for split in range(0, tl.cdiv(tl.cdiv(length, PAGE), PAGES)):
        part = index * splits + split
        of_split = tl.load(stats + part * 2 * G + g)
        now = tl.maximum(peak, of_split)
        before, here = tl.exp2(peak - now), tl.exp2(of_split - now)
        total = total * before + tl.load(stats + part * 2 * G + G + g) * here
        merged = merged * before + tl.load(partial + (part * G + g) * DV + channel) * here
        peak = now
    tl.store(output + (index * G + g) * DV + channel, (merged / total).to(output.dtype.element_ty))
