"""Pools whose layers are stored apart: what a family says of one layer is all that it has to say."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from kvcache.layout import LayerLayout
from kvcache.pages import PageArena
from kvcache.pool import Compressed, FamilyPool, MemoryBreakdown, PoolShape


class LayerStore(ABC):
    """One growing layer of all rows."""

    rows_on_host: ClassVar[bool] = False
    """Where it is told its rows: there, or on the pool's device."""

    def __init__(self, layout: LayerLayout, shape: PoolShape) -> None:
        self.layout, self.shape = layout, shape
        self.heads, self.group = layout.kv_heads, layout.group

    def write_rows(self, coming: Mapping[int, Compressed], layer: int) -> None:
        """Copy what prompts leave in growing layer ``layer``."""
        for row, compressed in coming.items():
            self.write(row, compressed, layer)

    def write(self, row: int, compressed: Compressed, layer: int) -> None:
        """The same for one row, where a family writes them one by one."""
        raise NotImplementedError

    @abstractmethod
    def append(self, rows: Tensor, keys: Tensor, values: Tensor) -> None:
        """One token per row. rows [r], keys [r, H_kv, d], values [r, H_kv, d_v]"""

    @abstractmethod
    def attend(self, rows: Tensor, queries: Tensor, scale: float) -> Tensor:
        """Attention of the tokens just appended; maintenance that follows it. [r, H_q, d] -> [r, H_q, d_v]"""

    def free_rows(self, rows: Sequence[int]) -> None:
        """Give back what these rows hold."""
        for row in rows:
            self.free(row)

    def free(self, row: int) -> None:
        """The same for one row, where a family frees them one by one."""
        raise NotImplementedError

    @abstractmethod
    def memory(self, row: int) -> MemoryBreakdown: ...

    def peak_held(self, row: int) -> int:
        return self.memory(row).held

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Of all tensors, free space included."""

    def queries_by_row(self, rows: Tensor, queries: Tensor) -> Tensor:
        """[r, H_q, d] -> [R, H_kv, G, d], zero for rows that have none now."""
        by_row = queries.new_zeros(self.shape.rows, self.heads, self.group, queries.shape[-1])
        by_row[rows] = queries.unflatten(1, (self.heads, self.group))
        return by_row

    def by_head(self, rows: Tensor) -> Tensor:
        """Owners of the pages of these rows, one per KV head: [p] -> [p * H_kv]"""
        return (rows[:, None] * self.heads + torch.arange(self.heads, device=rows.device)).flatten()


class LayeredPool(FamilyPool):
    """One store per growing layer. Layers do not see each other, so a step may pass them in any order."""

    def __init__(self, shape: PoolShape, stores: Sequence[LayerStore]) -> None:
        super().__init__(shape)
        self.stores = stores

    def _store(self, coming: Mapping[int, Compressed]) -> None:
        for layer, store in enumerate(self.stores):
            store.write_rows(coming, layer)

    def _free(self, rows: Sequence[int]) -> None:
        for store in self.stores:
            store.free_rows(rows)

    def _feed(
        self,
        layer: int,
        rows: Tensor,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        positions: Tensor,
        scale: float,
        more: bool,
    ) -> Tensor:
        store = self.stores[layer]
        rows = rows if store.rows_on_host else rows.to(self.shape.device, non_blocking=True)
        store.append(rows, keys, values)
        return store.attend(rows, queries, scale)

    def memory(self, row: int) -> MemoryBreakdown:
        of_layers = (vars(store.memory(row)).values() for store in self.stores)
        return MemoryBreakdown(*map(sum, zip(*of_layers, strict=True)))

    def peak_held(self, row: int) -> int:
        """Layers hold as many tokens at every step, so their peaks come together."""
        return sum(store.peak_held(row) for store in self.stores)

    def allocated_bytes(self) -> int:
        return sum(store.nbytes for store in self.stores)


def in_order(arenas: Sequence[PageArena], heads: int) -> Tensor:
    """The used pages of all arenas, one entry per head: row by row, arena by arena, then by ``ordinal``.

    Pages of an arena have ``row`` and ``ordinal``; entries number them as joined partials do, page * heads + head.
    """
    rows, places, ordinals, entries = [], [], [], []
    before = 0
    for number, arena in enumerate(arenas):
        pages = arena.used.nonzero().flatten()
        rows.append(arena["row"][pages])
        places.append(torch.full_like(pages, number))
        ordinals.append(arena["ordinal"][pages])
        entries.append(before + pages)
        before += arena.extent
    row, place, ordinal, entry = (torch.cat(part) for part in (rows, places, ordinals, entries))
    longest = int(ordinal.max()) + 1 if len(ordinal) else 1
    ordered = entry[((row * len(arenas) + place) * longest + ordinal).argsort()]
    return (ordered[:, None] * heads + torch.arange(heads, device=ordered.device)).flatten()
