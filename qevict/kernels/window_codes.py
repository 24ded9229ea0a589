"""Low-bit codes of windows, written into ledger slots: keys per channel as they were before rotation, values per token.

The plain path here is the reference of :mod:`qevict.kernels.triton_quantize`, which writes the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from kvcache.kernels import dispatch
from kvcache.quant import quantize
from kvcache.rotary import unrotate

Where = tuple[Tensor, Tensor, Tensor]
"""Layer, page and place of some slots, [K] each."""


def write_codes(
    ledger: Mapping[str, Tensor], where: Where, keys: Tensor, values: Tensor, windows: Tensor, rotary: Tensor, bits: int
) -> None:
    """Quantise windows into ledger slots.

    Args:
        ledger: the tensors of :class:`qevict.kernels.code_attention.CodePages` by name, of all layers, [L, P, ...].
        keys, values: [K, H_kv, Ω, d] and [K, H_kv, Ω, d_v], keys rotated.
        windows: [K] their numbers.
        rotary: [2, W, d / 2, Ω] fp32.
    """
    fits = all(size & (size - 1) == 0 for size in (*keys.shape[2:], values.shape[-1]))
    if fits and dispatch.use_triton(keys.device):
        _write_fused(ledger, where, keys, values, windows, rotary, bits)
    else:
        _write_plain(ledger, where, keys, values, windows, rotary, bits)


def _write_plain(
    ledger: Mapping[str, Tensor], where: Where, keys: Tensor, values: Tensor, windows: Tensor, rotary: Tensor, bits: int
) -> None:
    layer, page, place = where
    cos, sin = rotary[:, windows].transpose(2, 3).repeat(1, 1, 1, 2)[:, :, None]  # [K, 1, Ω, d] each
    of_keys, of_values = quantize(unrotate(keys, cos, sin).transpose(2, 3), bits), quantize(values, bits)
    for prefix, quantized in (("key", of_keys), ("value", of_values)):
        ledger[f"{prefix}_codes"][layer, page, :, place] = quantized.codes
        ledger[f"{prefix}_scale"][layer, page, :, place] = quantized.scale
        ledger[f"{prefix}_offset"][layer, page, :, place] = quantized.offset


def _write_fused(
    ledger: Mapping[str, Tensor], where: Where, keys: Tensor, values: Tensor, windows: Tensor, rotary: Tensor, bits: int
) -> None:
    from qevict.kernels.triton_quantize import quantize_windows

    count, heads, omega, dim = keys.shape
    names = ("key_codes", "key_scale", "key_offset", "value_codes", "value_scale", "value_offset")
    first = ledger["key_scale"]  # its pages are [H_kv, s, d]; a layer may have more pages than are in use
    quantize_windows[count, heads](
        keys.contiguous(), values.contiguous(), rotary, windows.int(), *(part.int() for part in where),
        *(ledger[name] for name in names), rotary.shape[1], first.stride(0) // first.stride(1),
        H=heads, SLOTS=first.shape[3], OMEGA=omega, D=dim, DV=values.shape[-1], BITS=bits,
        num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
