"""Generated tokens within the budget (``growth: bounded``), for methods that choose once, at the end of prefill.

    prompt        | keep C = B - 8 | 8 tokens come | keep C | 8 tokens come | keep C ...       never more than B

Every 8 tokens that follow the prompt, a question's included, a method chooses again, by its own rule, among the tokens
that a head holds: what is gone stays gone. How many tokens each head keeps, it decides once, for the prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from kvcache.budget import ResolvedBudget
from kvcache.evict import PromptEvictor
from kvcache.layout import CacheLayout
from kvcache.method import Method, Observations

if TYPE_CHECKING:
    from kvcache.pool import Compressed, FamilyPool, PoolShape
    from kvcache.prefill import Prefill

Growth = Literal["grow", "bounded"]

INTERVAL = 8
SUM_BYTES = 4
"""Of a token's fp32 attention sum, per KV head."""


def grown(method: Method, growth: Growth) -> Method:
    """A method under a protocol's ``growth``. Those that hold their budget by themselves, or have none, stay as they
    are."""
    if growth == "grow" or method.bounded or method.fixed or method.name == "full":
        return method
    return Bounded(method)


@dataclass(frozen=True)
class Bounded(Method):
    """``method``, chosen again every :data:`INTERVAL` tokens.

    A budget covers all tokens at any moment, and the sums that methods need which rank by all attention; the last
    queries, of which there is a fixed number, are workspace.
    """

    name: ClassVar[str] = "bounded"
    version: ClassVar[int] = 1
    bounded: ClassVar[bool] = True

    method: Method

    @property
    def stochastic(self) -> bool:
        return self.method.stochastic

    @property
    def queries(self) -> int:
        """How many of the last queries a row carries: what the method asks for, as far as every head still has their
        tokens, so that a query sees what came before it."""
        assert isinstance(self.method, PromptEvictor)
        return min(self.observes().queries, self.method.protected_ends[1] + INTERVAL)

    @property
    def sums(self) -> bool:
        """Whether it carries the attention that every token received."""
        return self.observes().column_sums

    def observes(self) -> Observations:
        return self.method.observes()

    @property
    def cannot(self) -> str | None:
        """Why the method cannot choose again, or None."""
        reason = self.method.chooses_once if isinstance(self.method, PromptEvictor) else "it is no evictor"
        if replace(self.observes(), queries=0, column_sums=False) != Observations():
            reason = reason or "it needs statistics of the whole prompt"
        if not reason:
            return None
        return f"{self.method.name} cannot choose again while tokens are generated ({reason}): set growth to 'grow'"

    def impossible(self, budget: ResolvedBudget, layout: CacheLayout) -> str | None:
        if self.cannot:
            return self.cannot
        reason = self.method.impossible(self.of_prompt(budget, layout), layout)
        return f"{reason} beside {INTERVAL} new ones (growth: bounded)" if reason else None

    def of_prompt(self, budget: ResolvedBudget, layout: CacheLayout) -> ResolvedBudget:
        """What heads keep of a prompt: the budget, less what comes before they choose again."""
        if budget.unlimited:
            return replace(budget, base="prompt")
        layers = (layout.layers[index] for index in layout.growing)
        sizes = [layer.token_bytes(layout.element_bytes) + layer.kv_heads * SUM_BYTES * self.sums for layer in layers]
        tokens = min(held // size for held, size in zip(budget.layer_bytes, sizes, strict=True))
        return replace(budget, base="prompt", tokens=tokens - INTERVAL)

    def peak_bytes(self, budget: ResolvedBudget, layout: CacheLayout) -> int:
        heads = sum(layout.layers[index].kv_heads for index in layout.growing)
        token = layout.full_bytes(1) + heads * SUM_BYTES * self.sums
        everything = (budget.prompt_tokens + budget.new_tokens) * token
        return everything if budget.unlimited else min(budget.total_bytes, everything)

    def workspace_bytes(self, budget: ResolvedBudget, layout: CacheLayout) -> int:
        layers = (layout.layers[index] for index in layout.growing)
        return sum(self.queries * layer.query_heads * layer.key_dim * layout.element_bytes for layer in layers)

    def examine(self, prefills: Sequence[Prefill], seeds: Sequence[str]) -> list[Any]:
        """What the method finds, and the seed, which it needs again."""
        return list(zip(self.method.examine(prefills, seeds), seeds, strict=True))

    def compress(self, prefill: Prefill, budget: ResolvedBudget, examined: Any) -> Compressed:
        from kvcache.bounded_pool import BoundedCompressed

        assert isinstance(self.method, PromptEvictor)
        found, seed = examined
        own = self.of_prompt(budget, prefill.layout)
        kept = self.method.keep(prefill, own, found)
        return BoundedCompressed(prefill, kept, self.method, own, seed)

    @property
    def family(self) -> str:
        return f"bounded ({self.queries} queries{', sums' if self.sums else ''})"

    def new_pool(self, shape: PoolShape) -> FamilyPool:
        from kvcache.bounded_pool import BoundedPool

        return BoundedPool(shape, self.queries, self.sums)
