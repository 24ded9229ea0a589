"""OBCache (arXiv 2510.07651): optimal brain damage for the cache: what an output loses with a key, a value, or both.

    S_V  = sum_q a² ||v||²        S_K = sum_q (a z)² ||v - o||²        S_VK = sum_q ||a v + a z (v - o)||²

a: attention, z: its logit q k / sqrt(d), o: the output. No output projection enters. See :mod:`kvcache.objectives`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, get_args

from kvcache.evict import PromptEvictor
from kvcache.method import Observations

if TYPE_CHECKING:
    from torch import Tensor

    from kvcache.prefill import LayerPrefill, Prefill

Saliency = Literal["prune_value", "prune_key", "prune_both", "value_norm", "attention"]


@dataclass(frozen=True)
class OBCache(PromptEvictor):
    """The last ``window`` queries score; the last ``recent`` tokens are kept, and the first ``sinks``.

    saliency: what goes when a token goes; ``attention`` and ``value_norm`` are the scores that OBCache replaces.
    ``attention`` is SnapKV's score with a pooling ``kernel`` and ``recent`` equal to ``window``, TOVA's with a window
    of one query, H2O's with a window as long as the prompt. kernel 1: no pooling.

    A group's query heads are summed; the authors' code keeps a cache per query head. Their recent share is 5 % of the
    budget on LongBench and their window the recent tokens; here both are 32 at every budget, so that all methods keep
    the same prompt end. z is the model's own logit: adding a constant to all logits changes S_K and S_VK, though not
    the attention. The authors' repository could not be read; these are the paper's formulas.
    """

    name: ClassVar[str] = "obcache"
    version: ClassVar[int] = 1

    window: int = 32
    recent: int = 32
    sinks: int = 0
    saliency: Saliency = "prune_both"
    kernel: int = 1
    pooling: Literal["max", "avg"] = "max"

    def __post_init__(self) -> None:
        if self.window < 1 or self.recent < 0 or self.sinks < 0 or self.kernel < 1 or self.kernel % 2 == 0:
            raise ValueError(
                "window must be at least 1, recent and sinks at least 0 and kernel odd, not "
                f"window={self.window}, recent={self.recent}, sinks={self.sinks}, kernel={self.kernel}"
            )
        if self.saliency not in get_args(Saliency):
            raise ValueError(f"saliency is one of {', '.join(get_args(Saliency))}, not {self.saliency!r}")
        if self.pooling not in ("max", "avg"):
            raise ValueError(f"pooling is 'max' or 'avg', not {self.pooling!r}")

    @property
    def protected_ends(self) -> tuple[int, int]:
        return self.sinks, self.recent

    def observes(self) -> Observations:
        return Observations(queries=self.window)

    def scores(self, prefill: Prefill, seed: str) -> list[Tensor]:
        return [self._layer_scores(layer, prefill.tokens) for layer in prefill.layers]

    def _layer_scores(self, layer: LayerPrefill, tokens: int) -> Tensor:
        """[H_kv, n], 0 for the recent tokens"""
        import torch
        from torch.nn.functional import avg_pool1d, max_pool1d

        from kvcache.objectives import token_worth
        from kvcache.window import unseen, window_logits

        assert layer.queries is not None
        pool = max_pool1d if self.pooling == "max" else avg_pool1d
        prefix = max(tokens - self.recent, 0)
        scored = torch.zeros(len(layer.keys), tokens, device=layer.keys.device)
        heads = layer.queries[:, -self.window :].unflatten(0, (len(layer.keys), -1))
        future = unseen(heads.shape[2], layer.keys.device)
        for head, queries in enumerate(heads if prefix else ()):
            keys, values = layer.keys[head], layer.values[head].float()
            logits = window_logits(queries, keys, layer.scale)
            attention = torch.softmax(logits, -1)
            logits[..., -len(future) :].masked_fill_(future, 0)  # has no attention, so any finite number will do
            output = attention @ values
            # One query head at a time: what is held of it stays in a CPU's cache.
            by_query_head = attention[..., :prefix].split(1), output.split(1), logits[..., :prefix].split(1)
            worth = torch.cat(
                [
                    token_worth(self.saliency, a, values[:prefix], o, z).sum(1)
                    for a, o, z in zip(*by_query_head, strict=True)
                ]
            )
            scored[head, :prefix] = pool(worth, self.kernel, stride=1, padding=self.kernel // 2).sum(0)
        return scored
