"""The storage of one cache family for all rows of a decode batch: the contract, and how its memory is told.

A row belongs to one pool and keeps its number from admission to release. Pools see every step of every layer and keep
all they need per row; nothing is ever reduced over rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kvcache.layout import CacheLayout, LayerLayout
from kvcache.prefill import Prefill, Rotary


@dataclass(frozen=True)
class MemoryBreakdown:
    """Bytes of one row by kind, read off the tensors that hold them.

    ``workspace`` are copies that outlive a step; ``slack`` is what the allocator holds beyond the row's tokens (free
    slots of its pages); ``charged`` is what the method's own rule says, 0 where it has none; ``host`` is what the
    method keeps in host memory besides.
    """

    full_precision: int = 0
    codes: int = 0
    quantization: int = 0
    positions: int = 0
    scores: int = 0
    tables: int = 0
    workspace: int = 0
    slack: int = 0
    charged: int = 0
    host: int = 0

    @property
    def held(self) -> int:
        """What counts against the budget: everything but slack, workspace, host memory and the charged figure."""
        return self.full_precision + self.codes + self.quantization + self.positions + self.scores + self.tables


@dataclass(frozen=True)
class PoolShape:
    """What a pool is built for: the growing layers of a model, a number of rows, where and in which type."""

    layout: CacheLayout
    rows: int
    device: torch.device
    dtype: torch.dtype
    rotary: Rotary

    @property
    def layers(self) -> list[LayerLayout]:
        return [self.layout.layers[index] for index in self.layout.growing]

    @property
    def element_bytes(self) -> int:
        return self.dtype.itemsize


@dataclass
class Compressed:
    """What a method keeps of a prompt, and ``facts`` on how it came to that, as JSON for the row's result. Each storage
    family has its own subclass."""

    prefill: Prefill
    facts: dict[str, Any] = field(default_factory=dict, kw_only=True)


class FamilyPool(ABC):
    """One per storage family and engine. ``layer`` counts growing layers from 0."""

    def __init__(self, shape: PoolShape) -> None:
        self.shape = shape
        self.rows = torch.zeros(0, dtype=torch.int64)
        """The rows held here, ascending; on the host."""

    def admit(self, coming: Mapping[int, Compressed]) -> None:
        """Copy the caches of these rows in; their prefills may be freed afterwards. Where a family can, the pool grows
        once and each layer is written once for all of them."""
        self._store(coming)
        self.rows = torch.cat([self.rows, self.rows.new_tensor(list(coming))]).sort().values

    def release(self, *rows: int) -> None:
        """Free everything these rows hold."""
        self.rows = self.rows[~torch.isin(self.rows, torch.tensor(rows))]
        self._free(rows)

    def attend(
        self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, positions: Tensor, counts: Tensor, scale: float
    ) -> Tensor:
        """Append new tokens and attend from them, causally; maintenance inside the t tokens falls where it is due.

        Args:
            queries: [r, H_q, t, d] of this pool's rows, in the order of ``rows``.
            keys, values: [r, H_kv, t, d], [r, H_kv, t, d_v], rotated.
            positions: [r, t] true token positions, on the host.
            counts: [r] how many of the t tokens are real, on the host; rows with 0 are left alone.

        Returns:
            [r, H_q, t, d_v] in the pool's dtype; outputs of tokens that are not real are undefined but finite.
        """
        if queries.shape[2] == 1 and bool((counts > 0).all()):  # almost every step: nothing needs to be sorted out
            new = queries[:, :, 0], keys[:, :, 0], values[:, :, 0]
            return self._feed(layer, self.rows, *new, positions[:, 0], scale, more=False).to(values.dtype)[:, :, None]
        output = values.new_zeros(*queries.shape[:3], values.shape[-1])
        for token in range(queries.shape[2]):
            fed = (counts > token).nonzero().flatten()
            if not len(fed):
                break
            there = fed.to(self.shape.device, non_blocking=True)
            new = queries[there, :, token], keys[there, :, token], values[there, :, token]
            found = self._feed(layer, self.rows[fed], *new, positions[fed, token], scale, more=token > 0)
            output[there, :, token] = found.to(output.dtype)
        return output

    @abstractmethod
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
        """Append one token to each of these rows and attend from it.

        Args:
            rows, positions: [k], on the host.
            queries, keys, values: [k, H_q, d], [k, H_kv, d], [k, H_kv, d_v].
            more: whether the same step fed these rows a token before, whose maintenance is due first.

        Returns:
            [k, H_q, d_v]
        """

    def after_step(self, positions: Tensor, counts: Tensor) -> None:  # noqa: B027
        """Maintenance that the last token of a step makes due, for all layers at once. [r, t], [r], on the host"""

    @abstractmethod
    def memory(self, row: int) -> MemoryBreakdown:
        """Bytes the row holds now."""

    def peak_held(self, row: int) -> int:
        """Most bytes the row ever held; of a cache that only grows, what it holds now."""
        return self.memory(row).held

    def facts(self, row: int) -> dict[str, Any]:
        """What the method resolved for the row and did to it, as JSON: a column of its result."""
        return {}

    @abstractmethod
    def allocated_bytes(self) -> int:
        """Bytes of all tensors of the pool, free space included."""

    @abstractmethod
    def _store(self, coming: Mapping[int, Compressed]) -> None: ...

    @abstractmethod
    def _free(self, rows: Sequence[int]) -> None: ...
