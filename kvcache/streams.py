"""Random streams that belong to what they are drawn for, whatever else is drawn, and on whichever device it is used."""

from __future__ import annotations

import hashlib

import torch


def stream(name: str) -> torch.Generator:
    """A generator on the CPU, the same for the same name."""
    digest = hashlib.sha256(name.encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
