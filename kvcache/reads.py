"""What methods that keep the whole cache read of it: counted step by step, told as facts of a row."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class ReadCounts:
    """Sums over the steps of every row, for one layer, of a mean query head: tokens held and read, and elements of keys
    and values read, those that chose the tokens included, beside all that are held."""

    def __init__(self, rows: int, device: torch.device) -> None:
        self._sums = torch.zeros(rows, 5, dtype=torch.float64, device=device)

    def add(self, rows: Tensor, held: Tensor, read: Tensor, elements: Tensor, elements_held: Tensor) -> None:
        """[r] each."""
        parts = [torch.ones_like(held), held, read, elements, elements_held]
        self._sums[rows] += torch.stack([part.double() for part in parts], -1)

    def reset(self, row: int) -> None:
        self._sums[row] = 0

    def of(self, row: int) -> Tensor:
        return self._sums[row]


def read_facts(sums: Tensor) -> dict[str, Any]:
    """``sums`` [5] of all layers."""
    steps, held, read, elements, elements_held = sums.tolist()
    if not steps:
        return {}
    return {
        "tokens_held": round(held / steps, 2),
        "tokens_read": round(read / steps, 2),
        "elements_read_share": round(elements / elements_held, 4),
    }
