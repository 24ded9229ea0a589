"""How long a value is once the output projection has taken it to the residual stream."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

TOKENS_PER_PRODUCT = 512
"""Bounds the fp32 workspace."""


def projected_norms(values: Tensor, output_projection: Tensor) -> Tensor:
    """Mean over a group's query heads h of ``|| W_O^h v ||_1``, in fp32 (fp64 stays fp64).

    values [H_kv, n, d_v], output_projection [hidden, H_q, d_v] -> [H_kv, n]
    """
    dtype = torch.promote_types(values.dtype, torch.float32)
    columns = output_projection.to(dtype).permute(1, 2, 0).unflatten(0, (len(values), -1))  # [H_kv, G, d_v, hidden]
    norms = torch.zeros(values.shape[:2], dtype=dtype, device=values.device)
    with _products_of_bf16(values.dtype == output_projection.dtype == torch.bfloat16):
        for head, of_group in enumerate(columns):
            for start in range(0, values.shape[1], TOKENS_PER_PRODUCT):
                block = slice(start, start + TOKENS_PER_PRODUCT)
                tokens = values[head, block].to(dtype)
                for of_head in of_group:  # vector_norm takes six times longer on a CPU
                    norms[head, block] += (tokens @ of_head).abs_().sum(-1)
            norms[head] /= len(of_group)
    return norms


@contextmanager
def _products_of_bf16(exact: bool) -> Iterator[None]:
    """A CPU multiplies fp32 matrices as bf16 ones and sums in fp32: nothing is lost where all numbers are bf16's."""
    setting = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = setting.fp32_precision
    if exact:
        setting.fp32_precision = "bf16"
    try:
        yield
    finally:
        setting.fp32_precision = before
