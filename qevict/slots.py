"""Window slots: pages of s slots in every layer, with a table that says which window is in which slot."""

from __future__ import annotations

import torch
from torch import Tensor

from kvcache.pages import PageArena
from qevict.capacity import slots_per_page

FREE, SINK = -1, -2
"""What a slot holds instead of a window number."""

Where = tuple[Tensor, Tensor, Tensor]
"""Layer, page and place of some slots, [K] each."""


class WindowSlots:
    """Slots of one tier, for all rows and layers. A row knows its slots by number, 0 ... over its pages in order.

    ``score`` is what attention adds to, and what ranks the window; unless a ``norm`` is kept: that ranks it, and
    ``score`` is only what came since the last event.
    """

    def __init__(
        self,
        layers: int,
        window: int,
        device: torch.device,
        shapes: dict[str, tuple[tuple[int, ...], torch.dtype]],
        norm: bool = False,
    ) -> None:
        self.per_page = slots_per_page(window)
        # The table holds window + 1, so that the zeros of new pages mean FREE.
        shapes |= {"window": ((self.per_page,), torch.int32), "score": ((self.per_page,), torch.float32)}
        self._scores = ["score"]
        if norm:
            shapes |= {"norm": ((self.per_page,), torch.float32)}
            self._scores.append("norm")
        stacked = {name: ((layers, *dims), dtype) for name, (dims, dtype) in shapes.items()}
        self.arena = PageArena(1, device, stacked)

    def __getitem__(self, name: str) -> Tensor:
        return self.arena[name]

    def __len__(self) -> int:
        """Pages up to the last that is used, free ones included."""
        return self.arena.extent

    def take(self, slots: int) -> Tensor:
        """Pages for this many slots, all of them free."""
        return self.arena.take(self.pages(slots))

    def pages(self, slots: int) -> int:
        return -(-slots // self.per_page)

    def give_back(self, pages: Tensor) -> None:
        self.arena.give_back(pages)

    def table(self, pages: Tensor, layers: slice = slice(None)) -> tuple[Tensor, Tensor]:
        """Window numbers, FREE and SINK included, and what ranks them, of a row's slots. [l, slots] each"""
        windows, scores = (self.arena[name][layers][:, pages].flatten(1) for name in ("window", self._scores[-1]))
        return windows - 1, scores

    def at(self, pages: Tensor, layers: Tensor | int, slots: Tensor) -> Where:
        """Where a row's slots are."""
        layer = layers if isinstance(layers, Tensor) else torch.full_like(slots, layers)
        return layer, pages[slots // self.per_page], slots % self.per_page

    def occupy(self, where: Where, windows: Tensor, scores: Tensor | float) -> None:
        """Put windows with these ranks into free slots."""
        self.arena["window"][where] = windows.int() + 1
        self.arena[self._scores[-1]][where] = scores

    def clear(self, where: Where) -> None:
        for name in ("window", *self._scores):
            self.arena[name][where] = 0

    @property
    def score_bytes(self) -> int:
        """Of one slot."""
        return sum(self.arena[name].itemsize for name in self._scores)
