"""The family of Quest (Tang et al., arXiv 2406.10774): the whole cache, of which each query head reads its best pages.

    page: keys of T tokens, and channel by channel their minimum m and maximum M
    bound = Σ_j max(q_j m_j, q_j M_j)  >=  q · k   for every key k of the page

The bound needs two vectors per page. The pages with the highest ones are read, the newest always among them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvcache.kernels.paged_attention import attend_pages, merge_pages
from kvcache.layered import LayeredPool, LayerStore
from kvcache.layout import LayerLayout
from kvcache.pool import Compressed, MemoryBreakdown, PoolShape
from kvcache.reads import ReadCounts, read_facts
from kvcache.select import rank
from kvcache.token_pages import TokenPages


class PageReadPool(LayeredPool):
    """``pages`` of ``page`` tokens are read in all growing layers but the first ``dense`` ones, which read all."""

    def __init__(self, shape: PoolShape, page: int, pages: int, dense: int) -> None:
        self.layers = [
            _PageReads(layout, shape, page, None if layer < dense else pages)
            for layer, layout in enumerate(shape.layers)
        ]
        super().__init__(shape, self.layers)

    def facts(self, row: int) -> dict[str, Any]:
        return read_facts(torch.stack([layer.counts.of(row) for layer in self.layers]).sum(0))


class _PageReads(LayerStore):
    def __init__(self, layout: LayerLayout, shape: PoolShape, page: int, pages: int | None) -> None:
        """``pages``: how many a step reads; None for all."""
        super().__init__(layout, shape)
        self.size, self.count = page, pages
        bound: tuple[tuple[int, ...], torch.dtype] = (layout.kv_heads, layout.key_dim), shape.dtype
        self.pages = TokenPages(layout, shape, page, {"low": bound, "high": bound})
        self.counts = ReadCounts(shape.rows, shape.device)

    def write(self, row: int, compressed: Compressed, layer: int) -> None:
        content = compressed.prefill.layers[layer]
        pages, arena = self.pages.write(row, content.keys, content.values), self.pages.arena
        filled = self.pages.filled()[pages, None, :, None]
        arena["low"][pages] = arena["keys"][pages].masked_fill(~filled, torch.inf).amin(2)
        arena["high"][pages] = arena["keys"][pages].masked_fill(~filled, -torch.inf).amax(2)
        self.counts.reset(row)

    def append(self, rows: Tensor, keys: Tensor, values: Tensor) -> None:
        pages, first = self.pages.append(rows, keys, values)
        for name, bound in (("low", torch.minimum), ("high", torch.maximum)):
            held = self.pages.arena[name]
            held[pages] = torch.where(first[:, None, None], keys, bound(held[pages], keys))

    def attend(self, rows: Tensor, queries: Tensor, scale: float) -> Tensor:
        by_row = self.queries_by_row(rows, queries)
        if self.count is None:
            return self._attend_all(rows, by_row, scale)
        chosen = self._best_pages(rows, by_row)  # [r, H_kv, G, pages]
        tokens = (chosen[..., None] * self.size + torch.arange(self.size, device=rows.device)).flatten(3)
        heads = torch.arange(self.heads, device=rows.device)[:, None].expand(self.heads, self.group)
        owner_rows = rows[:, None, None].expand(tokens.shape[:3]).flatten()
        owner_heads = heads.expand(tokens.shape[:3]).flatten()
        own = by_row[rows].flatten(0, 2)[:, None]
        output = self.pages.attend_some(owner_rows, own, owner_heads, tokens.flatten(0, 2), scale)
        self._count(rows, (tokens < self.pages.tokens[rows, None, None, None]).sum(-1).float().mean((1, 2)))
        return output.view(len(rows), self.heads * self.group, -1)

    def _best_pages(self, rows: Tensor, queries: Tensor) -> Tensor:
        """[r, H_kv, G, pages] ascending. Numbers beyond a row's pages stand for none, so that all rows have as many."""
        assert self.count is not None
        bounds = self.pages.by_row(rows, self._bounds(queries), -torch.inf, self.count)
        newest = (self.pages.tokens[rows] - 1) // self.size
        bounds.scatter_(3, newest[:, None, None, None].expand(*bounds.shape[:3], 1), torch.inf)
        return rank(bounds)[..., : self.count].sort(-1).values

    def _bounds(self, queries: Tensor) -> Tensor:
        """[R, H_kv, G, d] -> [P, H_kv, G, 1]"""
        arena = self.pages.arena
        own = queries[arena["row"]].float().flatten(0, 1)
        low, high = (arena[name].float().flatten(0, 1)[..., None] for name in ("low", "high"))
        bounds = torch.bmm(own.clamp_min(0), high) + torch.bmm(own.clamp_max(0), low)
        return bounds.unflatten(0, (-1, self.heads))

    def _attend_all(self, rows: Tensor, queries: Tensor, scale: float) -> Tensor:
        arena, held = self.pages.arena, self.pages.filled().repeat_interleave(self.heads, 0)
        keys, values = arena["keys"].flatten(0, 1), arena["values"].flatten(0, 1)
        partials = attend_pages(queries[arena["row"]].flatten(0, 1), keys, values, held, scale)
        merged = merge_pages(partials, self.pages.owners, self.pages.order, self.shape.rows * self.heads)
        self._count(rows, self.pages.tokens[rows].float())
        return merged.output.unflatten(0, (-1, self.heads))[rows].flatten(1, 2)

    def _count(self, rows: Tensor, read: Tensor) -> None:
        held, element = self.pages.tokens[rows], self.layout.key_dim + self.layout.value_dim
        bounds = 0 if self.count is None else -(-held // self.size) * 2 * self.layout.key_dim
        self.counts.add(rows, held, read, read * element + bounds, held * element)

    def free(self, row: int) -> None:
        self.pages.free(row)

    def memory(self, row: int) -> MemoryBreakdown:
        """All tokens, and the bounds of their pages."""
        tokens, bounds, allocated = self.pages.row_bytes(row)
        return MemoryBreakdown(full_precision=tokens, tables=bounds, slack=allocated - tokens - bounds)

    @property
    def nbytes(self) -> int:
        return self.pages.arena.nbytes
