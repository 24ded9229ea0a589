"""Attention over grouped codes where they lie, against attention over what they stand for."""

from __future__ import annotations

import pytest
import torch

from kvcache.kernels.grouped_attention import attend_grouped_codes
from kvcache.kernels.paged_attention import attend_pages
from kvcache.quant import Quantized, dequantize, quantize, unpack, unpack_planes

SCALE = 0.3
PAGES, HEADS, GROUP, TOKENS, DIM, VALUE_DIM = 3, 2, 3, 32, 12, 16


def coded(bits: int, token_groups: int, channel_groups: int) -> tuple[Quantized, Quantized]:
    keys, values = torch.randn(PAGES, HEADS, DIM, TOKENS) + 1, torch.randn(PAGES, HEADS, TOKENS, VALUE_DIM) - 1
    by_token_group, by_channel_group = (
        part.unflatten(-1, (groups, -1)) for part, groups in ((keys, token_groups), (values, channel_groups))
    )
    return quantize(by_token_group, bits), quantize(by_channel_group, bits)


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize(("token_groups", "channel_groups"), [(1, 1), (4, 1), (4, 2), (2, 4)])
def test_it_equals_attention_over_dequantised_pages(bits: int, token_groups: int, channel_groups: int) -> None:
    keys, values = coded(bits, token_groups, channel_groups)
    queries, valid = torch.randn(PAGES, HEADS, GROUP, DIM), torch.rand(PAGES, TOKENS) < 0.7
    found, weights = attend_grouped_codes(queries, keys, values, bits, valid, SCALE)
    rebuilt = dequantize(keys, bits).flatten(3).transpose(2, 3).flatten(0, 1), dequantize(values, bits).flatten(3)
    own, of_heads = queries.flatten(0, 1), valid.repeat_interleave(HEADS, 0)
    expected = attend_pages(own, rebuilt[0], rebuilt[1].flatten(0, 1), of_heads, SCALE)
    for name in ("peak", "mass", "output"):
        torch.testing.assert_close(getattr(found, name), getattr(expected, name), rtol=1e-4, atol=1e-5)
    assert not weights[~of_heads[:, None].expand_as(weights)].any()


def test_a_token_without_scale_and_offset_has_weight_and_adds_nothing() -> None:
    keys, values = coded(4, 2, 2)
    values.scale[:, :, 5], values.offset[:, :, 5] = 0, 0
    queries, valid = torch.randn(PAGES, HEADS, GROUP, DIM), torch.ones(PAGES, TOKENS, dtype=torch.bool)
    found, weights = attend_grouped_codes(queries, keys, values, 4, valid, SCALE)
    others = dequantize(values, 4).flatten(3).flatten(0, 1)
    assert not others[:, 5].any()
    torch.testing.assert_close(found.mass[..., 0], weights.sum(-1))
    torch.testing.assert_close(found.output, weights @ others, rtol=1e-4, atol=1e-5)
    assert (weights[..., 5] > 0).all()


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_planes_hold_the_codes_of_each_byte_in_turn(bits: int) -> None:
    packed = torch.randint(256, (5, 7), dtype=torch.uint8)
    torch.testing.assert_close(unpack_planes(packed, bits).permute(1, 2, 0).flatten(1), unpack(packed, bits))
