"""What this machine has and what would be used of it."""

from __future__ import annotations

import os
from pathlib import Path

from rich.table import Table

from kvcache.method import method_names
from workers.provenance import versions

CPU_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "amx_tile")


def examine() -> Table:
    """A table of facts, one a line."""
    import torch

    from workers.flash import prefill_attention

    table = Table("what", "here", show_header=False)
    for name, version in versions().items():
        table.add_row(name, version)
    table.add_row("methods", ", ".join(method_names()) or "none registered: pip install -e .")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    table.add_row("CPU", f"{cores} cores, {torch.get_num_threads()} torch threads")
    table.add_row("CPU instructions", ", ".join(flag for flag in CPU_FLAGS if flag in _cpu_flags()) or "plain")
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            device = torch.cuda.get_device_properties(index)
            table.add_row(f"GPU {index}", f"{device.name}, {device.total_memory / 2**30:.0f} GiB")
    else:
        table.add_row("GPU", "none that torch can use")
    table.add_row("attention of prefill", prefill_attention())
    table.add_row("RAY_ADDRESS", os.environ.get("RAY_ADDRESS", "not set: a local Ray is started"))
    return table


def _cpu_flags() -> list[str]:
    facts = Path("/proc/cpuinfo")
    if not facts.is_file():
        return []
    lines = [line for line in facts.read_text().splitlines() if line.startswith("flags")]
    return lines[0].split() if lines else []
