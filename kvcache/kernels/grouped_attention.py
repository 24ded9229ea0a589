"""Attention over pages of grouped codes, where they lie: neither keys nor values are rebuilt.

    k_t = s_γ ∘ c_t + o_γ    keys per channel, γ = a group of tokens       q · k_t    = (q ∘ s_γ) · c_t + q · o_γ
    v_t = s_t c_t + o_t      values per token and group of channels        Σ p_t v_t  = Σ (p_t s_t) c_t + Σ p_t o_t

Scales go into the queries and into the probabilities, all in fp32. Codes that share a byte are taken apart as planes,
shift by shift. A product covers all groups at once, and of its blocks those are kept whose two groups are the same.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvcache.kernels.paged_attention import PagePartials
from kvcache.quant import Quantized, unpack_planes


def attend_grouped_codes(
    queries: Tensor, keys: Quantized, values: Quantized, bits: int, valid: Tensor, scale: float
) -> tuple[PagePartials, Tensor]:
    """Attention inside each page of each head, of P * H_kv pages; and the unnormalised weights, [P * H_kv, G, T].

    Args:
        queries: [P, H_kv, G, d].
        keys: codes [P, H_kv, d, γ, b], scale and offset [P, H_kv, d, γ].
        values: codes [P, H_kv, T, γ_v, b_v], scale and offset [P, H_kv, T, γ_v]; a token whose two are 0 adds nothing.
        valid: [P, T] bool, which slots hold a token.
    """
    own = queries.flatten(0, 1).float()
    key_scale, key_offset, value_scale, value_offset = (
        part.flatten(0, 1).float() for part in (keys.scale, keys.offset, values.scale, values.offset)
    )
    scaled = own[:, :, None] * key_scale.transpose(1, 2)[:, None]  # [P H, G, γ, d]
    of_groups = torch.bmm(own, key_offset)
    scores = _on_codes(scaled, keys.codes, bits).add_(of_groups[..., None]).flatten(2).mul_(scale)
    scores.masked_fill_(~valid.repeat_interleave(queries.shape[1], 0)[:, None], -torch.inf)
    peak = scores.amax(-1)
    weights = scores.sub_(peak.clamp_min(torch.finfo(torch.float32).min)[..., None]).exp_()
    scaled = weights[:, :, None] * value_scale.transpose(1, 2)[:, None]  # [P H, G, γ_v, T]
    of_groups = torch.bmm(weights, value_offset)
    output = _on_codes(scaled, values.codes, bits).add_(of_groups[..., None]).flatten(2)
    return PagePartials(peak, weights.sum(-1, keepdim=True), output), weights


def _on_codes(left: Tensor, codes: Tensor, bits: int) -> Tensor:
    """Each group's factors times that group's codes: [p, G, γ, k] x [..., k, γ, b] -> [p, G, γ, b * 8 / bits]"""
    groups = left.shape[2]
    planes = unpack_planes(codes.flatten(0, 1).flatten(2), bits)  # [c, p, k, γ b]
    per_byte = len(planes)
    rows = left.flatten(1, 2).expand(per_byte, -1, -1, -1)
    product = torch.matmul(rows, planes).unflatten(2, (-1, groups)).unflatten(4, (groups, -1))
    own = product.diagonal(dim1=3, dim2=4)  # [c, p, G, b, γ]
    return own.permute(1, 2, 4, 3, 0).flatten(3)
