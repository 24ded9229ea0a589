"""What this machine does right now: printed beside every timing, since shared machines swing tenfold."""

from __future__ import annotations

import time

import torch


def calibration() -> dict[str, float]:
    """Copy bandwidth in GB/s, bf16 and fp32 products in GFLOP/s, best of five."""
    return {
        "copy_gb_s": 2 * 64e6 * 4 / _best(_copy) / 1e9,
        "bf16_gflop_s": 2 * 1024**3 / _best(_product, torch.bfloat16) / 1e9,
        "fp32_gflop_s": 2 * 1024**3 / _best(_product, torch.float32) / 1e9,
        "threads": torch.get_num_threads(),
    }


def _copy() -> float:
    source, target = torch.ones(64_000_000), torch.empty(64_000_000)
    began = time.perf_counter()
    target.copy_(source)
    return time.perf_counter() - began


def _product(dtype: torch.dtype) -> float:
    left, right = torch.ones(1024, 1024, dtype=dtype), torch.ones(1024, 1024, dtype=dtype)
    began = time.perf_counter()
    left @ right
    return time.perf_counter() - began


def _best(measure: object, *arguments: object) -> float:
    assert callable(measure)
    return min(measure(*arguments) for _ in range(5))
