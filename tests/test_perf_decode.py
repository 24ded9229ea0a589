"""What the measurement of a decode step checks before it reports a ratio."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from models import prompt_ids, tiny_llama

from kvcache.budget import Budget
from perf.decode import _compressed, refuse_other_tokens_without_copy
from qevict.method import QEvict
from qevict.pool import TieredPool
from workers.fork import Fork, Prompt, Ready
from workers.models import LoadedModel

NEW = 17


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return dataclasses.replace(tiny_llama(), stop_ids=frozenset())


@pytest.fixture
def ready(model: LoadedModel) -> Ready:
    fork = Fork("method", QEvict(recent=8), Budget.parse("40%"), "0")
    return _compressed(model, Prompt("p", prompt_ids(200), [], NEW, [fork]), fork)


def test_both_ways_are_run_and_say_the_same(model: LoadedModel, ready: Ready, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[bool] = []

    def noted(self: TieredPool, *arguments: object) -> torch.Tensor:
        kept.append(self.tiers.keeps_copy)
        return attend(self, *arguments)

    attend = TieredPool.attend
    monkeypatch.setattr(TieredPool, "attend", noted)
    refuse_other_tokens_without_copy(model, ready)
    assert set(kept) == {True, False}


def test_a_copy_that_says_something_else_stops_the_report(
    model: LoadedModel, ready: Ready, monkeypatch: pytest.MonkeyPatch
) -> None:
    def spoiled(self: TieredPool, *arguments: object) -> torch.Tensor:
        output = attend(self, *arguments)
        return -output if self.tiers.keeps_copy else output

    attend = TieredPool.attend
    monkeypatch.setattr(TieredPool, "attend", spoiled)
    with pytest.raises(SystemExit, match="no ratio is reported"):
        refuse_other_tokens_without_copy(model, ready)
