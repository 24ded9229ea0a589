"""Evictors that look at the output: objectives, AnDPro, OBCache; and what they share with those that look ahead.
Golden values, brute force in fp64, the limits where one method becomes another, exact totals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from output_prompts import kept_by, random_prompt, resolved, window_parts
from torch import Tensor

from kvcache.allocate import best_of_layer
from kvcache.baselines.andpro import AnDPro
from kvcache.baselines.defensivekv import DefensiveKV, LayerDefensiveKV
from kvcache.baselines.gvote import GVote
from kvcache.baselines.laq import LAQ, LAQPlusPlus
from kvcache.baselines.obcache import OBCache
from kvcache.baselines.snapkv import SnapKV
from kvcache.evict import PromptEvictor
from kvcache.method import Method
from kvcache.objectives import NEED_LOGITS, OBJECTIVES, prune_both, prune_key, prune_value, token_worth
from kvcache.select import keep_counts, protect_ends

# Objectives


GOLDEN = {
    "attention": [0.5, 0.3, 0.2],
    "value_norm": [0.5, 0.3, 0],
    "projection": [0.25, 0.09, 0],
    "prune_value": [0.25, 0.09, 0],
    "prune_key": [0.04084, 0.09654, 0.03523],
    "prune_both": [0.11755, 0.03484, 0.03523],
}


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_golden_worths(objective: Any) -> None:
    attention = torch.tensor([[[0.5, 0.3, 0.2]]], dtype=torch.float64)
    values = torch.tensor([[1, 0], [0, 1], [0, 0]], dtype=torch.float64)
    logits = attention.log() if objective in NEED_LOGITS else None
    found = token_worth(objective, attention, values, attention @ values, logits)
    torch.testing.assert_close(found[0, 0], torch.tensor(GOLDEN[objective]).double(), rtol=0, atol=5e-6)


def test_projections_on_the_output_sum_to_its_square_and_grow_with_the_square_of_the_values() -> None:
    _, attention, values, output = window_parts(random_prompt(30, 5).layers[0], 1, 5)
    worth = token_worth("projection", attention, values, output)
    torch.testing.assert_close(worth.sum(-1), output.square().sum(-1))
    torch.testing.assert_close(token_worth("projection", attention, 3 * values, 3 * output), 9 * worth)
    assert float(worth.min()) < 0, "a token may point away from the output"


def test_pruning_worths_are_what_the_output_loses() -> None:
    """The value's exactly, by zeroing it; the key's and both to first order, by the derivative of the softmax."""
    logits, _, values, _ = window_parts(random_prompt(12, 1).layers[0], 0, 1)
    logits = logits[:1, -1]

    def output_of(z: Tensor) -> Tensor:
        return torch.softmax(z, -1) @ values

    attention, output = torch.softmax(logits, -1), output_of(logits)
    slope = torch.autograd.functional.jacobian(output_of, logits)[0, :, 0]  # [d_v, n]
    for token in range(12):
        left = values.clone()
        left[token] = 0
        of_value = (attention @ left - output)[0]
        of_key = -slope[:, token] * logits[0, token]
        one = attention[None], values, output[None]
        torch.testing.assert_close(prune_value(*one[:2])[0, 0, token], of_value.square().sum())
        torch.testing.assert_close(prune_key(*one, logits[None])[0, 0, token], of_key.square().sum())
        torch.testing.assert_close(prune_both(*one, logits[None])[0, 0, token], (of_value + of_key).square().sum())


def test_what_a_query_may_not_see_is_worth_nothing_to_it() -> None:
    logits, attention, values, output = window_parts(random_prompt(20, 6).layers[0], 0, 6)
    for objective in OBJECTIVES:
        worth = token_worth(objective, attention, values, output, logits)
        assert worth[:, 0, 15:].abs().max() == 0
        assert worth[:, 5, 15:].abs().max() > 0


# AnDPro


@pytest.mark.parametrize("anchor", ["droppable", "full"])
@pytest.mark.parametrize("kernel", [1, 7])
def test_andpro_scores_equal_brute_force(anchor: Any, kernel: int) -> None:
    method, prefill = AnDPro(window=8, anchor=anchor, kernel=kernel), random_prompt(50, 8)
    found = method.scores(prefill, "0")[0]
    for head in range(2):
        _, attention, values, output = window_parts(prefill.layers[0], head, 8)
        expected = torch.zeros(50, dtype=torch.float64)
        for of_group, whole in zip(attention.flatten(0, 1), output.flatten(0, 1), strict=True):
            reach = kernel // 2
            pooled = torch.stack([of_group[max(0, i - reach) : i + reach + 1].max() for i in range(50)])
            y = pooled[4:42] @ values[4:42] if anchor == "droppable" else whole
            expected += pooled * (values @ y) / len(attention)
        torch.testing.assert_close(found[head].double(), expected, rtol=1e-4, atol=1e-5)


@given(st.integers(1, 60), st.integers(1, 5), st.integers(1, 12), st.integers(0, 40), st.integers(0, 3))
def test_andpro_fills_its_budget_with_whole_chunks(tokens: int, chunk: int, window: int, more: int, seed: int) -> None:
    method, prefill = AnDPro(window=window, chunk=chunk), random_prompt(tokens, window, layers=2, seed=seed)
    ends = min(tokens, chunk + window)
    budget = min(ends + more, tokens)
    for layer in kept_by(method, prefill, budget):
        held = sum(map(len, layer))
        assert 2 * budget - chunk < held <= 2 * budget
        for head in layer:
            assert head == sorted(set(head))
            assert {*range(min(chunk, tokens)), *range(max(tokens - window, 0), tokens)} <= set(head)
            free = [token for token in head if chunk <= token < tokens - window]
            for token in free:
                start = token // chunk * chunk
                assert set(range(start, min(start + chunk, tokens - window))) <= set(free)


def test_andpro_ranks_chunks_of_all_heads_and_breaks_ties_by_position_then_head() -> None:
    prefill, method = random_prompt(24, 4), AnDPro(window=4, chunk=4)
    flat = torch.zeros(2, 24)
    kept = method.keep(prefill, resolved(prefill, 14), [flat])[0]
    assert [head.tolist()[4:-4] for head in kept] == [[*range(4, 12)], [*range(4, 8)]]
    flat[1, 12:16] = 1
    flat[0, 9] = -5
    kept = method.keep(prefill, resolved(prefill, 14), [flat])[0]
    assert [head.tolist()[4:-4] for head in kept] == [[*range(4, 8)], [*range(4, 8), *range(12, 16)]]


def test_andpro_with_equal_values_and_single_tokens_is_adakv_without_safeguard() -> None:
    """Apart from the first token, which only AnDPro keeps."""
    prefill = random_prompt(60, 8)
    prefill.layers[0].values[:] = torch.randn(8)
    kept = kept_by(AnDPro(window=8, chunk=1, kernel=1, anchor="full"), prefill, 25)[0]
    attention = SnapKV(window=8, kernel=1).scores(prefill, "0")[0]
    counts = best_of_layer(attention[:, 1:52], 2 * 16)
    ends = protect_ends(60, 1, 8)
    assert kept == [head.tolist() for head in keep_counts(attention, [count + 9 for count in counts], ends)]


# OBCache


@pytest.mark.parametrize("saliency", ["prune_value", "prune_key", "prune_both", "value_norm", "attention"])
def test_obcache_scores_equal_brute_force(saliency: Any) -> None:
    prefill = random_prompt(40, 6)
    found = OBCache(window=6, recent=4, saliency=saliency).scores(prefill, "0")[0]
    assert found[:, 36:].abs().max() == 0
    for head in range(2):
        logits, attention, values, output = window_parts(prefill.layers[0], head, 6)
        a, z = attention[..., None], logits[..., None]
        apart = values - output[..., None, :]
        expected = {
            "prune_value": (a * values).square().sum(-1),
            "prune_key": (a * z * apart).square().sum(-1),
            "prune_both": (a * values + a * z * apart).square().sum(-1),
            "value_norm": attention * values.norm(dim=-1),
            "attention": attention,
        }[saliency].sum((0, 1))
        torch.testing.assert_close(found[head, :36].double(), expected[:36], rtol=1e-3, atol=1e-5)


def test_obcache_by_attention_is_snapkv_tova_and_h2o() -> None:
    prefill = random_prompt(60, 60)
    snapkv = kept_by(SnapKV(window=8), prefill, 20)
    assert kept_by(OBCache(window=8, recent=8, saliency="attention", kernel=7), prefill, 20) == snapkv
    layer = prefill.layers[0]
    assert layer.queries is not None
    tova = torch.softmax(layer.queries[:, -1].unflatten(0, (2, 2)) @ layer.keys.mT * layer.scale, -1).sum(1)
    (found,) = OBCache(window=1, recent=0, saliency="attention").scores(prefill, "0")
    torch.testing.assert_close(found, tova)
    (found,) = OBCache(window=60, recent=0, saliency="attention").scores(prefill, "0")
    sums = torch.stack([window_parts(layer, head, 60)[1].sum((0, 1)) for head in range(2)])
    torch.testing.assert_close(found.double(), sums, rtol=1e-4, atol=1e-5)


def test_obcache_with_unit_values_prunes_by_squared_attention() -> None:
    prefill = random_prompt(40, 6)
    values = prefill.layers[0].values
    values /= values.norm(dim=-1, keepdim=True)
    (found,) = OBCache(window=6, recent=0, saliency="prune_value").scores(prefill, "0")
    squares = torch.stack([window_parts(prefill.layers[0], head, 6)[1].square().sum((0, 1)) for head in range(2)])
    torch.testing.assert_close(found.double(), squares, rtol=1e-4, atol=1e-6)


# All of them


@pytest.mark.parametrize(
    ("method", "least"),
    [(AnDPro(), 36), (OBCache(sinks=2), 34), (DefensiveKV(), 32), (LAQ(), 32), (LAQPlusPlus(), 8), (GVote(), 1)],
    ids=lambda value: getattr(value, "name", value),
)
def test_a_budget_below_what_must_be_kept_is_impossible(method: PromptEvictor, least: int) -> None:
    prefill = random_prompt(100, 1)
    assert method.impossible(resolved(prefill, least), prefill.layout) is None
    if least > 1:
        assert f"{least} protected" in str(method.impossible(resolved(prefill, least - 1), prefill.layout))


@pytest.mark.parametrize(
    ("method", "wrong"),
    [
        (AnDPro, {"chunk": 0}),
        (AnDPro, {"kernel": 2}),
        (AnDPro, {"anchor": "mean"}),
        (OBCache, {"sinks": -1}),
        (OBCache, {"saliency": "projection"}),
        (OBCache, {"pooling": "sum"}),
        (DefensiveKV, {"kernel": 4}),
        (DefensiveKV, {"first_stage": 1.5}),
        (LayerDefensiveKV, {"bias": "none"}),
        (LAQ, {"lookahead": -1}),
        (LAQPlusPlus, {"kernel": 4}),
        (GVote, {"nucleus": 0.0}),
        (GVote, {"samples": -1}),
    ],
    ids=str,
)
def test_settings_that_mean_nothing_are_refused(method: Callable[..., Method], wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="not"):
        method(**wrong)
