"""Group quantisation and bit packing."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvcache.quant import dequantize, pack, quantize, unpack
from kvcache.rotary import rotate, unrotate


def test_golden_group() -> None:
    """[-1, 0, 0.5, 2] at two bits: scale 1, offset -1; 1.5 rounds to the even code 2; one byte, first code lowest."""
    coded = quantize(torch.tensor([-1, 0, 0.5, 2]), 2)
    assert coded.codes.tolist() == [0b11100100] == [228]
    assert (float(coded.scale), float(coded.offset)) == (1, -1)
    assert dequantize(coded, 2).tolist() == [-1, 0, 1, 2]


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_packing_is_lossless(bits: int) -> None:
    codes = torch.randint(0, 2**bits, (3, 5, 16), dtype=torch.uint8)
    packed = pack(codes, bits)
    assert packed.shape == (3, 5, 16 * bits // 8)
    assert torch.equal(unpack(packed, bits).to(torch.uint8), codes)


@given(st.integers(0, 10_000), st.sampled_from([2, 4]), st.floats(0.01, 100), st.floats(-1000, 1000))
def test_error_is_half_a_step(seed: int, bits: int, spread: float, bias: float) -> None:
    """Half a scale, plus what fp16 loses of scale and offset; large biases included."""
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(seed)) * spread + bias
    coded = quantize(x, bits)
    error = (dequantize(coded, bits) - x).abs().amax(-1)
    rounding = (x.abs().amax(-1) + (2**bits) * coded.scale.float()) * 2**-10
    assert bool((error <= coded.scale.float() / 2 + rounding).all())


def test_a_constant_group_is_exact_and_never_nan() -> None:
    coded = quantize(torch.full((2, 8), 3.25), 2)
    assert bool((coded.scale == 1).all())
    assert torch.equal(dequantize(coded, 2), torch.full((2, 8), 3.25))


def test_groups_do_not_see_each_other() -> None:
    x = torch.randn(3, 8)
    assert torch.equal(quantize(x, 2).codes[1], quantize(x[1:2] * 1, 2).codes[0])


@pytest.mark.parametrize("scaling", [1.0, 1.37])
def test_undoing_a_rotation_with_scaled_tables(scaling: float) -> None:
    """The tables of YaRN carry a factor: dividing by it once would leave an error."""
    x = torch.randn(2, 40, 16)
    angles = torch.arange(40)[:, None] / 100 ** (torch.arange(0, 16, 2) / 16)
    cos, sin = (torch.cat([part, part], -1) * scaling for part in (angles.cos(), angles.sin()))
    torch.testing.assert_close(unrotate(rotate(x, cos, sin), cos, sin), x, rtol=1e-5, atol=1e-5)
