"""The mixed low-bit family: ZipCache (He et al., arXiv 2405.14256), more bits for the tokens that attention dwells on.

    prompt                       new tokens
    | block                    | block      | block      | recent ..
    | salient 4 bit, rest 2 bit| the same   | the same   | full precision

A block is the prompt, or ``interval`` new tokens. Every KV head ranks its tokens for itself and codes each once:

    keys     per channel, over all salient (or all other) tokens of the block
    values   divided by a channel's factor c = sqrt(max |v|), then per token

Attention does not ask for an order, and keys are rotated, so a head's salient tokens lie together in pages.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvcache.kernels.grouped_attention import attend_grouped_codes
from kvcache.kernels.paged_attention import PagePartials, attend_pages, join_partials, merge_pages
from kvcache.layered import LayeredPool, LayerStore, in_order
from kvcache.layout import LayerLayout
from kvcache.mix import Mix
from kvcache.pages import PageArena
from kvcache.pool import Compressed, MemoryBreakdown, PoolShape
from kvcache.probes import probe_positions, witnesses
from kvcache.quant import Quantized, quantize
from kvcache.select import keep_top

PAGE = 32
"""Tokens of a page of codes."""

PAGES_AT_ONCE = 128
"""Pages whose codes are unpacked at a time: bounds what a step needs."""


@dataclass
class MixedCompressed(Compressed):
    """``saliency`` [layers] of [H_kv, n]: the normalised attention that each prompt token received from probes."""

    saliency: list[Tensor]


class MixedPool(LayeredPool):
    """Coded blocks, and the newest tokens in full."""

    def __init__(self, shape: PoolShape, mix: Mix) -> None:
        super().__init__(shape, [_MixedLayer(layout, shape, mix) for layout in shape.layers])


class _MixedLayer(LayerStore):
    def __init__(self, layout: LayerLayout, shape: PoolShape, mix: Mix) -> None:
        super().__init__(layout, shape)
        self.mix, self.bits = mix, (mix.salient_bits, mix.other_bits)
        heads, dim, value_dim = self.heads, layout.key_dim, layout.value_dim
        where = {"row": ((), torch.int64), "ordinal": ((), torch.int64)}
        self.codes = [
            PageArena(
                0,
                shape.device,
                {
                    "key_codes": ((heads, dim, PAGE * bits // 8), torch.uint8),
                    "value_codes": ((heads, PAGE, value_dim * bits // 8), torch.uint8),
                    "value_scale": ((heads, PAGE), torch.float16),
                    "value_offset": ((heads, PAGE), torch.float16),
                    "fill": ((), torch.int64),
                    "block": ((), torch.int64),
                    **where,
                },
            )
            for bits in self.bits
        ]
        self.blocks = PageArena(
            0,
            shape.device,
            {
                "key_scale": ((2, heads, dim), torch.float16),
                "key_offset": ((2, heads, dim), torch.float16),
                "channel": ((heads, value_dim), torch.float16),
                "row": ((), torch.int64),
            },
        )
        """Key scales and offsets of the salient and of the other tokens, channel factors of all values."""
        self.recent = PageArena(
            0,
            shape.device,
            {
                "keys": ((heads, mix.interval, dim), shape.dtype),
                "values": ((heads, mix.interval, value_dim), shape.dtype),
                "received": ((heads, mix.interval), torch.float32),
                **where,
            },
        )
        self.count = torch.zeros(shape.rows, dtype=torch.int64, device=shape.device)
        """[R] recent tokens of each row."""
        self.ring = torch.zeros_like(self.count)
        self.witnesses = witnesses(mix.interval, mix.probes).to(shape.device)
        self.is_probe = torch.zeros(mix.interval, dtype=torch.bool, device=shape.device)
        self.is_probe[probe_positions(mix.interval, mix.probes)] = True
        self._peak: dict[int, int] = {}
        self._arrange()

    # -- tokens come and go --------------------------------------------------------------------------------------------

    def write(self, row: int, compressed: Compressed, layer: int) -> None:
        assert isinstance(compressed, MixedCompressed)
        content = compressed.prefill.layers[layer]
        self.count[row], self._peak[row] = 0, 0
        self.ring[row] = ring = self.recent.take(1)
        self.recent["row"][ring] = row
        self._code_block(row, content.keys, content.values, compressed.saliency[layer])

    def append(self, rows: Tensor, keys: Tensor, values: Tensor) -> None:
        slot, ring = self.count[rows], self.ring[rows]
        self.recent["keys"][ring, :, slot] = keys
        self.recent["values"][ring, :, slot] = values
        self.count[rows] += 1

    def _close(self, row: int) -> None:
        """Code a full ring, once its last token has attended."""
        self._peak[row] = max(self._peak[row], self.memory(row).held)
        recent = {name: self.recent[name][self.ring[row]] for name in ("keys", "values", "received")}
        self._code_block(row, recent["keys"], recent["values"], recent["received"] / self.witnesses)
        self.recent["received"][self.ring[row]] = 0
        self.count[row] = 0

    def _code_block(self, row: int, keys: Tensor, values: Tensor, saliency: Tensor) -> None:
        """keys [H_kv, m, d], values [H_kv, m, d_v], saliency [H_kv, m]"""
        block = self.blocks.take(1)
        channel = values.float().abs().amax(1).sqrt().half()
        channel = torch.where(channel == 0, 1.0, channel)
        self.blocks["row"][block], self.blocks["channel"][block] = row, channel
        # What is no number costs its own row alone: an error here would end those beside it.
        salient = keep_top(saliency.nan_to_num(), self.mix.salient_tokens(keys.shape[1]))
        others = torch.ones_like(saliency, dtype=torch.bool).scatter_(1, salient, False)
        scaled = values.float() / channel.float()[:, None]
        for place, chosen in enumerate((salient, others.nonzero()[:, 1].view(self.heads, -1))):
            if chosen.shape[1]:
                self._code(place, row, block, *_taken(chosen, keys, scaled), chosen.shape[1])
        self._arrange()

    def _code(self, place: int, row: int, block: Tensor, keys: Tensor, values: Tensor, count: int) -> None:
        """Whole pages of tokens, of which the last may repeat. keys [H_kv, p * PAGE, d]"""
        arena, bits = self.codes[place], self.bits[place]
        before = len(self._pages_of(arena, row))
        pages = arena.take(keys.shape[1] // PAGE)
        of_keys, of_values = quantize(keys.transpose(1, 2), bits), quantize(values, bits)
        arena["key_codes"][pages] = of_keys.codes.unflatten(-1, (len(pages), -1)).permute(2, 0, 1, 3)
        for name in ("codes", "scale", "offset"):
            arena[f"value_{name}"][pages] = getattr(of_values, name).unflatten(1, (-1, PAGE)).transpose(0, 1)
        self.blocks["key_scale"][block, place], self.blocks["key_offset"][block, place] = of_keys.scale, of_keys.offset
        number = torch.arange(len(pages), device=pages.device)
        arena["fill"][pages] = (count - number * PAGE).clamp(max=PAGE)
        arena["block"][pages], arena["row"][pages], arena["ordinal"][pages] = block, row, before + number

    def free(self, row: int) -> None:
        for arena in (*self.codes, self.blocks):
            arena.give_back(self._pages_of(arena, row))
        self.recent.give_back(self.ring[row : row + 1])
        self.count[row] = 0
        del self._peak[row]
        self._arrange()

    @staticmethod
    def _pages_of(arena: PageArena, row: int) -> Tensor:
        return ((arena["row"] == row) & arena.used).nonzero().flatten()

    def _arrange(self) -> None:
        arenas = [*self.codes, self.recent]
        self._owners = self.by_head(torch.cat([arena["row"] for arena in arenas]))
        self._order = in_order(arenas, self.heads)

    # -- attention -----------------------------------------------------------------------------------------------------

    def attend(self, rows: Tensor, queries: Tensor, scale: float) -> Tensor:
        by_row = self.queries_by_row(rows, queries)
        recent = self._attend_recent(by_row, scale)
        whole = PagePartials(recent.peak, recent.mass.sum(-1, keepdim=True), recent.output)
        parts = [part for place in (0, 1) for part in self._attend_codes(place, by_row, scale)]
        merged = merge_pages(join_partials([*parts, whole]), self._owners, self._order, self.shape.rows * self.heads)
        self._probe(rows, merged.share[len(merged.share) - len(recent.peak) :], recent.mass)
        for row in rows[self.count[rows] == self.mix.interval].tolist():
            self._close(row)
        return merged.output.unflatten(0, (-1, self.heads))[rows].flatten(1, 2)

    def _probe(self, rows: Tensor, share: Tensor, mass: Tensor) -> None:
        """Add what recent tokens received from the queries that are probes. share [p * H_kv, G], mass [..., G, I]"""
        pages = self.ring[rows[self.is_probe[self.count[rows] - 1]]]
        received = (share[..., None] * mass).sum(1).unflatten(0, (-1, self.heads))
        self.recent["received"][pages] += received[pages]

    def _attend_recent(self, queries: Tensor, scale: float) -> PagePartials:
        row, slots = self.recent["row"], torch.arange(self.mix.interval, device=queries.device)
        held = (slots < self.count[row][:, None]) & self.recent.used[:, None]
        return attend_pages(
            queries[row].flatten(0, 1),
            self.recent["keys"].flatten(0, 1),
            self.recent["values"].flatten(0, 1),
            held.repeat_interleave(self.heads, 0),
            scale,
            self.mix.interval,
        )

    def _attend_codes(self, place: int, queries: Tensor, scale: float) -> list[PagePartials]:
        arena, bits, parts = self.codes[place], self.bits[place], []
        for start in range(0, arena.extent, PAGES_AT_ONCE):
            some = slice(start, start + PAGES_AT_ONCE)
            held = torch.arange(PAGE, device=queries.device) < arena["fill"][some, None]
            of_pages = queries[arena["row"][some]]
            part, _ = attend_grouped_codes(of_pages, *self._coded(place, some), bits, held, scale)
            part.output *= self.blocks["channel"][arena["block"][some]].flatten(0, 1).float()[:, None]
            parts.append(part)
        return parts

    def _coded(self, place: int, pages: slice) -> tuple[Quantized, Quantized]:
        """Keys and values, which are still divided by their channels' factors; one group of each a page."""
        arena = self.codes[place]
        block = arena["block"][pages]
        of_block = (self.blocks[name][block, place] for name in ("key_scale", "key_offset"))
        keys = Quantized(*(part.unsqueeze(3) for part in (arena["key_codes"][pages], *of_block)))
        of_tokens = (arena[f"value_{name}"][pages] for name in ("codes", "scale", "offset"))
        return keys, Quantized(*(part.unsqueeze(3) for part in of_tokens))

    # -- memory --------------------------------------------------------------------------------------------------------

    def memory(self, row: int) -> MemoryBreakdown:
        """Codes, scales and recent tokens held, and the sums that will rank these; free slots are slack."""
        codes = scales = allocated = 0
        for arena in self.codes:
            pages = self._pages_of(arena, row)
            tokens, sets = int(arena["fill"][pages].sum()), len(arena["block"][pages].unique())
            codes += tokens * (arena.bytes_of("key_codes") + arena.bytes_of("value_codes")) // PAGE
            scales += tokens * (arena.bytes_of("value_scale") + arena.bytes_of("value_offset")) // PAGE
            scales += sets * (self.blocks.bytes_of("key_scale") + self.blocks.bytes_of("key_offset")) // 2
            allocated += len(pages) * arena.page_bytes
        blocks = len(self._pages_of(self.blocks, row))
        scales += blocks * self.blocks.bytes_of("channel")
        slot = (self.recent.bytes_of("keys") + self.recent.bytes_of("values")) // self.mix.interval
        full, scores = int(self.count[row]) * slot, self.recent.bytes_of("received")
        allocated += blocks * self.blocks.page_bytes + self.recent.page_bytes
        return MemoryBreakdown(
            full_precision=full,
            codes=codes,
            quantization=scales,
            scores=scores,
            slack=allocated - full - codes - scales - scores,
        )

    def peak_held(self, row: int) -> int:
        """Closing a block makes a row smaller."""
        return max(self._peak[row], self.memory(row).held)

    @property
    def nbytes(self) -> int:
        return sum(arena.nbytes for arena in (*self.codes, self.blocks, self.recent))


def _taken(chosen: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Each head's tokens, up to whole pages by repeating the last, which changes no minimum. chosen [H_kv, s]"""
    pages, last = -(-chosen.shape[1] // PAGE), chosen.shape[1] - 1
    index = chosen[:, torch.arange(pages * PAGE, device=chosen.device).clamp(max=last), None]
    return (
        keys.gather(1, index.expand(-1, -1, keys.shape[-1])),
        values.gather(1, index.expand(-1, -1, values.shape[-1])),
    )
