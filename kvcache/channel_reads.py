"""The family of SparQ (Ribar et al., arXiv 2312.04985): the whole cache, of which a step reads r channels of all keys,
then the k tokens that score best on them.

    1  the r channels with the largest Σ |q_j| over the group           q_r, K_r
    2  ŝ = softmax( q_r K_r^T / τ ),  τ = sqrt( d ||q_r||_1 / ||q||_1 )   approximate attention; the best k tokens
    3  α softmax( q K_k^T / sqrt(d) ) V_k + (1 - α) v̄,  α = Σ ŝ over them, v̄ the mean of all values
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvcache.kernels.paged_attention import PagePartials, merge_pages
from kvcache.layered import LayeredPool, LayerStore
from kvcache.layout import LayerLayout
from kvcache.pool import Compressed, MemoryBreakdown, PoolShape
from kvcache.reads import ReadCounts, read_facts
from kvcache.select import best_of_rows, rank
from kvcache.token_pages import TokenPages

PAGE = 64
"""Tokens of a page: only of the storage."""


class ChannelReadPool(LayeredPool):
    """``channels`` r of each key, then ``tokens`` k and the current one, the last ``local`` always among them."""

    def __init__(self, shape: PoolShape, channels: int, tokens: int, local: int) -> None:
        self.layers = [_ChannelReads(layout, shape, channels, tokens, local) for layout in shape.layers]
        super().__init__(shape, self.layers)

    def facts(self, row: int) -> dict[str, Any]:
        return read_facts(torch.stack([layer.counts.of(row) for layer in self.layers]).sum(0))


class _ChannelReads(LayerStore):
    def __init__(self, layout: LayerLayout, shape: PoolShape, channels: int, tokens: int, local: int) -> None:
        super().__init__(layout, shape)
        self.channels, self.count, self.local = channels, tokens + 1, local + 1  # the current token comes for free
        self.pages = TokenPages(layout, shape, PAGE)
        self.value_sums = torch.zeros(shape.rows, self.heads, layout.value_dim, device=shape.device)
        self.counts = ReadCounts(shape.rows, shape.device)

    def write(self, row: int, compressed: Compressed, layer: int) -> None:
        content = compressed.prefill.layers[layer]
        self.pages.write(row, content.keys, content.values)
        self.value_sums[row] = content.values.float().sum(1)
        self.counts.reset(row)

    def append(self, rows: Tensor, keys: Tensor, values: Tensor) -> None:
        self.pages.append(rows, keys, values)
        self.value_sums[rows] += values.float()

    def attend(self, rows: Tensor, queries: Tensor, scale: float) -> Tensor:
        by_row = self.queries_by_row(rows, queries)
        scores, attention = self._approximate(rows, by_row, scale)
        chosen = self._best_tokens(rows, scores.sum(2))  # [r, H_kv, k + 1]
        owner_rows = rows[:, None].expand(chosen.shape[:2]).flatten()
        owner_heads = torch.arange(self.heads, device=rows.device).expand(chosen.shape[:2]).flatten()
        own = by_row[rows].flatten(0, 1)
        exact = self.pages.attend_some(owner_rows, own, owner_heads, chosen.flatten(0, 1), scale)
        index = chosen[:, :, None].expand(-1, -1, self.group, -1)
        alpha = attention.gather(3, index).sum(-1, keepdim=True)
        mean = (self.value_sums[rows] / self.pages.tokens[rows, None, None])[:, :, None]
        output = alpha * exact.unflatten(0, chosen.shape[:2]) + (1 - alpha) * mean
        self._count(rows)
        return output.flatten(1, 2)

    def _approximate(self, rows: Tensor, queries: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """Scores on r channels, and their softmax: [R, H_kv, G, d] -> [r, H_kv, G, tokens] twice, none where none."""
        arena = self.pages.arena
        queries = queries.float()
        best = rank(queries.abs().sum(2))[..., : self.channels].sort(-1).values  # [R, H_kv, r]
        own = queries.gather(3, best[:, :, None].expand(-1, -1, self.group, -1))
        covered = own.abs().sum(-1, keepdim=True) / queries.abs().sum(-1, keepdim=True).clamp_min(1e-30)
        own = own * (scale / covered.clamp_min(1e-30).sqrt())  # scale is 1 / sqrt(d), so this is 1 / τ
        row = arena["row"]
        keys = arena["keys"].gather(3, best[row][:, :, None].expand(-1, -1, PAGE, -1)).float()
        scores = torch.bmm(own[row].flatten(0, 1), keys.flatten(0, 1).transpose(1, 2))
        scores.masked_fill_(~self.pages.filled().repeat_interleave(self.heads, 0)[:, None], -torch.inf)
        peak = scores.amax(-1)
        mass = (scores - peak.clamp_min(torch.finfo(torch.float32).min)[..., None]).exp()
        partials = PagePartials(peak, mass.sum(-1, keepdim=True), mass.new_zeros(*peak.shape, 0))
        share = merge_pages(partials, self.pages.owners, self.pages.order, self.shape.rows * self.heads).share
        laid = (scores, -torch.inf), (mass * share[..., None], 0.0)
        by_row = (self.pages.by_row(rows, part.unflatten(0, (-1, self.heads)), fill, self.count) for part, fill in laid)
        return next(by_row), next(by_row)

    def _best_tokens(self, rows: Tensor, scores: Tensor) -> Tensor:
        """[r, H_kv, n] -> [r, H_kv, k + 1] ascending; positions beyond a row's tokens stand for none."""
        ends = self.pages.tokens[rows, None]
        position = torch.arange(scores.shape[-1], device=rows.device)
        local = (position >= ends - self.local) & (position < ends)
        scores = scores.nan_to_num(-torch.inf, torch.inf, -torch.inf)  # what is no number costs its own row alone
        scores = scores.masked_fill_(local[:, None], torch.inf)
        count = torch.full((scores.shape[0] * self.heads,), self.count, device=scores.device)
        return best_of_rows(scores.flatten(0, 1), count).nonzero()[:, 1].view(-1, self.heads, self.count)

    def _count(self, rows: Tensor) -> None:
        held, key, value = self.pages.tokens[rows], self.layout.key_dim, self.layout.value_dim
        read = held.clamp(max=self.count)
        self.counts.add(rows, held, read, held * self.channels + read * (key + value), held * (key + value))

    def free(self, row: int) -> None:
        self.pages.free(row)
        self.value_sums[row] = 0

    def memory(self, row: int) -> MemoryBreakdown:
        """All tokens, and the sum of their values."""
        tokens, _, allocated = self.pages.row_bytes(row)
        return MemoryBreakdown(full_precision=tokens, tables=self.value_sums[row].nbytes, slack=allocated - tokens)

    @property
    def nbytes(self) -> int:
        return self.pages.arena.nbytes
