"""SnapKV (Li et al., arXiv 2404.14469): keep what the last prompt queries attend to, and its neighbours.

    score(i) = mean over the group of  pool_i( sum over the last w queries of  softmax(q K^T / sqrt(d))_i )

The authors' code selects per query head, so its cache is as many times larger as query heads share a KV head; here the
group's mean decides and the cache stays one per KV head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from kvcache.evict import PromptEvictor
from kvcache.method import Observations

if TYPE_CHECKING:
    from torch import Tensor

    from kvcache.prefill import Prefill


@dataclass(frozen=True)
class SnapKV(PromptEvictor):
    """``window`` last queries score and are kept; ``kernel`` and ``pooling`` are the clustering of the paper's §4.2.

    Defaults are those of the authors' LongBench runs. Border positions: maximum pooling ignores what lies outside,
    average pooling counts it as zero.
    """

    name: ClassVar[str] = "snapkv"
    version: ClassVar[int] = 1

    window: int = 32
    kernel: int = 7
    pooling: Literal["max", "avg"] = "max"

    def __post_init__(self) -> None:
        if self.window < 1 or self.kernel < 1 or self.kernel % 2 == 0:
            raise ValueError(
                f"window must be at least 1 and kernel odd, not window={self.window}, kernel={self.kernel}"
            )
        if self.pooling not in ("max", "avg"):
            raise ValueError(f"pooling is 'max' or 'avg', not {self.pooling!r}")

    @property
    def protected_ends(self) -> tuple[int, int]:
        return 0, self.window

    def observes(self) -> Observations:
        return Observations(queries=self.window)

    def scores(self, prefill: Prefill, seed: str) -> list[Tensor]:
        import torch
        from torch.nn.functional import avg_pool1d, max_pool1d

        from kvcache.window import window_attention

        pool = max_pool1d if self.pooling == "max" else avg_pool1d
        scores = []
        for layer in prefill.layers:
            assert layer.queries is not None
            prefix = max(prefill.tokens - self.window, 0)
            scored = torch.zeros(len(layer.keys), prefill.tokens, device=layer.keys.device)
            heads = layer.queries[:, -self.window :].unflatten(0, (len(layer.keys), -1))
            for head, queries in enumerate(heads if prefix else ()):
                received = window_attention(queries, layer.keys[head], layer.scale)[..., :prefix].sum(1)
                scored[head, :prefix] = pool(received, self.kernel, stride=1, padding=self.kernel // 2).mean(0)
            scores.append(scored)
        return scores
