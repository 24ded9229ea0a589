"""SnapKV (Li et al., arXiv 2404.14469): keep what the last prompt queries attend to, and its neighbours.

    score(i) = mean over the group of  pool_i( sum over the last w queries of  softmax(q K^T / sqrt(d))_i )

The authors' code selects per query head, so its cache is as many times larger as query heads share a KV head; here the
group's mean decides and the cache stays one per KV head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvcache.window_evictor import WindowEvictor


@dataclass(frozen=True)
class SnapKV(WindowEvictor):
    """The best of :func:`kvcache.window.pooled_window_scores` in every KV head, the same number in all."""

    name: ClassVar[str] = "snapkv"
    version: ClassVar[int] = 1
