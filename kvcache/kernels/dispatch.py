"""Which path a kernel takes: Triton for tensors on a CUDA device, where it is installed, and plain torch else."""

from __future__ import annotations

import importlib.util
from functools import cache
from typing import Any

import torch


def use_triton(device: torch.device) -> bool:
    return device.type == "cuda" and _installed()


@cache
def _installed() -> bool:
    return importlib.util.find_spec("triton") is not None


def triton_dtype(dtype: torch.dtype) -> Any:
    """What a kernel calls it."""
    import triton.language as tl

    return {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}[dtype]
