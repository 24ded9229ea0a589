"""Memory of a device: the peak that a plan predicts from a model's configuration, and the peak that was measured.

On a GPU the measured figure is the allocator's. On a CPU it is the growth of the process's resident memory since the
model began to load, so it counts what the operating system counts.
"""

from __future__ import annotations

import ctypes
import gc
from pathlib import Path
from typing import TYPE_CHECKING

from kvcache.bounded import Growth, grown
from kvcache.budget import Base, Budget
from kvcache.method import method_class
from workers.architecture import copied_expert_weights, mlp_width
from workers.description import ELEMENT_BYTES, ModelDescription
from workers.job import PREFILLED_BYTES, PROMPTS_AT_ONCE, CellSpec, EngineSpec

if TYPE_CHECKING:
    import torch

RUNTIME_BYTES = 128 * 2**20
"""Libraries that come with a model, and what their kernels keep."""

HELD_SLACK = 1.25
"""Of prompts' caches: freed pieces between them that the allocator has not given back."""

FUTURES = 16
"""Rows of a lookahead batch: linear layers keep a state for each."""

POOL_SLACK = 1.15
"""Of pools: pages are handed out whole, and arenas grow by an eighth."""

LACKING = ("can't allocate memory", "CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
"""What torch says of memory that its own allocator did not ask for, or on a CPU."""


class OutOfMemory(RuntimeError):
    """A job held more at once than its device has room for: less of it may fit."""


def lacks_memory(error: BaseException) -> bool:
    """Whether this is torch's or Python's way to say that there is no memory left, on a GPU or on the host."""
    known = isinstance(error, (MemoryError, OutOfMemory)) or type(error).__name__ == "OutOfMemoryError"
    return known or any(words in str(error) for words in LACKING)


class PeakMeter:
    """Peak bytes since it was made."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        if device.type == "cuda":
            import torch

            torch.cuda.reset_peak_memory_stats(device)
        else:
            _reset_resident_peak()
            self._before = _status("VmRSS")

    def restart(self) -> None:
        """Forget the peak, not what memory is counted from."""
        if self._device.type == "cuda":
            import torch

            torch.cuda.reset_peak_memory_stats(self._device)
        else:
            _reset_resident_peak()

    def peak_bytes(self) -> int:
        """Of a GPU all that is allocated, of a CPU what the process holds more than when the meter was made."""
        if self._device.type == "cuda":
            import torch

            return int(torch.cuda.max_memory_allocated(self._device))
        return max(0, _status("VmHWM") - self._before)


def predict_peak(
    description: ModelDescription,
    engine: EngineSpec,
    cells: list[CellSpec],
    context: int,
    max_new_tokens: int,
    prompts: int,
    base: Base = "prompt",
    growth: Growth = "grow",
) -> int:
    """Peak bytes while a job with these cells and this many prompts runs: weights, prompts prefilled ahead, a full
    decode batch. Slack factors and workspace are those of a CPU; a GPU needs less.

    ``context`` 0 stands for the task's own lengths, which are not known here: half of the model's positions.
    """
    prompt = max(1, (context or description.max_positions // 2) - max_new_tokens)
    weights = description.parameters * ELEMENT_BYTES[description.dtype]
    layout = description.layout
    forks = [_fork_bytes(description, cell, prompt, max_new_tokens, base, growth) for cell in cells]
    if not forks:
        return weights + RUNTIME_BYTES
    one = layout.full_bytes(prompt) + layout.sliding_bytes(prompt) + layout.linear_bytes
    groups = -(-engine.row_width // (len(forks) * PROMPTS_AT_ONCE))
    ahead = min(prompts, groups * PROMPTS_AT_ONCE, PREFILLED_BYTES // layout.full_bytes(prompt) + 1)
    rows = sum(forks) / len(forks) * min(engine.row_width, prompts * len(forks))
    rows += layout.sliding_bytes(description.max_positions) * engine.row_width
    rows += layout.linear_bytes * (engine.row_width + FUTURES)
    transient = _transient_bytes(description, engine, prompt)
    return int(weights + RUNTIME_BYTES + ahead * one * HELD_SLACK + rows * POOL_SLACK + transient)


def _fork_bytes(
    description: ModelDescription, cell: CellSpec, prompt: int, max_new_tokens: int, base: Base, growth: Growth
) -> int:
    """A row at its largest: what the budget allows, the generated tokens where the method adds them, its workspace."""
    method = grown(method_class(cell.method)(**cell.settings), growth)
    budget = Budget.parse(cell.budget).resolve(prompt, max_new_tokens, base, description.layout)
    return method.peak_bytes(budget, description.layout) + method.workspace_bytes(budget, description.layout)


def _transient_bytes(description: ModelDescription, engine: EngineSpec, prompt: int) -> int:
    """What one layer of one prefill chunk, and one step's logits, need beside it."""
    config, layer = description.config, description.layout.layers[description.layout.growing[0]]
    chunk, element = min(engine.prefill_chunk, prompt), ELEMENT_BYTES[description.dtype]
    mlp = chunk * (3 * mlp_width(config) + 4 * config["hidden_size"]) * element
    mlp = max(mlp, copied_expert_weights(config) * element)
    # Attention's output, and what column sums make of queries and keys, or a block of their scores in fp32.
    attention = 5 * prompt * layer.query_heads * layer.key_dim * element + 128 * prompt * layer.query_heads * 4
    logits = engine.row_width * description.vocabulary * element
    return mlp + attention + 2 * logits


def return_free_memory() -> None:
    """Give back what the C allocator keeps after tensors of many sizes were freed: gigabytes over a night."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def leave_nothing_behind(device: torch.device) -> None:
    """Free what only cycles still hold, and give back what allocators keep of it."""
    gc.collect()
    return_free_memory()
    if device.type == "cuda":
        import torch

        torch.cuda.empty_cache()


def _reset_resident_peak() -> None:
    """Linux forgets the peak of a process that writes 5 here."""
    Path("/proc/self/clear_refs").write_text("5")


def _status(name: str) -> int:
    """A size from the process's status, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {name}")
