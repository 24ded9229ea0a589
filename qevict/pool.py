"""The tiered family: QEvict's cache for all rows of a batch (§4.3, Algorithm 1).

A row comes with its prompt's windows in their tiers, or with the whole prompt where the first eviction comes later.
Every step attends to both tiers, and what windows receive ranks them at the next routing event.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvcache.budget import ResolvedBudget
from kvcache.kernels.paged_attention import PagePartials, attend_pages, join_partials, merge_pages
from kvcache.pool import Compressed, FamilyPool, MemoryBreakdown, PoolShape
from qevict.capacity import Capacities, window_bytes
from qevict.kernels.code_attention import CodePages, attend_code_pages
from qevict.kernels.tiered_attention import FullPages, PageTables, attend_tiers, fuses, rotary_rows
from qevict.routing import EVICTED, assign_tiers
from qevict.slots import FREE
from qevict.tiers import RowSlots, Tiers
from qevict.window_scores import key_norms

if TYPE_CHECKING:
    from qevict.method import QEvict

WRITTEN_AT_ONCE = 2**22
"""Elements of a prompt's keys, of some layers, whose windows are written together: bounds what admission needs."""
PAGES_AT_ONCE = 64
"""Ledger pages whose keys are dequantised at a time, where no copy is kept: bounds what a step needs."""


@dataclass
class TieredCompressed(Compressed):
    """``scores`` [L, W]: what the prompt leaves each window with, the incomplete last one included."""

    scores: Tensor
    budget: ResolvedBudget
    room: Capacities
    method: QEvict


@dataclass
class _Row(RowSlots):
    """A row's slots, its capacities, and what routing did so far; ``first`` is how many tokens it holds when first
    routed."""

    room: Capacities
    method: QEvict
    prompt_tokens: int
    first: int
    promoted: Tensor
    evicted: Tensor
    peak: int = 0

    def is_due(self, tokens: int) -> bool:
        return tokens >= self.first and (tokens - self.first) % self.method.window == 0


def keeps_working_copy(device: torch.device) -> bool:
    """Whether plain attention reads the ledger from a copy that is dequantised once, or dequantises at every step."""
    return device.type == "cpu"


class TieredPool(FamilyPool):
    """Full-precision windows and a ledger of low-bit windows, for growing layers of one shape."""

    def __init__(
        self, shape: PoolShape, window: int, sinks: int, bits: int, ranking: str = "attention", originals: bool = False
    ) -> None:
        """``ranking``: what a step does to scores: ``attention``, ``p_norm`` or ``key_norm``."""
        super().__init__(shape)
        self.window, self.sinks, self.bits, self.ranking = window, sinks, bits, ranking
        self.layout = shape.layers[0]
        self.layers = len(shape.layers)
        self._fused = fuses(self.layout, window, shape.device)
        kinds = {"norm": ranking == "p_norm", "originals": originals}
        copies = keeps_working_copy(shape.device) and not self._fused
        self.tiers = Tiers(shape, window, sinks, bits, **kinds, keeps_copy=copies)
        self.full, self.ledger = self.tiers.full, self.tiers.ledger
        self._every_layer = slice(0, self.layers)
        self._held: dict[int, _Row] = {}
        self._tail_page = torch.zeros(self.layers, shape.rows, dtype=torch.int64, device=shape.device)
        self._tail_place = torch.zeros_like(self._tail_page)
        self._arrange()

    @property
    def _rotary(self) -> Tensor:
        return self.tiers.rotary

    # -- a row comes and goes ------------------------------------------------------------------------------------------

    def _store(self, coming: Mapping[int, Compressed]) -> None:
        self.tiers.reserve([self._slots_of(one) for one in coming.values() if isinstance(one, TieredCompressed)])
        for row, compressed in coming.items():
            assert isinstance(compressed, TieredCompressed)
            self._store_row(row, compressed)
        self._arrange()

    def _store_row(self, row: int, compressed: TieredCompressed) -> None:
        prefill, method = compressed.prefill, compressed.method
        self.tiers.extend_rotary(compressed.budget.prompt_tokens + compressed.budget.new_tokens)
        slots = self.tiers.take(*self._slots_of(compressed))
        none = torch.zeros((), dtype=torch.int64, device=self.shape.device)
        first = prefill.tokens + method.eviction_delay
        self._held[row] = held = _Row(
            slots.full_pages,
            slots.code_pages,
            slots.full_slots,
            slots.code_slots,
            slots.working_pages,
            compressed.room,
            method,
            prefill.tokens,
            first,
            none,
            none,
        )
        self.tiers.write_sinks(held, prefill.layers)
        self._first_assignment(row, compressed)
        if (prefill.tokens - self.sinks) % self.window == 0:
            self._open_window(row, prefill.tokens, self._every_layer)

    def _first_assignment(self, row: int, compressed: TieredCompressed) -> None:
        """Every window of the prompt gets its tier; recent ones, the incomplete last one included, stay full, and so
        do all of them until the first eviction."""
        held, scores = self._held[row], compressed.scores
        windows = torch.arange(scores.shape[1], device=scores.device).expand_as(scores)
        candidate = windows < (self._boundary(row, held.prompt_tokens) if held.is_due(held.prompt_tokens) else 0)
        tiers = assign_tiers(scores, windows, candidate, torch.zeros_like(candidate), held.room)
        held.evicted = (tiers == EVICTED).sum()
        at_once = max(1, WRITTEN_AT_ONCE // compressed.prefill.layers[0].keys.numel())
        for first in range(0, self.layers, at_once):
            some = slice(first, min(first + at_once, self.layers))
            last = self.tiers.write_prompt(held, compressed.prefill.layers[some], first, tiers[some], scores[some])
            self._point_tail(row, some, last)
        if held.is_due(held.prompt_tokens):
            self._decay(held, self._every_layer)

    def _free(self, rows: Sequence[int]) -> None:
        for row in rows:
            self.tiers.give_back(self._held.pop(row))
        self._arrange()

    def _arrange(self) -> None:
        """Who owns which page, and the order in which a row's pages are merged: full precision, then ledger, whose
        working copy has pages of the full tier."""
        heads = torch.arange(self.layout.kv_heads, device=self.shape.device)
        copied = self.tiers.keeps_copy
        rows = self._tail_page.new_zeros(len(self.full) + (0 if copied else len(self.ledger)))
        order = [heads[:0]]
        for row, held in sorted(self._held.items()):
            records = held.working_pages if copied else held.code_pages + len(self.full)
            pages = torch.cat([held.full_pages, records])
            rows[pages] = row
            order.append((pages * len(heads) + heads[:, None]).flatten())
        self._row_of_page = rows
        if self._fused:
            full = {row: held.full_pages for row, held in self._held.items()}
            codes = {row: held.code_pages for row, held in self._held.items()}
            self._tables = PageTables.of(self.shape.rows, full, codes, self.shape.device)
            self._rotary_rows = rotary_rows(self._rotary, self.shape.dtype)
        if copied:
            self._code_pages = torch.cat([heads[:0], *(held.code_pages for held in self._held.values())])
            self._working_pages = torch.cat([heads[:0], *(held.working_pages for held in self._held.values())])
        self._owners = (rows[:, None] * len(heads) + heads).flatten()
        self._order = torch.cat(order)

    # -- attention -----------------------------------------------------------------------------------------------------

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
        if more:  # for the last token of the step, ``after_step`` does it
            self._maintain(rows, positions, slice(layer, layer + 1))
        rows, positions = (part.to(self.shape.device, non_blocking=True) for part in (rows, positions))
        self._append(layer, rows, keys, values, positions)
        return self._attend(layer, rows, queries, scale)

    def after_step(self, positions: Tensor, counts: Tensor) -> None:
        real = counts > 0
        last = positions[real].gather(1, counts[real, None] - 1)[:, 0]
        self._maintain(self.rows[real], last + 1, self._every_layer)

    def _append(self, layer: int, rows: Tensor, keys: Tensor, values: Tensor, positions: Tensor) -> None:
        page, place = self._tail_page[layer, rows], self._tail_place[layer, rows]
        offset = (positions - self.sinks) % self.window
        self.full["keys"][layer, page, :, place, offset] = keys
        self.full["values"][layer, page, :, place, offset] = values
        self.full["fill"][layer, page, place] = (offset + 1).to(torch.uint8)
        if self.ranking == "key_norm":
            self.full["score"][layer, page, place] -= key_norms(keys) / self.window

    def _attend(self, layer: int, rows: Tensor, queries: Tensor, scale: float) -> Tensor:
        """[r, H_q, d] -> [r, H_q, d_v] fp32. Every window's score grows by the attention it received (Eq. 1)."""
        if self._fused:
            return self._attend_fused(layer, rows, queries, scale)
        heads, group = self.layout.kv_heads, self.layout.group
        by_row = queries.new_zeros(self.shape.rows, heads, group, queries.shape[-1])
        by_row[rows] = queries.unflatten(1, (heads, group))
        by_page = by_row[self._row_of_page]
        pages = self._attend_full(layer, by_page, scale)
        if not self.tiers.keeps_copy:
            pages = join_partials([pages, *self._attend_codes(layer, by_page, scale)])
        merged = merge_pages(pages, self._owners, self._order, self.shape.rows * heads)
        if self.ranking != "key_norm":
            mass = (merged.share[..., None] * pages.mass).unflatten(0, (-1, heads))
            received = mass.sum((1, 2)) / (heads * group)
            received = torch.where(torch.isin(self._row_of_page, rows)[:, None], received, 0)
            self.full["score"][layer] += received[: len(self.full)]
            if self.tiers.keeps_copy:
                self.ledger["score"][layer, self._code_pages] += received[self._working_pages]
            else:
                self.ledger["score"][layer] += received[len(self.full) :]
        return merged.output.unflatten(0, (-1, heads))[rows].flatten(1, 2)

    def _attend_fused(self, layer: int, rows: Tensor, queries: Tensor, scale: float) -> Tensor:
        full = FullPages(*(self.full[name][layer] for name in FullPages.__dataclass_fields__))
        codes = CodePages(*(self.ledger[name][layer] for name in CodePages.__dataclass_fields__))
        scores = None if self.ranking == "key_norm" else (self.full["score"][layer], self.ledger["score"][layer])
        windows, rotary = self.ledger["window"][layer], self._rotary_rows
        return attend_tiers(queries, rows, self._tables, full, codes, windows, scores, rotary, self.bits, scale)

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
            if held.is_due(count):
                held.peak = max(held.peak, self.memory(row).held)
                self._route(row, count, layers)
            if (count - self.sinks) % self.window == 0:
                self._open_window(row, count, layers)

    def _route(self, row: int, tokens: int, layers: slice) -> None:
        """A routing event (Algorithm 1) of one row, for the given layers at once."""
        held = self._held[row]
        if self.ranking == "p_norm":  # the first event's attention is that of the prompt and of all steps until it
            self.tiers.fold(held, 1 if tokens == held.first else held.method.p, layers)
        windows, scores, coded = self.tiers.table(held, layers)
        candidate = (windows >= 0) & (windows < self._boundary(row, tokens))
        tiers = assign_tiers(scores, windows, candidate, coded, held.room)
        held.evicted = held.evicted + (tiers == EVICTED).sum()
        held.promoted = held.promoted + self.tiers.migrate(held, tiers, layers)
        self._decay(held, layers)
        if tokens == held.first:
            self._shrink(row, tokens, layers)

    def _decay(self, held: _Row, layers: slice) -> None:
        if held.method.ranker == "decay":
            self.tiers.decay(held, held.method.decay, layers)

    def _shrink(self, row: int, tokens: int, layers: slice) -> None:
        """After the first eviction: give back the slots that the whole prompt took, once every layer has routed."""
        held = self._held[row]
        needed = held.room.protected_slots + held.room.full
        if needed >= held.full_slots:
            return
        self.tiers.compact(held, needed, layers)
        newest = self.full.table(held.full_pages, layers)[0] == (tokens - 1 - self.sinks) // self.window
        self._point_tail(row, layers, newest.int().argmax(1))
        if layers.stop == self.layers:
            self.tiers.give_back_beyond(held, needed)
            self._arrange()

    def _open_window(self, row: int, tokens: int, layers: slice) -> None:
        """Take a free slot in every layer for the window that the next token begins."""
        number = (tokens - self.sinks) // self.window
        self._point_tail(row, layers, self.tiers.open_window(self._held[row], number, layers))

    def _point_tail(self, row: int, layers: slice, slots: Tensor) -> None:
        """Where each layer's newest window is. slots [l]"""
        self._tail_page[layers, row] = self._held[row].full_pages[slots // self.full.per_page]
        self._tail_place[layers, row] = slots % self.full.per_page

    # -- the grid of windows, and memory -------------------------------------------------------------------------------

    def _slots_of(self, compressed: TieredCompressed) -> tuple[int, int]:
        return compressed.method.slots(compressed.room, compressed.prefill.tokens)

    def _boundary(self, row: int, tokens: int) -> int:
        """Windows below this number lie wholly outside the recent region and may be routed."""
        return max(0, (tokens - self._held[row].room.recent - self.sinks) // self.window)

    def memory(self, row: int) -> MemoryBreakdown:
        """Tokens and ledger records held, and the table entries of all slots that the row may use."""
        held, layout = self._held[row], self.layout
        size = window_bytes(self.window, self.bits, layout, self.shape.element_bytes)
        scales = layout.kv_heads * 4 * (layout.key_dim + self.window)
        tokens = int(self.full["fill"][:, held.full_pages].sum()) * layout.token_bytes(self.shape.element_bytes)
        records = int((self.ledger.table(held.code_pages)[0] != FREE).sum())
        promoted = int(self.ledger["promoted"][:, held.code_pages].sum())
        slots = self.layers * (held.full_slots + held.code_slots)
        tables = slots * (4 + self.full.score_bytes + 1)
        kept = tokens + records * size.quantized
        allocated = sum(
            slots.arena.page_bytes * len(pages)
            for slots, pages in ((self.full, held.full_pages), (self.ledger, held.code_pages))
        )
        charged = kept + promoted * size.full
        charged += tables if held.room.strict else -promoted * size.quantized
        return MemoryBreakdown(
            full_precision=tokens,
            codes=records * (size.quantized - scales),
            quantization=records * scales,
            positions=slots * 4,
            scores=slots * self.full.score_bytes,
            tables=slots,
            workspace=self.full.arena.page_bytes * len(held.working_pages),
            slack=allocated - kept - tables,
            charged=charged,
            host=records * size.full if self.tiers.originals is not None else 0,
        )

    def facts(self, row: int) -> dict[str, Any]:
        """Capacities as resolved for this prompt, and what routing did, summed over layers."""
        held = self._held[row]
        return {
            "full_windows": held.room.full,
            "quantized_windows": held.room.quantized,
            "recent_tokens": held.room.recent,
            "evicted_windows": int(held.evicted),
            "promotions": int(held.promoted),
        }

    def peak_held(self, row: int) -> int:
        return max(self._held[row].peak, self.memory(row).held)

    def allocated_bytes(self) -> int:
        """On the device: what exact promotion keeps in host memory is not in it."""
        return self.full.arena.nbytes + self.ledger.arena.nbytes
