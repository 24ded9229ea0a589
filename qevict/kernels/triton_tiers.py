"""Decode attention over both tiers where they lie, without a reconstruction buffer (Triton).

    program (row, KV heads, split)         a split is a run of one tier's pages; it serves whole query groups, of two KV
                                           heads at once in the tier of codes: they share positions, so rotary tables
    page of 64 tokens = 2 chunks of 32     one warp per chunk, softmax state of its own: no barrier inside the loop

    attend_full, attend_codes -> partial outputs, window mass
    combine -> output, log-sum-exp                  add_scores -> what windows received (Eq. 1)

The codes of a pair of channels (keys) or tokens (values) share a 32-bit word, half a word each, so that one shift and
one mask-and-mark give two numbers in packed halves. A code c goes to the top of an fp16 mantissa whose exponent says
one: 1 + c / 2^bits. The rest is folded away: scale and offset of the keys absorb the factor and the one, the values'
factor is applied to the sum, and the ones are taken off with the rounded weights that were summed, hence exactly.
The tile is S^T = K Q^T: tokens along the long side of a tensor-core product, query heads padded to 8.

:mod:`qevict.kernels.code_attention` and :mod:`kvcache.kernels.paged_attention` are the reference. ``COMPUTE`` is the
dtype of the arithmetic on codes, ``FULL`` that of products with full-precision keys and values.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

CHUNKS = tl.constexpr(2)
CHUNK = tl.constexpr(32)
PAGE = tl.constexpr(64)
LOWEST = tl.constexpr(-1e30)
HEADROOM = tl.constexpr(6.0)
"""Weights are 2^(score - peak + 6): products with small value scales stay out of fp16's subnormal range."""


@triton.jit(do_not_specialize=["width", "total_width", "splits"])
def attend_full(
    queries,  # [r, H, G, D]
    rows,  # [r] int32
    tables,  # [rows, width] int32: the pages of each row
    counts,  # [rows] int32: how many they are
    keys,  # [P, H, 64, D]
    values,  # [P, H, 64, DV]
    fill,  # [P, s] uint8: tokens in each slot
    partial,  # [r, H, S, G, DV] fp32
    stats,  # [r, H, S, 2, G] fp32: peak and sum
    mass,  # [r, W, H, s, G] fp32: what each window received, relative to its chunk's peak
    peaks,  # [r, W, H, 2, G] fp32
    scale,  # of the scores, times log2(e)
    width,
    total_width,  # W, of both tables together
    splits,  # S, of both tiers together
    H: tl.constexpr,
    G: tl.constexpr,
    HEADS: tl.constexpr,  # G padded
    D: tl.constexpr,
    DV: tl.constexpr,
    OMEGA: tl.constexpr,
    PAGES: tl.constexpr,  # of a split
    FULL: tl.constexpr,
):
    """Full-precision pages: program (row * H + head, split). Its splits and pages come first in the outputs."""
    owner, split = tl.program_id(0), tl.program_id(1)
    index, head = owner // H, owner % H
    row = tl.load(rows + index)
    first = split * PAGES
    last = tl.minimum(tl.load(counts + row), first + PAGES)
    pages = tables + row * width
    SLOTS: tl.constexpr = CHUNK // OMEGA  # of a chunk
    g = tl.arange(0, HEADS)
    channel, value_channel = tl.arange(0, D), tl.arange(0, DV)
    of_query = owner * G * D + (g[None, :] * D + channel[:, None])
    query = tl.load(queries + of_query, mask=(g < G)[None, :], other=0).to(FULL)
    query = tl.broadcast_to(query[None], [CHUNKS, D, HEADS])
    token = tl.reshape(tl.arange(0, PAGE), [CHUNKS, CHUNK])
    peak = tl.full([CHUNKS, HEADS], LOWEST, tl.float32)
    total = tl.zeros([CHUNKS, HEADS], tl.float32)
    output = tl.zeros([CHUNKS, DV, HEADS], tl.float32)
    page = tl.load(pages + first, mask=first < last, other=0)
    for ordinal in range(first, last):
        block = page.to(tl.int64) * H + head
        k = tl.load(keys + block * PAGE * D + (token[:, :, None] * D + channel[None, None, :])).to(FULL)
        v = tl.load(values + block * PAGE * DV + (token[:, :, None] * DV + value_channel[None, None, :])).to(FULL)
        filled = tl.load(fill + page.to(tl.int64) * (PAGE // OMEGA) + token // OMEGA)
        page = tl.load(pages + tl.minimum(ordinal + 1, last - 1))
        score = tl.dot(k, query, input_precision="ieee")
        score = tl.where((token % OMEGA < filled)[:, :, None], score, -float("inf"))
        weight, rescale, peak = _softmax_step(score, scale, peak)
        tile = index * total_width + ordinal
        received = tl.sum(tl.reshape(weight, [CHUNKS, SLOTS, OMEGA, HEADS]), 2)
        _store_mass(received, peak, mass, peaks, tile * H + head, G, HEADS, OMEGA)
        total = total * rescale + tl.sum(received, 1)
        output = output * rescale[:, None, :]
        output = tl.dot(tl.permute(v, [0, 2, 1]), weight.to(FULL), output, input_precision="ieee")
    part = owner * splits + split
    _store_partial(output, total, peak, value_channel, partial, stats, part, splits, 1, G, DV, HEADS)


@triton.jit(do_not_specialize=["width", "total_width", "first_split", "splits"])
def attend_codes(
    queries,  # [r, H, G, D]
    rows,  # [r] int32
    tables,  # [rows, width] int32
    counts,  # [rows] int32
    key_codes,  # [P, H, s, D, Ω * bits / 8] bytes
    key_scale,  # [P, H, s, D] fp16
    key_offset,
    value_codes,  # [P, H, 64, DV * bits / 32] uint32
    value_scale,  # [P, H, 64] fp16
    value_offset,
    windows,  # [P, s] int32: window + 1, not positive where free
    cos,  # [windows, Ω, D / 2]
    sin,
    partial,  # as in attend_full
    stats,
    mass,
    peaks,
    scale,
    width,
    total_width,
    first_split,  # splits of the full-precision tier
    splits,
    H: tl.constexpr,
    G: tl.constexpr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    OMEGA: tl.constexpr,
    BITS: tl.constexpr,
    PAGES: tl.constexpr,
    PAIR: tl.constexpr,  # KV heads that one program serves: 2, or 1 where their number is odd
    COMPUTE: tl.constexpr,
    PACKED: tl.constexpr,  # fp16 arithmetic two by two, in instructions that the interpreter does not know
):
    """Pages of codes: program (row * H / 2 + pair of heads, split). Heads of a pair share the rotary tables' loads."""
    owner, split = tl.program_id(0) * PAIR, tl.program_id(1)
    index, head = owner // H, owner % H
    row = tl.load(rows + index)
    first = split * PAGES
    last = tl.minimum(tl.load(counts + row), first + PAGES)
    pages = tables + row * width
    HALF: tl.constexpr = D // 2
    SLOTS: tl.constexpr = CHUNK // OMEGA  # of a chunk
    FACTOR: tl.constexpr = 2**BITS
    PER_HALF: tl.constexpr = 16 // BITS  # codes in half a word
    WORDS: tl.constexpr = DV * BITS // 32
    # The third program index is zero. Adding it keeps the mark in a register: one instruction then masks and marks.
    mark = 0x3C003C00 + tl.program_id(2)
    g, i, omega = tl.arange(0, HEADS), tl.arange(0, HALF), tl.arange(0, OMEGA)
    # Tiles are [head of the pair, chunk of its page, ...], both in one dimension: the heads of a page lie side by side.
    BOTH: tl.constexpr = PAIR * CHUNKS
    by_head = (owner + tl.arange(0, BOTH) // CHUNKS) * G * D
    of_query = by_head[:, None, None] + g[None, None, :] * D + i[None, :, None]
    first_query = tl.load(queries + of_query, mask=(g < G)[None, None, :], other=0).to(COMPUTE)
    second_query = tl.load(queries + HALF + of_query, mask=(g < G)[None, None, :], other=0).to(COMPUTE)
    in_page = tl.reshape(tl.arange(0, CHUNKS * SLOTS), [CHUNKS, SLOTS])
    slot = tl.reshape(tl.arange(0, BOTH * SLOTS), [BOTH, SLOTS])
    # Tokens of a chunk in the order [Ω, slots]
    token = tl.reshape(slot[:, None, :] * OMEGA + omega[None, :, None], [BOTH, CHUNK])
    even, odd = tl.split(tl.reshape(token, [BOTH, CHUNK // 2, 2]))
    word = tl.arange(0, WORDS)
    code = tl.arange(0, PER_HALF)
    peak = tl.full([BOTH, HEADS], LOWEST, tl.float32)
    total = tl.zeros([BOTH, SLOTS, HEADS], tl.float32)
    offsets = tl.zeros([BOTH, HEADS], tl.float32)
    output = tl.zeros([BOTH, DV, HEADS], tl.float32)
    page = tl.load(pages + first, mask=first < last, other=0)
    for ordinal in range(first, last):
        block = page.to(tl.int64) * H + head
        window = tl.load(windows + page.to(tl.int64) * (PAGE // OMEGA) + in_page) - 1
        page = tl.load(pages + tl.minimum(ordinal + 1, last - 1))

        at = block * (PAGE // OMEGA) * D + (slot[:, :, None] * D + i[None, None, :])
        first_scale = tl.load(key_scale + at).to(COMPUTE) * FACTOR
        second_scale = tl.load(key_scale + HALF + at).to(COMPUTE) * FACTOR
        first_offset = tl.load(key_offset + at).to(COMPUTE) - first_scale
        second_offset = tl.load(key_offset + HALF + at).to(COMPUTE) - second_scale
        first_codes = _key_codes(key_codes, block * (PAGE // OMEGA) * D, slot, mark, D, OMEGA, BITS)
        second_codes = _key_codes(key_codes, block * (PAGE // OMEGA) * D + HALF, slot, mark, D, OMEGA, BITS)
        first_half = _fma(first_codes.to(COMPUTE), first_scale[None], first_offset[None], PACKED)
        second_half = _fma(second_codes.to(COMPUTE), second_scale[None], second_offset[None], PACKED)
        first_half = tl.reshape(first_half, [OMEGA, PAIR, CHUNKS, SLOTS, HALF])
        second_half = tl.reshape(second_half, [OMEGA, PAIR, CHUNKS, SLOTS, HALF])
        position = tl.maximum(window, 0)[None] * OMEGA + omega[:, None, None]
        c = tl.load(cos + (position[:, :, :, None] * HALF + i[None, None, None, :])).to(COMPUTE)[:, None]
        s = tl.load(sin + (position[:, :, :, None] * HALF + i[None, None, None, :])).to(COMPUTE)[:, None]
        rotated = tl.reshape(
            tl.permute(_fma(first_half, c, _minus(second_half, s, PACKED), PACKED), [1, 2, 0, 3, 4]),
            [BOTH, CHUNK, HALF],
        )
        score = tl.dot(rotated, first_query, input_precision="ieee")
        rotated = tl.reshape(
            tl.permute(_fma(second_half, c, _times(first_half, s, PACKED), PACKED), [1, 2, 0, 3, 4]),
            [BOTH, CHUNK, HALF],
        )
        score = tl.dot(rotated, second_query, score, input_precision="ieee")
        held = tl.broadcast_to((window >= 0)[None, :, None, :], [PAIR, CHUNKS, OMEGA, SLOTS])
        score = tl.where(tl.reshape(held, [BOTH, CHUNK])[:, :, None], score, -float("inf"))
        weight, rescale, peak = _softmax_step(score, scale, peak)

        by_token = tl.load(value_scale + block * PAGE + token).to(tl.float32)
        offset = tl.load(value_offset + block * PAGE + token).to(tl.float32)
        scaled = (weight * by_token[:, :, None]).to(COMPUTE)
        surplus = weight * offset[:, :, None] - FACTOR * scaled.to(tl.float32)
        offsets = offsets * rescale + tl.sum(surplus, 1)
        codes = value_codes + block * PAGE * WORDS
        of_even = tl.load(codes + (even[:, None, :] * WORDS + word[None, :, None]))
        of_odd = tl.load(codes + (odd[:, None, :] * WORDS + word[None, :, None]))
        # Two tokens side by side: [chunks, words, 32] -> halves of words [chunks, 2, words, 16]
        low, high = (of_even & 0xFFFF) | (of_odd << 16), (of_even >> 16) | (of_odd & 0xFFFF0000)
        paired = tl.permute(tl.join(low, high), [0, 3, 1, 2])
        marked = _mark(paired[:, :, None, :, :], code[None, None, :, None, None], mark, BITS)
        v = tl.reshape(_halves(marked), [BOTH, DV, CHUNK]).to(COMPUTE)
        output = tl.dot(v, scaled, output * rescale[:, None, :], input_precision="ieee")

        received = tl.sum(tl.reshape(weight, [BOTH, OMEGA, SLOTS, HEADS]), 1)
        total = total * rescale[:, None, :] + received
        tile = index * total_width + total_width - width + ordinal
        _store_mass(received, peak, mass, peaks, tile * H + head, G, HEADS, OMEGA)
    # Rows of the product are (half, code, word); a word holds 2 * PER_HALF channels in order.
    order = tl.arange(0, DV)
    half, code_of, word_of = order // (PER_HALF * WORDS), order // WORDS % PER_HALF, order % WORDS
    channel = word_of * (2 * PER_HALF) + half * PER_HALF + code_of
    output = FACTOR * output + offsets[:, None, :]
    part = owner * splits + first_split + split
    _store_partial(output, tl.sum(total, 1), peak, channel, partial, stats, part, splits, PAIR, G, DV, HEADS)


@triton.jit
def _fma(a, b, c, PACKED: tl.constexpr):
    if PACKED:
        return tl.inline_asm_elementwise(
            "fma.rn.f16x2 $0, $1, $2, $3;", "=r,r,r,r", [a, b, c], dtype=tl.float16, is_pure=True, pack=2
        )
    else:
        return a * b + c


@triton.jit
def _times(a, b, PACKED: tl.constexpr):
    if PACKED:
        return tl.inline_asm_elementwise(
            "mul.rn.f16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.float16, is_pure=True, pack=2
        )
    else:
        return a * b


@triton.jit
def _minus(a, b, PACKED: tl.constexpr):
    if PACKED:
        return tl.inline_asm_elementwise(
            "{.reg .b32 t; mul.rn.f16x2 t, $1, $2; neg.f16x2 $0, t;}",
            "=r,r,r",
            [a, b],
            dtype=tl.float16,
            is_pure=True,
            pack=2,
        )
    else:
        return -(a * b)


@triton.jit
def _key_codes(codes, start, slot, mark, D: tl.constexpr, OMEGA: tl.constexpr, BITS: tl.constexpr):
    """Codes of half the channels of a page, each as 1 + c / 2^bits. [Ω, chunks, slots, D / 2] fp16

    ``start`` counts channels. A channel's codes of one window are units of at most 16 bits.
    """
    UNIT: tl.constexpr = min(16, OMEGA * BITS)
    UNITS: tl.constexpr = OMEGA * BITS // UNIT
    pair = tl.arange(0, D // 4)
    if OMEGA * BITS == 16:  # both channels of a pair are one word
        own = codes.to(tl.pointer_type(tl.uint32)) + start // 2
        words = tl.load(own + (slot[None, :, :, None] * (D // 2) + pair[None, None, None, :]))
    elif BITS == 4 and OMEGA == 8:  # each is a word, whose halves go with those of the other
        own = codes.to(tl.pointer_type(tl.uint32)) + start
        both = tl.load(own + (slot[:, :, None] * D + tl.arange(0, D // 2)[None, None, :]))
        even, odd = tl.split(tl.reshape(both, [slot.shape[0], CHUNK // OMEGA, D // 4, 2]))
        words = tl.join((even & 0xFFFF) | (odd << 16), (even >> 16) | (odd & 0xFFFF0000))
        words = tl.permute(words, [3, 0, 1, 2])
    else:
        own = codes.to(tl.pointer_type(tl.uint16 if UNIT == 16 else tl.uint8)) + start * UNITS
        unit = tl.arange(0, UNITS)[:, None, None, None]
        at = (slot[None, :, :, None] * D + 2 * pair[None, None, None, :]) * UNITS + unit
        words = tl.load(own + at).to(tl.uint32) | (tl.load(own + UNITS + at).to(tl.uint32) << 16)
    code = tl.arange(0, UNIT // BITS)
    marked = _mark(words[:, None], code[None, :, None, None, None], mark, BITS)
    return tl.reshape(_halves(marked), [OMEGA, slot.shape[0], CHUNK // OMEGA, D // 2])


@triton.jit
def _mark(words, code, mark, BITS: tl.constexpr):
    """The given code of both halves of each word, as the top of a mantissa: halves of 1 + c / 2^bits."""
    TOP: tl.constexpr = 10 - BITS
    PER_BYTE: tl.constexpr = 8 // BITS
    MASK: tl.constexpr = ((1 << BITS) - 1 << TOP) * 0x10001
    # Codes of the lower byte are moved up first, those of the upper byte are not: one more shift, always to the right.
    lower = code < PER_BYTE
    base = words << tl.where(lower, TOP, 0).to(tl.uint32)
    turned = base >> (tl.where(lower, 0, 8 - TOP) + BITS * (code % PER_BYTE)).to(tl.uint32)
    return (turned & MASK) | mark.to(tl.uint32)


@triton.jit
def _halves(words):
    """The two fp16 numbers in each word, low one first. [...] -> [..., 2]"""
    low = (words & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True)
    high = (words >> 16).to(tl.uint16).to(tl.float16, bitcast=True)
    return tl.join(low, high)


@triton.jit
def _softmax_step(score, scale, peak):
    """Weights of a tile [chunks, tokens, heads], the factor for what was summed before, and the new peak."""
    now = tl.maximum(peak, tl.max(score, 1) * scale - HEADROOM)
    return tl.exp2(score * scale - now[:, None, :]), tl.exp2(peak - now), now


@triton.jit
def _store_mass(received, peak, mass, peaks, tile, G: tl.constexpr, HEADS: tl.constexpr, OMEGA: tl.constexpr):
    """What each window of a page received, [chunks, slots, heads], and what it is relative to, [chunks, heads]."""
    SLOTS: tl.constexpr = CHUNK // OMEGA
    chunk, g = tl.arange(0, received.shape[0]), tl.arange(0, HEADS)
    slot = chunk[:, None] * SLOTS + tl.arange(0, SLOTS)[None, :]
    at = tile.to(tl.int64) * (CHUNKS * SLOTS * G) + (slot[:, :, None] * G + g[None, None, :])
    tl.store(mass + at, received, mask=(g < G)[None, None, :])
    at = tile.to(tl.int64) * (CHUNKS * G) + (chunk[:, None] * G + g[None, :])
    tl.store(peaks + at, peak, mask=(g < G)[None, :])


@triton.jit
def _store_partial(
    output,
    total,
    peak,
    channel,
    partial,
    stats,
    part,
    splits,
    PAIR: tl.constexpr,
    G: tl.constexpr,
    DV: tl.constexpr,
    HEADS: tl.constexpr,
):
    """Merge the chunks of a split."""
    g = tl.arange(0, HEADS)
    peak, total = tl.reshape(peak, [PAIR, CHUNKS, HEADS]), tl.reshape(total, [PAIR, CHUNKS, HEADS])
    highest = tl.max(peak, 1)
    rescale = tl.exp2(peak - highest[:, None, :])
    merged = tl.sum(tl.reshape(output, [PAIR, CHUNKS, DV, HEADS]) * rescale[:, :, None, :], 1)
    parts = part + tl.arange(0, PAIR) * splits
    at = (parts.to(tl.int64) * G * DV)[:, None, None] + (g[None, None, :] * DV + channel[None, :, None])
    tl.store(partial + at, merged, mask=(g < G)[None, None, :])
    at = parts[:, None] * 2 * G + g[None, :]
    tl.store(stats + at, highest, mask=(g < G)[None, :])
    tl.store(stats + at + G, tl.sum(total * rescale, 1), mask=(g < G)[None, :])


@triton.jit(do_not_specialize=["full_splits", "splits"])
def combine(
    partial,
    stats,
    rows,
    full_count,
    code_count,
    output,  # [r, H, G, DV] fp32
    log_sums,  # [r, H, G] fp32, base 2
    full_splits,
    splits,
    H: tl.constexpr,
    G: tl.constexpr,
    DV: tl.constexpr,
    FULL_PAGES: tl.constexpr,
    CODE_PAGES: tl.constexpr,
):
    """Join the splits of one query head: program (row, query head)."""
    owner, g = tl.program_id(0) // G, tl.program_id(0) % G
    row = tl.load(rows + owner // H)
    channel = tl.arange(0, DV)
    peak, total = tl.full([], LOWEST, tl.float32), tl.full([], 0.0, tl.float32)
    merged = tl.zeros([DV], tl.float32)
    full_used = tl.cdiv(tl.load(full_count + row), FULL_PAGES)
    code_used = tl.cdiv(tl.load(code_count + row), CODE_PAGES)
    for ordinal in range(0, full_used + code_used):
        split = tl.where(ordinal < full_used, ordinal, ordinal - full_used + full_splits)
        part = owner * splits + split
        of_split = tl.load(stats + part * 2 * G + g)
        now = tl.maximum(peak, of_split)
        before, here = tl.exp2(peak - now), tl.exp2(of_split - now)
        total = total * before + tl.load(stats + part * 2 * G + G + g) * here
        merged = merged * before + tl.load(partial + (part.to(tl.int64) * G + g) * DV + channel) * here
        peak = now
    tl.store(output + (owner * G + g) * DV + channel, merged / total)
    tl.store(log_sums + owner * G + g, peak + tl.log2(total))


@triton.jit(do_not_specialize=["full_width", "code_width"])
def add_scores(
    mass,
    peaks,
    log_sums,
    rows,
    full_pages,
    full_count,
    code_pages,
    code_count,
    full_score,  # [P, s] fp32
    code_score,
    full_width,
    code_width,
    H: tl.constexpr,
    H_PADDED: tl.constexpr,
    G: tl.constexpr,
    HEADS: tl.constexpr,
    OMEGA: tl.constexpr,
    PAGES: tl.constexpr,
):
    """Add what windows received, mean over all query heads, to their scores: program (row, run of pages)."""
    SLOTS: tl.constexpr = PAGE // OMEGA
    index = tl.program_id(0)
    row = tl.load(rows + index)
    full_used, code_used = tl.load(full_count + row), tl.load(code_count + row)
    head = tl.arange(0, H_PADDED)[:, None, None]
    slot, g = tl.arange(0, SLOTS)[None, :, None], tl.arange(0, HEADS)[None, None, :]
    mask = (head < H) & (g < G)
    log_sum = tl.load(log_sums + index * H * G + head * G + g, mask=mask, other=0)
    first, width = tl.program_id(1) * PAGES, full_width + code_width
    for ordinal in range(first, tl.minimum(first + PAGES, width)):
        coded = ordinal >= full_width
        place = tl.where(coded, ordinal - full_width, ordinal)
        if place < tl.where(coded, code_used, full_used):
            tile = (index * width + ordinal).to(tl.int64) * H
            received = tl.load(mass + tile * SLOTS * G + ((head * SLOTS + slot) * G + g), mask=mask, other=0)
            chunk = slot * OMEGA // CHUNK
            peak = tl.load(peaks + tile * CHUNKS * G + ((head * CHUNKS + chunk) * G + g), mask=mask, other=LOWEST)
            share = tl.sum(tl.sum(received * tl.exp2(peak - log_sum), 2), 0) / (H * G)
            if coded:
                page = tl.load(code_pages + row * code_width + place).to(tl.int64)
                score = code_score + page * SLOTS + tl.arange(0, SLOTS)
                tl.store(score, tl.load(score) + share)
            else:
                page = tl.load(full_pages + row * full_width + place).to(tl.int64)
                score = full_score + page * SLOTS + tl.arange(0, SLOTS)
                tl.store(score, tl.load(score) + share)
