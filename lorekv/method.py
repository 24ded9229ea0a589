"""LORE-KV (arXiv 2610.07643): sample short futures from the model itself, keep the prompt tokens whose deletion would
hurt them most.

    score_i = (1 - λ_L) mean over window queries of cost_i  +  λ_L Σ_m w_m mean over future m's queries of cost_i

both averaged over the query heads that share a KV head. The futures are discarded; decoding starts from the compressed
cache at position n, with the prompt's own logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from kvcache.evict import PromptEvictor
from kvcache.method import Observations

if TYPE_CHECKING:
    from torch import Tensor

    from kvcache.prefill import LayerPrefill, Prefill
    from lorekv.lookahead import Futures


@dataclass(frozen=True)
class LoreKV(PromptEvictor):
    """Settings; the summary of the paper names the quantities, values it does not state are our choice.

    window: last prompt queries that score, and that are kept beside the first token.
    particles, tokens: M futures of T tokens; 0 particles is the prompt-only control.
    mix: λ_L, the weight of the lookahead term; 0 is the prompt-only control.
    atypicality, entropy: λ_A and λ_E of the reliability weights; 0 and 0 are uniform weights.
    temperature: of the sampling; the uniform estimator is the Monte Carlo estimate under the model only at 1.
    """

    name: ClassVar[str] = "lorekv"
    version: ClassVar[int] = 1

    window: int = 32
    particles: int = 4
    tokens: int = 16
    mix: float = 0.5
    atypicality: float = 1.0
    entropy: float = 1.0
    temperature: float = 1.0

    def __post_init__(self) -> None:
        if self.window < 1 or self.particles < 0 or self.tokens < 1:
            raise ValueError("window and tokens must be at least 1, particles at least 0")
        if not 0 <= self.mix <= 1:
            raise ValueError(f"mix is between 0 and 1, not {self.mix}")
        if self.temperature <= 0:
            raise ValueError(f"temperature must be above 0, not {self.temperature}")

    @property
    def stochastic(self) -> bool:
        return self.particles > 0 and self.mix > 0

    @property
    def protected_ends(self) -> tuple[int, int]:
        return 1, self.window

    def observes(self) -> Observations:
        return Observations(queries=self.window)

    def examine(self, prefills: Sequence[Prefill], seeds: Sequence[str]) -> list[Any]:
        """Scores of each prompt; the futures of all prompts are sampled together."""
        if not self.particles or not self.mix:
            return [self._scores(prefill, None) for prefill in prefills]
        from lorekv.lookahead import sample_futures

        futures = sample_futures(prefills, self.particles, self.tokens, self.temperature, seeds)
        return [self._scores(prefill, own) for prefill, own in zip(prefills, futures, strict=True)]

    def scores(self, prefill: Prefill, seed: str) -> list[Tensor]:
        """Expected deletion cost of every prompt token. [H_kv, n] per growing layer"""
        scores: list[Tensor] = self.examine([prefill], [seed])[0]
        return scores

    def _scores(self, prefill: Prefill, futures: Futures | None) -> list[Tensor]:
        from lorekv.deletion import projection_grams
        from lorekv.reliability import particle_weights

        weights = None if futures is None else particle_weights(futures, self.atypicality, self.entropy)
        scores = []
        for index, layer in enumerate(prefill.layers):
            grams = projection_grams(layer.output_projection, len(layer.keys))
            cost = self._window_cost(layer, grams)
            if futures is not None and weights is not None and bool(weights.any()):
                future_cost = self._future_cost(index, layer, grams, futures, weights)
                cost = (1 - self.mix) * cost + self.mix * future_cost
            scores.append(cost)
        return scores

    def _window_cost(self, layer: LayerPrefill, grams: Tensor) -> Tensor:
        """P: mean over the group and the window's queries. [H_kv, n]"""
        import torch

        from lorekv.deletion import attend_prompt, deletion_cost

        assert layer.queries is not None
        queries = layer.queries[:, -self.window :].unflatten(0, (len(layer.keys), -1))
        costs = []
        for head, values in enumerate(layer.values):
            attended = attend_prompt(queries[head], layer.keys[head], values, layer.scale)
            costs.append(deletion_cost(attended, values.float(), grams[head]).mean((0, 1)))
        return torch.stack(costs)

    def _future_cost(self, index: int, layer: LayerPrefill, grams: Tensor, futures: Futures, weights: Tensor) -> Tensor:
        """F: weighted over futures, mean over the group and each future's queries. [H_kv, n]"""
        import torch

        from lorekv.deletion import attend_futures, deletion_cost

        queries = futures.queries[index].unflatten(1, (len(layer.keys), -1))  # [M, H_kv, G, T, d]
        own_keys, own_values = futures.keys[index], futures.values[index]
        by_query = (weights / futures.lengths.clamp_min(1))[:, None] * futures.steps()
        costs = []
        for head, values in enumerate(layer.values):
            own = own_keys[:, head], own_values[:, head]
            attended = attend_futures(queries[:, head].transpose(0, 1), layer.keys[head], values, *own, layer.scale)
            cost = deletion_cost(attended, values.float(), grams[head]).mean(0)
            costs.append(by_query.flatten() @ cost)
        return torch.stack(costs)
