"""The grouped low-bit family: KIVI's cache (Liu et al., arXiv 2402.02750, §4), codes packed in bytes.

    keys    | closed page | closed page | open page ...    per channel, in groups of G tokens; the open page in full
    values  | coded ........ up to n - R | full ........    per token, in groups of G channels; the last R in full

A page has R tokens, the residual length. Keys are coded page by page, when a page's last token comes; a value is coded
when R newer ones are there; both before that token attends. So the newest tokens of a row fit a ring of R slots, token
p in slot p mod R, and values still in full are those of the open page and of the end of the last closed one.

Every row has its own grid, which starts at its first token. Pages are attended to as codes: see
:mod:`kvcache.kernels.grouped_attention`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvcache.kernels.grouped_attention import attend_grouped_codes
from kvcache.kernels.paged_attention import PagePartials, attend_pages, join_partials, merge_pages
from kvcache.layered import LayeredPool, LayerStore, in_order
from kvcache.layout import LayerLayout
from kvcache.pages import PageArena
from kvcache.pool import Compressed, MemoryBreakdown, PoolShape
from kvcache.quant import Quantized, quantize

TOKENS_AT_ONCE = 4096
"""Tokens whose codes are unpacked at a time: bounds what a step needs."""


@dataclass(frozen=True)
class Grid:
    """Bits per code, G tokens or channels per group, R recent tokens in full precision."""

    bits: int
    group: int
    residual: int


class LowBitPool(LayeredPool):
    """Codes of all but the newest tokens."""

    def __init__(self, shape: PoolShape, grid: Grid) -> None:
        super().__init__(shape, [_LowBitLayer(layout, shape, grid) for layout in shape.layers])


class _LowBitLayer(LayerStore):
    def __init__(self, layout: LayerLayout, shape: PoolShape, grid: Grid) -> None:
        super().__init__(layout, shape)
        self.bits, self.group_size, self.residual = grid.bits, grid.group, grid.residual
        heads, size, dim, value_dim = self.heads, grid.residual, layout.key_dim, layout.value_dim
        groups, value_groups, packed = size // grid.group, value_dim // grid.group, grid.group * grid.bits // 8
        where = {"row": ((), torch.int64), "ordinal": ((), torch.int64)}
        self.codes = PageArena(
            0,
            shape.device,
            {
                "key_codes": ((heads, dim, groups, packed), torch.uint8),
                "key_scale": ((heads, dim, groups), torch.float16),
                "key_offset": ((heads, dim, groups), torch.float16),
                "value_codes": ((heads, size, value_groups, packed), torch.uint8),
                "value_scale": ((heads, size, value_groups), torch.float16),
                "value_offset": ((heads, size, value_groups), torch.float16),
                **where,
            },
        )
        self.recent = PageArena(
            0,
            shape.device,
            {"keys": ((heads, size, dim), shape.dtype), "values": ((heads, size, value_dim), shape.dtype), **where},
        )
        self.tokens = torch.zeros(shape.rows, dtype=torch.int64, device=shape.device)
        self.ring = torch.zeros_like(self.tokens)
        """[R] the row's page among the recent ones."""
        self.last = torch.full_like(self.tokens, -1)
        """[R] the row's last closed page, -1 without one."""
        self._peak: dict[int, int] = {}
        self._arrange()

    # -- tokens come and go --------------------------------------------------------------------------------------------

    def write(self, row: int, compressed: Compressed, layer: int) -> None:
        content = compressed.prefill.layers[layer]
        keys, values = content.keys.transpose(0, 1), content.values.transpose(0, 1)  # [n, H_kv, d]
        tokens, size = len(keys), self.residual
        closed, coded = tokens // size, max(0, tokens - size)
        position = torch.arange(tokens, device=keys.device)
        pages = self._take(torch.full_like(position[:closed], row), position[:closed])
        self._code_keys(pages, keys[: closed * size].unflatten(0, (closed, size)))
        self._code_values(pages[position[:coded] // size], position[:coded] % size, values[:coded])
        self.ring[row] = ring = self.recent.take(1)
        self.recent["row"][ring] = row
        for name, full, start in (("keys", keys, closed * size), ("values", values, coded)):
            self.recent[name][ring, :, position[start:] % size] = full[start:]
        self.tokens[row] = tokens
        self.last[row] = pages[-1] if closed else -1
        self._peak[row] = 0
        self._arrange()

    def append(self, rows: Tensor, keys: Tensor, values: Tensor) -> None:
        slot, ring = self.tokens[rows] % self.residual, self.ring[rows]
        leaving = self.tokens[rows] >= self.residual
        oldest = self.recent["values"][ring[leaving], :, slot[leaving]]
        self._code_values(self.last[rows[leaving]], slot[leaving], oldest)
        self.recent["keys"][ring, :, slot] = keys
        self.recent["values"][ring, :, slot] = values
        self.tokens[rows] += 1
        full = rows[self.tokens[rows] % self.residual == 0]
        if len(full):
            for row in full.tolist():
                self._peak[row] = max(self._peak[row], self._memory(row, closing=True).held)
            self.last[full] = pages = self._take(full, self.tokens[full] // self.residual - 1)
            self._code_keys(pages, self.recent["keys"][self.ring[full]].transpose(1, 2))
            self._arrange()

    def _take(self, rows: Tensor, ordinals: Tensor) -> Tensor:
        pages = self.codes.take(len(rows))
        self.codes["row"][pages], self.codes["ordinal"][pages] = rows, ordinals
        return pages

    def _code_keys(self, pages: Tensor, keys: Tensor) -> None:
        """Keys of whole pages, [p, R, H_kv, d]."""
        by_channel = keys.permute(0, 2, 3, 1)
        self._put("key", (pages,), quantize(by_channel.unflatten(-1, (-1, self.group_size)), self.bits))

    def _code_values(self, pages: Tensor, slots: Tensor, values: Tensor) -> None:
        """Values of single tokens, [k, H_kv, d_v]."""
        by_group = values.unflatten(-1, (-1, self.group_size))
        self._put("value", (pages, slice(None), slots), quantize(by_group, self.bits))

    def _put(self, kind: str, where: tuple[Tensor | slice, ...], coded: Quantized) -> None:
        for name in ("codes", "scale", "offset"):
            self.codes[f"{kind}_{name}"][where] = getattr(coded, name)

    def _coded(self, kind: str, pages: slice) -> Quantized:
        return Quantized(*(self.codes[f"{kind}_{name}"][pages] for name in ("codes", "scale", "offset")))

    def free(self, row: int) -> None:
        self.codes.give_back(self._pages_of(row))
        self.recent.give_back(self.ring[row : row + 1])
        self.tokens[row], self.last[row] = 0, -1
        del self._peak[row]
        self._arrange()

    def _pages_of(self, row: int) -> Tensor:
        """Closed pages in the order of their tokens."""
        pages = ((self.codes["row"] == row) & self.codes.used).nonzero().flatten()
        return pages[self.codes["ordinal"][pages].argsort()]

    def _arrange(self) -> None:
        rows = torch.cat([self.codes["row"], self.recent["row"]])
        self._owners = self.by_head(rows)
        self._order = in_order([self.codes, self.recent], self.heads)

    # -- attention -----------------------------------------------------------------------------------------------------

    def attend(self, rows: Tensor, queries: Tensor, scale: float) -> Tensor:
        by_row = self.queries_by_row(rows, queries)
        parts = [*self._attend_closed(by_row, scale), self._attend_open(by_row, scale)]
        merged = merge_pages(join_partials(parts), self._owners, self._order, self.shape.rows * self.heads)
        return merged.output.unflatten(0, (-1, self.heads))[rows].flatten(1, 2)

    def _attend_closed(self, queries: Tensor, scale: float) -> list[PagePartials]:
        parts, at_once = [], max(1, TOKENS_AT_ONCE // self.residual)
        for start in range(0, self.codes.extent, at_once):
            some = slice(start, start + at_once)
            keys, values = self._coded("key", some), self._coded("value", some)
            valid = self.codes.used[some, None].expand(-1, self.residual)
            of_pages = queries[self.codes["row"][some]]
            part, weights = attend_grouped_codes(of_pages, keys, values, self.bits, valid, scale)
            self._add_values_in_full(part.output, weights, some)
            parts.append(part)
        return parts

    def _attend_open(self, queries: Tensor, scale: float) -> PagePartials:
        row = self.recent["row"]
        held = self._open_slots(row) & self.recent.used[:, None]
        return attend_pages(
            queries[row].flatten(0, 1),
            self.recent["keys"].flatten(0, 1),
            self.recent["values"].flatten(0, 1),
            held.repeat_interleave(self.heads, 0),
            scale,
        )

    def _open_slots(self, rows: Tensor) -> Tensor:
        """[p, R] bool: slots of the ring that hold a token of the open page. The others hold the last closed one's."""
        slots = torch.arange(self.residual, device=rows.device)
        return slots < (self.tokens[rows] % self.residual)[:, None]

    def _add_values_in_full(self, output: Tensor, weights: Tensor, pages: slice) -> None:
        """Values of a row's last closed page that are not coded yet; scales and offsets of their codes are 0.

        output [p * H_kv, G, d_v], weights [p * H_kv, G, R]
        """
        row = self.codes["row"][pages]
        number = torch.arange(self.codes.extent, device=row.device)[pages]
        last = (self.codes.used[pages] & (self.last[row] == number)).nonzero().flatten()
        in_full = ~self._open_slots(row[last])[:, None, None]
        of_pages = weights.unflatten(0, (-1, self.heads))[last] * in_full
        values = self.recent["values"][self.ring[row[last]]].float()
        added = torch.bmm(of_pages.flatten(0, 1), values.flatten(0, 1)).unflatten(0, (-1, self.heads))
        output.unflatten(0, (-1, self.heads))[last] += added

    # -- memory --------------------------------------------------------------------------------------------------------

    def memory(self, row: int) -> MemoryBreakdown:
        """Tokens and codes held; free slots of the ring, and room for codes of values yet to come, are slack."""
        return self._memory(row)

    def _memory(self, row: int, closing: bool = False) -> MemoryBreakdown:
        """``closing``: as it was before the open page, full now, was coded."""
        tokens, size = int(self.tokens[row]), self.residual
        closed = tokens // size * size - size * closing
        coded = max(0, tokens - size)

        def of_tokens(arena: PageArena, name: str, count: int) -> int:
            return arena.bytes_of(name) * count // size

        full = of_tokens(self.recent, "keys", tokens - closed) + of_tokens(self.recent, "values", tokens - coded)
        codes, scale, offset = (
            of_tokens(self.codes, f"key_{name}", closed) + of_tokens(self.codes, f"value_{name}", coded)
            for name in ("codes", "scale", "offset")
        )
        allocated = self.recent.page_bytes + len(self._pages_of(row)) * self.codes.page_bytes
        held = full + codes + scale + offset
        return MemoryBreakdown(full_precision=full, codes=codes, quantization=scale + offset, slack=allocated - held)

    def peak_held(self, row: int) -> int:
        """Closing a page makes a row smaller."""
        return max(self._peak[row], self.memory(row).held)

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.recent.nbytes
