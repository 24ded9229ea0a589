"""The quantising kernel in Triton's interpreter against the plain path. Run by test_triton_interpreter.py."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from qevict.kernels import window_codes

LAYERS, PAGES, HEADS = 2, 3, 2


def ledger(window: int, dim: int, bits: int) -> dict[str, Tensor]:
    """Empty pages, with more pages in memory than are in use, as an arena has them."""
    slots, codes = 64 // window, torch.uint8
    shapes = {
        "key_codes": ((slots, dim, window * bits // 8), codes),
        "key_scale": ((slots, dim), torch.float16),
        "key_offset": ((slots, dim), torch.float16),
        "value_codes": ((slots, window, dim * bits // 8), codes),
        "value_scale": ((slots, window), torch.float16),
        "value_offset": ((slots, window), torch.float16),
    }
    return {
        name: torch.zeros(LAYERS, PAGES + 1, HEADS, *shape, dtype=dtype)[:, :PAGES]
        for name, (shape, dtype) in shapes.items()
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=["fp32", "fp16", "bf16"])
@pytest.mark.parametrize(("window", "dim", "bits"), [(8, 64, 2), (4, 64, 2), (16, 128, 4), (32, 64, 4), (8, 128, 2)])
def test_codes_scales_and_offsets_are_the_same_bits(window: int, dim: int, bits: int, dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(window * dim + bits)
    keys, values = (torch.randn(5, HEADS, window, dim, generator=g).to(dtype) * 3 for _ in range(2))
    keys[0] = 0.25  # constant before rotation only where the angle is zero
    values[1] = -7.5  # a constant group
    windows = torch.tensor([0, 7, 3, 11, 2])
    angles = torch.arange(12 * window)[:, None] / 50 ** (torch.arange(dim // 2) / (dim // 2))
    yarn = 1.3
    rotary = (torch.stack([angles.cos(), angles.sin()]) * yarn).unflatten(1, (-1, window)).transpose(2, 3).contiguous()
    where = torch.tensor([0, 1, 1, 0, 1]), torch.tensor([2, 0, 1, 2, 0]), torch.tensor([0, 1, 0, 1, 0])
    expected, found = ledger(window, dim, bits), ledger(window, dim, bits)
    window_codes._write_plain(expected, where, keys, values, windows, rotary, bits)
    window_codes._write_fused(found, where, keys, values, windows, rotary, bits)
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
        assert tensor.any(), name
