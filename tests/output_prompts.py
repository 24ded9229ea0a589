"""Random prompts, and those of small models, for evictors that look at the output or ahead."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import pytest
import torch
from models import prompt_ids
from torch import Tensor

from kvcache.baselines.gvote import GVote
from kvcache.baselines.snapkv import SnapKV
from kvcache.budget import Budget, ResolvedBudget
from kvcache.evict import PromptEvictor
from kvcache.layout import CacheLayout, LayerLayout
from kvcache.method import Method
from kvcache.prefill import LayerPrefill, Prefill
from workers.fork import Fork, Prompt, PromptForks
from workers.models import LoadedModel


def random_prompt(tokens: int, window: int, layers: int = 1, heads: int = 2, group: int = 2, seed: int = 0) -> Prefill:
    """Random keys, values, window queries and projections, in fp32; it cannot be continued."""
    g = torch.Generator().manual_seed(tokens + 1000 * seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g)

    made = [
        LayerPrefill(
            random(heads, tokens, 8) * 2,
            random(heads, tokens, 8),
            random(heads * group, min(window, tokens), 8) * 2,
            None,
            random(12, heads * group, 8),
            8**-0.5,
        )
        for _ in range(layers)
    ]
    layout = CacheLayout(tuple(LayerLayout("growing", heads * group, heads, 8, 8) for _ in made), 4)
    return Prefill(made, layout, tokens, torch.zeros(3), lambda *_: (Tensor(), Tensor()), lambda _: pytest.fail("ran"))


def resolved(prefill: Prefill, budget: int | str) -> ResolvedBudget:
    text = f"{budget} tokens" if isinstance(budget, int) else budget
    return Budget.parse(text).resolve(prefill.tokens, 8, "prompt", prefill.layout)


def kept_by(method: PromptEvictor, prefill: Prefill, budget: int | str) -> list[list[list[int]]]:
    """[layers][heads] of positions."""
    with torch.inference_mode():
        (examined,) = method.examine([prefill], ["0"])
        kept = method.keep(prefill, resolved(prefill, budget), examined)
    return [[head.tolist() for head in layer] for layer in kept]


def total(kept: list[list[list[int]]]) -> int:
    return sum(len(head) for layer in kept for head in layer)


@lru_cache(maxsize=8)
def loaded(build: Callable[[], LoadedModel]) -> LoadedModel:
    return build()


def prefilled(model: LoadedModel, tokens: int = 60, method: Method | None = None, chunk: int = 64) -> Prefill:
    forks = [Fork("", one, Budget.parse("unlimited"), "0") for one in (method or GVote(), SnapKV())]
    with torch.inference_mode():
        return PromptForks(model, chunk).prefill(Prompt("", prompt_ids(tokens), [], 4, forks))


def window_parts(layer: LayerPrefill, head: int, window: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Logits and causal attention of one KV head's queries, values and outputs, by loops in fp64. [G, w, n]"""
    group = layer.queries.shape[0] // len(layer.keys)  # type: ignore[union-attr]
    keys, values = layer.keys[head].double(), layer.values[head].double()
    queries = layer.queries[head * group : (head + 1) * group, -window:].double()  # type: ignore[index]
    logits = queries @ keys.T * layer.scale
    attention = torch.zeros_like(logits)
    for place in range(queries.shape[1]):
        seen = len(keys) - queries.shape[1] + place + 1
        attention[:, place, :seen] = torch.softmax(logits[:, place, :seen], -1)
    return logits, attention, values, attention @ values
