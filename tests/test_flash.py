"""FlashAttention-2 in prefill, by a stand-in with its signature: it needs a GPU."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from models import prompt_ids, tiny_llama
from torch import Tensor

from kvcache.budget import Budget
from kvcache.method import method_class
from workers import attention, flash
from workers.engine import Engine
from workers.fork import Fork, Prompt
from workers.job import EngineSpec
from workers.softmax import causal_attention

SCALE = 0.25


class FlashAttn(ModuleType):
    """The package, in plain torch, for one prompt."""

    def __init__(self) -> None:
        super().__init__("flash_attn")
        self.calls: list[tuple[int, ...]] = []

    def flash_attn_func(  # the real one's arguments, in its order
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        alibi_slopes: Tensor | None = None,
        deterministic: bool = False,
        return_attn_probs: bool = False,
    ) -> tuple[Tensor, Tensor, None]:
        """q [B, t, H_q, d], k, v [B, n, H_kv, d] -> [B, t, H_q, d], [B, H_q, t]"""
        assert causal
        assert return_attn_probs
        assert not dropout_p
        assert softmax_scale is not None
        self.calls.append((*q.shape, k.shape[1]))
        group, new, seen = q.shape[2] // k.shape[2], q.shape[1], k.shape[1]
        keys, values = (part.repeat_interleave(group, 2).transpose(1, 2).float() for part in (k, v))
        scores = q.transpose(1, 2).float() @ keys.transpose(2, 3) * softmax_scale
        distance = torch.arange(seen - new, seen)[:, None] - torch.arange(seen)
        left, right = window_size
        hidden = (distance < 0) | ((distance > left) if left >= 0 else distance < 0)
        assert right in (-1, 0)
        scores.masked_fill_(hidden, -torch.inf)
        output = scores.softmax(-1) @ values
        return output.transpose(1, 2).to(q.dtype), scores.logsumexp(-1), None


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[FlashAttn]:
    package = FlashAttn()
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    flash.flash_attn_func.cache_clear()
    yield package
    flash.flash_attn_func.cache_clear()


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize(("new", "visible"), [(12, 12), (5, 12)])
def test_its_arguments_mean_causal_attention(stand_in: FlashAttn, new: int, visible: int, window: int | None) -> None:
    queries = torch.randn(1, 6, new, 8)
    keys, values = torch.randn(2, 1, 2, visible, 8)
    output, log_sums = flash.flash_attention(queries, keys, values, SCALE, window)
    torch.testing.assert_close(output, causal_attention(queries, keys, values, SCALE, window)[0])
    assert log_sums.shape == (1, 6, new)


def test_prefill_attends_by_it_and_hands_its_sums_to_the_column_sums(
    stand_in: FlashAttn, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Tensor] = []

    def noted(*arguments: Any) -> None:
        given.append(arguments[5])
        add(*arguments)

    add = attention.add_column_sums
    monkeypatch.setattr(attention, "add_column_sums", noted)
    plain = _tokens()
    assert not stand_in.calls
    of_torch = given.copy()
    given.clear()
    monkeypatch.setattr(attention, "serves", lambda queries, values: True)
    assert _tokens() == plain
    assert stand_in.calls
    assert given
    for sums, other in zip(given, of_torch, strict=True):
        torch.testing.assert_close(sums, other)


def test_nothing_but_a_gpu_is_served(stand_in: FlashAttn) -> None:
    queries = torch.randn(1, 6, 4, 8, dtype=torch.bfloat16)
    assert flash.flash_attn_func() == stand_in.flash_attn_func
    assert not flash.serves(queries, queries)


def _tokens() -> list[int]:
    fork = Fork("h2o", method_class("h2o")(), Budget.parse("50%"), "0")
    (finished,) = Engine(tiny_llama(), EngineSpec(2, prefill_chunk=16)).run(
        [Prompt("p", prompt_ids(40), [], 6, [fork])]
    )
    assert not finished.error
    return finished.tokens
