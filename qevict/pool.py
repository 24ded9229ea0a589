"""The tiered family: QEvict's cache for all rows of a batch (§4.3, Algorithm 1).

Windows sit in fixed slots, several slots to a page of about 64 tokens:

    full     keys, values [L, P, H_kv, s, Ω, d]                      sinks | recent | F
    ledger   packed codes, fp16 scales and offsets, promoted flag    Q, and F that was promoted

A window's codes are written once, at its first demotion. Promotion changes a flag: the promoted window is by the
paper's rule the same low-bit content, so it is read where it lies and nothing is copied; attention does not care about
order. Demoting it again clears the flag. Eviction frees the slot, codes included.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvcache.budget import ResolvedBudget
from kvcache.kernels.paged_attention import PagePartials, attend_pages, merge_pages
from kvcache.pool import Compressed, FamilyPool, MemoryBreakdown, PoolShape
from kvcache.prefill import LayerPrefill
from kvcache.quant import quantize
from kvcache.rotary import unrotate
from qevict.capacity import TABLE_BYTES, Capacities, window_bytes
from qevict.kernels.code_attention import CodePages, attend_code_pages
from qevict.routing import EVICTED, FULL, QUANTIZED, UNTOUCHED, assign_tiers, nth_free
from qevict.slots import FREE, SINK, Where, WindowSlots, slots_per_page

PAGES_AT_ONCE = 64
"""Ledger pages whose keys are dequantised at a time: the workspace, which does not outlive the product."""

EVERY_LAYER = slice(0, None)


@dataclass
class TieredCompressed(Compressed):
    """``scores`` [L, W]: what each window received during prefill, the incomplete last one included."""

    scores: Tensor
    budget: ResolvedBudget
    room: Capacities


@dataclass
class _Row:
    """A row's pages in both tiers, and how many of their slots it may use."""

    full_pages: Tensor
    code_pages: Tensor
    full_slots: int
    code_slots: int
    room: Capacities
    prompt_tokens: int
    peak: int = 0


class TieredPool(FamilyPool):
    """Full-precision windows and a ledger of low-bit windows, for growing layers of one shape."""

    def __init__(self, shape: PoolShape, window: int, sinks: int, recent: int, bits: int) -> None:
        super().__init__(shape)
        self.window, self.sinks, self.recent, self.bits = window, sinks, recent, bits
        self.layout = layout = shape.layers[0]
        self.layers = len(shape.layers)
        heads, slots = layout.kv_heads, slots_per_page(window)
        self.full = WindowSlots(
            self.layers,
            window,
            shape.device,
            {
                "keys": ((heads, slots, window, layout.key_dim), shape.dtype),
                "values": ((heads, slots, window, layout.value_dim), shape.dtype),
                "fill": ((slots,), torch.uint8),
            },
        )
        self.ledger = WindowSlots(
            self.layers,
            window,
            shape.device,
            {
                "key_codes": ((heads, layout.key_dim, slots, window * bits // 8), torch.uint8),
                "key_scale": ((heads, layout.key_dim, slots), torch.float16),
                "key_offset": ((heads, layout.key_dim, slots), torch.float16),
                "value_codes": ((heads, slots, window, layout.value_dim * bits // 8), torch.uint8),
                "value_scale": ((heads, slots, window), torch.float16),
                "value_offset": ((heads, slots, window), torch.float16),
                "promoted": ((slots,), torch.bool),
            },
        )
        self._held: dict[int, _Row] = {}
        self._tail_page = torch.zeros(self.layers, shape.rows, dtype=torch.int64, device=shape.device)
        self._tail_place = torch.zeros_like(self._tail_page)
        self._rotary = torch.zeros(2, 0, layout.key_dim // 2, window, device=shape.device)
        self._arrange()

    # -- a row comes and goes ------------------------------------------------------------------------------------------

    def expect(self, coming: Sequence[Compressed]) -> None:
        needed = [self._slots_of(one) for one in coming if isinstance(one, TieredCompressed)]
        self.full.arena.reserve(sum(self.full.pages(full) for full, _ in needed))
        self.ledger.arena.reserve(sum(self.ledger.pages(codes) for _, codes in needed))

    def _store(self, row: int, compressed: Compressed) -> None:
        assert isinstance(compressed, TieredCompressed)
        prefill = compressed.prefill
        self._extend_rotary(compressed.budget.prompt_tokens + compressed.budget.new_tokens)
        full_slots, code_slots = self._slots_of(compressed)
        pages = self.full.take(full_slots), self.ledger.take(code_slots)
        self._held[row] = held = _Row(*pages, full_slots, code_slots, compressed.room, prefill.tokens)
        self._write_sinks(held, prefill.layers)
        self._first_assignment(row, prefill.layers, compressed.scores)
        if (prefill.tokens - self.sinks) % self.window == 0:
            self._open_window(row, prefill.tokens, EVERY_LAYER)
        self._arrange()

    def _free(self, row: int) -> None:
        held = self._held.pop(row)
        self.full.give_back(held.full_pages)
        self.ledger.give_back(held.code_pages)
        self._arrange()

    def _arrange(self) -> None:
        """Who owns which page, and the order in which a row's pages are merged: full precision, then ledger."""
        heads = torch.arange(self.layout.kv_heads, device=self.shape.device)
        rows = self._tail_page.new_zeros(len(self.full) + len(self.ledger))
        order = [heads[:0]]
        for row, held in sorted(self._held.items()):
            pages = torch.cat([held.full_pages, held.code_pages + len(self.full)])
            rows[pages] = row
            order.append((pages * len(heads) + heads[:, None]).flatten())
        self._row_of_page = rows
        self._owners = (rows[:, None] * len(heads) + heads).flatten()
        self._order = torch.cat(order)

    def _extend_rotary(self, positions: int) -> None:
        """The model's tables by window, [2, W, d / 2, Ω]: both halves of a table are the same."""
        windows = -(-positions // self.window)
        if windows > self._rotary.shape[1]:
            every = self._positions(torch.arange(windows, device=self.shape.device))
            cos, sin = self.shape.rotary(0, every.flatten())
            half = torch.stack([cos, sin])[..., : self.layout.key_dim // 2].float()
            self._rotary = half.unflatten(1, every.shape).transpose(2, 3).contiguous()

    # -- the end of prefill --------------------------------------------------------------------------------------------

    def _write_sinks(self, held: _Row, layers: list[LayerPrefill]) -> None:
        for slot in range(self._sink_slots):
            first, last = slot * self.window, min((slot + 1) * self.window, self.sinks)
            for index, layer in enumerate(layers):
                where = _, page, place = self.full.at(held.full_pages, index, held.full_pages.new_tensor([slot]))
                self.full["keys"][index, page, :, place, : last - first] = layer.keys[None, :, first:last]
                self.full["values"][index, page, :, place, : last - first] = layer.values[None, :, first:last]
                self.full["fill"][where] = last - first
                self.full.occupy(where, torch.full_like(page, SINK), 0.0)

    def _first_assignment(self, row: int, layers: list[LayerPrefill], scores: Tensor) -> None:
        """Every window of the prompt gets its tier; recent ones, the incomplete last one included, stay full."""
        held = self._held[row]
        windows = torch.arange(scores.shape[1], device=scores.device).expand_as(scores)
        candidate = windows < self._boundary(held.prompt_tokens)
        tiers = assign_tiers(scores, windows, candidate, torch.zeros_like(candidate), held.room)
        for index, layer in enumerate(layers):
            kept = ((tiers[index] == FULL) | (tiers[index] == UNTOUCHED)).nonzero().flatten()
            slots = torch.arange(self._sink_slots, self._sink_slots + len(kept), device=kept.device)
            where = self.full.at(held.full_pages, index, slots)
            self._write_full(where, layer, kept, scores[index, kept])
            demoted = (tiers[index] == QUANTIZED).nonzero().flatten()
            where = self.ledger.at(held.code_pages, index, torch.arange(len(demoted), device=kept.device))
            self._write_codes(where, *self._of_prompt(layer, demoted), demoted, scores[index, demoted])
            self._point_tail(row, index, held.full_pages, slots[-1])

    def _write_full(self, where: Where, layer: LayerPrefill, windows: Tensor, scores: Tensor) -> None:
        index, page, place = where
        self.full["keys"][index, page, :, place], self.full["values"][index, page, :, place] = self._of_prompt(
            layer, windows
        )
        left = layer.keys.shape[1] - self.sinks - windows * self.window
        self.full["fill"][where] = left.clamp(max=self.window).to(torch.uint8)
        self.full.occupy(where, windows, scores)

    def _of_prompt(self, layer: LayerPrefill, windows: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of windows; past the prompt's end its last token is repeated. [K, H_kv, Ω, d] each"""
        positions = self._positions(windows).clamp(max=layer.keys.shape[1] - 1)
        return layer.keys[:, positions].transpose(0, 1), layer.values[:, positions].transpose(0, 1)

    # -- attention -----------------------------------------------------------------------------------------------------

    def attend(
        self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, positions: Tensor, counts: Tensor, scale: float
    ) -> Tensor:
        output = values.new_zeros(*queries.shape[:3], values.shape[-1])
        for token in range(queries.shape[2]):
            real = counts > token
            rows, now = self.rows[real], positions[real, token]
            if token:  # what the token before made due; for the last one of the step, ``after_step`` does it
                self._maintain(rows, now, slice(layer, layer + 1))
            self._append(layer, rows, keys[real, :, token], values[real, :, token], now)
            output[real, :, token] = self._attend(layer, rows, queries[real, :, token], scale).to(output.dtype)
        return output

    def after_step(self, positions: Tensor, counts: Tensor) -> None:
        real = counts > 0
        last = positions[real].gather(1, counts[real, None] - 1)[:, 0]
        self._maintain(self.rows[real], last + 1, EVERY_LAYER)

    def _append(self, layer: int, rows: Tensor, keys: Tensor, values: Tensor, positions: Tensor) -> None:
        page, place = self._tail_page[layer, rows], self._tail_place[layer, rows]
        offset = (positions - self.sinks) % self.window
        self.full["keys"][layer, page, :, place, offset] = keys
        self.full["values"][layer, page, :, place, offset] = values
        self.full["fill"][layer, page, place] = (offset + 1).to(torch.uint8)

    def _attend(self, layer: int, rows: Tensor, queries: Tensor, scale: float) -> Tensor:
        """[r, H_q, d] -> [r, H_q, d_v] fp32. Every window's score grows by the attention it received (Eq. 1)."""
        heads, group = self.layout.kv_heads, self.layout.group
        by_row = queries.new_zeros(self.shape.rows, heads, group, queries.shape[-1])
        by_row[rows] = queries.unflatten(1, (heads, group))
        by_page = by_row[self._row_of_page]
        pages = _join([self._attend_full(layer, by_page, scale), *self._attend_codes(layer, by_page, scale)])
        merged = merge_pages(pages, self._owners, self._order, self.shape.rows * heads)
        received = (merged.share[..., None] * pages.mass).unflatten(0, (-1, heads)).sum((1, 2)) / (heads * group)
        received = torch.where(torch.isin(self._row_of_page, rows)[:, None], received, 0)
        self.full["score"][layer] += received[: len(self.full)]
        self.ledger["score"][layer] += received[len(self.full) :]
        return merged.output.unflatten(0, (-1, heads))[rows].flatten(1, 2)

    def _attend_full(self, layer: int, queries: Tensor, scale: float) -> PagePartials:
        heads = self.layout.kv_heads
        held = torch.arange(self.window, device=queries.device) < self.full["fill"][layer][..., None]
        keys, values = (self.full[name][layer].flatten(2, 3).flatten(0, 1) for name in ("keys", "values"))
        grouped = queries[: len(self.full)].flatten(0, 1)
        valid = held.flatten(1).repeat_interleave(heads, 0)
        return attend_pages(grouped, keys, values, valid, scale, self.full.per_page)

    def _attend_codes(self, layer: int, queries: Tensor, scale: float) -> list[PagePartials]:
        of_codes = queries[len(self.full) :]
        partials = []
        for start in range(0, len(self.ledger), PAGES_AT_ONCE):
            some = slice(start, start + PAGES_AT_ONCE)
            windows = self.ledger["window"][layer, some] - 1
            codes = CodePages(*(self.ledger[name][layer, some] for name in CodePages.__dataclass_fields__))
            partials.append(attend_code_pages(of_codes[some], codes, windows, self._rotary, self.bits, scale))
        return partials

    # -- maintenance ---------------------------------------------------------------------------------------------------

    def _maintain(self, rows: Tensor, tokens: Tensor, layers: slice) -> None:
        """What is due when a row holds this many tokens: routing every Ω generated tokens, a slot for a new window."""
        for row, count in zip(rows.tolist(), tokens.tolist(), strict=True):
            held = self._held[row]
            if (count - held.prompt_tokens) % self.window == 0:
                held.peak = max(held.peak, self.memory(row).held)
                self._route(held, count, layers)
            if (count - self.sinks) % self.window == 0:
                self._open_window(row, count, layers)

    def _route(self, held: _Row, tokens: int, layers: slice) -> None:
        """A routing event (Algorithm 1) of one row, for the given layers at once."""
        full_windows, full_scores = self.full.table(held.full_pages, layers)
        code_windows, code_scores = self.ledger.table(held.code_pages, layers)
        split = full_windows.shape[1]
        windows = torch.cat([full_windows, code_windows], 1)
        coded = torch.arange(windows.shape[1], device=windows.device).expand_as(windows) >= split
        candidate = (windows >= 0) & (windows < self._boundary(tokens))
        tiers = assign_tiers(torch.cat([full_scores, code_scores], 1), windows, candidate, coded, held.room)
        of_full, of_code = tiers[:, :split], tiers[:, split:]

        layer, slot = (of_code != UNTOUCHED).nonzero().unbind(1)
        where = self.ledger.at(held.code_pages, layer + layers.start, slot)
        self.ledger["promoted"][where] = of_code[layer, slot] == FULL
        layer, slot = (of_code == EVICTED).nonzero().unbind(1)
        self.ledger.clear(self.ledger.at(held.code_pages, layer + layers.start, slot))
        self._demote(held, of_full == QUANTIZED, full_windows, full_scores, layers)
        layer, slot = ((of_full == QUANTIZED) | (of_full == EVICTED)).nonzero().unbind(1)
        where = self.full.at(held.full_pages, layer + layers.start, slot)
        self.full["fill"][where] = 0
        self.full.clear(where)

    def _demote(self, held: _Row, demoted: Tensor, windows: Tensor, scores: Tensor, layers: slice) -> None:
        """First demotion: quantise once and create the ledger record, in the free slots of each layer in order."""
        layer, slot = demoted.nonzero().unbind(1)
        nth = (demoted.cumsum(1) - 1)[layer, slot]
        free = self.ledger.table(held.code_pages, layers)[0] == FREE
        free[:, held.code_slots :] = False
        target = nth_free(free)[layer, nth]
        index, page, place = self.full.at(held.full_pages, layer + layers.start, slot)
        keys, values = (self.full[name][index, page, :, place] for name in ("keys", "values"))
        where = self.ledger.at(held.code_pages, index, target)
        self._write_codes(where, keys, values, windows[layer, slot], scores[layer, slot])

    def _write_codes(self, where: Where, keys: Tensor, values: Tensor, windows: Tensor, scores: Tensor) -> None:
        """Quantise windows into ledger slots. keys [K, H_kv, Ω, d] are coded as they were before rotation."""
        if not len(windows):
            return
        layer, page, place = where
        cos, sin = self._rotary[:, windows].transpose(2, 3).repeat(1, 1, 1, 2)[:, :, None]  # [K, 1, Ω, d] each
        coded_keys = quantize(unrotate(keys, cos, sin).transpose(2, 3), self.bits)
        coded_values = quantize(values, self.bits)
        self.ledger["key_codes"][layer, page, :, :, place] = coded_keys.codes
        self.ledger["key_scale"][layer, page, :, :, place] = coded_keys.scale
        self.ledger["key_offset"][layer, page, :, :, place] = coded_keys.offset
        self.ledger["value_codes"][layer, page, :, place] = coded_values.codes
        self.ledger["value_scale"][layer, page, :, place] = coded_values.scale
        self.ledger["value_offset"][layer, page, :, place] = coded_values.offset
        self.ledger["promoted"][where] = False
        self.ledger.occupy(where, windows, scores)

    def _open_window(self, row: int, tokens: int, layers: slice) -> None:
        """Take a free slot in every layer for the window that the next token begins."""
        held = self._held[row]
        free = self.full.table(held.full_pages, layers)[0] == FREE
        free[:, held.full_slots :] = False
        slots = nth_free(free)[:, 0]
        index = torch.arange(len(slots), device=slots.device) + layers.start
        where = self.full.at(held.full_pages, index, slots)
        self.full["fill"][where] = 0
        self.full.occupy(where, torch.full_like(slots, (tokens - self.sinks) // self.window), 0.0)
        self._point_tail(row, layers, held.full_pages, slots)

    def _point_tail(self, row: int, layers: slice | int, pages: Tensor, slots: Tensor) -> None:
        self._tail_page[layers, row] = pages[slots // self.full.per_page]
        self._tail_place[layers, row] = slots % self.full.per_page

    # -- the grid of windows, and memory -------------------------------------------------------------------------------

    def _slots_of(self, compressed: TieredCompressed) -> tuple[int, int]:
        """Full-precision slots and ledger slots of a row. Records of promoted windows count as quantised only where
        the accounting is strict."""
        room = compressed.room
        promoted = 0 if room.strict or not room.quantized else room.full
        return room.protected_slots + room.full, room.quantized + promoted

    @property
    def _sink_slots(self) -> int:
        return -(-self.sinks // self.window)

    def _boundary(self, tokens: int) -> int:
        """Windows below this number lie wholly outside the recent region and may be routed."""
        return max(0, (tokens - self.recent - self.sinks) // self.window)

    def _positions(self, windows: Tensor) -> Tensor:
        """True positions of each window's tokens. [...] -> [..., Ω]"""
        return self.sinks + windows[..., None] * self.window + torch.arange(self.window, device=windows.device)

    def memory(self, row: int) -> MemoryBreakdown:
        """Tokens and ledger records held, and the table entries of all slots that the row may use."""
        held, layout = self._held[row], self.layout
        size = window_bytes(self.window, self.bits, layout, self.shape.element_bytes)
        scales = layout.kv_heads * 4 * (layout.key_dim + self.window)
        tokens = int(self.full["fill"][:, held.full_pages].sum()) * layout.token_bytes(self.shape.element_bytes)
        records = int((self.ledger.table(held.code_pages)[0] != FREE).sum())
        promoted = int(self.ledger["promoted"][:, held.code_pages].sum())
        slots = self.layers * (held.full_slots + held.code_slots)
        kept = tokens + records * size.quantized
        allocated = sum(
            slots.arena.page_bytes * len(pages)
            for slots, pages in ((self.full, held.full_pages), (self.ledger, held.code_pages))
        )
        charged = kept + promoted * size.full
        charged += slots * TABLE_BYTES if held.room.strict else -promoted * size.quantized
        return MemoryBreakdown(
            full_precision=tokens,
            codes=records * (size.quantized - scales),
            quantization=records * scales,
            positions=slots * 4,
            scores=slots * 4,
            tables=slots,
            slack=allocated - kept - slots * TABLE_BYTES,
            charged=charged,
        )

    def peak_held(self, row: int) -> int:
        return max(self._held[row].peak, self.memory(row).held)

    def allocated_bytes(self) -> int:
        return self.full.arena.nbytes + self.ledger.arena.nbytes


def _join(parts: list[PagePartials]) -> PagePartials:
    return PagePartials(
        torch.cat([part.peak for part in parts]),
        torch.cat([part.mass for part in parts]),
        torch.cat([part.output for part in parts]),
    )
