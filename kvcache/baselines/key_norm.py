"""Key norm (Devoto et al., arXiv 2406.11430): keys with a small L2 norm receive much attention, so they are kept.

    score(i) = - || k_i ||_2

No query takes part. Rotation keeps norms, and the factor of scaled rotary tables is the same for all keys, so it does
not matter that cached keys are rotated. Every KV head ranks its own keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from kvcache.evict import EndsEvictor

if TYPE_CHECKING:
    from torch import Tensor

    from kvcache.prefill import Prefill


@dataclass(frozen=True)
class KeyNorm(EndsEvictor):
    """The smallest keys beside ``sinks`` first and ``recent`` last tokens.

    By default nothing is protected and every layer is compressed, as in kvpress; the paper leaves the first two layers
    alone in its language modelling runs. A variant with protected ends is another method: report it apart.
    """

    name: ClassVar[str] = "key_norm"
    version: ClassVar[int] = 1

    def scores(self, prefill: Prefill, seed: str) -> list[Tensor]:
        """[H_kv, n] per layer, of keys [H_kv, n, d]"""
        return [-layer.keys.float().norm(dim=-1) for layer in prefill.layers]
