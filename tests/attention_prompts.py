"""Random prompts with everything that a prefill observes, for methods that score with attention."""

from __future__ import annotations

import torch
from torch import Tensor

from kvcache.budget import Budget
from kvcache.evict import PromptEvictor
from kvcache.kernels.column_sums import add_column_sums
from kvcache.layout import CacheLayout, LayerLayout
from kvcache.moments import QueryMoments
from kvcache.prefill import LayerPrefill, Prefill
from kvcache.ragged import RaggedCompressed
from kvcache.rotary import unrotate

QUERY_HEADS, DIM, HIDDEN, SCALE = 4, 8, 20, 8**-0.5


def tables(layer: int, positions: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin as a model has them, [n] -> [n, d]."""
    angles = positions[:, None] * 100.0 ** -(torch.arange(DIM // 2) / (DIM // 2))
    return torch.cat([angles, angles], -1).cos(), torch.cat([angles, angles], -1).sin()


def prompt(tokens: int, layers: int = 3, kv_heads: int = 2, seed: int = 0, sinks: int = 4) -> Prefill:
    """Observes every query."""
    generator = torch.Generator().manual_seed(1000 * seed + tokens)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    layout = CacheLayout((LayerLayout("growing", QUERY_HEADS, kv_heads, DIM, DIM),) * layers, 4)
    prefills = []
    for layer in range(layers):
        queries, keys = 2 * random(QUERY_HEADS, tokens, DIM), 2 * random(kv_heads, tokens, DIM)
        sums = torch.zeros(QUERY_HEADS, tokens)
        add_column_sums(sums, queries, keys, 0, SCALE)
        moments = QueryMoments.empty(QUERY_HEADS, DIM, queries.device)
        moments.add(unrotate(queries, *tables(layer, torch.arange(tokens)))[:, sinks:])
        values, projection = random(kv_heads, tokens, DIM), random(HIDDEN, QUERY_HEADS, DIM)
        prefills.append(LayerPrefill(keys, values, queries, sums, projection, SCALE, {sinks: moments}))
    return Prefill(prefills, layout, tokens, torch.zeros(3), tables, lambda _: None)  # type: ignore[arg-type,return-value]


def kept(method: PromptEvictor, prefill: Prefill, budget: int, seed: str = "0") -> list[list[list[int]]]:
    """[layers][H_kv] of positions"""
    resolved = Budget.parse(f"{budget} tokens").resolve(prefill.tokens, 8, "prompt", prefill.layout)
    assert method.impossible(resolved, prefill.layout) is None
    (examined,) = method.examine([prefill], [seed])
    compressed = method.compress(prefill, resolved, examined)
    assert isinstance(compressed, RaggedCompressed)
    return [[head.tolist() for head in layer] for layer in compressed.kept]
