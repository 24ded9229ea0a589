"""Bytes counted from the launches, and the roofline model that is made of them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from perf.roofline import A100, H200, modelled
from perf.traffic import Setting, minimum, traffic
from qevict.kernels.code_attention import CodePages
from qevict.kernels.tiered_attention import PAGE

BATCH = Setting(rows=8, context=32 * 1024, budget="20%")


def test_a_step_moves_little_more_than_is_stored_and_far_less_than_reconstruction() -> None:
    moved = traffic(BATCH)
    assert moved.minimum < moved.counted <= 1.05 * moved.minimum
    assert moved.counted <= moved.reconstruction / 10
    assert moved.reconstruction > moved.full, "reconstructing moves more than the uncompressed cache"


@pytest.mark.parametrize("rows", [1, 32])
@pytest.mark.parametrize("budget", ["5%", "20%"])
def test_other_batches_move_at_most_15_per_cent_more(rows: int, budget: str) -> None:
    moved = traffic(Setting(rows, 32 * 1024, budget))
    assert moved.counted <= 1.15 * moved.minimum


def test_the_minimum_is_the_size_of_the_stored_tensors_and_the_ends() -> None:
    launch = BATCH.launch()
    slots = PAGE // launch.window
    pages = BATCH.rows * launch.code_width, launch.heads, slots
    codes = CodePages(
        torch.empty(*pages, 128, 2, dtype=torch.uint8, device="meta"),
        torch.empty(*pages, 128, dtype=torch.float16, device="meta"),
        torch.empty(*pages, 128, dtype=torch.float16, device="meta"),
        torch.empty(*pages, 8, 32, dtype=torch.uint8, device="meta"),
        torch.empty(*pages, 8, dtype=torch.float16, device="meta"),
        torch.empty(*pages, 8, dtype=torch.float16, device="meta"),
    )
    full = torch.empty(BATCH.rows * launch.full_width, launch.heads, PAGE, 2 * 128, dtype=torch.bfloat16, device="meta")
    stored = sum(part.nbytes for part in vars(codes).values()) + full.nbytes
    assert stored < minimum(launch, 0) < 1.01 * stored


def test_the_model_is_limited_by_the_slowest_part() -> None:
    usual = modelled(BATCH, H200)
    slow_loop = modelled(BATCH, H200, (40.0, 5.0))
    assert slow_loop.limit == "issue"
    assert slow_loop.fused_s > usual.fused_s
    assert modelled(BATCH, A100).fused_s > usual.fused_s
    assert usual.speedup == pytest.approx(usual.full_cache_s / usual.fused_s)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_device_script_says_so_and_prints_what_is_modelled() -> None:
    root = Path(__file__).resolve().parents[1]
    done = subprocess.run([sys.executable, "-m", "perf.device"], cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "torch sees no CUDA device" in done.stderr
    assert "modelled, H200, 20% of 32K, batch 8:" in done.stderr
    assert not done.stdout
