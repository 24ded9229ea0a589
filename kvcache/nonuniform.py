"""The non-uniform low-bit family: KVQuant's cache (Hooper et al., arXiv 2401.18079).

    | first tokens  | dense codes, 2 to 4 bits, and outliers beside them ..................... |
    | in full       | keys before rotation, values as they are                                 |

A token is coded when it comes, before it attends; nothing waits. Codebooks and key thresholds belong to the model, as
weights do, and no row is charged for them. This is the plain path: pages are dequantised and rotated for the product at
hand, and forgotten.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvcache.dense_sparse import (
    LayerTables,
    Outliers,
    Span,
    code_keys,
    code_values,
    points_of_words,
    read_keys,
    read_values,
)
from kvcache.kernels.paged_attention import PagePartials, attend_pages, join_partials, merge_pages
from kvcache.layered import LayeredPool, LayerStore, in_order
from kvcache.layout import LayerLayout
from kvcache.pages import PageArena
from kvcache.pool import Compressed, MemoryBreakdown, PoolShape
from kvcache.rotary import rotate_into, unrotate
from kvcache.sparse_grid import MOST_SINKS, SparseGrid

PAGE = MOST_SINKS
"""Tokens of a page: the first ones of a row are in its first page."""

PAGES_AT_ONCE = 16
"""Pages dequantised at a time: few enough for a processor's cache; results do not depend on it."""

SPARSE = ("key_channel", "key_outlier", "value_channel", "value_outlier")
SPAN = ("value_mid", "value_half")


class NonUniformPool(LayeredPool):
    """Codes of all tokens but the first. ``tables``: one for each growing layer."""

    def __init__(self, shape: PoolShape, grid: SparseGrid, tables: Sequence[LayerTables]) -> None:
        layers = enumerate(zip(shape.layers, tables, strict=True))
        super().__init__(shape, [_CodedLayer(place, layout, shape, grid, own) for place, (layout, own) in layers])


class _CodedLayer(LayerStore):
    def __init__(self, place: int, layout: LayerLayout, shape: PoolShape, grid: SparseGrid, tables: LayerTables):
        super().__init__(layout, shape)
        self.place, self.grid, self.tables = place, grid, tables.to(shape.device)
        heads, dims = self.heads, {"key": layout.key_dim, "value": layout.value_dim}
        self.tails = {kind: grid.tail(heads * dim) for kind, dim in dims.items()}
        fields: dict[str, tuple[tuple[int, ...], torch.dtype]] = {name: ((PAGE,), torch.float16) for name in SPAN}
        for kind, dim in dims.items():
            fields[f"{kind}_codes"] = ((PAGE, heads * dim * grid.bits // 8), torch.uint8)
            fields[f"{kind}_channel"] = ((PAGE, 2 * self.tails[kind]), torch.int16)
            fields[f"{kind}_outlier"] = ((PAGE, 2 * self.tails[kind]), torch.float16)
        fields |= {"row": ((), torch.int64), "ordinal": ((), torch.int64)}
        self.codes = PageArena(0, shape.device, fields)
        shapes = {f"{kind}s": ((heads, grid.sinks, dim), shape.dtype) for kind, dim in dims.items()}
        self.sinks = PageArena(0, shape.device, {**shapes})
        self.tokens = torch.zeros(shape.rows, dtype=torch.int64, device=shape.device)
        self.last = torch.zeros_like(self.tokens)
        """[R] the row's newest page."""
        self.first = torch.zeros_like(self.tokens)
        """[R] the row's page of sinks."""
        self._arrange()

    # -- tokens come and go --------------------------------------------------------------------------------------------

    def write(self, row: int, compressed: Compressed, layer: int) -> None:
        content = compressed.prefill.layers[layer]
        keys, values = content.keys.transpose(0, 1), content.values.transpose(0, 1)  # [n, H_kv, d]
        position = torch.arange(len(keys), device=keys.device)
        ordinals = position[: -(-len(keys) // PAGE)]
        pages = self._take(torch.full_like(ordinals, row), ordinals)
        self.first[row] = self.sinks.take(1)
        self.last[row], self.tokens[row] = pages[-1], len(keys)
        self._write(position.new_full((len(keys),), row), pages[position // PAGE], position, keys, values)
        self._arrange()

    def append(self, rows: Tensor, keys: Tensor, values: Tensor) -> None:
        position = self.tokens[rows]
        opening = position % PAGE == 0
        if bool(opening.any()):
            self.last[rows[opening]] = self._take(rows[opening], position[opening] // PAGE)
            self._arrange()
        self._write(rows, self.last[rows], position, keys, values)
        self.tokens[rows] += 1

    def _take(self, rows: Tensor, ordinals: Tensor) -> Tensor:
        pages = self.codes.take(len(rows))
        self.codes["row"][pages], self.codes["ordinal"][pages] = rows, ordinals
        return pages

    def _write(self, rows: Tensor, pages: Tensor, position: Tensor, keys: Tensor, values: Tensor) -> None:
        """Single tokens: rows, pages and positions [k], keys [k, H_kv, d]. The codes of first tokens are never read."""
        full = position < self.grid.sinks
        for name, tokens in (("keys", keys), ("values", values)):
            self.sinks[name][self.first[rows[full]], :, position[full]] = tokens[full]
        cos, sin = self.shape.rotary(self.place, position)
        plain = unrotate(keys, cos[:, None], sin[:, None]).flatten(1)
        bits, tables = self.grid.bits, self.tables
        key_codes, outer = code_keys(plain, tables, self.tails["key"], bits)
        coded = code_values(values.flatten(1).float(), tables.value_codebook, self.tails["value"], bits)
        value_codes, span, extreme = coded
        for name, part in (
            ("key_codes", key_codes),
            ("value_codes", value_codes),
            *zip(SPARSE, (outer.channel, outer.value, extreme.channel, extreme.value), strict=True),
            *zip(SPAN, (span.mid, span.half), strict=True),
        ):
            self.codes[name][pages, position % PAGE] = part

    def free(self, row: int) -> None:
        self.codes.give_back(self._pages_of(row))
        self.sinks.give_back(self.first[row : row + 1])
        self.tokens[row] = 0
        self._arrange()

    def _pages_of(self, row: int) -> Tensor:
        return ((self.codes["row"] == row) & self.codes.used).nonzero().flatten()

    def _arrange(self) -> None:
        self._owners = self.by_head(self.codes["row"])
        self._order = in_order([self.codes], self.heads)

    # -- attention -----------------------------------------------------------------------------------------------------

    def attend(self, rows: Tensor, queries: Tensor, scale: float) -> Tensor:
        by_row = self.queries_by_row(rows, queries)
        points = self._points()
        starts = range(0, self.codes.extent, PAGES_AT_ONCE)
        parts = [self._attend_pages(slice(start, start + PAGES_AT_ONCE), points, by_row, scale) for start in starts]
        merged = merge_pages(join_partials(parts), self._owners, self._order, self.shape.rows * self.heads)
        return merged.output.unflatten(0, (-1, self.heads))[rows].flatten(1, 2)

    def _attend_pages(self, some: slice, points: tuple[Tensor, Tensor], queries: Tensor, scale: float) -> PagePartials:
        row, ordinal = self.codes["row"][some], self.codes["ordinal"][some]
        slots = ordinal[:, None] * PAGE + torch.arange(PAGE, device=row.device)
        held = (slots < self.tokens[row][:, None]) & self.codes.used[some, None]
        keys, values = self._read(some, *points)
        of_pages = queries[row].flatten(0, 1)
        valid = held.repeat_interleave(self.heads, 0)
        return attend_pages(of_pages, keys.flatten(0, 1), values.flatten(0, 1), valid, scale)

    def _points(self) -> tuple[Tensor, Tensor]:
        """Of keys and of values: made for each step, since they are larger than all else that belongs to the model."""
        return points_of_words(self.tables.key_codebook), points_of_words(self.tables.value_codebook)

    def _read(self, pages: slice, key_points: Tensor, value_points: Tensor) -> tuple[Tensor, Tensor]:
        """What the codes say, rotated; the first tokens as they came. [p, H_kv, PAGE, d], [p, H_kv, PAGE, d_v] fp32"""
        part = {name: self.codes[name][pages] for name in ("key_codes", "value_codes", *SPARSE, *SPAN)}
        outer = Outliers(part["key_channel"], part["key_outlier"])
        extreme = Outliers(part["value_channel"], part["value_outlier"])
        span, bits, tables = Span(part["value_mid"], part["value_half"]), self.grid.bits, self.tables
        plain = read_keys(part["key_codes"], key_points, tables, outer, bits)
        values = read_values(part["value_codes"], value_points, span, extreme, bits)
        plain, values = (x.unflatten(-1, (self.heads, -1)).transpose(1, 2) for x in (plain, values))
        row, ordinal = self.codes["row"][pages], self.codes["ordinal"][pages]
        cos, sin = self._rotary(ordinal)
        keys = plain.new_empty(plain.shape)
        rotate_into(keys, plain, cos[:, None], sin[:, None])
        values = values.contiguous()
        start = (self.codes.used[pages] & (ordinal == 0)).nonzero().flatten()
        for name, read in (("keys", keys), ("values", values)):
            read[start, :, : self.grid.sinks] = self.sinks[name][self.first[row[start]]].float()
        return keys, values

    def _rotary(self, ordinals: Tensor) -> tuple[Tensor, Tensor]:
        """Tables for the positions of these pages. [p] -> cos, sin [p, PAGE, d] fp32"""
        pages = int(ordinals.max()) + 1
        tables = self.shape.rotary(self.place, torch.arange(pages * PAGE, device=ordinals.device))
        cos, sin = (table.float().unflatten(0, (pages, PAGE))[ordinals] for table in tables)
        return cos, sin

    # -- memory --------------------------------------------------------------------------------------------------------

    def memory(self, row: int) -> MemoryBreakdown:
        """Tokens and codes held; free slots of the newest page, and of the first one those of sinks, are slack."""
        tokens = int(self.tokens[row])
        sinks = min(self.grid.sinks, tokens)
        full = self.sinks.page_bytes * sinks // max(self.grid.sinks, 1)

        def of_tokens(*names: str) -> int:
            return sum(self.codes.bytes_of(name) for name in names) * (tokens - sinks) // PAGE

        codes, beside = of_tokens("key_codes", "value_codes"), of_tokens(*SPARSE, *SPAN)
        allocated = self.sinks.page_bytes + len(self._pages_of(row)) * self.codes.page_bytes
        held = full + codes + beside
        return MemoryBreakdown(full_precision=full, codes=codes, quantization=beside, slack=allocated - held)

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.sinks.nbytes + self.tables.nbytes
