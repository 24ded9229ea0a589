"""Quest and SparQ: what they choose, exact attention over it, and an unchanged memory."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lowbit_cases import (
    DIM,
    KV_HEADS,
    LAYERS,
    LAYOUT,
    QUERY_HEADS,
    SCALE,
    Tokens,
    admit,
    assert_a_broken_row_ends_no_other,
    assert_rows_do_not_see_each_other,
    broken,
    dense,
    feed,
    one_by_one,
    shape,
)
from torch import Tensor

from kvcache.baselines.quest import Quest
from kvcache.baselines.sparq import SparQ
from kvcache.budget import Budget
from kvcache.layout import LayerLayout
from kvcache.method import Method
from kvcache.page_reads import PageReadPool

GROUP = QUERY_HEADS // KV_HEADS
METHODS: list[Method] = [Quest(tokens=12, page=4, dense_layers=1), SparQ(channels=3, tokens=10, local=4)]


def masked(tokens: Tokens, layer: int, head: int, position: int, kept: list[int]) -> Tensor:
    """Attention of one query head over the tokens kept. [d]"""
    keys, values = (part[layer, head // GROUP, kept] for part in (tokens.keys, tokens.values))
    return torch.softmax(keys @ tokens.queries[layer, head, position] * SCALE, -1) @ values


def quest_tokens(method: Quest, tokens: Tokens, layer: int, head: int, position: int) -> list[int]:
    """What a query head reads, page by page as the paper has it."""
    query, keys = tokens.queries[layer, head, position], tokens.keys[layer, head // GROUP, : position + 1]
    pages = list(range(-(-(position + 1) // method.page)))
    if layer < method.dense_layers:
        return list(range(position + 1))

    def bound(page: int) -> float:
        own = keys[page * method.page : (page + 1) * method.page]
        return float(torch.maximum(query * own.amin(0), query * own.amax(0)).sum())

    best = sorted(pages[:-1], key=bound, reverse=True)[: method.pages - 1]
    kept = [token for page in (*best, pages[-1]) for token in range(page * method.page, (page + 1) * method.page)]
    return sorted(token for token in kept if token <= position)


def sparq_output(method: SparQ, tokens: Tokens, layer: int, kv_head: int, position: int) -> Tensor:
    """Algorithm 1 for one group of query heads. [G, d]"""
    queries = tokens.queries[layer, kv_head * GROUP : (kv_head + 1) * GROUP, position]
    keys, values = (part[layer, kv_head, : position + 1] for part in (tokens.keys, tokens.values))
    channels = queries.abs().sum(0).topk(method.channels).indices
    tau = (queries[:, channels].abs().sum(1) / queries.abs().sum(1)).sqrt() / SCALE
    scores = queries[:, channels] @ keys[:, channels].T / tau[:, None]
    approximate = torch.softmax(scores, -1)
    ranked = scores.sum(0)
    ranked[max(0, position - method.local) :] = torch.inf
    kept = ranked.topk(min(method.tokens + 1, position + 1)).indices
    alpha = approximate[:, kept].sum(1, keepdim=True)
    attention = torch.softmax(queries @ keys[kept].T * SCALE, -1) @ values[kept]
    return alpha * attention + (1 - alpha) * values.mean(0)


def test_the_bound_of_a_page() -> None:
    """q = (1, -1), minimum (-2, -3), maximum (1, 0): 1 * 1 + (-1) * (-3) = 4."""
    layout = LayerLayout("growing", 1, 1, 2, 2)
    pool = PageReadPool(shape(), 16, 3, 0)
    store = type(pool.layers[0])(layout, shape(), 16, 3)
    for key in ([1.0, -3.0], [-2.0, 0.0]):
        store.append(torch.tensor([1]), torch.tensor([[key]]), torch.zeros(1, 1, 2))
    page = int(store.pages.pages_of(1))
    assert store.pages.arena["low"][page].tolist() == [[-2, -3]]
    assert store.pages.arena["high"][page].tolist() == [[1, 0]]
    bounds = store._bounds(torch.tensor([1.0, -1.0]).expand(4, 1, 1, 2))
    assert float(bounds[page]) == 4


@settings(max_examples=25)
@given(st.integers(1, 60), st.integers(1, 8), st.sampled_from((1, 2, 4, 16)), st.integers(1, 40), st.integers(0, 2))
def test_quest_reads_the_pages_with_the_highest_bounds(
    prompt: int, new: int, page: int, read: int, dense_layers: int
) -> None:
    method, tokens = Quest(read, page, dense_layers), Tokens.random(prompt + new, seed=prompt)
    found = one_by_one(admit(method, tokens, prompt), tokens, prompt, prompt + new)
    for step in range(new):
        for layer in range(LAYERS):
            for head in range(QUERY_HEADS):
                kept = quest_tokens(method, tokens, layer, head, prompt + step)
                expected = masked(tokens, layer, head, prompt + step, kept)
                torch.testing.assert_close(found[layer, head, step], expected, rtol=1e-4, atol=1e-5)


@settings(max_examples=15)
@given(st.integers(1, 100), st.integers(1, 12))
def test_the_bound_is_above_every_key(prompt: int, new: int) -> None:
    tokens = Tokens.random(prompt + new, seed=new)
    pool = admit(Quest(8, 8, 0), tokens, prompt)
    one_by_one(pool, tokens, prompt, prompt + new)
    assert isinstance(pool, PageReadPool)
    for layer, store in enumerate(pool.layers):
        queries = tokens.queries[layer, :, -1].unflatten(0, (KV_HEADS, GROUP))
        bounds = store._bounds(queries.expand(4, -1, -1, -1))[store.pages.pages_of(1)]  # [pages, H_kv, G, 1]
        true = tokens.keys[layer] @ queries.transpose(1, 2)  # [H_kv, n, G]
        for token in range(prompt + new):
            assert bool((bounds[token // 8, ..., 0] >= true[:, token] - 1e-4).all())


def test_pages_of_one_token_are_the_exact_best() -> None:
    """The bound of a page with one key is its score."""
    tokens = Tokens.random(50)
    found = feed(admit(Quest(10, 1, 0), tokens, 49), {1: (tokens, 49, 50)})[1]
    for layer in range(LAYERS):
        for head in range(QUERY_HEADS):
            scores = tokens.keys[layer, head // GROUP] @ tokens.queries[layer, head, 49]
            scores[49] = torch.inf
            expected = masked(tokens, layer, head, 49, sorted(scores.topk(10).indices.tolist()))
            torch.testing.assert_close(found[layer, head, 0], expected, rtol=1e-4, atol=1e-5)


@settings(max_examples=25)
@given(st.integers(1, 90), st.integers(1, 6), st.integers(1, DIM), st.integers(0, 40), st.integers(0, 10))
def test_sparq_is_its_algorithm(prompt: int, new: int, channels: int, read: int, local: int) -> None:
    method, tokens = SparQ(channels, read, min(local, read)), Tokens.random(prompt + new, seed=prompt)
    found = one_by_one(admit(method, tokens, prompt), tokens, prompt, prompt + new)
    for step in range(new):
        for layer in range(LAYERS):
            for kv_head in range(KV_HEADS):
                expected = sparq_output(method, tokens, layer, kv_head, prompt + step)
                own = found[layer, kv_head * GROUP : (kv_head + 1) * GROUP, step]
                torch.testing.assert_close(own, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("method", [Quest(80, 8, 0), Quest(1000, 16, 2), SparQ(DIM, 70), SparQ(DIM, 1000)], ids=str)
def test_reading_everything_is_dense(method: Method) -> None:
    tokens = Tokens.random(70)
    found = one_by_one(admit(method, tokens, 60), tokens, 60, 70)
    for step in range(10):
        expected = dense(tokens, tokens.keys[:, :, : 61 + step], tokens.values[:, :, : 61 + step], 60 + step)
        torch.testing.assert_close(found[:, :, step].double(), expected, rtol=1e-4, atol=1e-5)


def test_equal_values_are_exact_whatever_sparq_reads() -> None:
    tokens = Tokens.random(70)
    tokens.values[:] = tokens.values[:, :, :1]
    found = feed(admit(SparQ(2, 3, 1), tokens, 69), {1: (tokens, 69, 70)})[1][:, :, 0]
    torch.testing.assert_close(found, tokens.values[:, :, 0].repeat_interleave(GROUP, 1), rtol=1e-4, atol=1e-5)


def test_reading_more_errs_less() -> None:
    for methods in ([Quest(read, 4, 0) for read in (12, 24, 48, 96)], [SparQ(4, k, 4) for k in (4, 16, 48, 99)]):
        errors = []
        for method in methods:
            total = 0.0
            for seed in range(20):
                tokens = Tokens.random(100, seed=seed * 7)
                found = feed(admit(method, tokens, 99), {1: (tokens, 99, 100)})[1][:, :, 0]
                total += float((found - dense(tokens, tokens.keys, tokens.values, 99)).norm())
            errors.append(total)
        assert errors == sorted(errors, reverse=True)


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_memory_is_that_of_the_full_cache_and_what_chooses(method: Method) -> None:
    tokens = Tokens.random(100)
    for prompt in (1, 3, 4, 63, 64, 65):
        pool = admit(method, tokens, prompt)
        for new in range(8):
            held = pool.memory(1)
            assert held.full_precision == LAYOUT.full_bytes(prompt + new)
            assert held.held == method.held_bytes(prompt, new, LAYOUT)  # type: ignore[attr-defined]
            feed(pool, {1: (tokens, prompt + new, prompt + new + 1)})
        pool.release(1)
        assert pool.allocated_bytes() == 0


def test_bounds_take_a_sixteenth() -> None:
    method, layout = Quest(), LAYOUT
    assert method.held_bytes(1600, 0, layout) == layout.full_bytes(1600) * 17 // 16
    for text in ("100%", "10%"):
        reason = method.impossible(Budget.parse(text).resolve(1600, 0, "prompt", layout), layout)
        assert "operating point" in str(reason)


def test_facts_say_what_was_read() -> None:
    """Quest: layer 0 reads all of 40, 41 tokens; layer 1 three pages, the newest with 4 tokens, then 1."""
    tokens = Tokens.random(50)
    quest, sparq = (admit(method, tokens, 39) for method in METHODS)
    for pool in (quest, sparq):
        assert pool.facts(1) == {}
        one_by_one(pool, tokens, 39, 41)
    assert quest.facts(1)["tokens_held"] == sparq.facts(1)["tokens_held"] == 40.5
    assert quest.facts(1)["tokens_read"] == (40 + 41 + 12 + 9) / 4
    reads, bounds = (40 + 41 + 12 + 9) * 2 * DIM, (10 + 11) * 2 * DIM
    assert quest.facts(1)["elements_read_share"] == pytest.approx((reads + bounds) / (2 * 81 * 2 * DIM), abs=1e-4)
    assert sparq.facts(1)["tokens_read"] == 11
    share = (81 * 3 + 2 * 11 * 2 * DIM) / (81 * 2 * DIM)
    assert sparq.facts(1)["elements_read_share"] == pytest.approx(share, abs=1e-4)


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_a_chunk_equals_single_tokens(method: Method) -> None:
    tokens = Tokens.random(90)
    at_once, single = admit(method, tokens, 61), admit(method, tokens, 61)
    together = feed(at_once, {1: (tokens, 61, 78)})[1]
    assert torch.equal(together, one_by_one(single, tokens, 61, 78))
    assert at_once.memory(1) == single.memory(1)
    assert at_once.facts(1) == single.facts(1)


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_rows_do_not_see_each_other(method: Method) -> None:
    streams = {row: Tokens.random(150, seed=10 * row) for row in range(4)}
    lengths = {0: 3, 1: 40, 2: 130, 3: 16}
    assert_rows_do_not_see_each_other(partial(admit, method), streams, lengths, (broken(100), 100), 10)


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_a_broken_row_ends_no_other(method: Method) -> None:
    assert_a_broken_row_ends_no_other(partial(admit, method), broken(60), 5)


def test_settings_without_meaning_are_refused() -> None:
    for build in (lambda: Quest(0), lambda: Quest(page=0), lambda: SparQ(channels=0), lambda: SparQ(tokens=4, local=5)):
        with pytest.raises(ValueError, match="at least 1"):
            build()
    unlimited = Budget.parse("unlimited").resolve(10, 1, "prompt", LAYOUT)
    assert "keys have 8" in str(SparQ().impossible(unlimited, LAYOUT))
