"""The bounded family: ragged pages whose heads choose again, every :data:`~kvcache.bounded.INTERVAL` tokens.

A row carries what its method ranks with: the last w rotated queries, in a ring, and where it asks for column sums, the
attention that every token received (mean over a head's group, as it is summed over queries). A head is then shown to
the method as a prompt of its own: kept keys and values in the order of their positions, which are still the true ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from kvcache.bounded import INTERVAL, SUM_BYTES
from kvcache.budget import Budget, ResolvedBudget
from kvcache.evict import PromptEvictor
from kvcache.kernels.paged_attention import attend_pages, merge_pages
from kvcache.layered import LayeredPool, LayerStore
from kvcache.layout import CacheLayout, LayerLayout
from kvcache.pages import to_device
from kvcache.pool import Compressed, MemoryBreakdown, PoolShape
from kvcache.prefill import LayerPrefill, Prefill
from kvcache.ragged import PAGE, Kept, LayerPages


@dataclass
class BoundedCompressed(Compressed):
    """``kept`` of the prompt, as in the ragged family; ``budget`` is what a head may hold after each choice, the same
    for all, and ``method`` with ``seed`` is who chooses."""

    kept: list[list[Tensor]]
    method: PromptEvictor
    budget: ResolvedBudget
    seed: str


@dataclass
class _Chooser:
    """What a row's next choices in one layer need. ``counts``: tokens of each head after a choice, None for all."""

    method: PromptEvictor
    seed: str
    counts: list[int] | None
    output_projection: Tensor
    scale: float


class BoundedPool(LayeredPool):
    """``queries`` w of each row, and attention sums where ``sums``."""

    def __init__(self, shape: PoolShape, queries: int, sums: bool) -> None:
        stores = [_BoundedLayer(layout, shape, place, queries, sums) for place, layout in enumerate(shape.layers)]
        super().__init__(shape, stores)


class _BoundedLayer(LayerStore):
    rows_on_host = True

    def __init__(self, layout: LayerLayout, shape: PoolShape, place: int, queries: int, sums: bool) -> None:
        super().__init__(layout, shape)
        self.place, self.sums = place, sums
        self.pages = LayerPages(layout, shape, {"received": ((PAGE,), torch.float32)} if sums else {})
        self.queries = torch.zeros(
            shape.rows, layout.query_heads, queries, layout.key_dim, dtype=shape.dtype, device=shape.device
        )
        """[R, H_q, w, d], query number i in slot i modulo w."""
        self.tokens = torch.zeros(shape.rows, dtype=torch.int64)
        """[R] all that a row has seen; on the host."""
        self.prompt = torch.zeros_like(self.tokens)
        self._choosers: dict[int, _Chooser] = {}
        self._peak: dict[int, int] = {}

    # -- tokens come and go --------------------------------------------------------------------------------------------

    def write(self, row: int, compressed: Compressed, layer: int) -> None:
        assert isinstance(compressed, BoundedCompressed)
        content, kept, budget = compressed.prefill.layers[layer], compressed.kept[layer], compressed.budget
        self.pages.lay({row: Kept(content.keys, content.values, kept)})
        if self.sums:
            assert content.column_sums is not None
            received = content.column_sums.unflatten(0, (self.heads, -1)).mean(1)
            self._write_sums(row, [own[head] for own, head in zip(received, kept, strict=True)])
        self.tokens[row] = self.prompt[row] = compressed.prefill.tokens
        self._write_queries(row, content)
        counts = [len(head) if budget.tokens < budget.prompt_tokens else budget.tokens for head in kept]
        self._choosers[row] = _Chooser(
            compressed.method,
            compressed.seed,
            None if budget.unlimited else counts,
            content.output_projection,
            content.scale,
        )
        self._peak[row] = 0

    def _write_queries(self, row: int, content: LayerPrefill) -> None:
        width = self.queries.shape[2]
        if width:
            assert content.queries is not None
            last = content.queries[:, -width:]
            numbers = torch.arange(int(self.tokens[row]) - last.shape[1], int(self.tokens[row]), device=last.device)
            self.queries[row] = 0
            self.queries[row, :, numbers % width] = last

    def _write_sums(self, row: int, received: list[Tensor]) -> None:
        """[H_kv] of [k]"""
        laid = [pad(of_head, (0, -len(of_head) % PAGE)).view(-1, PAGE) for of_head in received]
        self.pages.arena["received"][to_device(self.pages.pages_of(row), self.shape.device)] = torch.cat(laid)

    def append(self, rows: Tensor, keys: Tensor, values: Tensor) -> None:
        self.pages.append(rows, keys, values)
        self.tokens[rows] += 1

    def free(self, row: int) -> None:
        self.pages.free_rows([row])
        self.tokens[row] = self.prompt[row] = 0
        del self._choosers[row], self._peak[row]

    # -- attention -----------------------------------------------------------------------------------------------------

    def attend(self, rows: Tensor, queries: Tensor, scale: float) -> Tensor:
        pages, arena = self.pages, self.pages.arena
        if width := self.queries.shape[2]:
            self.queries[rows, :, (self.tokens[rows] - 1) % width] = queries
        owners, owner = pages.owners(rows)[1], pages.tables.owner
        grouped = self.queries_by_row(rows, queries).flatten(0, 1)
        filled = pages.filled()
        partials = attend_pages(grouped[owner], arena["keys"], arena["values"], filled, scale, PAGE if self.sums else 1)
        merged = merge_pages(partials, owner, pages.tables.order, len(pages.lengths))
        if self.sums:
            attending = (torch.isin(owner, owners) & arena.used).nonzero().flatten()
            received = (merged.share[..., None] * partials.mass).mean(1)
            arena["received"][attending] += received[attending]
        output = merged.output[owners].to(queries.dtype).unflatten(0, (len(rows), self.heads)).flatten(1, 2)
        for row in rows[(self.tokens[rows] - self.prompt[rows]) % INTERVAL == 0].tolist():
            self._choose_again(row)
        return output

    def _choose_again(self, row: int) -> None:
        chooser = self._choosers[row]
        if chooser.counts is None or not (self.pages.lengths[self.pages.owners_of(row)] > chooser.counts).any():
            return
        self._peak[row] = max(self._peak[row], self.memory(row).held)
        held = {name: self._by_head(name, row) for name in ("keys", "values", *["received"] * self.sums)}
        kept = [
            self._chosen(row, head, chooser, {name: of_heads[head] for name, of_heads in held.items()})
            for head in range(self.heads)
        ]
        self.pages.free_rows([row])
        keys, values = (pad_sequence(held[name], batch_first=True) for name in ("keys", "values"))
        self.pages.lay({row: Kept(keys, values, kept)})
        if self.sums:
            self._write_sums(row, [own[head] for own, head in zip(held["received"], kept, strict=True)])

    def _chosen(self, row: int, head: int, chooser: _Chooser, held: dict[str, Tensor]) -> Tensor:
        """What a head keeps, of the tokens it holds, in their order."""
        assert chooser.counts is not None
        tokens, count = len(held["keys"]), chooser.counts[head]
        if tokens <= count:
            return torch.arange(tokens, device=held["keys"].device)
        prefill = self._as_prompt(row, head, chooser, held)
        budget = Budget.parse(f"{count} tokens").resolve(tokens, 0, "prompt", prefill.layout)
        seed = f"{chooser.seed}/{int(self.tokens[row])}/{self.place}/{head}"
        (examined,) = chooser.method.examine([prefill], [seed])
        return chooser.method.keep(prefill, budget, examined)[0][0]

    def _as_prompt(self, row: int, head: int, chooser: _Chooser, held: dict[str, Tensor]) -> Prefill:
        group = slice(head * self.group, (head + 1) * self.group)
        # A method refuses what is not finite, and here that would end the rows beside this one too.
        held = {name: part.where(part.isfinite(), 0) for name, part in held.items()}
        queries = self._last_queries(row)[group]
        received = held["received"].expand(self.group, -1) if self.sums else None
        layer = LayerPrefill(
            held["keys"][None],
            held["values"][None],
            queries.where(queries.isfinite(), 0),
            received,
            chooser.output_projection[:, group],
            chooser.scale,
        )
        shape = LayerLayout("growing", self.group, 1, self.layout.key_dim, self.layout.value_dim)
        layout = CacheLayout((shape,), self.shape.element_bytes)
        no_logits = torch.zeros(0, device=self.shape.device)
        return Prefill([layer], layout, len(held["keys"]), no_logits, _no_model, _no_model)

    def _last_queries(self, row: int) -> Tensor:
        """[H_q, w, d] in their order, or as many as there were."""
        width, seen = self.queries.shape[2], int(self.tokens[row])
        numbers = torch.arange(seen - min(seen, width), seen, device=self.queries.device)
        return self.queries[row][:, numbers % max(width, 1)]

    # -- pages and memory ----------------------------------------------------------------------------------------------

    def _by_head(self, name: str, row: int) -> list[Tensor]:
        """[H_kv] of [k, ...]"""
        lengths = self.pages.lengths[self.pages.owners_of(row)]
        pages = to_device(self.pages.pages_of(row), self.shape.device)
        parts = self.pages.arena[name][pages].split((-(-lengths // PAGE)).tolist())
        return [part.flatten(0, 1)[:length] for part, length in zip(parts, lengths.tolist(), strict=True)]

    def memory(self, row: int) -> MemoryBreakdown:
        """Tokens held, and their sums; the unfilled rest of their pages is slack, the last queries are workspace."""
        used, allocated = self.pages.row_bytes(row)
        sums = int(self.pages.lengths[self.pages.owners_of(row)].sum()) * SUM_BYTES if self.sums else 0
        return MemoryBreakdown(
            full_precision=used, scores=sums, workspace=self.queries[row].nbytes, slack=allocated - used
        )

    def peak_held(self, row: int) -> int:
        """Choosing again makes a row smaller."""
        return max(self._peak[row], self.memory(row).held)

    @property
    def nbytes(self) -> int:
        return self.pages.arena.nbytes + self.queries.nbytes


def _no_model(*_: Any) -> NoReturn:
    raise AssertionError("a cache that chooses again has no model to run")
