"""The ragged family: full-precision tokens, any number of them per row, layer and KV head.

Serves the full cache and every method that evicts at the end of prefill. Tokens lie in pages of 64; a (row, head) owns
pages, appends to its last one and asks for another when that is full:

    keys [P, 64, d]   owner [P] = row * H_kv + head   ordinal [P] = the page's place in its owner's sequence
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from kvcache.kernels.owned_attention import attend_owned, fuses, pages_per_split
from kvcache.kernels.paged_attention import attend_pages, merge_pages
from kvcache.layered import LayeredPool, LayerStore
from kvcache.layout import LayerLayout
from kvcache.pages import Numbers, PageArena, to_device
from kvcache.pool import Compressed, MemoryBreakdown, PoolShape

PAGE = 64
WIDER = 8
"""Pages by which the kernels' table grows at least."""


@dataclass
class RaggedCompressed(Compressed):
    """``kept``: for every growing layer the kept positions of every KV head, ascending. [layers][H_kv] of [k] int64"""

    kept: list[list[Tensor]]


class RaggedPool(LayeredPool):
    """Pages of full-precision tokens."""

    def __init__(self, shape: PoolShape) -> None:
        super().__init__(shape, [LayerPages(layer, shape) for layer in shape.layers])


@dataclass(frozen=True)
class Kept:
    """What a row keeps of one layer: keys [H_kv, n, d], values [H_kv, n, d_v], and positions of every KV head,
    ascending, [H_kv] of [k] int64."""

    keys: Tensor
    values: Tensor
    positions: Sequence[Tensor]


class LayerPages(LayerStore):
    """The pages of one layer. ``more``: further tensors that every page has.

    Who owns which page, and how many tokens there are, is kept on the host: a step asks the device for nothing.
    """

    rows_on_host = True

    def __init__(
        self, layout: LayerLayout, shape: PoolShape, more: dict[str, tuple[tuple[int, ...], torch.dtype]] | None = None
    ) -> None:
        super().__init__(layout, shape)
        self.arena = PageArena(
            0,
            shape.device,
            {
                "keys": ((PAGE, layout.key_dim), shape.dtype),
                "values": ((PAGE, layout.value_dim), shape.dtype),
                **(more or {}),
            },
        )
        owners = shape.rows * self.heads
        self.lengths = np.zeros(owners, dtype=np.int64)
        """[R * H_kv] tokens of every owner."""
        self._tail = np.zeros(owners, dtype=np.int64)
        self._owner = self._ordinal = np.zeros(0, dtype=np.int64)
        self._tables: _Tables | None = None
        self._asked: tuple[Tensor, Numbers, Tensor] | None = None
        self._fused = fuses(layout.key_dim, layout.value_dim, shape.device)
        self._page_table: Tensor | None = None
        """[R * H_kv, width] int32, every owner's pages in their order: for the kernels, once they are asked."""

    def write_rows(self, coming: Mapping[int, Compressed], layer: int) -> None:
        self.lay({row: self.kept_of(compressed, layer) for row, compressed in coming.items()})

    def kept_of(self, compressed: Compressed, layer: int) -> Kept:
        assert isinstance(compressed, RaggedCompressed)
        content = compressed.prefill.layers[layer]
        return Kept(content.keys, content.values, compressed.kept[layer])

    def lay(self, coming: Mapping[int, Kept]) -> None:
        """Copy the kept tokens of rows into pages of their own."""
        owners = np.concatenate([self.owners_of(row) for row in coming])
        lengths = np.array([len(positions) for kept in coming.values() for positions in kept.positions])
        counts = -(-lengths // PAGE)
        owner, ordinal = _enumerated(counts)
        pages = self._take(owners[owner], ordinal)
        of_token, place = _enumerated(lengths)
        slots = pages[(counts.cumsum() - counts)[of_token] + place // PAGE] * PAGE + place % PAGE
        into, head = (to_device(part, self.shape.device) for part in (slots, of_token % self.heads))
        first = 0
        for kept in coming.values():
            tokens = torch.cat(list(kept.positions))
            some = slice(first, first + len(tokens))
            for name, source in (("keys", kept.keys), ("values", kept.values)):
                self.arena[name].flatten(0, 1)[into[some]] = source[head[some], tokens]
            first = some.stop
        self.lengths[owners] = lengths
        last = ordinal == counts[owner] - 1
        self._tail[owners[owner[last]]] = pages[last]

    def append(self, rows: Tensor, keys: Tensor, values: Tensor) -> None:
        """One token per row. keys [r, H_kv, d]"""
        owners = self.owners(rows)[0]
        lengths = self.lengths[owners]
        full = owners[lengths % PAGE == 0]
        if len(full):
            self._tail[full] = self._take(full, self.lengths[full] // PAGE)
        self.put(self._tail[owners] * PAGE + lengths % PAGE, keys, values)
        self.lengths[owners] += 1

    def put(self, slots: Numbers, keys: Tensor, values: Tensor) -> None:
        """A token of each row and KV head into its slot, slots being numbered page by page. keys [r, H_kv, d]"""
        into = to_device(slots, self.shape.device)
        self.arena["keys"].flatten(0, 1)[into] = keys.flatten(0, 1)
        self.arena["values"].flatten(0, 1)[into] = values.flatten(0, 1)

    def attend(self, rows: Tensor, queries: Tensor, scale: float) -> Tensor:
        """queries [r, H_q, d] -> [r, H_q, d_v]"""
        if self._fused:
            return self._attend_fused(rows, queries, scale)
        owners, owner = self.owners(rows)[1], self.tables.owner
        grouped = self.queries_by_row(rows, queries).flatten(0, 1)
        partials = attend_pages(grouped[owner], self.arena["keys"], self.arena["values"], self.filled(), scale)
        merged = merge_pages(partials, owner, self.tables.order, len(self.lengths))
        output = merged.output[owners].to(queries.dtype)
        return output.unflatten(0, (len(rows), self.heads)).flatten(1, 2)

    def _attend_fused(self, rows: Tensor, queries: Tensor, scale: float) -> Tensor:
        owners, owners_there = self.owners(rows)
        if self._page_table is None:
            self._page_table = torch.zeros(len(self.lengths), 0, dtype=torch.int32, device=self.shape.device)
            self._enter(self.tables.order_here)
        output = attend_owned(
            queries.unflatten(1, (self.heads, self.group)).flatten(0, 1),
            owners_there.int(),
            self._page_table,
            to_device(self.lengths.astype(np.int32), self.shape.device),
            self.arena["keys"],
            self.arena["values"],
            scale,
            longest=int(-(-self.lengths[owners].max() // PAGE)),
            split=pages_per_split(self.shape.rows),
        )
        return output.unflatten(0, (len(rows), self.heads)).flatten(1, 2)

    def filled(self) -> Tensor:
        """Slots that hold a token. [P, 64] bool"""
        begins, device = self.tables.begins, self.shape.device
        tokens = to_device(self.lengths[self._owner[: len(begins)]] - begins, device)
        return torch.arange(PAGE, device=device) < tokens[:, None]

    def free_rows(self, rows: Sequence[int]) -> None:
        self.arena.give_back_here(self.pages_of(*rows))
        for row in rows:
            self.lengths[self.owners_of(row)] = 0
        self._tables = None

    def memory(self, row: int) -> MemoryBreakdown:
        """Tokens held; the unfilled rest of their pages is slack."""
        used, allocated = self.row_bytes(row)
        return MemoryBreakdown(full_precision=used, slack=allocated - used)

    @property
    def nbytes(self) -> int:
        return self.arena.nbytes + (0 if self._page_table is None else self._page_table.nbytes)

    def row_bytes(self, row: int) -> tuple[int, int]:
        """Bytes of the row's tokens, and of the pages it owns."""
        lengths = self.lengths[self.owners_of(row)]
        token = sum(self.arena[name].shape[-1] * self.arena[name].itemsize for name in ("keys", "values"))
        return int(lengths.sum()) * token, int((-(-lengths // PAGE)).sum()) * PAGE * token

    def pages_of(self, *rows: int) -> Numbers:
        """The pages of rows, head by head in the order of their tokens."""
        order = self.tables.order_here
        return order[np.isin(self._owner[order] // self.heads, rows)]

    def owners_of(self, row: int) -> Numbers:
        """[H_kv]"""
        return np.arange(row * self.heads, (row + 1) * self.heads)

    def owners(self, rows: Tensor) -> tuple[Numbers, Tensor]:
        """Of rows [r], [r * H_kv] on the host and on the device. The same tensor comes step after step."""
        if self._asked is None or self._asked[0] is not rows:
            owners = (rows.numpy()[:, None] * self.heads + np.arange(self.heads)).flatten()
            self._asked = rows, owners, to_device(owners, self.shape.device)
        return self._asked[1:]

    def _take(self, owners: Numbers, ordinals: Numbers) -> Numbers:
        pages = self.arena.take_here(len(owners))
        if self.arena.extent > len(self._owner):
            more = (0, self.arena.extent - len(self._owner))
            self._owner, self._ordinal = np.pad(self._owner, more), np.pad(self._ordinal, more)
        self._owner[pages], self._ordinal[pages] = owners, ordinals
        self._tables = None
        self._enter(pages)
        return pages

    def _enter(self, pages: Numbers) -> None:
        """Put pages into the kernels' table."""
        if self._page_table is None or not len(pages):
            return
        owners, ordinals = self._owner[pages], self._ordinal[pages]
        missing = int(ordinals.max()) + 1 - self._page_table.shape[1]
        if missing > 0:
            self._page_table = pad(self._page_table, (0, max(missing, WIDER)))
        owner, ordinal, page = (to_device(part, self.shape.device) for part in (owners, ordinals, pages))
        self._page_table[owner, ordinal] = page.int()

    @property
    def tables(self) -> _Tables:
        """Found when asked for: rows come and go many at a time."""
        if self._tables is None:
            device, extent = self.shape.device, self.arena.extent
            owner, ordinal, used = self._owner[:extent], self._ordinal[:extent], self.arena.used_here
            pages = np.flatnonzero(used)
            pages = pages[np.lexsort((ordinal[pages], owner[pages]))]
            begins = np.where(used, ordinal * PAGE, np.iinfo(np.int64).max)
            self._tables = _Tables(to_device(owner.copy(), device), begins, pages, to_device(pages, device))
        return self._tables


@dataclass(frozen=True)
class _Tables:
    """Which page is whose: ``owner`` [P], of a free page any, and ``order``, the used pages, owner by owner, each
    owner's in the order of its tokens; on the host ``begins`` [P], which of its owner's tokens a page begins with, a
    number above all others where it is free."""

    owner: Tensor
    begins: Numbers
    order_here: Numbers
    order: Tensor


def _enumerated(counts: Numbers) -> tuple[Numbers, Numbers]:
    """Every thing of all owners in turn: whose it is, and which of that owner's. [o] -> [sum], [sum]"""
    owner = np.repeat(np.arange(len(counts)), counts)
    return owner, np.arange(len(owner)) - (counts.cumsum() - counts)[owner]
