"""Evictors that score with attention, keys or chance: golden values, brute force, and where one becomes another."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise
from typing import Any

import pytest
import torch
from attention_prompts import DIM, SCALE, kept, prompt, tables
from hypothesis import given, settings
from hypothesis import strategies as st
from models import prompt_ids, tiny_gemma, tiny_llama, tiny_qwen
from torch import Tensor

from kvcache.allocate import best_of_layer, blend, head_budgets, layers_of_one_size, pyramid
from kvcache.baselines.adakv import AdaKV
from kvcache.baselines.criticalkv import CriticalAdaKV, CriticalKV
from kvcache.baselines.expected_attention import ExpectedAttention
from kvcache.baselines.h2o import H2O
from kvcache.baselines.key_norm import KeyNorm
from kvcache.baselines.pyramidkv import PyramidKV
from kvcache.baselines.random_tokens import RandomTokens
from kvcache.baselines.scissorhands import Scissorhands, times_below_uniform
from kvcache.baselines.snapkv import SnapKV
from kvcache.budget import Budget
from kvcache.evict import PromptEvictor
from kvcache.layout import CacheLayout, LayerLayout
from kvcache.moments import QueryMoments
from kvcache.prefill import LayerPrefill, Prefill
from kvcache.projection import TOKENS_PER_PRODUCT, projected_norms
from kvcache.rotary import rotate
from kvcache.window import window_attention
from workers.fork import Fork, Prompt, PromptForks
from workers.models import LoadedModel

METHODS: tuple[PromptEvictor, ...] = (
    RandomTokens(sinks=2, recent=3),
    KeyNorm(sinks=2, recent=3),
    H2O(),
    H2O(heavy_share=0.0),
    Scissorhands(history=20, recent=5),
    PyramidKV(window=5, beta=3),
    AdaKV(window=5),
    AdaKV(window=5, alpha=0.0),
    AdaKV(window=5, safeguard="force"),
    CriticalKV(window=5),
    CriticalAdaKV(window=5),
    ExpectedAttention(),
)


def name_of(method: object) -> str:
    return str(method)


# -- all of them -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS, ids=name_of)
def test_scores_are_fp32_per_kv_head_whatever_the_cache_is_in(method: PromptEvictor) -> None:
    prefill = prompt(30)
    for layer in prefill.layers:
        layer.keys, layer.values = layer.keys.bfloat16(), layer.values.bfloat16()
        layer.queries = layer.queries.bfloat16() if layer.queries is not None else None
    for scores in method.scores(prefill, "0"):
        assert scores.dtype == torch.float32
        assert scores.shape == (2, 30)
        assert scores.isfinite().all()


@pytest.mark.parametrize("method", [one for one in METHODS if not one.stochastic], ids=name_of)
def test_heads_may_change_places(method: PromptEvictor) -> None:
    """KV heads, with the query heads of their groups: what is kept changes places with them."""
    prefill = prompt(40)
    before = kept(method, prefill, 12)
    for index, layer in enumerate(prefill.layers):
        assert layer.queries is not None
        assert layer.column_sums is not None
        groups = torch.tensor([2, 3, 0, 1])
        (sinks, moments), *_ = layer.query_moments.items()
        moments = replace(moments, mean=moments.mean[groups], scatter=moments.scatter[groups])
        swapped = layer.keys.flip(0), layer.values.flip(0), layer.queries[groups], layer.column_sums[groups]
        prefill.layers[index] = LayerPrefill(*swapped, layer.output_projection[:, groups], SCALE, {sinks: moments})
    assert kept(method, prefill, 12) == [list(reversed(layer)) for layer in before]


@pytest.mark.parametrize(
    ("method", "wrong"),
    [
        (RandomTokens, {"sinks": -1}),
        (KeyNorm, {"recent": -1}),
        (H2O, {"heavy_share": 1.0}),
        (Scissorhands, {"history": 0}),
        (PyramidKV, {"beta": 0}),
        (PyramidKV, {"kernel": 2}),
        (AdaKV, {"alpha": 1.5}),
        (AdaKV, {"safeguard": "floor"}),
        (CriticalKV, {"first_stage": -0.1}),
        (CriticalAdaKV, {"epsilon": -1}),
        (CriticalAdaKV, {"alpha": -1}),
        (ExpectedAttention, {"future": 0}),
        (ExpectedAttention, {"epsilon": -1}),
    ],
    ids=str,
)
def test_settings_that_mean_nothing_are_refused(method: type, wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        method(**wrong)


# -- random tokens, key norm -----------------------------------------------------------------------------------------


def test_random_tokens_depend_on_seed_layer_and_head_alone() -> None:
    method, prefill = RandomTokens(), prompt(60)
    found = kept(method, prefill, 20)
    assert found == kept(method, prompt(60, seed=5), 20)
    orders = [tuple(head) for layer in found for head in layer]
    others = [tuple(head) for layer in kept(method, prefill, 20, seed="1") for head in layer]
    assert len({*orders, *others}) == len(orders) + len(others)
    assert method.stochastic


def test_more_random_tokens_are_the_same_and_others() -> None:
    few, more = kept(RandomTokens(), prompt(60), 20), kept(RandomTokens(), prompt(60), 35)
    for layer, larger in zip(few, more, strict=True):
        assert all(set(one) < set(other) for one, other in zip(layer, larger, strict=True))


def test_every_token_is_as_likely_as_any_other() -> None:
    scores = torch.stack(
        [torch.stack(RandomTokens().scores(prompt(10, layers=1), str(seed)))[0] for seed in range(200)]
    )
    chosen = (scores.flatten(0, 1) >= 5).float().mean(0)
    torch.testing.assert_close(chosen, torch.full((10,), 0.5), rtol=0, atol=4 * 0.5 / 400**0.5)


def test_key_norm_keeps_the_smallest_keys_whatever_their_rotation() -> None:
    prefill = prompt(40)
    found = kept(KeyNorm(), prefill, 10)
    for layer, heads in zip(prefill.layers, found, strict=True):
        for keys, head in zip(layer.keys, heads, strict=True):
            order = sorted(range(40), key=lambda position, keys=keys: float(keys[position].double().square().sum()))
            assert head == sorted(order[:10])
    for index, layer in enumerate(prefill.layers):
        layer.keys = rotate(layer.keys, *tables(index, torch.arange(40)))
        layer.queries = None
    assert kept(KeyNorm(), prefill, 10) == found


# -- H2O, Scissorhands -----------------------------------------------------------------------------------------------


def test_h2o_by_hand() -> None:
    """Equal keys: token i gets 1 / (i + 1) + ... + 1 / n."""
    prefill = prompt(3, layers=1)
    prefill.layers[0].column_sums = torch.tensor([[11 / 6, 5 / 6, 2 / 6]]).expand(4, -1)
    (scores,) = H2O().scores(prefill, "0")
    torch.testing.assert_close(scores, torch.tensor([[11 / 6, 5 / 6, 2 / 6]]).expand(2, -1))
    assert kept(H2O(), prefill, 2) == [[[0, 2]] * 2]


@given(st.integers(1, 90))
@settings(max_examples=10)
def test_h2o_shares_out_one_for_every_query(tokens: int) -> None:
    for scores in H2O().scores(prompt(tokens), "0"):
        torch.testing.assert_close(scores.sum(-1), torch.full((2,), float(tokens)))


def test_h2o_splits_its_budget_and_the_odd_token_is_recent() -> None:
    prefill = prompt(50, layers=1)
    (scores,) = H2O().scores(prefill, "0")
    for head, own in zip(kept(H2O(), prefill, 11)[0], scores.tolist(), strict=True):
        best = sorted(range(44), key=lambda position, own=own: (-own[position], position))[:5]
        assert head == sorted(best) + list(range(44, 50))
    assert [H2O(heavy_share=0.1).recent(count) for count in (9, 10, 100)] == [9, 9, 90]
    assert H2O(heavy_share=0.29).recent(100) == 71, "an exact share: 0.29 * 100 is below 29 in floating point"


def test_a_window_over_the_whole_prompt_without_pooling_is_h2o() -> None:
    """SnapKV with w = n and kernel 1, but for the window that it protects."""
    prefill = prompt(60)
    for layer, scores in zip(prefill.layers, H2O().scores(prefill, "0"), strict=True):
        assert layer.queries is not None
        for keys, queries, own in zip(layer.keys, layer.queries.unflatten(0, (2, 2)), scores, strict=True):
            torch.testing.assert_close(window_attention(queries, keys, SCALE).sum(1).mean(0), own)


def test_scissorhands_counts_like_brute_force() -> None:
    """In fp64, query by query; 100 queries are several blocks, and the first of them do not see all tokens."""
    tokens, history = 130, 100
    prefill = prompt(tokens)
    for layer, scores in zip(prefill.layers, Scissorhands(history=history).scores(prefill, "0"), strict=True):
        expected = torch.zeros(2, tokens)
        assert layer.queries is not None
        for query_head, queries in enumerate(layer.queries.double()):
            keys = layer.keys[query_head // 2].double()
            for position in range(tokens - history, tokens):
                attention = torch.softmax(keys[: position + 1] @ queries[position] * SCALE, -1)
                expected[query_head // 2, : position + 1] -= (attention < 1 / (position + 1)).float()
        assert torch.equal(scores, expected)


def test_equal_attention_is_not_below_its_share_and_ties_go_to_earlier_tokens() -> None:
    prefill = prompt(40)
    for layer in prefill.layers:
        layer.keys = torch.ones_like(layer.keys)
    assert all(not scores.any() for scores in Scissorhands(history=40).scores(prefill, "0"))
    assert kept(Scissorhands(history=40, recent=3), prefill, 10) == [[[0, 1, 2, 3, 4, 5, 6, 37, 38, 39]] * 2] * 3


@given(st.integers(0, 29))
@settings(max_examples=10)
def test_the_one_token_that_all_attend_to_survives(token: int) -> None:
    keys, queries = torch.zeros(40, DIM), torch.ones(2, 10, DIM)
    keys[token] = 50
    counts = times_below_uniform(queries, keys, 1.0)
    assert int(counts[token]) == 0
    assert counts[:30].tolist() == [0 if place == token else 20 for place in range(30)]
    assert counts[30:].tolist() == [2 * (10 - place) for place in range(10)], "only queries that see a token count"


@given(st.integers(0, 99))
@settings(max_examples=10)
def test_every_query_finds_something_important(seed: int) -> None:
    layer = prompt(50, layers=1, seed=seed).layers[0]
    assert layer.queries is not None
    for query in range(50):
        counts = times_below_uniform(layer.queries[:1, query : query + 1], layer.keys[0, : query + 1], SCALE)
        assert int(counts.sum()) <= query


# -- PyramidKV -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("budget", "first", "rounded_last", "rounded_total"),
    [(128, 234, 17, 4016), (256, 484, 19, 8048), (512, 983, 53, 16576), (1024, 1982, 60, 32672)],
)
def test_golden_pyramids(budget: int, first: int, rounded_last: int, rounded_total: int) -> None:
    """32 layers, 8000 tokens, a window of 8, β = 20: the ends are the authors', whose rounded steps add up to more."""
    mean = budget - 8
    line = pyramid(32, mean, 20, 7992)
    assert (line[0], line[-1], sum(line)) == (first, mean // 20, 32 * mean)
    rounded = [line[0] - layer * ((line[0] - line[-1]) // 31) for layer in range(32)]
    assert (rounded[-1], sum(rounded)) == (rounded_last, rounded_total)


def test_golden_pyramid_with_exact_steps() -> None:
    line = pyramid(32, 1600, 20, 8000)
    assert (line[0], line[-1], sum(line)) == (3120, 80, 51200)


@given(st.integers(1, 40), st.integers(0, 300), st.integers(1, 30), st.integers(0, 400))
def test_a_pyramid_is_exact_falls_and_fits(layers: int, mean: int, beta: int, room: int) -> None:
    line = pyramid(layers, mean, beta, mean + room)
    assert sum(line) == layers * mean
    assert all(above >= below for above, below in pairwise(line))
    assert all(0 <= own <= mean + room for own in line)
    exact = [line[0] - place * Fraction(line[0] - line[-1], max(layers - 1, 1)) for place in range(layers)]
    assert all(abs(own - on_line) < 2 for own, on_line in zip(line, exact, strict=True))


def test_a_flat_pyramid_and_one_for_a_short_prompt_are_snapkv() -> None:
    assert kept(PyramidKV(window=5, beta=1), prompt(60), 20) == kept(SnapKV(window=5), prompt(60), 20)
    assert kept(PyramidKV(window=5), prompt(29), 20) == kept(SnapKV(window=5), prompt(29), 20)
    assert kept(PyramidKV(window=5), prompt(30), 20) != kept(SnapKV(window=5), prompt(30), 20)


def test_deeper_layers_keep_less_of_what_snapkv_ranks() -> None:
    found = kept(PyramidKV(window=5), prompt(60), 20)
    assert [len(layer[0]) for layer in found] == [5 + 30, 5 + 15, 5 + 0]
    for layer, count in enumerate((35, 20, 5)):
        assert found[layer] == kept(SnapKV(window=5), prompt(60), count)[layer]


def test_layers_of_different_sizes_give_each_other_nothing() -> None:
    small, large = LayerLayout("growing", 4, 2, 8, 8), LayerLayout("growing", 4, 4, 8, 8)
    layout = CacheLayout((small, LayerLayout("sliding", 4, 2, 8, 8, 16), large, small, large), 4)
    assert layers_of_one_size(layout) == [[0, 2], [1, 3]]
    prefill = prompt(60, layers=4)
    prefill.layout = layout
    resolved = Budget.parse("20 tokens").resolve(60, 8, "prompt", layout)
    budgets = PyramidKV(window=5, beta=3).layer_budgets(prefill, resolved)
    assert budgets == [5 + 25, 5 + 25, 5 + 5, 5 + 5]
    sizes = [layout.layers[index].token_bytes(4) for index in layout.growing]
    assert sum(own * size for own, size in zip(budgets, sizes, strict=True)) == resolved.total_bytes


# -- AdaKV -----------------------------------------------------------------------------------------------------------

GOLDEN = torch.tensor([[0.9, 0.8, 0.7, 0.1], [0.3, 0.2, 0.1, 0.05]])


@pytest.mark.parametrize(
    ("alpha", "safeguard", "expected"),
    [(0, "blend", [3, 1]), (0.5, "blend", [2, 2]), (0.5, "force", [3, 1]), (1, "blend", [2, 2]), (1, "force", [2, 2])],
)
def test_golden_head_budgets(alpha: float, safeguard: Any, expected: list[int]) -> None:
    assert head_budgets(GOLDEN, 2, 0, alpha, safeguard) == expected


def test_the_best_of_a_layer_tie_by_position_then_head() -> None:
    assert best_of_layer(torch.ones(3, 4), 5) == [2, 2, 1]
    assert best_of_layer(torch.tensor([[0.0, 2, 2], [2, 0, 0]]), 2) == [1, 1]


def test_blends_restore_the_total_one_token_at_a_time() -> None:
    assert blend([5, 3, 1], 3, Fraction(1, 4)) == [4, 3, 2], "4.5, 3 and 1.5: halves to even keep the total"
    assert blend([0, 0, 3], 1, Fraction(1, 2)) == [1, 0, 2], "0.5, 0.5 and 2: one is missing, the lower head gets it"
    assert blend([1, 1, 4], 2, Fraction(1, 2)) == [2, 1, 3], "1.5, 1.5 and 3: one is too many, the higher head gives it"


@given(st.lists(st.integers(0, 60), min_size=1, max_size=8), st.sampled_from((0.0, 0.1, 0.2, 0.25, 0.5, 0.75, 1.0)))
def test_blends_are_exact_and_close(counts: list[int], alpha: float) -> None:
    each, spare = divmod(sum(counts), len(counts))
    counts[counts.index(max(counts))] -= spare
    share = Fraction(str(alpha))
    found = blend(counts, each, share)
    assert sum(found) == len(counts) * each
    for own, count in zip(found, counts, strict=True):
        exact = (1 - share) * count + share * each
        assert abs(own - exact) <= 1
        assert min(count, each) <= own <= max(count, each)


@given(st.integers(0, 99), st.integers(5, 40), st.sampled_from(("blend", "force")))
@settings(max_examples=15)
def test_full_safeguard_and_single_heads_are_snapkv(seed: int, budget: int, safeguard: Any) -> None:
    prefill = prompt(50, seed=seed)
    snapkv = kept(SnapKV(window=5), prefill, budget)
    assert kept(AdaKV(window=5, alpha=1.0, safeguard=safeguard), prefill, budget) == snapkv
    alone = prompt(50, kv_heads=1, seed=seed)
    for alpha in (0.0, 0.2):
        method = AdaKV(window=5, alpha=alpha, safeguard=safeguard)
        assert kept(method, alone, budget) == kept(SnapKV(window=5), alone, budget)


@given(st.integers(0, 99), st.integers(5, 40))
@settings(max_examples=15)
def test_without_safeguard_a_layer_keeps_the_most_attention_it_can(seed: int, budget: int) -> None:
    prefill = prompt(50, seed=seed)
    method, scores = AdaKV(window=5, alpha=0.0), AdaKV(window=5).scores(prefill, "0")
    adaptive, uniform = kept(method, prefill, budget), kept(SnapKV(window=5), prefill, budget)
    for layer, own in enumerate(scores):
        best = own[:, :45].flatten().sort(descending=True).values[: 2 * (budget - 5)].sum()
        torch.testing.assert_close(mass(own, adaptive[layer]), best)
        assert mass(own, adaptive[layer]) >= mass(own, uniform[layer]) - 1e-5


def mass(scores: Tensor, heads: list[list[int]]) -> Tensor:
    return torch.stack([own[places].sum() for own, places in zip(scores, heads, strict=True)]).sum()


@given(st.integers(0, 99), st.integers(5, 40), st.sampled_from((0.2, 0.5, 0.8)))
@settings(max_examples=15)
def test_forced_heads_keep_their_own_best(seed: int, budget: int, alpha: float) -> None:
    prefill = prompt(50, seed=seed)
    found = kept(AdaKV(window=5, alpha=alpha, safeguard="force"), prefill, budget)
    for layer, own in zip(found, kept(SnapKV(window=5), prefill, max(int(alpha * budget), 5)), strict=True):
        assert all(set(forced) <= set(head) for forced, head in zip(own, layer, strict=True))


# -- CriticalKV ------------------------------------------------------------------------------------------------------


def test_projected_norms_equal_brute_force() -> None:
    tokens = TOKENS_PER_PRODUCT + 7
    values, projection = torch.randn(2, tokens, DIM, dtype=torch.float64), torch.randn(20, 4, DIM, dtype=torch.float64)
    found = projected_norms(values, projection)
    for head in range(2):
        norms = [(values[head] @ projection[:, query_head].T).abs().sum(-1) for query_head in (2 * head, 2 * head + 1)]
        torch.testing.assert_close(found[head], sum(norms) / 2, rtol=1e-12, atol=1e-12)
    rounded, weights = values.bfloat16(), projection.bfloat16()
    in_fp32 = projected_norms(rounded, weights)
    assert in_fp32.dtype == torch.float32
    exact = projected_norms(rounded.double(), weights.double())
    torch.testing.assert_close(in_fp32.double(), exact, rtol=2e-6, atol=0, msg="only the order of sums may differ")
    setting = torch.backends.mkldnn.matmul.fp32_precision  # type: ignore[attr-defined]
    assert setting not in ("bf16", "tf32"), "products of fp32 numbers stay as they were"


@pytest.mark.parametrize("ada", [False, True], ids=["uniform", "adaptive"])
@pytest.mark.parametrize("first_stage", [0.0, 0.29, 0.5])
def test_two_stages_equal_brute_force(first_stage: float, ada: bool) -> None:
    """In fp64, head by head: the best by attention, then by attention times norm, the window besides."""
    prefill = prompt(60)
    method = (CriticalAdaKV if ada else CriticalKV)(window=5, first_stage=first_stage, epsilon=0.01)
    found = kept(method, prefill, 25)
    budgets = kept(AdaKV(window=5) if ada else SnapKV(window=5), prefill, 25)
    for index, (layer, scores) in enumerate(zip(prefill.layers, method.scores(prefill, "0"), strict=True)):
        norms = projected_norms(layer.values.double(), layer.output_projection)
        for head in range(2):
            attention = (scores[head].double() / 5).tolist()
            worth = [(own + 0.01) * norm for own, norm in zip(attention, norms[head].tolist(), strict=True)]
            count = len(budgets[index][head]) - 5
            by_attention = sorted(range(55), key=lambda place, own=attention: (-own[place], place))
            first = by_attention[: int(Fraction(str(first_stage)) * count)]
            rest = sorted(set(range(55)) - set(first), key=lambda place, own=worth: (-own[place], place))
            assert found[index][head] == sorted(first + rest[: count - len(first)]) + list(range(55, 60))


@given(st.integers(0, 99), st.integers(5, 40))
@settings(max_examples=15)
def test_limits_of_two_stages(seed: int, budget: int) -> None:
    prefill = prompt(50, seed=seed)
    snapkv = kept(SnapKV(window=5), prefill, budget)
    assert kept(CriticalKV(window=5, first_stage=1.0), prefill, budget) == snapkv
    assert kept(CriticalAdaKV(window=5, first_stage=1.0), prefill, budget) == kept(AdaKV(window=5), prefill, budget)
    critical = kept(CriticalKV(window=5), prefill, budget)
    assert kept(CriticalAdaKV(window=5, alpha=1.0), prefill, budget) == critical
    largest = kept(CriticalKV(window=5, first_stage=0.0, epsilon=1e9), prefill, budget)
    for layer, heads in zip(prefill.layers, largest, strict=True):
        for norms, head in zip(layer.projected_value_norms, heads, strict=True):
            assert head[:-5] == norms[:45].topk(budget - 5).indices.sort().values.tolist()


def test_values_of_one_length_leave_snapkvs_choice() -> None:
    prefill = prompt(50)
    for layer in prefill.layers:
        layer.values = torch.ones_like(layer.values)
    for first_stage in (0.0, 0.5):
        method = CriticalKV(window=5, first_stage=first_stage, kernel=1, epsilon=0.0)
        assert kept(method, prefill, 20) == kept(SnapKV(window=5, kernel=1), prefill, 20)


def test_a_ranking_without_a_budget_is_the_second_stages() -> None:
    prefill = prompt(50)
    method = CriticalKV(window=5)
    ((first, *_),) = method.utilities([prefill], ["0"])
    expected = (method.scores(prefill, "0")[0] / 5 + 1e-4) * prefill.layers[0].projected_value_norms
    torch.testing.assert_close(first, expected)


# -- Expected Attention ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("covariance", [True, False])
@pytest.mark.parametrize("value_norm", [True, False])
def test_expected_attention_equals_brute_force(covariance: bool, value_norm: bool) -> None:
    """In fp64, with the mean of explicit rotation matrices."""
    prefill = prompt(40)
    method = ExpectedAttention(future=9, covariance=covariance, value_norm=value_norm, epsilon=0.01)
    for index, (layer, scores) in enumerate(zip(prefill.layers, method.scores(prefill, "0"), strict=True)):
        rotation = mean_rotation(index, torch.arange(40, 49))
        moments = layer.query_moments[4]
        for head, keys in enumerate(layer.keys[:, 4:].double()):
            softmaxes = []
            for query_head in (2 * head, 2 * head + 1):
                mean = rotation @ moments.mean[query_head].double()
                spread = rotation @ moments.covariance[query_head].double() @ rotation.T
                logits = keys @ mean / DIM**0.5
                if covariance:
                    logits = logits + torch.einsum("nd,de,ne->n", keys, spread, keys) / (2 * DIM)
                softmaxes.append(torch.softmax(logits, 0))
            expected = sum(softmaxes) / 2
            if value_norm:
                expected = (expected + 0.01) * layer.values[head, 4:].double().norm(dim=-1)
            torch.testing.assert_close(scores[head, 4:].double(), expected, rtol=1e-4, atol=1e-7)
        assert not scores[:, :4].any()


def mean_rotation(layer: int, positions: Tensor) -> Tensor:
    """[d, d] fp64"""
    basis = torch.eye(DIM, dtype=torch.float64)
    matrices = []
    for cos, sin in zip(*tables(layer, positions), strict=True):
        matrices.append(rotate(basis, cos.double(), sin.double()).T)
    return torch.stack(matrices).mean(0)


def test_queries_all_alike_are_expected_as_they_are() -> None:
    """No covariance and one future position: the softmax of that query, rotated to it."""
    prefill, query = prompt(40), torch.randn(DIM, generator=torch.Generator().manual_seed(1))
    method = ExpectedAttention(future=1, value_norm=False)
    for layer in prefill.layers:
        moments = QueryMoments.empty(4, DIM, query.device)
        moments.add(query.expand(4, 36, DIM))
        assert moments.covariance.abs().max() < 1e-10
        layer.query_moments[4] = moments
    for index, (layer, scores) in enumerate(zip(prefill.layers, method.scores(prefill, "0"), strict=True)):
        rotated = rotate(query, *(table[0] for table in tables(index, torch.tensor([40]))))
        torch.testing.assert_close(scores[:, 4:], torch.softmax(layer.keys[:, 4:] @ rotated * SCALE, -1))


def test_the_formula_is_the_mean_over_gaussian_queries() -> None:
    """Monte Carlo: draw future queries at one position, average exp(k q / sqrt(d)), normalise over keys."""
    prefill = prompt(20, layers=1, kv_heads=4)
    layer, generator = prefill.layers[0], torch.Generator().manual_seed(2)
    moments = layer.query_moments[4]
    moments.scatter = moments.scatter / 20  # a wide Gaussian's exponential has no steady mean
    (scores,) = ExpectedAttention(future=1, value_norm=False).scores(prefill, "0")
    cos, sin = (table[0] for table in tables(0, torch.tensor([20])))
    for head in range(4):
        noise = torch.randn(200_000, DIM, generator=generator)
        queries = moments.mean[head] + noise @ torch.linalg.cholesky(moments.covariance[head]).T
        weights = (rotate(queries, cos, sin) @ layer.keys[head, 4:].T * SCALE).exp()
        mean, error = weights.mean(0), weights.std(0) / len(weights) ** 0.5
        assert bool(((scores[head, 4:] * mean.sum() - mean).abs() < 5 * error + 1e-3 * mean).all())


def test_sinks_stay_and_the_last_tokens_may_go() -> None:
    found = kept(ExpectedAttention(), prompt(60), 10)
    assert all(head[:4] == [0, 1, 2, 3] for layer in found for head in layer)
    assert any(head[-1] != 59 for layer in found for head in layer)
    assert kept(ExpectedAttention(), prompt(3), 8) == [[[0, 1, 2]] * 2] * 3


@given(st.lists(st.integers(0, 9), min_size=1, max_size=6), st.integers(0, 9))
@settings(max_examples=15)
def test_moments_do_not_depend_on_chunks(chunks: list[int], seed: int) -> None:
    queries = 3 + torch.randn(2, sum(chunks), DIM, generator=torch.Generator().manual_seed(seed))
    moments, start = QueryMoments.empty(2, DIM, queries.device), 0
    for chunk in chunks:
        moments.add(queries[:, start : start + chunk])
        start += chunk
    assert moments.count == start
    if start:
        exact = queries.double()
        torch.testing.assert_close(moments.mean.double(), exact.mean(1), rtol=1e-5, atol=1e-5)
        centred = exact - exact.mean(1, keepdim=True)
        torch.testing.assert_close(
            moments.covariance.double(), centred.transpose(1, 2) @ centred / start, rtol=1e-4, atol=1e-5
        )


@pytest.mark.parametrize("length", [1.0, 1.3], ids=["plain", "scaled"])
def test_moments_of_rotated_queries_are_those_of_the_plain_ones(length: float) -> None:
    """Scaled tables, as YaRN's, lengthen what they rotate."""
    plain = 3 + torch.randn(2, 40, DIM, generator=torch.Generator().manual_seed(0))
    cos, sin = (length * table for table in tables(0, torch.arange(40)))
    expected, found = (QueryMoments.empty(2, DIM, plain.device) for _ in range(2))
    rotated = rotate(plain, cos, sin)
    expected.add(plain)
    for chunk in (slice(0, 7), slice(7, 7), slice(7, 40)):
        found.add_rotated(rotated[:, chunk], cos[chunk], sin[chunk])
    assert torch.equal(rotated, rotate(plain, cos, sin)), "queries belong to the model"
    torch.testing.assert_close(found.mean, expected.mean)
    torch.testing.assert_close(found.covariance, expected.covariance, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("build", [tiny_llama, tiny_qwen, tiny_gemma], ids=["llama", "qwen", "gemma"])
def test_prefill_records_moments_of_the_models_own_queries(build: Callable[[], LoadedModel]) -> None:
    """Biases and norms included, before rotation; whatever the chunks; nothing else changes."""
    model = build()
    projected: dict[int, Tensor] = {}
    for index in model.layout.growing:
        attention = model.forward.get_decoder().layers[index].self_attn
        last = attention.q_norm if hasattr(attention, "q_norm") else attention.q_proj
        last.register_forward_hook(lambda _, __, output, index=index: projected.__setitem__(index, output))
    whole, chunked, plain = (
        prefilled(model, chunk, observed) for chunk, observed in ((64, True), (7, True), (64, False))
    )
    for place, index in enumerate(model.layout.growing):
        queries = projected[index][0]
        if queries.ndim == 2:  # of a projection, not yet by head
            queries = queries.unflatten(-1, (6, -1)).transpose(0, 1)
        for skipped in (0, 9):
            expected = QueryMoments.empty(6, queries.shape[-1], queries.device)
            expected.add(queries[:, skipped:])
            for found in (whole, chunked):
                moments = found.layers[place].query_moments[skipped]
                assert moments.count == 60 - skipped
                torch.testing.assert_close(moments.mean, expected.mean, rtol=1e-4, atol=1e-4)
                torch.testing.assert_close(moments.covariance, expected.covariance, rtol=1e-3, atol=1e-4)
        assert torch.equal(whole.layers[place].keys, plain.layers[place].keys)
        assert not plain.layers[place].query_moments
    assert torch.equal(whole.logits, plain.logits)


def prefilled(model: LoadedModel, chunk: int, observed: bool) -> Prefill:
    methods = [ExpectedAttention(sinks=0), ExpectedAttention(sinks=9)] if observed else [KeyNorm()]
    forks = [Fork(method, method, Budget.parse("50%"), "0") for method in methods]
    with torch.inference_mode():
        return PromptForks(model, chunk).prefill(Prompt("", prompt_ids(60), [], 4, forks))
