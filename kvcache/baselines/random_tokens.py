"""Random tokens: a floor that every method must beat.

Each (seed, layer, KV head) draws one random order of the prompt, so that a larger budget keeps what a smaller one does,
and more.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from kvcache.evict import EndsEvictor

if TYPE_CHECKING:
    from torch import Tensor

    from kvcache.prefill import Prefill


@dataclass(frozen=True)
class RandomTokens(EndsEvictor):
    """Uniformly random tokens beside ``sinks`` first and ``recent`` last ones.

    By default nothing is protected. Protection alone is worth much: compare methods that protect a window with a random
    choice that protects the same.
    """

    name: ClassVar[str] = "random"
    version: ClassVar[int] = 1

    @property
    def stochastic(self) -> bool:
        return True

    def scores(self, prefill: Prefill, seed: str) -> list[Tensor]:
        """A token's score is its place in a random order: there are no ties. [H_kv, n] per layer"""
        import torch

        device = prefill.logits.device
        return [
            torch.stack([random_order(seed, index, head, prefill.tokens) for head in range(len(layer.keys))]).to(device)
            for index, layer in enumerate(prefill.layers)
        ]


def random_order(seed: str, layer: int, head: int, tokens: int) -> Tensor:
    """A permutation of 0 ... n - 1 from a stream of its own, drawn on the CPU so that devices agree. [n] fp32"""
    import torch

    from kvcache.streams import stream

    return torch.randperm(tokens, generator=stream(f"{seed}/{layer}/{head}")).float()
