"""Prompts and futures for the tests of LORE-KV."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from models import prompt_ids
from torch import Tensor

from kvcache.budget import Budget
from kvcache.prefill import Prefill
from lorekv.lookahead import Futures
from lorekv.method import LoreKV
from workers.fork import Fork, Prompt, PromptForks
from workers.models import LoadedModel

WINDOW = 8
ENDS = 1 + WINDOW
"""Tokens that are kept whatever their score."""


def lorekv(**changes: Any) -> LoreKV:
    return replace(LoreKV(window=WINDOW), **changes)


def same(found: list[Tensor], expected: list[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def prefilled(model: LoadedModel, tokens: int = 60, seed: int = 0) -> Prefill:
    fork = Fork("", lorekv(), Budget.parse("unlimited"), "0")
    with torch.inference_mode():
        return PromptForks(model, 64).prefill(Prompt("", prompt_ids(tokens, seed), [], 4, [fork]))


def made_futures(
    surprise: Tensor, entropy: Tensor, lengths: Tensor, varentropy: Tensor | None = None, queries: Tensor | None = None
) -> Futures:
    """Futures of given statistics: surprise, entropy and varentropy [M, T], queries [M, H_q, T, d] of one layer."""
    varentropy = torch.ones_like(entropy) if varentropy is None else varentropy
    of_layers = [] if queries is None else [queries]
    tokens = torch.zeros_like(surprise, dtype=torch.int64)
    return Futures(tokens, lengths, -surprise, entropy, varentropy, of_layers, [], [], [])
