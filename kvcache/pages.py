"""Tensors that share a dimension of pages: handed out lowest first, grown when none is free, given back in the end.

| used | free | used | used |   free   |      capacity grows by an eighth when it is too small, or as reserved,
└────────── extent ─────────┘          │      and shrinks to the extent when that is less than half of it
└────────────── capacity ──────────────┘
"""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

GROWTH = 8
"""Extents are multiples of this, so that few shapes of products ever occur."""


class PageArena:
    """Named tensors with a common page dimension.

    ``arena["keys"]`` is the tensor up to the extent; a page keeps its number while it is used. A page that is taken is
    zero: a slot that is masked out still takes part in a product, and 0 times what a row left there might be NaN.
    """

    def __init__(self, dim: int, device: torch.device, shapes: dict[str, tuple[tuple[int, ...], torch.dtype]]) -> None:
        """``shapes`` without the page dimension, which is inserted at ``dim``."""
        self._dim = dim
        self._tensors = {
            name: torch.zeros(*shape[:dim], 0, *shape[dim:], dtype=dtype, device=device)
            for name, (shape, dtype) in shapes.items()
        }
        self._used = torch.zeros(0, dtype=torch.bool, device=device)
        self.extent = 0

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name].narrow(self._dim, 0, self.extent)

    @property
    def used(self) -> Tensor:
        """[extent] bool"""
        return self._used[: self.extent]

    def reserve(self, count: int, spare: int = 0) -> None:
        """Make room for this many pages; where that takes growing, which copies everything, by ``spare`` at least."""
        missing = count - int((~self._used).sum())
        if missing > 0:
            self._resize(_rounded(len(self._used) + max(missing, spare)))

    def take(self, count: int) -> Tensor:
        """Numbers of ``count`` free pages, ascending; their contents are zero."""
        self.reserve(count, len(self._used) // 8)
        pages = (~self._used).nonzero().flatten()[:count]
        self._used[pages] = True
        self._measure()
        return pages

    def give_back(self, pages: Tensor) -> None:
        for tensor in self._tensors.values():
            tensor.index_fill_(self._dim, pages, 0)
        self._used[pages] = False
        self._measure()
        if self.extent < len(self._used) // 2 or not self.extent:
            self._resize(self.extent)

    @property
    def nbytes(self) -> int:
        """Of the whole capacity."""
        return sum(tensor.nbytes for tensor in self._tensors.values())

    @property
    def page_bytes(self) -> int:
        return self.nbytes // max(len(self._used), 1)

    def bytes_of(self, name: str) -> int:
        """Bytes of one page of one tensor."""
        tensor = self._tensors[name]
        return tensor.itemsize * prod(size for dim, size in enumerate(tensor.shape) if dim != self._dim)

    def _measure(self) -> None:
        self.extent = _rounded(int(self._used.nonzero().max()) + 1) if bool(self._used.any()) else 0

    def _resize(self, pages: int) -> None:
        remain = min(pages, len(self._used))
        for name, old in self._tensors.items():
            shape = list(old.shape)
            shape[self._dim] = pages
            new = old.new_empty(shape)
            new.narrow(self._dim, 0, remain).copy_(old.narrow(self._dim, 0, remain))
            new.narrow(self._dim, remain, pages - remain).zero_()
            self._tensors[name] = new
        used = self._used.new_zeros(pages)
        used[:remain] = self._used[:remain]
        self._used = used


def _rounded(pages: int) -> int:
    return -(-pages // GROWTH) * GROWTH
