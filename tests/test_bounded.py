"""``growth: bounded``: methods that choose once choose again every 8 tokens, and the budget holds at any moment."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import stub_worker
import torch
from attention_prompts import DIM, HIDDEN
from hypothesis import given, settings
from hypothesis import strategies as st
from lowbit_cases import (
    KV_HEADS,
    LAYERS,
    LAYOUT,
    QUERY_HEADS,
    SCALE,
    Tokens,
    assert_a_broken_row_ends_no_other,
    assert_rows_do_not_see_each_other,
    feed,
    one_by_one,
    shape,
)
from models import prompt_ids, tiny_gemma, tiny_llama, tiny_qwen
from test_plan import grid
from torch import Tensor

from kvcache.baselines.adakv import AdaKV
from kvcache.baselines.andpro import AnDPro
from kvcache.baselines.criticalkv import CriticalAdaKV, CriticalKV
from kvcache.baselines.defensivekv import DefensiveKV, LayerDefensiveKV
from kvcache.baselines.expected_attention import ExpectedAttention
from kvcache.baselines.full import Full
from kvcache.baselines.gvote import GVote
from kvcache.baselines.h2o import H2O
from kvcache.baselines.key_norm import KeyNorm
from kvcache.baselines.kivi import KIVI
from kvcache.baselines.laq import LAQ, LAQPlusPlus
from kvcache.baselines.obcache import OBCache
from kvcache.baselines.pyramidkv import PyramidKV
from kvcache.baselines.random_tokens import RandomTokens
from kvcache.baselines.scissorhands import Scissorhands
from kvcache.baselines.snapkv import SnapKV
from kvcache.baselines.streaming_llm import RollingStreamingLLM, StreamingLLM
from kvcache.bounded import INTERVAL, Bounded, grown
from kvcache.budget import Base, Budget, ResolvedBudget
from kvcache.evict import PromptEvictor
from kvcache.kernels.column_sums import add_column_sums
from kvcache.method import Method, method_class, method_names
from kvcache.pool import FamilyPool
from kvcache.prefill import Prefill
from lorekv.method import LoreKV
from qevict.method import QEvict
from workers.engine import Engine
from workers.fork import Fork, Generation, Prompt
from workers.job import EngineSpec
from workers.models import LoadedModel

METHODS: tuple[PromptEvictor, ...] = (
    StreamingLLM(),
    SnapKV(window=8),
    RandomTokens(),
    KeyNorm(),
    H2O(),
    Scissorhands(history=30, recent=5),
    PyramidKV(window=8, beta=4),
    AdaKV(window=8),
    CriticalKV(window=8),
    CriticalAdaKV(window=8),
    AnDPro(window=8),
    OBCache(window=8, recent=5),
)
FOREVER = (LoreKV(), LAQ(), LAQPlusPlus(), GVote(), ExpectedAttention(), DefensiveKV(), LayerDefensiveKV())
GROUP = QUERY_HEADS // KV_HEADS
NEW = 20


def name_of(method: Method) -> str:
    return method.name


# -- what a head holds, step by step ---------------------------------------------------------------------------------


def observed(tokens: Tokens, count: int) -> Prefill:
    """A prompt with all its queries, its column sums and a projection."""
    prefill = tokens.prompt(count)
    for index, layer in enumerate(prefill.layers):
        assert layer.queries is not None
        layer.column_sums = torch.zeros(QUERY_HEADS, count)
        add_column_sums(layer.column_sums, layer.queries, layer.keys, 0, SCALE)
        generator = torch.Generator().manual_seed(index)
        layer.output_projection = torch.randn(HIDDEN, QUERY_HEADS, DIM, generator=generator)
    return prefill


def resolved(tokens: int, budget: str) -> ResolvedBudget:
    return Budget.parse(budget).resolve(tokens, 1000, "prompt", LAYOUT)


def admitted(method: Method, tokens: Tokens, count: int, budget: str, row: int = 1, pool: Any = None) -> FamilyPool:
    bounded, prefill = grown(method, "bounded"), observed(tokens, count)
    assert bounded.impossible(resolved(count, budget), LAYOUT) is None
    pool = bounded.new_pool(shape()) if pool is None else pool
    (examined,) = bounded.examine([prefill], ["0"])
    pool.admit({row: bounded.compress(prefill, resolved(count, budget), examined)})
    return pool


def put(method: Method, tokens: Tokens, count: int, row: int, pool: FamilyPool | None) -> FamilyPool:
    return admitted(method, tokens, count, "40 tokens", row, pool)


class Reference:
    """One KV head by lists: attends to the positions it holds, and every 8 tokens ``choose`` keeps ``capacity``."""

    def __init__(
        self, tokens: Tokens, layer: int, head: int, count: int, capacity: int, choose: Callable[..., list[int]]
    ) -> None:
        group = slice(head * GROUP, (head + 1) * GROUP)
        self.queries = tokens.queries[layer, group].double()  # [G, n, d]
        self.keys, self.values = tokens.keys[layer, head].double(), tokens.values[layer, head].double()
        self.prompt, self.capacity, self.choose = count, capacity, choose
        self.held = list(range(count))
        self.sums = [0.0] * len(self.keys)
        for position in range(count):
            self._see(position, list(range(position + 1)))
        self._evict(count - 1)

    def step(self, position: int) -> Tensor:
        self.held.append(position)
        output = self._see(position, self.held)
        if (position + 1 - self.prompt) % INTERVAL == 0:
            self._evict(position)
        return output

    def attention(self, position: int, held: list[int]) -> Tensor:
        """[G, len(held)], 0 for what comes after the query"""
        scores = self.queries[:, position] @ self.keys[held].T * SCALE
        scores[:, torch.tensor(held) > position] = -torch.inf
        return torch.softmax(scores, -1)

    def _see(self, position: int, held: list[int]) -> Tensor:
        attention = self.attention(position, held)
        for place, own in zip(held, attention.mean(0).tolist(), strict=True):
            self.sums[place] += own
        return attention @ self.values[held]

    def _evict(self, last: int) -> None:
        if len(self.held) > self.capacity:
            self.held = sorted(self.choose(self, last))
            assert len(self.held) == self.capacity


def most_recent(head: Reference, last: int) -> list[int]:
    """StreamingLLM."""
    return head.held[:4] + head.held[4:][-(head.capacity - 4) :]


def heavy_and_recent(head: Reference, last: int) -> list[int]:
    """H2O."""
    heavy = head.capacity // 2
    older = head.held[: len(head.held) - (head.capacity - heavy)]
    return sorted(older, key=lambda place: (-head.sums[place], place))[:heavy] + head.held[len(older) :]


def what_the_window_sees(head: Reference, last: int) -> list[int]:
    """SnapKV with a window of 8 and a kernel of 3, over what is held."""
    received = sum(head.attention(position, head.held) for position in range(last - 7, last + 1))
    assert isinstance(received, Tensor)
    older = head.held[:-8]
    pooled = torch.nn.functional.max_pool1d(received[:, : len(older)], 3, 1, 1).mean(0).tolist()
    best = sorted(range(len(older)), key=lambda place: (-pooled[place], place))[: head.capacity - 8]
    return [older[place] for place in best] + head.held[-8:]


@pytest.mark.parametrize(
    ("method", "choose"),
    [(StreamingLLM(), most_recent), (H2O(), heavy_and_recent), (SnapKV(window=8, kernel=3), what_the_window_sees)],
    ids=["streaming_llm", "h2o", "snapkv"],
)
@settings(max_examples=10)
@given(st.integers(12, 90), st.integers(20, 90), st.integers(1, 40))
def test_heads_hold_what_the_rule_says_at_every_step(
    method: PromptEvictor, choose: Callable[..., list[int]], prompt: int, budget: int, new: int
) -> None:
    """Prompts longer and shorter than the budget, several pages; by what attention gives."""
    tokens = Tokens.random(prompt + new, seed=prompt)
    pool = admitted(method, tokens, prompt, f"{budget} tokens")
    bounded = Bounded(method)
    capacity = bounded.of_prompt(resolved(prompt, f"{budget} tokens"), LAYOUT).tokens
    token = 2 * DIM * 4
    assert capacity == budget * token // (token + 4 * bounded.sums) - INTERVAL, "sums are paid for"
    heads = [
        [Reference(tokens, layer, head, prompt, capacity, choose) for head in range(KV_HEADS)]
        for layer in range(LAYERS)
    ]
    for position in range(prompt, prompt + new):
        found = feed(pool, {1: (tokens, position, position + 1)})[1][:, :, 0]
        expected = [torch.cat([head.step(position) for head in layer]) for layer in heads]
        torch.testing.assert_close(found.double(), torch.stack(expected), rtol=1e-3, atol=1e-4)
        held = sum(len(head.held) for layer in heads for head in layer)
        assert pool.memory(1).full_precision == held * token
        assert pool.memory(1).scores == held * 4 * (method == H2O())


@pytest.mark.parametrize("method", METHODS, ids=name_of)
@pytest.mark.parametrize("prompt", [20, 61])
def test_a_chunk_equals_single_tokens(method: PromptEvictor, prompt: int) -> None:
    """Choices fall due inside a step of several tokens."""
    tokens = Tokens.random(prompt + 21)
    at_once, single = (admitted(method, tokens, prompt, "30 tokens") for _ in range(2))
    together = feed(at_once, {1: (tokens, prompt, prompt + 21)})[1]
    assert torch.equal(together, one_by_one(single, tokens, prompt, prompt + 21))
    assert at_once.memory(1) == single.memory(1)
    assert at_once.peak_held(1) == single.peak_held(1)


@pytest.mark.parametrize("method", METHODS, ids=name_of)
def test_rows_do_not_see_each_other(method: PromptEvictor) -> None:
    streams = {row: Tokens.random(150, seed=10 * row) for row in range(4)}
    lengths = {0: 9, 1: 40, 2: 110, 3: 32}

    empty = grown(method, "bounded").new_pool(shape()).allocated_bytes()
    left = Tokens.random(100, seed=99), 100
    assert_rows_do_not_see_each_other(partial(put, method), streams, lengths, left, 19, empty)


@pytest.mark.parametrize("method", METHODS, ids=name_of)
def test_a_row_that_breaks_ends_no_other(method: PromptEvictor) -> None:
    bad = Tokens.random(75, seed=5)
    bad.keys[:, :, 55:], bad.queries[:, :, 56] = torch.nan, torch.inf
    assert_a_broken_row_ends_no_other(partial(put, method), bad, 25)


def test_the_last_queries_are_workspace() -> None:
    for method, queries in ((SnapKV(window=8), 8), (Scissorhands(history=30, recent=5), 13), (KeyNorm(), 0)):
        pool, budget = admitted(method, Tokens.random(50), 50, "30 tokens"), resolved(50, "30 tokens")
        assert pool.memory(1).workspace == queries * LAYERS * QUERY_HEADS * DIM * 4
        assert pool.memory(1).workspace == Bounded(method).workspace_bytes(budget, LAYOUT)


# -- through the engine ----------------------------------------------------------------------------------------------


def run(model: LoadedModel, prompts: list[Prompt]) -> dict[tuple[Any, Any], Generation]:
    return {(one.prompt.key, one.fork.key): one for one in Engine(model, EngineSpec(6, 64)).run(prompts)}


def forks(budget: str, *methods: Method) -> list[Fork]:
    return [Fork(method, grown(method, "bounded"), Budget.parse(budget), "0") for method in methods]


def asked(tokens: int, question: int, some: list[Fork], base: Base = "prompt") -> Prompt:
    appended = prompt_ids(question, seed=7) if question else []
    return Prompt((tokens, question), prompt_ids(tokens), appended, NEW, some, min_new_tokens=NEW, base=base)


@settings(max_examples=8)
@given(
    st.lists(st.integers(30, 160), min_size=1, max_size=2, unique=True),
    st.sampled_from((0, 1, 25)),
    st.sampled_from(("prompt", "prompt+max_new")),
    st.one_of(st.integers(15, 100).map("{}%".format), st.integers(24, 200).map("{} tokens".format)),
)
def test_the_budget_holds_at_any_moment(lengths: list[int], question: int, base: Base, budget: str) -> None:
    model = tiny_llama(num_hidden_layers=2)
    found = run(model, [asked(length, question, forks(budget, *METHODS), base) for length in lengths])
    assert len(found) == len(lengths) * len(METHODS)
    for generation in found.values():
        assert generation.budget is not None or "must" in generation.error
        if generation.budget is None:
            continue
        assert not generation.error
        held = max(generation.at_prefill.held, generation.peak_held, generation.at_end.held)
        assert held <= generation.budget.total_bytes
        assert held <= generation.fork.method.peak_bytes(generation.budget, model.layout)


@pytest.mark.parametrize("build", [tiny_llama, tiny_qwen, tiny_gemma])
def test_an_unlimited_budget_is_the_full_cache(build: Callable[[], LoadedModel]) -> None:
    found = run(
        build(),
        [asked(tokens, question, forks("unlimited", Full(), *METHODS)) for tokens, question in ((20, 0), (90, 19))],
    )
    for (prompt, method), generation in found.items():
        assert not generation.error
        assert generation.tokens == found[prompt, Full()].tokens, method


def test_tokens_do_not_depend_on_what_runs_beside() -> None:
    model = tiny_llama(torch.bfloat16)
    prompts = [asked(tokens, question, forks("40%", *METHODS)) for tokens, question in ((64, 5), (150, 40))]
    together = run(model, prompts)
    for prompt in prompts:
        for one in prompt.forks:
            alone = run(model, [dataclasses.replace(prompt, forks=[one])])[prompt.key, one.key]
            beside = together[prompt.key, one.key]
            assert not alone.error
            assert (alone.tokens, alone.at_end, alone.peak_held) == (beside.tokens, beside.at_end, beside.peak_held)


def test_what_the_prompt_leaves_is_the_methods_own_choice() -> None:
    """At a budget of eight tokens less; the answer differs once they are used up."""
    model, method = tiny_llama(), SnapKV(window=8)
    grows = Fork("grow", method, Budget.parse("40 tokens"), "0")
    bounded = Fork("bounded", grown(method, "bounded"), Budget.parse("48 tokens"), "0")
    found = run(model, [Prompt("", prompt_ids(120), [], 40, [grows, bounded], min_new_tokens=40)])
    one, other = (found["", key] for key in ("grow", "bounded"))
    assert one.at_prefill.held == other.at_prefill.held
    assert one.tokens[: INTERVAL + 1] == other.tokens[: INTERVAL + 1]
    assert one.tokens != other.tokens
    assert other.peak_held == model.layout.full_bytes(48)
    assert one.peak_held == model.layout.full_bytes(40 + 39)


# -- which methods, and what a plan says -----------------------------------------------------------------------------


def test_methods_that_hold_their_budget_or_have_none_stay_as_they_are() -> None:
    for method in (Full(), QEvict(), RollingStreamingLLM(), KIVI()):
        assert grown(method, "bounded") is method
    assert grown(SnapKV(), "grow") == SnapKV()


@pytest.mark.parametrize("method", FOREVER, ids=name_of)
def test_methods_that_cannot_choose_again_say_why(method: Method) -> None:
    reason = grown(method, "bounded").impossible(resolved(500, "50%"), LAYOUT)
    assert reason is not None
    assert reason.startswith(f"{method.name} cannot choose again while tokens are generated (it")
    assert reason.endswith("): set growth to 'grow'")


def test_registered_methods_are_bounded_or_say_why_not() -> None:
    methods = [grown(method_class(name)(), "bounded") for name in method_names()]
    cannot = {one.method.name for one in methods if isinstance(one, Bounded) and one.cannot}
    can = {one.method.name for one in methods if isinstance(one, Bounded) and not one.cannot}
    assert cannot >= {method.name for method in FOREVER}
    assert can >= {method.name for method in METHODS}


def test_a_budget_without_room_for_eight_tokens_is_impossible() -> None:
    bounded = Bounded(SnapKV(window=8))
    assert bounded.impossible(resolved(90, "16 tokens"), LAYOUT) is None
    assert bounded.impossible(resolved(90, "15 tokens"), LAYOUT) == (
        "snapkv must keep 8 protected tokens, and 15 tokens leaves 7 beside 8 new ones (growth: bounded)"
    )


def test_the_protocol_of_a_sweep_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stub_worker.install(monkeypatch)
    grow, bounded = (grid(tmp_path, protocol={"growth": growth}).cells for growth in ("grow", "bounded"))
    assert {cell.cell_id for cell in grow}.isdisjoint(cell.cell_id for cell in bounded)
    reasons = {cell.spec.method: str(cell.impossible) for cell in bounded}
    assert reasons["full"] == "None"
    assert "window cannot choose again" in reasons["window"]
    assert all(cell.impossible is None for cell in grow)
