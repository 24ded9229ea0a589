"""What the measurement of observing and choosing times, exempts and checks."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from models import prompt_ids, tiny_llama

from kvcache.baselines.adakv import AdaKV
from kvcache.baselines.andpro import AnDPro
from kvcache.baselines.expected_attention import ExpectedAttention
from kvcache.baselines.gvote import GVote
from kvcache.baselines.h2o import H2O
from kvcache.baselines.scissorhands import Scissorhands
from kvcache.baselines.snapkv import SnapKV
from kvcache.baselines.zipcache import ZipCache
from kvcache.budget import Budget
from kvcache.method import Observations, method_names
from kvcache.prefill import Prefill
from perf import observe
from perf.observe import Outcome, compare, faults, observed, unscored, usable
from workers.fork import Prompt
from workers.models import LoadedModel

BUDGET = Budget.parse("30%")
METHODS = (SnapKV(), AdaKV(), AnDPro(), GVote(), H2O(), Scissorhands(), ExpectedAttention(), ZipCache())


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return tiny_llama()


@pytest.fixture(scope="module")
def prompt() -> Prompt:
    return Prompt("p", prompt_ids(200), [], 1, [])


@pytest.fixture(scope="module")
def prefill(model: LoadedModel, prompt: Prompt) -> Prefill:
    return observed(model, prompt, METHODS)[0]


def test_every_kind_of_observation_is_timed_once(model: LoadedModel, prompt: Prompt) -> None:
    prefill, seconds = observed(model, prompt, METHODS)
    assert set(seconds) == {method.observes() for method in METHODS}
    assert all(of_kind > 0 for kind, of_kind in seconds.items() if kind != Observations())
    assert prefill.layers[0].queries is not None
    assert prefill.layers[0].queries.shape[1] == 200, "the union of all: Scissorhands asks for 400"


def test_all_methods_are_measured_and_exempt_for_what_they_do(
    model: LoadedModel, prompt: Prompt, tmp_path: Path
) -> None:
    names = ["snapkv", *(name for name in method_names() if name not in ("snapkv", "kivi"))]  # its groups do not fit
    methods, reasons = usable(model, prompt, names, tmp_path)
    outcomes = compare(model, prompt, methods, reasons, BUDGET, rounds=1)
    assert outcomes["snapkv"].ratio == outcomes["snapkv"].with_admission == 1
    assert outcomes.keys() == set(names)
    assert {name: one.exempt for name, one in outcomes.items() if one.exempt} == {
        "h2o": "column sums",
        "qevict": "column sums",
        "zipcache": "column sums",
        "laq": "extra forward passes",
        "laqpp": "extra forward passes",
        "gvote": "extra forward passes",
        "lorekv": "extra forward passes",
        "kvquant": "calibration",
    }


def test_only_methods_without_an_excuse_are_above_the_limit() -> None:
    slow = Outcome(1.0, 1.0, 1.0, 3.1, 0.5, "")
    assert slow.over
    assert not dataclasses.replace(slow, exempt="column sums").over
    assert not dataclasses.replace(slow, ratio=3.0, with_admission=9.0).over


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_nothing_is_wrong_with_the_methods(method: SnapKV, prefill: Prefill) -> None:
    assert faults(method, prefill, BUDGET) == []


def test_another_choice_than_sorting_makes_is_refused(prefill: Prefill, monkeypatch: pytest.MonkeyPatch) -> None:
    def last_of_equals(scores: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        return sorting(scores.flip(-1), counts).flip(-1)

    sorting = observe.best_by_sorting
    monkeypatch.setattr("kvcache.select.best_of_rows", last_of_equals)
    level = dataclasses.replace(prefill, layers=[dataclasses.replace(layer) for layer in prefill.layers])
    for layer in level.layers:
        layer.queries = torch.zeros_like(layer.queries) if layer.queries is not None else None
    assert faults(SnapKV(), level, BUDGET) == ["snapkv: the fast selection keeps other tokens than sorting does"]


def test_a_budget_that_is_not_filled_is_refused(prefill: Prefill, monkeypatch: pytest.MonkeyPatch) -> None:
    keep = SnapKV.keep
    monkeypatch.setattr(SnapKV, "keep", lambda *given: [[head[1:] for head in heads] for heads in keep(*given)])
    heads = sum(len(layer.keys) for layer in prefill.layers)
    assert faults(SnapKV(), prefill, BUDGET) == [
        f"snapkv: {heads * 59} tokens are kept, and the budget is {heads * 60}"
    ]


def test_methods_share_scores_but_not_with_a_prompt_that_nobody_has_scored(prefill: Prefill) -> None:
    mine, other = unscored(prefill), unscored(prefill)
    found = SnapKV().scores(mine, "0")
    assert all(one is again for one, again in zip(found, AdaKV().scores(mine, "0"), strict=True))
    assert not any(one is again for one, again in zip(found, SnapKV(kernel=5).scores(mine, "0"), strict=True))
    assert not any(one is again for one, again in zip(found, SnapKV().scores(other, "0"), strict=True))
