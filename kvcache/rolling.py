"""The rolling family: the first tokens of a row and its most recent ones, and positions that count inside the cache.

    sinks [rows * H_kv, S, d]          pages of the others, as in the ragged family: when a row has its capacity,
    | 0 | 1 | 2 | 3 |                  the next token takes the slot of the oldest
          ...moved along, e gone...    | 9 | 10 | 7 | 8 |

Attention depends on differences of positions only, and among recent tokens these are the same in the cache as in the
text. So no recent key is ever rotated anew: once e tokens are gone from between, each step turns a copy of the sinks by
e positions more, and every distance is the one inside the cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from kvcache.kernels.paged_attention import attend_pages, join_partials, merge_pages
from kvcache.layered import LayeredPool
from kvcache.layout import LayerLayout
from kvcache.pages import Numbers
from kvcache.pool import Compressed, MemoryBreakdown, PoolShape
from kvcache.ragged import PAGE, Kept, LayerPages
from kvcache.rotary import rotate


@dataclass
class RollingCompressed(Compressed):
    """``capacity``: tokens that every KV head may ever hold, more than there are sinks."""

    capacity: int


class RollingPool(LayeredPool):
    """The ``sinks`` first tokens, at least one, and a ring of recent ones."""

    def __init__(self, shape: PoolShape, sinks: int) -> None:
        self.sinks = sinks
        self._layers = [_RollingPages(layer, shape, sinks) for layer in shape.layers]
        super().__init__(shape, self._layers)

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
        pages = self._layers[layer]
        pages.append(rows, keys, values)
        gone = torch.zeros(self.shape.rows, dtype=torch.int64)
        gone[rows] = positions + 1 - pages.held(rows)
        moved = pages.moved_sinks(*self.shape.rotary(layer, gone.to(self.shape.device, non_blocking=True)))
        return pages.attend_all(rows, queries, moved, scale)


class _RollingPages(LayerPages):
    """One layer: pages of recent tokens that are written over, and the sinks beside them."""

    def __init__(self, layout: LayerLayout, shape: PoolShape, sinks: int) -> None:
        super().__init__(layout, shape)
        owners = len(self.lengths)
        self.sink_keys = torch.zeros(owners, sinks, layout.key_dim, dtype=shape.dtype, device=shape.device)
        self.sink_values = torch.zeros(owners, sinks, layout.value_dim, dtype=shape.dtype, device=shape.device)
        self.ring, self.written = np.ones(owners, dtype=np.int64), np.zeros(owners, dtype=np.int64)

    @property
    def sink_bytes(self) -> int:
        """Of one row."""
        return self.sink_keys[: self.heads].nbytes + self.sink_values[: self.heads].nbytes

    def write_rows(self, coming: Mapping[int, Compressed], layer: int) -> None:
        super().write_rows(coming, layer)
        sinks = self.sink_keys.shape[1]
        for row, compressed in coming.items():
            assert isinstance(compressed, RollingCompressed)
            content, owners = compressed.prefill.layers[layer], self.owners_of(row)
            self.sink_keys[owners], self.sink_values[owners] = content.keys[:, :sinks], content.values[:, :sinks]
            self.ring[owners], self.written[owners] = compressed.capacity - sinks, self.lengths[owners]

    def kept_of(self, compressed: Compressed, layer: int) -> Kept:
        """The most recent tokens that fit beside the sinks."""
        assert isinstance(compressed, RollingCompressed)
        content, tokens = compressed.prefill.layers[layer], compressed.prefill.tokens
        recent = min(compressed.capacity, tokens) - self.sink_keys.shape[1]
        positions = torch.arange(tokens - recent, tokens, device=self.shape.device)
        return Kept(content.keys, content.values, [positions] * self.heads)

    def memory(self, row: int) -> MemoryBreakdown:
        recent = super().memory(row)
        return replace(recent, full_precision=recent.full_precision + self.sink_bytes)

    @property
    def nbytes(self) -> int:
        return self.arena.nbytes + self.sink_keys.nbytes + self.sink_values.nbytes

    def held(self, rows: Tensor) -> Tensor:
        """Tokens of each row, per KV head. [r], on the host"""
        return torch.from_numpy(self.lengths[rows.numpy() * self.heads]) + self.sink_keys.shape[1]

    def append(self, rows: Tensor, keys: Tensor, values: Tensor) -> None:
        """One token per row, in a slot of its own or in that of the oldest. keys [r, H_kv, d]"""
        full = torch.from_numpy((self.lengths == self.ring)[rows.numpy() * self.heads])
        super().append(rows[~full], keys[~full], values[~full])
        owners = self.owners(rows[full])[0]
        slots = self.written[owners] % self.ring[owners]
        self.put(self._page_at(owners, slots // PAGE) * PAGE + slots % PAGE, keys[full], values[full])
        self.written[self.owners(rows)[0]] += 1

    def _page_at(self, owners: Numbers, ordinals: Numbers) -> Numbers:
        """Pages in ``order`` lie owner by owner."""
        counts = -(-self.lengths // PAGE)
        return self.tables.order_here[(counts.cumsum() - counts)[owners] + ordinals]

    def moved_sinks(self, cos: Tensor, sin: Tensor) -> Tensor:
        """Keys turned by as many positions as the tables [rows, d] are for. [rows * H_kv, S, d]

        Scaled tables would stretch what is scaled already, hence the division.
        """
        cos, sin = (table.float().repeat_interleave(self.heads, 0)[:, None] for table in (cos, sin))
        moved = rotate(self.sink_keys.float(), cos, sin) / (cos.square() + sin.square()).sqrt()
        return moved.to(self.sink_keys.dtype)

    def attend_all(self, rows: Tensor, queries: Tensor, sink_keys: Tensor, scale: float) -> Tensor:
        """Over sinks and recent tokens. queries [r, H_q, d] -> [r, H_q, d_v]"""
        owners, owner = self.owners(rows)[1], self.tables.owner
        grouped = self.queries_by_row(rows, queries).flatten(0, 1)
        recent = attend_pages(grouped[owner], self.arena["keys"], self.arena["values"], self.filled(), scale)
        everywhere = torch.ones(sink_keys.shape[:2], dtype=torch.bool, device=owners.device)
        first = attend_pages(grouped, sink_keys, self.sink_values, everywhere, scale)
        joined = join_partials([recent, first])
        every = torch.arange(len(self.lengths), device=owners.device)
        order = torch.cat([self.tables.order, len(owner) + owners])
        merged = merge_pages(joined, torch.cat([owner, every]), order, len(self.lengths))
        output = merged.output[owners].to(queries.dtype)
        return output.unflatten(0, (len(rows), self.heads)).flatten(1, 2)
