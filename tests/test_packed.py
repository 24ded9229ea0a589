"""Packed weights: the same products, and no second copy."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from models import prompt_ids, tiny_llama
from torch import nn

from workers.packed import PackedLinear, pack_linears

needs_bf16_products = pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="this processor has no bf16 products of its own"
)


@needs_bf16_products
@given(st.integers(1, 70), st.sampled_from([8, 24, 64, 192]), st.sampled_from([8, 40, 64]), st.booleans())
def test_a_packed_layer_gives_what_the_layer_gave(rows: int, inputs: int, outputs: int, bias: bool) -> None:
    linear = nn.Linear(inputs, outputs, bias).bfloat16()
    x = torch.randn(2, rows, inputs).bfloat16()
    packed = PackedLinear(linear)
    with torch.inference_mode():
        torch.testing.assert_close(packed(x), linear(x), rtol=2**-7, atol=2**-9)


@needs_bf16_products
def test_a_packed_model_has_the_same_products() -> None:
    model = tiny_llama(torch.float32).forward.bfloat16()
    packed = tiny_llama(torch.bfloat16).forward
    ids = torch.tensor([prompt_ids(40)])
    layers = [one for one in packed.modules() if isinstance(one, PackedLinear)]
    assert len(layers) == 7 * len(packed.model.layers) + (model.lm_head.weight is not model.model.embed_tokens.weight)
    for layer, before in zip(packed.model.layers, model.model.layers, strict=True):
        assert torch.equal(layer.self_attn.o_proj.weight, before.self_attn.o_proj.weight)
        assert layer.mlp.up_proj.weight is None
    with torch.inference_mode():
        found, expected = (one.model.embed_tokens(ids) for one in (packed, model))
        assert torch.equal(found, expected)
        for ours, theirs in zip(packed.model.layers, model.model.layers, strict=True):
            torch.testing.assert_close(ours.mlp(found), theirs.mlp(found), rtol=2**-6, atol=2**-8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_dtypes_are_left_alone(dtype: torch.dtype) -> None:
    model = copy.deepcopy(tiny_llama(dtype).forward)
    pack_linears(model)
    assert not [one for one in model.modules() if isinstance(one, PackedLinear)]
