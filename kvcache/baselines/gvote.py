"""GVote (arXiv 2509.03136): let likely future queries vote on what to keep, and keep what any of them wants.

    1  k_h = the fewest tokens that hold 95 % of the current query's attention, for each query head
    2  hidden states that enter attention are close to Gaussian: fit mean and variance, channel by channel
    3  draw eight, project each to queries, rotate them to the position after the prompt
    4  each of these queries, and the current one, votes for its k_h best keys; the union of a group's votes is kept

So the method decides itself how much to keep: more for some heads and prompts than for others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from kvcache.budget import ResolvedBudget
from kvcache.evict import PromptEvictor
from kvcache.method import Observations

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from kvcache.pool import Compressed
    from kvcache.prefill import LayerPrefill, Prefill


@dataclass(frozen=True)
class GVote(PromptEvictor):
    """``nucleus`` is the share of attention in step 1, ``samples`` the number of drawn queries. Nucleus 1 keeps all.

    A budget is a ceiling: each KV head keeps what was voted for, and no more than its budget, by votes, then by the
    current query's attention. ``unlimited`` is the paper's method, at an operating point of its own: results at a
    budget that cut it off say what was left of it, not what it is. A row's facts tell the share of the prompt voted
    for, ``voted_share``, and the share kept, ``kept_share``.

    No code is public. Our choices: statistics over all tokens of the prompt; every drawn query at position n; the union
    is over the query heads that share a KV head; the first token is kept; the current query votes too.
    """

    name: ClassVar[str] = "gvote"
    version: ClassVar[int] = 1
    chooses_once: ClassVar[str] = "it decides itself how much of a prompt to keep"

    nucleus: float = 0.95
    samples: int = 8

    def __post_init__(self) -> None:
        if not 0 < self.nucleus <= 1:
            raise ValueError(f"nucleus is above 0 and at most 1, not {self.nucleus}")
        if self.samples < 0:
            raise ValueError(f"samples must be at least 0, not {self.samples}")

    @property
    def stochastic(self) -> bool:
        return self.samples > 0

    @property
    def protected_ends(self) -> tuple[int, int]:
        return 1, 0

    def observes(self) -> Observations:
        return Observations(queries=1, hidden_moments=self.samples > 0)

    def examine(self, prefills: Sequence[Prefill], seeds: Sequence[str]) -> list[Any]:
        """Votes, plus half the current query's attention: it decides among tokens with as many votes, and a token that
        nobody voted for has less than 1. fp64, or small attention would be lost beside a vote."""
        return [
            [self._votes(prefill, layer, index, seed) for index, layer in enumerate(prefill.layers)]
            for prefill, seed in zip(prefills, seeds, strict=True)
        ]

    def scores(self, prefill: Prefill, seed: str) -> list[Tensor]:
        return [votes.float() for votes in self.examine([prefill], [seed])[0]]

    def compress(self, prefill: Prefill, budget: ResolvedBudget, examined: Any) -> Compressed:
        from kvcache.ragged import RaggedCompressed

        kept = self.keep(prefill, budget, examined)
        held = sum(votes.numel() for votes in examined)
        shares = {
            "voted_share": sum(int((votes >= 1).sum()) for votes in examined) / held,
            "kept_share": sum(len(own) for heads in kept for own in heads) / held,
        }
        return RaggedCompressed(prefill, kept, facts=shares)

    def keep(self, prefill: Prefill, budget: ResolvedBudget, examined: Any) -> list[list[Tensor]]:
        from kvcache.select import keep_counts

        self.room(prefill, budget)
        protected = self.protected(prefill)
        counts = [((votes >= 1) | protected).sum(1).clamp_max(budget.prompt_budget).tolist() for votes in examined]
        return [keep_counts(votes, own, protected) for votes, own in zip(examined, counts, strict=True)]

    def _votes(self, prefill: Prefill, layer: LayerPrefill, index: int, seed: str) -> Tensor:
        """[H_kv, n]"""
        import torch

        from kvcache.select import rank
        from kvcache.window import window_attention

        assert layer.queries is not None
        current = layer.queries[:, -1:]
        voters = torch.cat([current, self._drawn(prefill, layer, index, seed)], 1)
        by_head = (queries.unflatten(0, (len(layer.keys), -1)) for queries in (current, voters))
        place = torch.arange(prefill.tokens, device=layer.keys.device)
        scores = []
        for keys, own, all_voters in zip(layer.keys, *by_head, strict=True):
            attention = window_attention(own, keys, layer.scale)[:, 0].double()  # [G, n]
            sizes = nucleus_sizes(attention, self.nucleus)[:, None, None]
            order = rank(all_voters.float() @ keys.float().T * layer.scale)  # [G, 1 + S, n]
            ballots = order[(place < sizes).expand_as(order)]
            scores.append(torch.bincount(ballots, minlength=prefill.tokens) + attention.mean(0) / 2)
        return torch.stack(scores)

    def _drawn(self, prefill: Prefill, layer: LayerPrefill, index: int, seed: str) -> Tensor:
        """Queries of hidden states drawn from the prompt's Gaussian. [H_q, S, d]"""
        import torch

        assert layer.queries is not None
        if not self.samples:
            return layer.queries[:, :0]
        assert layer.hidden is not None
        assert prefill.project_queries is not None
        noise = _noise(f"{seed}/{index}", self.samples, len(layer.hidden.mean)).to(layer.hidden.mean.device)
        hidden = layer.hidden.mean + layer.hidden.variance.sqrt() * noise
        positions = torch.full((self.samples,), prefill.tokens, device=hidden.device)
        return prefill.project_queries(index, hidden, positions)


def nucleus_sizes(attention: Tensor, nucleus: float) -> Tensor:
    """The fewest tokens that hold ``nucleus`` of each row's attention. [G, n] fp64 -> [G]"""
    reached = attention.sort(-1, descending=True).values.cumsum(-1)
    if nucleus == 1:  # rounding may reach 1 before the last token
        return reached.new_full(reached.shape[:1], reached.shape[-1]).long()
    return ((reached < nucleus).sum(-1) + 1).clamp_max(reached.shape[-1])


def _noise(seed: str, samples: int, channels: int) -> Tensor:
    """[S, hidden] standard normal fp32, the same on every device and whatever else is drawn."""
    import torch

    from kvcache.streams import stream

    return torch.randn(samples, channels, generator=stream(seed))
