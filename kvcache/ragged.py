"""The ragged family: full-precision tokens, any number of them per row, layer and KV head.

Serves the full cache and every method that evicts at the end of prefill. Tokens lie in pages of 64; a (row, head) owns
pages, appends to its last one and asks for another when that is full:

    keys [P, 64, d]   owner [P] = row * H_kv + head   ordinal [P] = the page's place in its owner's sequence
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvcache.kernels.paged_attention import attend_pages, merge_pages
from kvcache.layered import LayeredPool, LayerStore
from kvcache.layout import LayerLayout
from kvcache.pages import PageArena
from kvcache.pool import Compressed, MemoryBreakdown, PoolShape

PAGE = 64


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
    """The pages of one layer. ``more``: further tensors that every page has."""

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
                "owner": ((), torch.int64),
                "ordinal": ((), torch.int64),
                **(more or {}),
            },
        )
        owners = shape.rows * self.heads
        self.tail = torch.zeros(owners, dtype=torch.int64, device=shape.device)
        self.lengths = torch.zeros(owners, dtype=torch.int64, device=shape.device)
        self._order: Tensor | None = None

    def write_rows(self, coming: Mapping[int, Compressed], layer: int) -> None:
        self.lay({row: self.kept_of(compressed, layer) for row, compressed in coming.items()})

    def write(self, row: int, compressed: Compressed, layer: int) -> None:
        self.write_rows({row: compressed}, layer)

    def kept_of(self, compressed: Compressed, layer: int) -> Kept:
        assert isinstance(compressed, RaggedCompressed)
        content = compressed.prefill.layers[layer]
        return Kept(content.keys, content.values, compressed.kept[layer])

    def lay(self, coming: Mapping[int, Kept]) -> None:
        """Copy the kept tokens of rows into pages of their own."""
        owners = self.by_head(self.tail.new_tensor(list(coming)))
        heads = [positions for kept in coming.values() for positions in kept.positions]
        lengths = self.tail.new_tensor([len(positions) for positions in heads])
        counts = -(-lengths // PAGE)
        owner, ordinal = _enumerated(counts)
        pages = self._take(owners[owner], ordinal)
        of_token, place = _enumerated(lengths)
        slots = pages[(counts.cumsum(0) - counts)[of_token] + place // PAGE] * PAGE + place % PAGE
        first = 0
        for kept in coming.values():
            tokens = torch.cat(list(kept.positions))
            into = slots[first : first + len(tokens)]
            head = of_token[first : first + len(tokens)] % self.heads
            for name, source in (("keys", kept.keys), ("values", kept.values)):
                self.arena[name].flatten(0, 1)[into] = source[head, tokens]
            first += len(tokens)
        self.lengths[owners] = lengths
        last = ordinal == counts[owner] - 1
        self.tail[owners[owner[last]]] = pages[last]

    def append(self, rows: Tensor, keys: Tensor, values: Tensor) -> None:
        """One token per row. keys [r, H_kv, d]"""
        owners = self.by_head(rows)
        offset = self.lengths[owners] % PAGE
        full = owners[offset == 0]
        if len(full):
            self.tail[full] = self._take(full, self.lengths[full] // PAGE)
        pages = self.tail[owners]
        self.arena["keys"][pages, offset] = keys.flatten(0, 1)
        self.arena["values"][pages, offset] = values.flatten(0, 1)
        self.lengths[owners] += 1

    def attend(self, rows: Tensor, queries: Tensor, scale: float) -> Tensor:
        """queries [r, H_q, d] -> [r, H_q, d_v]"""
        owners, owner = self.by_head(rows), self.arena["owner"]
        grouped = self.queries_by_row(rows, queries).flatten(0, 1)
        partials = attend_pages(grouped[owner], self.arena["keys"], self.arena["values"], self.filled(), scale)
        merged = merge_pages(partials, owner, self.order, len(self.lengths))
        output = merged.output[owners].to(queries.dtype)
        return output.unflatten(0, (len(rows), self.heads)).flatten(1, 2)

    def filled(self) -> Tensor:
        """Slots that hold a token. [P, 64] bool"""
        tokens = (self.lengths[self.arena["owner"]] - self.arena["ordinal"] * PAGE) * self.arena.used
        return torch.arange(PAGE, device=tokens.device) < tokens[:, None]

    def free(self, row: int) -> None:
        owners = self.by_head(self.tail.new_tensor([row]))
        self.arena.give_back(self._pages_of(owners))
        self.lengths[owners] = 0
        self._order = None

    def memory(self, row: int) -> MemoryBreakdown:
        """Tokens held; the unfilled rest of their pages is slack."""
        used, allocated = self.row_bytes(row)
        return MemoryBreakdown(full_precision=used, slack=allocated - used)

    @property
    def nbytes(self) -> int:
        return self.arena.nbytes

    def row_bytes(self, row: int) -> tuple[int, int]:
        """Bytes of the row's tokens, and of the pages it owns."""
        lengths = self.lengths[row * self.heads : (row + 1) * self.heads].tolist()
        token = sum(self.arena[name].shape[-1] * self.arena[name].itemsize for name in ("keys", "values"))
        return sum(lengths) * token, sum(-(-length // PAGE) for length in lengths) * PAGE * token

    def _pages_of(self, owners: Tensor) -> Tensor:
        return (torch.isin(self.arena["owner"], owners) & self.arena.used).nonzero().flatten()

    def _take(self, owners: Tensor, ordinals: Tensor) -> Tensor:
        pages = self.arena.take(len(owners))
        self.arena["owner"][pages] = owners
        self.arena["ordinal"][pages] = ordinals
        self._order = None
        return pages

    @property
    def order(self) -> Tensor:
        """Used pages, owner by owner, each owner's in the order of its tokens. Found when asked for: rows come and go
        many at a time."""
        if self._order is None:
            pages = self.arena.used.nonzero().flatten()
            longest = int(self.arena["ordinal"].max()) + 1 if len(pages) else 1
            self._order = pages[(self.arena["owner"][pages] * longest + self.arena["ordinal"][pages]).argsort()]
        return self._order


def _enumerated(counts: Tensor) -> tuple[Tensor, Tensor]:
    """Every thing of all owners in turn: whose it is, and which of that owner's. [o] -> [sum], [sum]"""
    owner = torch.arange(len(counts), device=counts.device).repeat_interleave(counts)
    return owner, torch.arange(len(owner), device=counts.device) - (counts.cumsum(0) - counts)[owner]
