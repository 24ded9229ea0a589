"""DefensiveKV and Layer-DefensiveKV (arXiv 2510.13334): guard against the worst query instead of the average one.

    risk(i)  = max over the window's queries and the group of  pooled attention_i
    score(i) = max(risk(i), mean risk of the head) · || W_O v_i ||_1 / sum over heads of || W_O v_i ||_1

The head's mean is a prior: a token that no query looked at yet may still be wanted. Two stages, as in CriticalKV: the
tokens that hold most of a head's attention come first, the rest by score, over all KV heads of a layer (DefensiveKV) or
of the model (Layer-DefensiveKV).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from kvcache.budget import ResolvedBudget
from kvcache.evict import PromptEvictor
from kvcache.method import Observations

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from kvcache.prefill import LayerPrefill, Prefill


@dataclass
class Risk:
    """What a layer's tokens are worth: ``scores`` [H_kv, n], 0 for the window; ``attention`` [H_kv, n - w], mean over
    window and group; ``mass`` [H_kv], how much of a head's attention the first stage keeps."""

    scores: Tensor
    attention: Tensor
    mass: Tensor


@dataclass(frozen=True)
class DefensiveKV(PromptEvictor):
    """Settings are those of the authors' code: the last ``window`` queries score and are kept, attention is averaged
    over ``kernel`` neighbours (outside counts as zero) and scaled back to the row's sum.

    The first stage takes a head's most attended tokens, those before the one that completes ``first_stage`` of the
    attention, at most as many as a head has on average; they rank above all other tokens of their layer. The window's
    own share of the attention counts towards ``first_stage``. bias: ``paper`` is that share, per head; ``repo`` is what
    the authors' code computes, the share of the last tokens *before* the window, mean over heads: it cuts the window's
    columns off first.

    Also unlike the authors' code: protected tokens and the first stage rank strictly above others (there they tie with
    the best score, and the window can lose); nothing is averaged over a batch; budgets are exact shares.
    """

    name: ClassVar[str] = "defensivekv"
    version: ClassVar[int] = 2
    chooses_once: ClassVar[str] = "it weighs the heads of a layer against each other"

    window: int = 32
    kernel: int = 5
    first_stage: float = 0.9
    bias: Literal["paper", "repo"] = "paper"

    def __post_init__(self) -> None:
        if self.window < 1 or self.kernel < 1 or self.kernel % 2 == 0:
            raise ValueError(
                f"window must be at least 1 and kernel odd, not window={self.window}, kernel={self.kernel}"
            )
        if not 0 <= self.first_stage <= 1:
            raise ValueError(f"first_stage is between 0 and 1, not {self.first_stage}")
        if self.bias not in ("paper", "repo"):
            raise ValueError(f"bias is 'paper' or 'repo', not {self.bias!r}")

    @property
    def protected_ends(self) -> tuple[int, int]:
        return 0, self.window

    def observes(self) -> Observations:
        return Observations(queries=self.window)

    def examine(self, prefills: Sequence[Prefill], seeds: Sequence[str]) -> list[Any]:
        return [[self._risk(layer, prefill.tokens) for layer in prefill.layers] for prefill in prefills]

    def scores(self, prefill: Prefill, seed: str) -> list[Tensor]:
        """Those of the second stage: the first depends on the budget."""
        return [self._risk(layer, prefill.tokens).scores for layer in prefill.layers]

    def keep(self, prefill: Prefill, budget: ResolvedBudget, examined: Any) -> list[list[Tensor]]:
        import torch

        from kvcache.allocate import best_of_layer
        from kvcache.select import keep_counts

        room, protected = self.room(prefill, budget), self.protected(prefill)
        ends, risks = int(protected.sum()), examined
        kept: list[list[Tensor]] = [[] for _ in risks]
        for layers in self._competing(prefill):
            ranked = torch.cat([_first_stage(risks[layer], room) for layer in layers])
            counts = best_of_layer(ranked[:, : prefill.tokens - ends], len(ranked) * room)
            heads = iter(keep_counts(ranked, [count + ends for count in counts], protected))
            for layer in layers:
                kept[layer] = [next(heads) for _ in risks[layer].scores]
        return kept

    def _competing(self, prefill: Prefill) -> list[list[int]]:
        """Growing layers, counted from 0, in groups that share one budget."""
        return [[layer] for layer in range(len(prefill.layers))]

    def _risk(self, layer: LayerPrefill, tokens: int) -> Risk:
        import torch

        from kvcache.window import window_attention

        assert layer.queries is not None
        prefix = max(tokens - self.window, 0)
        scores = torch.zeros(len(layer.keys), tokens, device=layer.keys.device)
        mean, bias = scores.new_zeros(len(layer.keys), prefix), scores.new_zeros(len(layer.keys))
        heads = layer.queries[:, -self.window :].unflatten(0, (len(layer.keys), -1))
        for head, queries in enumerate(heads if prefix else ()):
            attention = window_attention(queries, layer.keys[head], layer.scale)
            bias[head] = attention[..., prefix:].sum(-1).mean()
            attention = attention[..., :prefix]
            mean[head] = attention.mean((0, 1))
            worst = torch.stack([self._worst(of_query_head) for of_query_head in attention]).amax(0)
            scores[head, :prefix] = worst.clamp_min(worst.mean())
        if self.bias == "repo":
            bias[:] = mean[:, -self.window :].sum(1).mean()
        norms = layer.projected_value_norms[:, :prefix]
        scores[:, :prefix] *= norms / norms.sum(0).clamp_min(_LEAST)
        return Risk(scores, mean, self.first_stage - bias)

    def _worst(self, attention: Tensor) -> Tensor:
        """The most that a query of one head pays, pooled and scaled back. [w, n] -> [n]"""
        from kvcache.window import moving_average

        pooled = moving_average(attention, self.kernel)
        pooled *= attention.sum(-1, keepdim=True) / pooled.sum(-1, keepdim=True).clamp_min(_LEAST)
        return pooled.amax(0)


@dataclass(frozen=True)
class LayerDefensiveKV(DefensiveKV):
    """DefensiveKV with one budget for the whole model: scores of different layers are compared as they are, so a layer
    may keep more than another. The model's total is exact; nothing is freed before the last layer is scored.

    A token of the first stage has its layer's best score, as in the authors' code: another layer's better tokens come
    before it. Layers share a budget where a token of a head takes the same bytes, so that the total holds in bytes.
    """

    name: ClassVar[str] = "layer_defensivekv"

    def _competing(self, prefill: Prefill) -> list[list[int]]:
        sizes = [
            keys.shape[-1] + values.shape[-1] for keys, values in ((one.keys, one.values) for one in prefill.layers)
        ]
        return [[layer for layer, own in enumerate(sizes) if own == size] for size in dict.fromkeys(sizes)]


_LEAST = 1e-30
"""Stands in for a sum that has underflowed."""


def _first_stage(risk: Risk, most: int) -> Tensor:
    """Scores in which every head's most attended tokens, ``most`` at most, are the layer's best. [H_kv, n]"""
    import torch

    from kvcache.select import best_of_rows

    best = risk.attention.topk(min(most, risk.attention.shape[-1])).values
    reached = (best / risk.attention.sum(-1, keepdim=True).clamp_min(_LEAST)).double().cumsum(-1)
    first = best_of_rows(risk.attention, (reached < risk.mass[:, None]).sum(-1))
    scores = risk.scores.clone()
    above = torch.nextafter(scores.max(), scores.new_tensor(torch.inf))
    scores[:, : first.shape[-1]].masked_fill_(first, above)
    return scores
