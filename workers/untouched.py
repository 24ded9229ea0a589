"""What no method touches, for all rows of a decode batch: windows of sliding layers, states of linear ones."""

from __future__ import annotations

import torch
from torch import Tensor

from kvcache.layout import CacheLayout
from kvcache.prefill import Prefill
from kvcache.sliding import SlidingRing
from workers.linear import LinearCache, LinearRows


class UntouchedLayers:
    """The layers of a model that are not compressed. A row is written when it is admitted; nothing needs freeing."""

    def __init__(self, layout: CacheLayout, rows: int, device: torch.device, dtype: torch.dtype) -> None:
        self.sliding = {index: SlidingRing(layout.layers[index], rows, device, dtype) for index in layout.sliding}
        self._linear = LinearRows(layout, rows, device, dtype)

    def write(self, row: int, prefill: Prefill) -> None:
        for layer, (keys, values) in prefill.sliding.items():
            self.sliding[layer].write(row, keys, values, prefill.tokens)
        self._linear.write(row, prefill.linear)

    def cache(self, counts: Tensor) -> LinearCache:
        """What a step that feeds ``counts`` [R] tokens to the rows gives the model's linear layers."""
        return LinearCache(self._linear, counts)
