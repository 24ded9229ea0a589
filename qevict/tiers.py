"""Where a row's windows are, and how they move between tiers (§4.3, Algorithm 1).

    full        keys, values [L, P, H_kv, s, Ω, d]                      sinks | recent | F
    ledger      packed codes, fp16 scales and offsets, promoted flag    Q, and F that was promoted
    originals   keys, values, in host memory, page for page             of every ledger record, if promotion is exact
    working     keys, values, in further pages of the full tier         of every ledger record, on a CPU

A window's codes are written once, at its first demotion. Promotion changes a flag: the promoted window is by the
paper's rule the same low-bit content, so it is read where it lies and nothing is copied; attention does not care about
order. Demoting it again clears the flag. Exact promotion copies the original back and forgets the record; coded again,
it gets the same codes. Eviction frees the slot, codes and original included.

On a CPU dequantising takes longer than attention, so it is done once per record and not at every step: into slots of
the full tier that hold no window of their own, slot for slot as in the ledger, so that one product attends to both.
That working copy is memory besides the cache, and counted: kernels that read codes in place need none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvcache.pages import PageArena
from kvcache.pool import PoolShape
from kvcache.prefill import LayerPrefill
from qevict.capacity import slots_per_page
from qevict.kernels.code_attention import CodePages, dequantized
from qevict.kernels.window_codes import write_codes
from qevict.routing import EVICTED, FULL, QUANTIZED, UNTOUCHED, nth_free
from qevict.slots import FREE, SINK, Where, WindowSlots
from qevict.window_scores import p_norm

HOST = torch.device("cpu")
Shapes = dict[str, tuple[tuple[int, ...], torch.dtype]]


@dataclass
class RowSlots:
    """A row's pages in both tiers, how many of their slots it may use, and the pages of its working copy, if any."""

    full_pages: Tensor
    code_pages: Tensor
    full_slots: int
    code_slots: int
    working_pages: Tensor


class Tiers:
    """Both tiers of all rows, for growing layers of one shape."""

    def __init__(
        self, shape: PoolShape, window: int, sinks: int, bits: int, *, norm: bool, originals: bool, keeps_copy: bool
    ) -> None:
        self.shape, self.window, self.sinks, self.bits = shape, window, sinks, bits
        self.layout = layout = shape.layers[0]
        layers, heads, slots = len(shape.layers), layout.kv_heads, slots_per_page(window)
        whole: Shapes = {
            "keys": ((heads, slots, window, layout.key_dim), shape.dtype),
            "values": ((heads, slots, window, layout.value_dim), shape.dtype),
        }
        fill: Shapes = {"fill": ((slots,), torch.uint8)}
        self.full = WindowSlots(layers, window, shape.device, whole | fill, norm)
        self.ledger = WindowSlots(
            layers,
            window,
            shape.device,
            {
                "key_codes": ((heads, slots, layout.key_dim, window * bits // 8), torch.uint8),
                "key_scale": ((heads, slots, layout.key_dim), torch.float16),
                "key_offset": ((heads, slots, layout.key_dim), torch.float16),
                "value_codes": ((heads, slots, window, layout.value_dim * bits // 8), torch.uint8),
                "value_scale": ((heads, slots, window), torch.float16),
                "value_offset": ((heads, slots, window), torch.float16),
                "promoted": ((slots,), torch.bool),
            },
            norm,
        )
        stacked: Shapes = {name: ((layers, *dims), dtype) for name, (dims, dtype) in whole.items()}
        self.originals = PageArena(1, HOST, stacked) if originals else None
        self.keeps_copy = keeps_copy
        self.rotary = torch.zeros(2, 0, layout.key_dim // 2, window, device=shape.device)
        """The model's tables by window, [2, W, d / 2, Ω]: both halves of a table are the same."""

    # -- pages ---------------------------------------------------------------------------------------------------------

    def reserve(self, slots: list[tuple[int, int]]) -> None:
        """Make room for rows with so many full-precision and ledger slots."""
        code_pages = sum(self.ledger.pages(codes) for _, codes in slots)
        self.full.arena.reserve(sum(self.full.pages(full) for full, _ in slots) + self.keeps_copy * code_pages)
        self.ledger.arena.reserve(code_pages)

    def take(self, full_slots: int, code_slots: int) -> RowSlots:
        # Working pages lie first: after a late first eviction the pages behind them are given back.
        working = self.full.take(code_slots * self.keeps_copy)
        full, codes = self.full.take(full_slots), self.ledger.take(code_slots)
        if self.originals is not None:  # pages are handed out lowest first, so theirs have the same numbers
            self.originals.take(len(codes))
        return RowSlots(full, codes, full_slots, code_slots, working)

    def give_back(self, row: RowSlots) -> None:
        self.full.give_back(row.full_pages)
        self.ledger.give_back(row.code_pages)
        self.full.give_back(row.working_pages)
        if self.originals is not None:
            self.originals.give_back(row.code_pages.to(HOST))

    def give_back_beyond(self, row: RowSlots, full_slots: int) -> None:
        """Free the full-precision pages that a row does not need for its first slots."""
        needed = self.full.pages(full_slots)
        self.full.give_back(row.full_pages[needed:])
        row.full_pages, row.full_slots = row.full_pages[:needed], full_slots

    def positions(self, windows: Tensor) -> Tensor:
        """True positions of each window's tokens. [...] -> [..., Ω]"""
        return self.sinks + windows[..., None] * self.window + torch.arange(self.window, device=windows.device)

    def extend_rotary(self, positions: int) -> None:
        windows = -(-positions // self.window)
        if windows > self.rotary.shape[1]:
            every = self.positions(torch.arange(windows, device=self.shape.device))
            cos, sin = self.shape.rotary(0, every.flatten())
            half = torch.stack([cos, sin])[..., : self.layout.key_dim // 2].float()
            self.rotary = half.unflatten(1, every.shape).transpose(2, 3).contiguous()

    # -- the prompt ----------------------------------------------------------------------------------------------------

    def write_sinks(self, row: RowSlots, layers: list[LayerPrefill]) -> None:
        for slot in range(-(-self.sinks // self.window)):
            first, last = slot * self.window, min((slot + 1) * self.window, self.sinks)
            for index, layer in enumerate(layers):
                where = _, page, place = self.full.at(row.full_pages, index, row.full_pages.new_tensor([slot]))
                self.full["keys"][index, page, :, place, : last - first] = layer.keys[None, :, first:last]
                self.full["values"][index, page, :, place, : last - first] = layer.values[None, :, first:last]
                self.full["fill"][where] = last - first
                self.full.occupy(where, torch.full_like(page, SINK), 0.0)

    def write_prompt(
        self, row: RowSlots, layers: Sequence[LayerPrefill], first: int, tiers: Tensor, scores: Tensor
    ) -> Tensor:
        """Windows of some layers, ``first`` and those that follow it, into their tiers, UNTOUCHED ones into full
        precision; the slot of each layer's last. tiers, scores [l, W] -> [l]"""
        kept, sink_slots = (tiers == FULL) | (tiers == UNTOUCHED), -(-self.sinks // self.window)
        layer, windows = kept.nonzero().unbind(1)
        slots = sink_slots + (kept.cumsum(1) - 1)[layer, windows]
        where = self.full.at(row.full_pages, layer + first, slots)
        left = layers[0].keys.shape[1] - self.sinks - windows * self.window
        self._write_full(where, *self._of_prompt(layers, kept), left.clamp(max=self.window), windows, scores[kept])
        demoted = tiers == QUANTIZED
        layer, windows = demoted.nonzero().unbind(1)
        slots = (demoted.cumsum(1) - 1)[layer, windows]
        self._write_codes(row, layer + first, slots, *self._of_prompt(layers, demoted), windows, scores[demoted])
        return sink_slots + kept.sum(1) - 1

    def _of_prompt(self, layers: Sequence[LayerPrefill], chosen: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of the windows ``chosen`` [l, W], layer by layer; past the prompt's end its last token is
        repeated. [K, H_kv, Ω, d] each"""
        keys, values = [], []
        for layer, windows in zip(layers, chosen, strict=True):
            positions = self.positions(windows.nonzero().flatten()).clamp(max=layer.keys.shape[1] - 1)
            keys.append(layer.keys[:, positions].transpose(0, 1))
            values.append(layer.values[:, positions].transpose(0, 1))
        return torch.cat(keys), torch.cat(values)

    def _write_full(
        self, where: Where, keys: Tensor, values: Tensor, fill: Tensor, windows: Tensor, scores: Tensor
    ) -> None:
        layer, page, place = where
        self.full["keys"][layer, page, :, place], self.full["values"][layer, page, :, place] = keys, values
        self.full["fill"][where] = fill.to(torch.uint8)
        self.full.occupy(where, windows, scores)

    def _write_codes(
        self,
        row: RowSlots,
        layers: Tensor,
        slots: Tensor,
        keys: Tensor,
        values: Tensor,
        windows: Tensor,
        scores: Tensor,
    ) -> None:
        """Quantise windows into ledger slots. keys [K, H_kv, Ω, d] are coded as they were before rotation."""
        if not len(windows):
            return
        where = self.ledger.at(row.code_pages, layers, slots)
        ledger = {name: self.ledger[name] for name in CodePages.__dataclass_fields__}
        write_codes(ledger, where, keys, values, windows, self.rotary, self.bits)
        self.ledger["promoted"][where] = False
        self.ledger.occupy(where, windows, scores)
        if self.keeps_copy:
            layer, page, place = where
            record = CodePages(*(part[layer, page, :, place].unsqueeze(2) for part in ledger.values()))
            made = dequantized(record, windows[:, None], self.rotary, self.bits)
            layer, page, place = copy = self.full.at(row.working_pages, layers, slots)
            for name, part in zip(("keys", "values"), made, strict=True):
                self.full[name][layer, page, :, place] = part.to(self.shape.dtype)
            self.full["fill"][copy] = self.window
        if self.originals is not None:
            layer, page, place = (index.to(HOST) for index in where)
            self.originals["keys"][layer, page, :, place] = keys.to(HOST)
            self.originals["values"][layer, page, :, place] = values.to(HOST)

    def _forget(self, row: RowSlots, layers: Tensor, slots: Tensor) -> None:
        """Free ledger slots."""
        self.ledger.clear(self.ledger.at(row.code_pages, layers, slots))
        if self.keeps_copy:
            self.full["fill"][self.full.at(row.working_pages, layers, slots)] = 0

    # -- an event ------------------------------------------------------------------------------------------------------

    def table(self, row: RowSlots, layers: slice) -> tuple[Tensor, Tensor, Tensor]:
        """Window numbers, what ranks them, and whether they have codes, of all slots of a row. [l, C] each"""
        full_windows, full_scores = self.full.table(row.full_pages, layers)
        code_windows, code_scores = self.ledger.table(row.code_pages, layers)
        windows = torch.cat([full_windows, code_windows], 1)
        coded = torch.arange(windows.shape[1], device=windows.device).expand_as(windows) >= full_windows.shape[1]
        return windows, torch.cat([full_scores, code_scores], 1), coded

    def migrate(self, row: RowSlots, tiers: Tensor, layers: slice) -> Tensor:
        """Move every window of a row to the tier it is assigned; how many were promoted. tiers [l, C] as the table"""
        split = len(row.full_pages) * self.full.per_page
        of_full, of_code = tiers[:, :split], tiers[:, split:]
        promoted = of_code == FULL
        restored = self._take_originals(row, promoted, layers) if self.originals is not None else None
        newly = promoted.sum() if restored is not None else self._mark_promoted(row, of_code, layers)
        layer, slot = (of_code == EVICTED).nonzero().unbind(1)
        self._forget(row, layer + layers.start, slot)
        self._demote(row, of_full == QUANTIZED, layers)
        layer, slot = ((of_full == QUANTIZED) | (of_full == EVICTED)).nonzero().unbind(1)
        where = self.full.at(row.full_pages, layer + layers.start, slot)
        self.full["fill"][where] = 0
        self.full.clear(where)
        if restored is not None:
            self._restore(row, restored, layers)
        return newly

    def _mark_promoted(self, row: RowSlots, of_code: Tensor, layers: slice) -> Tensor:
        layer, slot = (of_code != UNTOUCHED).nonzero().unbind(1)
        where = self.ledger.at(row.code_pages, layer + layers.start, slot)
        promoted = of_code[layer, slot] == FULL
        newly = (promoted & ~self.ledger["promoted"][where]).sum()
        self.ledger["promoted"][where] = promoted
        return newly

    def _demote(self, row: RowSlots, demoted: Tensor, layers: slice) -> None:
        """First demotion: quantise once and create the ledger record, in the free slots of each layer in order."""
        windows, scores = self.full.table(row.full_pages, layers)
        layer, slot = demoted.nonzero().unbind(1)
        index, page, place = self.full.at(row.full_pages, layer + layers.start, slot)
        keys, values = (self.full[name][index, page, :, place] for name in ("keys", "values"))
        target = _free_slots(self.ledger, row.code_pages, row.code_slots, demoted, layers)
        self._write_codes(row, index, target, keys, values, windows[layer, slot], scores[layer, slot])

    def _take_originals(self, row: RowSlots, promoted: Tensor, layers: slice) -> _Restored:
        """What was kept of windows that become full again; their records are forgotten."""
        assert self.originals is not None
        windows, scores = self.ledger.table(row.code_pages, layers)
        layer, slot = promoted.nonzero().unbind(1)
        where = self.ledger.at(row.code_pages, layer + layers.start, slot)
        self._forget(row, layer + layers.start, slot)
        index, page, place = (part.to(HOST) for part in where)
        kept = (self.originals[name][index, page, :, place] for name in ("keys", "values"))
        keys, values = (part.to(promoted.device) for part in kept)
        return _Restored(promoted, keys, values, windows[layer, slot], scores[layer, slot])

    def _restore(self, row: RowSlots, restored: _Restored, layers: slice) -> None:
        layer = restored.promoted.nonzero()[:, 0] + layers.start
        target = _free_slots(self.full, row.full_pages, row.full_slots, restored.promoted, layers)
        where = self.full.at(row.full_pages, layer, target)
        fill = torch.full_like(target, self.window)
        self._write_full(where, restored.keys, restored.values, fill, restored.windows, restored.scores)

    def compact(self, row: RowSlots, slots: int, layers: slice) -> None:
        """Move what lies beyond a row's first ``slots`` full-precision slots into free ones among them."""
        windows, scores = self.full.table(row.full_pages, layers)
        beyond = windows != FREE
        beyond[:, :slots] = False
        layer, slot = beyond.nonzero().unbind(1)
        target = _free_slots(self.full, row.full_pages, slots, beyond, layers)
        old = index, page, place = self.full.at(row.full_pages, layer + layers.start, slot)
        keys, values = (self.full[name][index, page, :, place] for name in ("keys", "values"))
        where = self.full.at(row.full_pages, index, target)
        self._write_full(where, keys, values, self.full["fill"][old], windows[layer, slot], scores[layer, slot])
        self.full["fill"][old] = 0
        self.full.clear(old)

    def open_window(self, row: RowSlots, number: int, layers: slice) -> Tensor:
        """Give a window that begins a free slot in every layer: which one. [l]"""
        one = torch.ones(layers.stop - layers.start, 1, dtype=torch.bool, device=row.full_pages.device)
        slots = _free_slots(self.full, row.full_pages, row.full_slots, one, layers)
        where = self.full.at(row.full_pages, torch.arange(layers.start, layers.stop, device=slots.device), slots)
        self.full["fill"][where] = 0
        self.full.occupy(where, torch.full_like(slots, number), 0.0)
        return slots

    # -- scores between events -----------------------------------------------------------------------------------------

    def decay(self, row: RowSlots, factor: float, layers: slice) -> None:
        """Scores count for less from now on (Eq. 22)."""
        for tier, pages in ((self.full, row.full_pages), (self.ledger, row.code_pages)):
            tier["score"][layers][:, pages] *= factor

    def fold(self, row: RowSlots, p: float, layers: slice) -> None:
        """What came since the last event joins the norm of what came before (Eq. 23)."""
        for tier, pages in ((self.full, row.full_pages), (self.ledger, row.code_pages)):
            norm, score = tier["norm"][layers], tier["score"][layers]
            norm[:, pages] = p_norm(norm[:, pages], score[:, pages], p)
            score[:, pages] = 0


@dataclass
class _Restored:
    """Windows on their way from the host: promoted [l, C] says of which layer each of the K is."""

    promoted: Tensor
    keys: Tensor
    values: Tensor
    windows: Tensor
    scores: Tensor


def _free_slots(tier: WindowSlots, pages: Tensor, slots: int, wanted: Tensor, layers: slice) -> Tensor:
    """A free slot of its layer, below ``slots``, for each entry of ``wanted`` [l, C], as ``nonzero`` has them. [K]"""
    free = tier.table(pages, layers)[0] == FREE
    free[:, slots:] = False
    layer, entry = wanted.nonzero().unbind(1)
    return nth_free(free)[layer, (wanted.cumsum(1) - 1)[layer, entry]]
