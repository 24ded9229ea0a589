"""ZipCache (He et al., arXiv 2405.14256): four bits for the tokens that attention dwells on, two for the others.

    saliency(i) = (attention that probe queries give token i) / (number of probes that can see i)      §4.2, §4.3

Salient are the best ``salient`` of each KV head. Codes are written once: the authors' code quantises its whole cache
again every ``interval`` tokens, from values that were quantised before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from kvcache.budget import ResolvedBudget
from kvcache.fixed import FixedMethod
from kvcache.layout import LayerLayout
from kvcache.method import Observations
from kvcache.mix import Mix

if TYPE_CHECKING:
    from torch import Tensor

    from kvcache.pool import Compressed, FamilyPool, PoolShape
    from kvcache.prefill import Prefill

BITS = (1, 2, 4, 8)


@dataclass(frozen=True)
class ZipCache(FixedMethod):
    """``probes``: the share of queries that score, half the latest and half at random. ``interval``: new tokens stay in
    full precision until there are so many, then they are coded as a block."""

    name: ClassVar[str] = "zipcache"
    version: ClassVar[int] = 2

    salient: float = 0.7
    salient_bits: int = 4
    other_bits: int = 2
    probes: float = 0.1
    interval: int = 100

    def __post_init__(self) -> None:
        if self.salient_bits not in BITS or self.other_bits not in BITS:
            raise ValueError(f"bits are among {BITS}, not {self.salient_bits} and {self.other_bits}")
        if not 0 < self.salient <= 1 or not 0 < self.probes <= 1:
            raise ValueError(f"salient and probes are above 0 and at most 1, not {self.salient} and {self.probes}")
        if self.interval < 1:
            raise ValueError(f"interval is at least 1, not {self.interval}")

    @property
    def family(self) -> str:
        return f"mixed low-bit ({', '.join(f'{name} {value}' for name, value in self.settings().items())})"

    @property
    def mix(self) -> Mix:
        return Mix(**self.settings())

    def unsuited(self, layer: LayerLayout) -> str | None:
        for dim in (layer.key_dim, layer.value_dim):
            if dim * min(self.salient_bits, self.other_bits) % 8:
                return f"zipcache needs whole bytes: {dim} channels of so few bits do not fill them"
        return None

    def layer_bytes(self, prompt_tokens: int, new_tokens: int, layer: LayerLayout, element_bytes: int) -> int:
        return layer.kv_heads * self.mix.head_bytes(prompt_tokens, new_tokens, layer, element_bytes)

    def observes(self) -> Observations:
        return Observations(probes=frozenset({self.probes}))

    def examine(self, prefills: Sequence[Prefill], seeds: Sequence[str]) -> list[Any]:
        """The saliency of each prompt's tokens: [H_kv, n] per growing layer."""
        return [self.saliency(prefill) for prefill in prefills]

    def saliency(self, prefill: Prefill) -> list[Tensor]:
        from kvcache.probes import probe_positions, probed_attention, witnesses

        positions = probe_positions(prefill.tokens, self.probes)
        seen_by = witnesses(prefill.tokens, self.probes).to(prefill.logits.device)
        return [
            probed_attention(layer.probes[self.probes], positions, layer.keys, layer.scale) / seen_by
            for layer in prefill.layers
        ]

    def compress(self, prefill: Prefill, budget: ResolvedBudget, examined: Any) -> Compressed:
        from kvcache.salient import MixedCompressed

        return MixedCompressed(prefill, examined)

    def new_pool(self, shape: PoolShape) -> FamilyPool:
        from kvcache.salient import MixedPool

        return MixedPool(shape, self.mix)
