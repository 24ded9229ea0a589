"""LORE-KV (arXiv 2610.07643): sample short futures from the model itself, keep the prompt tokens whose deletion would
hurt them most.

    score_i = (1 - λ_L) mean over window queries of cost_i  +  λ_L Σ_m w_m mean over future m's queries of cost_i

both averaged over the query heads that share a KV head. The futures are discarded; decoding starts from the compressed
cache at position n, with the prompt's own logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

from kvcache.budget import ResolvedBudget
from kvcache.evict import PromptEvictor
from kvcache.method import Observations

if TYPE_CHECKING:
    from torch import Tensor

    from kvcache.pool import Compressed
    from kvcache.prefill import Prefill

Objective = Literal["deletion", "attention", "value_norm", "andpro", "obcache"]
Support = Literal["prompt_and_own", "prompt"]
Typicality = Literal["gap", "normalized", "centred"]
LayerBudgets = Literal["uniform", "global"]


@dataclass(frozen=True)
class LoreKV(PromptEvictor):
    """Settings; the summary of the paper names the quantities, values it does not state are our choice.

    window: last prompt queries that score, and that are kept beside the first token.
    particles, tokens: M futures of T tokens; 0 particles is the prompt-only control.
    mix: λ_L, the weight of the lookahead term; 0 is the prompt-only control, 1 is lookahead alone.
    atypicality, entropy, disagreement: λ_A, λ_E and λ_D of the reliability weights; all 0 are uniform weights.
    temperature: of the sampling; the uniform estimator is the Monte Carlo estimate under the model only at 1.
    typicality, hard_filter: other forms of the weights, see :mod:`lorekv.reliability`.
    objective, squared: what a token costs a query, see :mod:`lorekv.scoring`; ``squared`` is of the deletion cost.
    support: what a future's query attends to; ``prompt`` leaves its own tokens out.
    kernel: maximum pooling of scores over neighbours; 1 is none.
    tail: α, the weight of the costliest queries in the mean.
    head_exponent: τ, budgets of heads in proportion to their future cost to this power; 0 is uniform.
    key_diversity, value_diversity: λ_k and λ_v, what likeness to kept tokens costs, see :mod:`lorekv.diversity`.
    structural: keep chat and tool-call markers and document separators where the budget has room.
    stop_change: sample no more futures once a block of four moves at most this share of the kept tokens; 0 is never.
    layer_budgets: ``global`` lets layers compete for their budgets, see :mod:`lorekv.selection`.
    """

    name: ClassVar[str] = "lorekv"
    version: ClassVar[int] = 4
    chooses_once: ClassVar[str] = "its futures continue the prompt"

    window: int = 32
    particles: int = 4
    tokens: int = 16
    mix: float = 0.5
    atypicality: float = 1.0
    entropy: float = 1.0
    temperature: float = 1.0
    disagreement: float = 0.0
    typicality: Typicality = "gap"
    hard_filter: float = 0.0
    objective: Objective = "deletion"
    squared: bool = False
    support: Support = "prompt_and_own"
    kernel: int = 1
    tail: float = 0.0
    head_exponent: float = 0.0
    key_diversity: float = 0.0
    value_diversity: float = 0.0
    structural: bool = False
    stop_change: float = 0.0
    layer_budgets: LayerBudgets = "uniform"

    def __post_init__(self) -> None:
        if self.window < 1 or self.particles < 0 or self.tokens < 1:
            raise ValueError("window and tokens must be at least 1, particles at least 0")
        if self.temperature <= 0:
            raise ValueError(f"temperature must be above 0, not {self.temperature}")
        if self.kernel < 1 or self.kernel % 2 == 0:
            raise ValueError(f"kernel must be odd and at least 1, not {self.kernel}")
        for name in ("mix", "tail"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} is between 0 and 1, not {getattr(self, name)}")
        for name in ("hard_filter", "stop_change"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} is a share below 1, not {getattr(self, name)}")
        for name in ("atypicality", "entropy", "disagreement", "head_exponent", "key_diversity", "value_diversity"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be at least 0, not {getattr(self, name)}")
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} is one of {', '.join(choices)}, not {getattr(self, name)!r}")
        if self.squared and self.objective != "deletion":
            raise ValueError(f"squared is of the objective 'deletion': leave it out with {self.objective!r}")

    @property
    def stochastic(self) -> bool:
        return self.particles > 0 and self.mix > 0

    @property
    def protected_ends(self) -> tuple[int, int]:
        return 1, self.window

    def observes(self) -> Observations:
        return Observations(queries=self.window)

    def examine(self, prefills: Sequence[Prefill], seeds: Sequence[str]) -> list[Any]:
        """Scores of each prompt, with what was sampled; the futures of all prompts are sampled together."""
        from lorekv.adaptive import score_until_stable
        from lorekv.lookahead import sample_futures
        from lorekv.scoring import score_prompt

        if not self.stochastic:
            return [score_prompt(self, prefill) for prefill in prefills]
        if self.stop_change:
            return score_until_stable(self, prefills, seeds)
        futures = sample_futures(prefills, self.particles, self.tokens, self.temperature, seeds)
        return [score_prompt(self, prefill, own) for prefill, own in zip(prefills, futures, strict=True)]

    def utilities(self, prefills: Sequence[Prefill], seeds: Sequence[str]) -> list[list[Tensor]]:
        return [scored.scores for scored in self.examine(prefills, seeds)]

    def scores(self, prefill: Prefill, seed: str) -> list[Tensor]:
        """Expected deletion cost of every prompt token. [H_kv, n] per growing layer"""
        return self.utilities([prefill], [seed])[0]

    def keep(self, prefill: Prefill, budget: ResolvedBudget, examined: Any) -> list[list[Tensor]]:
        from lorekv.selection import keep_tokens

        return keep_tokens(self, prefill, budget.prompt_budget, examined)

    def compress(self, prefill: Prefill, budget: ResolvedBudget, examined: Any) -> Compressed:
        compressed = super().compress(prefill, budget, examined)
        compressed.facts = dict(examined.facts)
        return compressed


_CHOICES = {
    "objective": get_args(Objective),
    "support": get_args(Support),
    "typicality": get_args(Typicality),
    "layer_budgets": get_args(LayerBudgets),
}
