"""A model of decode attention on a GPU: the slowest of memory, L2 cache and instruction issue sets the pace.

Its figures are *modelled*: what counted bytes and the instructions of the machine code allow, not what a device did.
The efficiencies and the L2 bandwidths are assumptions; :mod:`perf.device` measures.
"""

from __future__ import annotations

from dataclasses import dataclass

from perf.traffic import Setting, counted, full_cache, rotary_reads
from qevict.kernels.tiered_attention import PAGE


@dataclass(frozen=True)
class Device:
    """Bytes/s of a device copy and of the L2 cache; ``clock`` in Hz, at 4 warp instructions a cycle and processor."""

    name: str
    target: str
    processors: int
    clock: float
    bandwidth: float
    l2_bandwidth: float


H200 = Device("H200", "sm_90", 132, 1.755e9, 4.3e12, 5.5e12)
A100 = Device("A100 80 GB", "sm_80", 108, 1.41e9, 1.75e12, 4e12)

BASELINE_BANDWIDTH = 0.93
"""What the best full-cache bf16 kernels reach of a copy's bandwidth at batch 8 and more."""
BANDWIDTH, ISSUE = 0.85, 0.75
"""What ours are taken to reach of a copy's bandwidth, and of the issue slots."""

INSTRUCTIONS = {"sm_80": (6.99, 4.59), "sm_90": (7.08, 4.66)}
"""Per (key, value) pair in the INT2 and the bf16 loop, from ``perf.kernels`` with Triton 3.9."""


@dataclass(frozen=True)
class Modelled:
    """Seconds per layer and step, and which limit our kernels run into."""

    fused_s: float
    full_cache_s: float
    limit: str

    @property
    def speedup(self) -> float:
        return self.full_cache_s / self.fused_s


def modelled(setting: Setting, device: Device, instructions: tuple[float, float] | None = None) -> Modelled:
    """``instructions`` per pair of the INT2 and the full-precision loop."""
    launch, tokens = setting.launch(), setting.context + setting.new_tokens
    of_codes, of_full = instructions or INSTRUCTIONS[device.target]
    pairs_of_a_page = launch.rows * launch.heads * PAGE * launch.key_dim
    warp_instructions = pairs_of_a_page * (launch.code_width * of_codes + launch.full_width * of_full) / 32
    moved = counted(launch, tokens)
    seconds = {
        "memory": moved / (BANDWIDTH * device.bandwidth),
        "L2": (moved + rotary_reads(launch)) / device.l2_bandwidth,
        "issue": warp_instructions / (ISSUE * 4 * device.processors * device.clock),
    }
    limit = max(seconds, key=lambda name: seconds[name])
    return Modelled(seconds[limit], full_cache(launch, tokens) / (BASELINE_BANDWIDTH * device.bandwidth), limit)
