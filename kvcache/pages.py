"""Tensors that share a dimension of pages: handed out lowest first, grown when none is free, trimmed when half are."""

from __future__ import annotations

import torch
from torch import Tensor

GROWTH = 16
"""Pages come in multiples of this, so that few shapes of products ever occur."""


class PageArena:
    """Named tensors with a common page dimension.

    ``arena["keys"]`` is the tensor; a page keeps its number while it is used. New and trimmed space is zero, so what
    lies in free slots is finite.
    """

    def __init__(self, dim: int, device: torch.device, shapes: dict[str, tuple[tuple[int, ...], torch.dtype]]) -> None:
        """``shapes`` without the page dimension, which is inserted at ``dim``."""
        self._dim = dim
        self._tensors = {
            name: torch.zeros(*shape[:dim], 0, *shape[dim:], dtype=dtype, device=device)
            for name, (shape, dtype) in shapes.items()
        }
        self.used = torch.zeros(0, dtype=torch.bool, device=device)

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def take(self, count: int) -> Tensor:
        """Numbers of ``count`` free pages, ascending. Their contents are whatever their last user left."""
        free = (~self.used).nonzero().flatten()
        if len(free) < count:
            missing = max(count - len(free), len(self.used) // 4)
            self._resize(len(self.used) + -(-missing // GROWTH) * GROWTH)
            free = (~self.used).nonzero().flatten()
        pages = free[:count]
        self.used[pages] = True
        return pages

    def give_back(self, pages: Tensor) -> None:
        self.used[pages] = False
        last = int(self.used.nonzero().max()) + 1 if bool(self.used.any()) else 0
        kept = -(-last // GROWTH) * GROWTH
        if kept <= len(self.used) // 2:  # not at once: the next row is likely to want them
            self._resize(kept)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._tensors.values())

    def _resize(self, pages: int) -> None:
        remain = min(pages, len(self.used))
        for name, old in self._tensors.items():
            shape = list(old.shape)
            shape[self._dim] = pages
            new = old.new_empty(shape)
            new.narrow(self._dim, 0, remain).copy_(old.narrow(self._dim, 0, remain))
            new.narrow(self._dim, remain, pages - remain).zero_()
            self._tensors[name] = new
        used = self.used.new_zeros(pages)
        used[:remain] = self.used[:remain]
        self.used = used
