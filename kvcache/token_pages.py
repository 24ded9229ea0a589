"""The whole cache of one layer, in pages that hold all KV heads, for methods that read a part of it at each step.

keys [P, H_kv, T, d]   row [P]   ordinal [P] = the page's place in its row     table [R, pages] = where each page is
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvcache.kernels.paged_attention import attend_pages
from kvcache.layered import in_order
from kvcache.layout import LayerLayout
from kvcache.pages import PageArena
from kvcache.pool import PoolShape

GATHERED_AT_ONCE = 2**22
"""Elements of keys copied together for one product: bounds what a step needs; results do not depend on it."""


class TokenPages:
    """Full-precision tokens of all rows. ``summaries``: further tensors that every page has."""

    def __init__(
        self,
        layout: LayerLayout,
        shape: PoolShape,
        page: int,
        summaries: dict[str, tuple[tuple[int, ...], torch.dtype]] | None = None,
    ) -> None:
        self.page, self.heads = page, layout.kv_heads
        self.summaries = list(summaries or {})
        self.arena = PageArena(
            0,
            shape.device,
            {
                "keys": ((layout.kv_heads, page, layout.key_dim), shape.dtype),
                "values": ((layout.kv_heads, page, layout.value_dim), shape.dtype),
                "row": ((), torch.int64),
                "ordinal": ((), torch.int64),
                **(summaries or {}),
            },
        )
        self.tokens = torch.zeros(shape.rows, dtype=torch.int64, device=shape.device)
        self.table = torch.zeros(shape.rows, 0, dtype=torch.int64, device=shape.device)
        self._arrange()

    def write(self, row: int, keys: Tensor, values: Tensor) -> Tensor:
        """Copy a prompt; its pages. keys [H_kv, n, d]"""
        position = torch.arange(keys.shape[1], device=keys.device)
        ordinals = position[:: self.page] // self.page
        pages = self._take(torch.full_like(ordinals, row), ordinals)
        for name, source in (("keys", keys), ("values", values)):
            self.arena[name][pages[position // self.page], :, position % self.page] = source.transpose(0, 1)
        self.tokens[row] = len(position)
        return pages

    def append(self, rows: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """One token per row; its page, and whether it is the first there. keys [r, H_kv, d] -> [r], [r] bool"""
        ordinal, offset = self.tokens[rows] // self.page, self.tokens[rows] % self.page
        first = offset == 0
        if bool(first.any()):
            self._take(rows[first], ordinal[first])
        pages = self.table[rows, ordinal]
        self.arena["keys"][pages, :, offset] = keys
        self.arena["values"][pages, :, offset] = values
        self.tokens[rows] += 1
        return pages, first

    def free(self, row: int) -> None:
        self.arena.give_back(self.pages_of(row))
        self.tokens[row] = 0
        self._arrange()

    def pages_of(self, row: int) -> Tensor:
        return self.table[row, : -(-int(self.tokens[row]) // self.page)]

    def filled(self) -> Tensor:
        """[P, T] bool: slots that hold a token."""
        left = (self.tokens[self.arena["row"]] - self.arena["ordinal"] * self.page) * self.arena.used
        return torch.arange(self.page, device=left.device) < left[:, None]

    def by_row(self, rows: Tensor, of_pages: Tensor, fill: float, least: int) -> Tensor:
        """Lay figures of pages out by row: [P, H_kv, G, x] -> [r, H_kv, G, pages * x]; at least ``least`` of them."""
        pages = self.table[rows]
        there = torch.arange(pages.shape[1], device=rows.device) * self.page < self.tokens[rows, None]
        laid = torch.where(there[..., None, None, None], of_pages[pages], fill)
        short = -(-least // of_pages.shape[-1]) - pages.shape[1]
        return pad(laid, (0, 0, 0, 0, 0, 0, 0, max(short, 0)), value=fill).permute(0, 2, 3, 1, 4).flatten(3)

    def attend_some(self, rows: Tensor, queries: Tensor, heads: Tensor, chosen: Tensor, scale: float) -> Tensor:
        """Exact attention over chosen tokens only, the same number for all; copied together, product by product.

        Args:
            rows, heads: [o] the row and the KV head of each group of queries.
            queries: [o, G, d].
            chosen: [o, k] ascending positions; those beyond a row's tokens are none.

        Returns:
            [o, G, d_v] fp32
        """
        outputs, at_once = [], max(1, GATHERED_AT_ONCE // (chosen.shape[1] * queries.shape[-1]))
        for start in range(0, len(rows), at_once):
            some = slice(start, start + at_once)
            row, head, position = rows[some, None], heads[some, None], chosen[some]
            there = position < self.tokens[row]
            position = torch.where(there, position, 0)
            pages = self.table[row, position // self.page]
            keys, values = (self.arena[name][pages, head, position % self.page] for name in ("keys", "values"))
            part = attend_pages(queries[some], keys, values, there, scale)
            outputs.append(part.output / part.mass)
        return torch.cat(outputs)

    def row_bytes(self, row: int) -> tuple[int, int, int]:
        """Bytes of the row's tokens, of the summaries of its pages, and of the pages it owns."""
        pages, arena = len(self.pages_of(row)), self.arena
        slot = (arena.bytes_of("keys") + arena.bytes_of("values")) // self.page
        summaries = pages * sum(arena.bytes_of(name) for name in self.summaries)
        return int(self.tokens[row]) * slot, summaries, pages * arena.page_bytes

    def _take(self, rows: Tensor, ordinals: Tensor) -> Tensor:
        pages = self.arena.take(len(rows))
        self.arena["row"][pages], self.arena["ordinal"][pages] = rows, ordinals
        self._arrange()
        return pages

    def _arrange(self) -> None:
        used = self.arena.used.nonzero().flatten()
        rows, ordinals = self.arena["row"][used], self.arena["ordinal"][used]
        self.table = self.table.new_zeros(len(self.table), int(ordinals.max()) + 1 if len(used) else 0)
        self.table[rows, ordinals] = used
        self.owners = (self.arena["row"][:, None] * self.heads + torch.arange(self.heads, device=rows.device)).flatten()
        """[P * H_kv] row * H_kv + head, of pages taken apart by head."""
        self.order = in_order([self.arena], self.heads)
        """The used ones, owner by owner."""
