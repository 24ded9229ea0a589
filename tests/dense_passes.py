"""The masking oracle: one dense pass in which the tokens after a prompt do not see what was evicted from it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from workers.attention import Step
from workers.models import LoadedModel

Kept = Sequence[Sequence[Sequence[int]]]
"""[layers][H_kv] of positions"""


class Dense(Step):
    """Causal attention over a prompt of ``tokens`` and what follows it, which sees the ``kept`` prompt tokens only."""

    def __init__(self, tokens: int, kept: Kept | None) -> None:
        self.tokens, self.kept = tokens, kept
        self.queries: dict[int, Tensor] = {}

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        self.queries[layer] = queries[0]
        group, length = queries.shape[1] // keys.shape[1], queries.shape[2]
        seen = torch.ones(keys.shape[1], length, length, dtype=torch.bool).tril()
        for head, kept in enumerate(self.kept[layer] if self.kept else ()):
            seen[head, self.tokens :, [token for token in range(self.tokens) if token not in kept]] = False
        keys, values, seen = (one.repeat_interleave(group, -3) for one in (keys, values, seen))
        return torch.nn.functional.scaled_dot_product_attention(queries, keys, values, attn_mask=seen, scale=scale)


def dense_pass(model: LoadedModel, ids: list[int], step: Step) -> Tensor:
    """Logits of every token, [n, V]."""
    with torch.inference_mode():
        return model.forward(input_ids=torch.tensor([ids]), use_cache=False, kv_step=step).logits[0]
