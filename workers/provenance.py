"""Where numbers come from: the device, the libraries, and what of them can move the last bits."""

from __future__ import annotations

import json
import platform
import socket
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

ARITHMETIC = 3
"""Of the engine's own prefill and attention: raised when they may give all rows other bits."""
PACKAGES = ("kvsweep", "torch", "transformers", "ray", "mlflow")


def provenance(device: torch.device) -> dict[str, str]:
    """Row fields that all rows of an actor share.

    ``numerics`` names what decides the bits of a product: rows that differ in it are never averaged together.
    """
    import torch

    from workers.flash import flash_attn_func

    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        numerics = f"{name}, torch {torch.__version__}"
        if flash_attn_func():
            numerics += f", flash_attn {metadata.version('flash_attn')}"
    else:
        name = _cpu_name()
        kernels = f"{torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads"
        numerics = f"{name}, torch {torch.__version__}, {kernels}"
    numerics += f", engine {ARITHMETIC}"
    return {
        "device": name,
        "node": socket.gethostname(),
        "numerics": numerics,
        "versions": json.dumps(versions(), sort_keys=True),
    }


def versions() -> dict[str, str]:
    """Of this project, Python, and the libraries that matter here, where they are installed."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def _cpu_name() -> str:
    facts = Path("/proc/cpuinfo")
    if facts.is_file():
        for line in facts.read_text().splitlines():
            if line.startswith("model name"):
                return " ".join(line.partition(":")[2].split())
    return platform.processor() or platform.machine()
