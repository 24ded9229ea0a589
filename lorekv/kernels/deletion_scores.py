"""Deletion costs of a prompt's tokens, summed over the queries of a group: all of LORE-KV's stage 3 in one call (§3.4).

    score_i = sum over a group's queries q of   w_q a_qi / (1 - a_qi) ||W_O (o_q - v_i)||

No projected value is ever held: with G = W_Oᵀ W_O the squared norm is oᵀGo - 2 (Go)ᵀv + vᵀGv, a product of the values
with few vectors. On a GPU the kernels of :mod:`lorekv.kernels.triton_deletion` read keys and values in blocks, and
write nothing larger than a number per query head and token; on a CPU the attention of a few queries is held at a time.

A query of a future also attends to its own tokens, which are not scored. They count as one more token, whose score is
their log-sum-exp and whose value is their output.

Where one token takes nearly all attention o is nearly v, and the three terms of the squared norm cancel: for a query's
most attended token it is taken from o - v itself.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kvcache.kernels import dispatch
from lorekv.deletion import SURVIVING
from lorekv.scoring_queries import ScoringQueries

ATTENDED = 2**19
"""About how many probabilities the CPU path holds at once: 2 MiB, so that they stay in its cache."""
TOKENS_PER_PRODUCT = 512
"""Tokens whose norms are taken together on a CPU: their products stay in its cache."""
ALIGNED = 16
"""Columns added to a row of probabilities: one for the query's own tokens, the others keep rows aligned."""
FUSED_SIZES, FUSED_DTYPES = (32, 64, 128), (torch.float16, torch.bfloat16)
"""What the kernels serve: blocks of larger heads, or of fp32, do not fit in registers."""
WARPS, STAGES = 4, 3
FUSED_KEYS, FUSED_QUERIES = 64, 32
CHANNELS = 16
"""Columns of G that the kernel for the values' norms takes at a time: more do not fit in registers."""


def deletion_scores(
    asked: ScoringQueries, keys: Tensor, values: Tensor, grams: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Weighted deletion costs of every prompt token, apart for the window's queries and for those of the futures.

    Args:
        keys, values: [H_kv, n, d], [H_kv, n, d_v], of the prompt.
        grams: [H_kv, G, d_v, d_v] fp32, ``W_Oᵀ W_O`` of each query head.

    Returns:
        [H_kv, n] fp32 each; zeros where there is no such query.
    """
    fuses = dispatch.use_triton(keys.device) and keys.dtype in FUSED_DTYPES
    if fuses and {keys.shape[-1], values.shape[-1]} <= set(FUSED_SIZES):
        return _score_fused(asked, keys, values, grams, scale)
    return _score_plain(asked, keys, values, grams, scale)


# -- plain torch -------------------------------------------------------------------------------------------------------


def _score_plain(
    asked: ScoringQueries, keys: Tensor, values: Tensor, grams: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    heads, tokens, dim = values.shape
    count, group = asked.queries.shape[1], grams.shape[1]
    of_window, of_futures = torch.zeros(2, heads, tokens, device=keys.device).unbind()
    columns = torch.ones(dim + 2, tokens, device=keys.device)
    block = min(count, max(16, ATTENDED // tokens))
    # Allocated once: fresh memory would cost as much as the arithmetic.
    room = torch.empty(2, block, tokens + ALIGNED, device=keys.device)
    for head in range(heads):
        by_column, of_head = keys[head].float().T.contiguous(), values[head].float()
        columns[:dim] = of_head.T
        norms = _value_norms(columns[:dim], grams[head])
        for member, gram in enumerate(grams[head]):
            # The squared norms are one product: [-2 Go, oᵀGo, 1] of a query with [v, 1, vᵀGv] of a token.
            columns[-1] = norms[member]
            for start in range(0, count, block):
                rows = slice(start, start + block)
                attention, output = _attend(asked, head * group + member, rows, by_column, of_head, scale, room[0])
                projected = output @ gram
                of_output = torch.linalg.vecdot(projected, output)[:, None]
                queries = torch.cat([projected.mul_(-2), of_output, torch.ones_like(of_output)], 1)
                cost = torch.mm(queries, columns, out=room[1, : len(queries), :tokens])
                _mend_most_attended(cost, attention, output, of_head, gram)
                cost.clamp_min_(0).sqrt_().mul_(attention).div_(attention.neg_().add_(1).clamp_min_(SURVIVING))
                weights, window = asked.weights[rows], max(0, asked.window - start)
                of_window[head].addmv_(cost[:window].T, weights[:window])
                of_futures[head].addmv_(cost[window:].T, weights[window:])
    return of_window, of_futures


def _attend(
    asked: ScoringQueries, head: int, rows: slice, keys: Tensor, values: Tensor, scale: float, room: Tensor
) -> tuple[Tensor, Tensor]:
    """Attention of some queries of a head. keys [d, n], values [n, d_v] -> [Q, n], a part of ``room``, and [Q, d_v]"""
    queries, visible = asked.queries[head, rows].float() * scale, asked.visible[rows]
    tokens = len(values)
    attention = room[: len(queries)]
    torch.mm(queries, keys, out=attention[:, :tokens])
    attention[:, tokens:] = -torch.inf
    attention[:, tokens] = asked.own_log_sums[head, rows]
    seen_by_all = int(visible.min())
    if seen_by_all < tokens:
        hidden = torch.arange(seen_by_all, tokens, device=visible.device) >= visible[:, None]
        attention[:, seen_by_all:tokens].masked_fill_(hidden, -torch.inf)
    torch.softmax(attention, -1, out=attention)
    of_prompt, of_own = attention[:, :tokens], attention[:, tokens, None]
    return of_prompt, torch.addcmul(of_prompt @ values, of_own, asked.own_output[head, rows])


def _mend_most_attended(squared: Tensor, attention: Tensor, output: Tensor, values: Tensor, gram: Tensor) -> None:
    """Squared norms [Q, n] of tokens that have more than half of a query's attention, from o - v; in place."""
    rows = (attention.amax(-1) > 0.5).nonzero()[:, 0]
    if len(rows):
        most = attention[rows].argmax(-1)
        apart = output[rows] - values[most]
        squared[rows, most] = torch.linalg.vecdot(apart @ gram, apart)


def _value_norms(values: Tensor, grams: Tensor) -> Tensor:
    """``vᵀGv``. values [d_v, n], grams [G, d_v, d_v] -> [G, n]"""
    group, dim = grams.shape[:2]
    norms = values.new_empty(group, values.shape[1])
    for start in range(0, values.shape[1], TOKENS_PER_PRODUCT):
        some = values[:, start : start + TOKENS_PER_PRODUCT]
        moved = (grams.flatten(0, 1) @ some).view(group, dim, -1)
        norms[:, start : start + TOKENS_PER_PRODUCT] = moved.mul_(some).sum(1)
    return norms


# -- Triton ------------------------------------------------------------------------------------------------------------


def _score_fused(
    asked: ScoringQueries, keys: Tensor, values: Tensor, grams: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    from lorekv.kernels import triton_deletion as kernels

    (heads, tokens, dim), value_dim = keys.shape, values.shape[-1]
    query_heads, count = asked.queries.shape[:2]
    keys, values = (part if part.stride()[1:] == (part.shape[2], 1) else part.contiguous() for part in (keys, values))
    queries, visible = asked.queries.contiguous(), asked.visible.int()
    base_2 = scale * math.log2(math.e)
    sizes = {
        "G": query_heads // heads,
        "DV": value_dim,
        "KEYS": FUSED_KEYS,
        "COMPUTE": dispatch.triton_dtype(keys.dtype),
    }
    sizes |= {"num_warps": WARPS, "num_stages": STAGES}
    walks = {"D": dim, "QUERIES": FUSED_QUERIES, **sizes}
    strides = keys.stride(0), values.stride(0)
    empty = asked.own_output.new_empty

    splits, split_tokens = split_prompt(tokens, count * value_dim)
    log_sums, output = empty(splits, query_heads, count), empty(splits, query_heads, count, value_dim)
    peaks, most = torch.empty_like(log_sums), torch.empty_like(log_sums, dtype=torch.int32)
    blocks = -(-count // FUSED_QUERIES) * (query_heads // heads)
    kernels.attend_prompt[blocks, heads, splits](
        queries, keys, values, visible, log_sums, output, peaks, most,
        count, tokens, split_tokens, *strides, base_2, **walks,
    )  # fmt: skip
    most = most.gather(0, peaks.argmax(0, keepdim=True))[0]
    log_sums, output = _joined(log_sums, output, asked)

    # Of unit size, since their products are halved in the model's dtype, and fp16 ends at 65,504.
    grams = grams.flatten(0, 1)
    unit = grams.diagonal(dim1=1, dim2=2).amax(1).clamp_min(torch.finfo(torch.float32).tiny)
    grams = (grams / unit[:, None, None]).contiguous()
    projected = output @ grams
    apart = output - _gathered(values, most)
    norms = empty(query_heads, tokens)
    token_blocks = -(-tokens // FUSED_KEYS)
    kernels.value_norms[token_blocks, query_heads](values, grams, norms, tokens, strides[1], CHANNELS=CHANNELS, **sizes)
    of_window, of_futures = empty(heads, tokens), empty(heads, tokens)
    kernels.deletion_costs[token_blocks, heads](
        queries, keys, values, visible, (unit.sqrt()[:, None] * asked.weights).contiguous(), log_sums, projected,
        torch.linalg.vecdot(projected, output), most, torch.linalg.vecdot(apart @ grams, apart), norms,
        of_window, of_futures,
        count, asked.window, tokens, *strides, base_2, SURVIVING, **walks,
    )  # fmt: skip
    return of_window, of_futures


def split_prompt(tokens: int, partial_size: int) -> tuple[int, int]:
    """Into how many parts attention takes a prompt, and how long each is: as many as leave partial outputs, which
    have ``partial_size`` numbers a query head, no larger than a score per query head and token."""
    blocks = -(-tokens // FUSED_KEYS)
    length = -(-blocks // max(1, min(tokens // partial_size, blocks)))
    return -(-blocks // length), length * FUSED_KEYS


def _joined(log_sums: Tensor, output: Tensor, asked: ScoringQueries) -> tuple[Tensor, Tensor]:
    """Attention over all splits and the queries' own tokens. [splits, H_q, Q], [splits, H_q, Q, d_v] -> [H_q, Q] to
    base 2, [H_q, Q, d_v]"""
    own = asked.own_log_sums * math.log2(math.e)
    peak = torch.maximum(log_sums.amax(0), own)
    shares, own_share = torch.exp2(log_sums - peak), torch.exp2(own - peak)
    total = shares.sum(0) + own_share
    summed = torch.addcmul((shares[..., None] * output).sum(0), own_share[..., None], asked.own_output)
    return peak + total.log2(), summed / total[..., None]


def _gathered(values: Tensor, tokens: Tensor) -> Tensor:
    """The value of one token for each query. values [H_kv, n, d_v], tokens [H_q, Q] -> [H_q, Q, d_v]"""
    of_group = tokens.long().view(len(values), -1, 1).expand(-1, -1, values.shape[-1])
    return values.gather(1, of_group).view(*tokens.shape, -1)
