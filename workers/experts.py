"""Mixtures of experts whose result for a token does not depend on the other tokens of the batch.

The usual products sort tokens by expert, so their shapes, and a result's last bits, follow from all rows. Decode
batches take each token's experts by themselves instead; a prompt is prefilled alone and keeps the fast products.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from transformers.integrations.moe import ExpertsInterface, batched_mm_experts_forward, grouped_mm_experts_forward

from workers.architecture import EXPERT_TOKENS

EXPERTS = "kvsweep"
_by_row = ContextVar("by_row", default=False)


@contextmanager
def token_by_token(wanted: bool) -> Iterator[None]:
    """Whether passes inside treat every token by itself."""
    before = _by_row.set(wanted)
    try:
        yield
    finally:
        _by_row.reset(before)


def experts_forward(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """transformers' experts interface. hidden_states [N, hidden], the others [N, k] -> [N, hidden]"""
    given = hidden_states, top_k_index, top_k_weights
    if not _by_row.get():
        return grouped_mm_experts_forward(module, *given)
    blocks = zip(*(part.split(EXPERT_TOKENS) for part in given), strict=True)
    return torch.cat([batched_mm_experts_forward(module, *block) for block in blocks])


ExpertsInterface.register(EXPERTS, experts_forward)
