"""Tensors that share a dimension of pages: handed out lowest first, grown when none is free, given back in the end.

| used | free | used | used |   free   |      capacity grows by an eighth when it is too small, or as reserved,
└────────── extent ─────────┘          │      and shrinks to the extent when that is less than half of it
└────────────── capacity ──────────────┘
"""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

Numbers = np.ndarray[Any, np.dtype[np.int64]]
"""Of pages, owners or tokens, on the host."""

GROWTH = 8
"""Extents are multiples of this, so that few shapes of products ever occur."""


class PageArena:
    """Named tensors with a common page dimension.

    ``arena["keys"]`` is the tensor up to the extent; a page keeps its number while it is used. A page that is taken is
    zero: a slot that is masked out still takes part in a product, and 0 times what a row left there might be NaN.

    Which pages are used is known on the host, so taking some waits for no device.
    """

    def __init__(self, dim: int, device: torch.device, shapes: dict[str, tuple[tuple[int, ...], torch.dtype]]) -> None:
        """``shapes`` without the page dimension, which is inserted at ``dim``."""
        self._dim = dim
        self._tensors = {
            name: torch.zeros(*shape[:dim], 0, *shape[dim:], dtype=dtype, device=device)
            for name, (shape, dtype) in shapes.items()
        }
        self._device = device
        self._used = np.zeros(0, dtype=bool)
        self._used_there: Tensor | None = None
        self.extent = 0

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name].narrow(self._dim, 0, self.extent)

    @property
    def used(self) -> Tensor:
        """[extent] bool"""
        if self._used_there is None:
            self._used_there = to_device(self.used_here, self._device)
        return self._used_there

    @property
    def used_here(self) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """The same, on the host."""
        return self._used[: self.extent]

    def reserve(self, count: int, spare: int = 0) -> None:
        """Make room for this many pages; where that takes growing, which copies everything, by ``spare`` at least."""
        missing = count - int(np.count_nonzero(~self._used))
        if missing > 0:
            self._resize(_rounded(len(self._used) + max(missing, spare)))

    def take(self, count: int) -> Tensor:
        """Numbers of ``count`` free pages, ascending; their contents are zero."""
        return to_device(self.take_here(count), self._device)

    def take_here(self, count: int) -> Numbers:
        """The same, on the host."""
        self.reserve(count, len(self._used) // 8)
        pages = np.flatnonzero(~self._used)[:count]
        self._used[pages] = True
        self._measure()
        return pages

    def give_back(self, pages: Tensor) -> None:
        self.give_back_here(pages.cpu().numpy())

    def give_back_here(self, pages: Numbers) -> None:
        """The same, from the host."""
        there = to_device(pages, self._device)
        for tensor in self._tensors.values():
            tensor.index_fill_(self._dim, there, 0)
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
        taken = np.flatnonzero(self._used)
        self.extent = _rounded(int(taken[-1]) + 1) if len(taken) else 0
        self._used_there = None

    def _resize(self, pages: int) -> None:
        remain = min(pages, len(self._used))
        for name, old in self._tensors.items():
            shape = list(old.shape)
            shape[self._dim] = pages
            new = old.new_empty(shape)
            new.narrow(self._dim, 0, remain).copy_(old.narrow(self._dim, 0, remain))
            new.narrow(self._dim, remain, pages - remain).zero_()
            self._tensors[name] = new
        used = np.zeros(pages, dtype=bool)
        used[:remain] = self._used[:remain]
        self._used = used


def to_device(numbers: np.ndarray[Any, Any], device: torch.device) -> Tensor:
    """Without waiting for the device."""
    return torch.from_numpy(numbers).to(device, non_blocking=True)


def _rounded(pages: int) -> int:
    return -(-pages // GROWTH) * GROWTH
