"""Evictors that look at the output or ahead: AnDPro, OBCache, DefensiveKV, LAQ, GVote. Golden values, brute force in
fp64, the limits where one method becomes another, exact totals."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from itertools import chain
from typing import Any

import pytest
import torch
from dense_passes import Dense, dense_pass
from hypothesis import given
from hypothesis import strategies as st
from models import prompt_ids, tiny_gemma4, tiny_llama, tiny_phi, tiny_qwen, tiny_qwen35
from torch import Tensor

from kvcache.allocate import best_of_layer
from kvcache.baselines.adakv import AdaKV
from kvcache.baselines.andpro import AnDPro
from kvcache.baselines.defensivekv import DefensiveKV, LayerDefensiveKV
from kvcache.baselines.full import Full
from kvcache.baselines.gvote import GVote, nucleus_sizes
from kvcache.baselines.laq import LAQ, LAQPlusPlus, draft_queries
from kvcache.baselines.obcache import OBCache
from kvcache.baselines.snapkv import SnapKV
from kvcache.budget import Budget, ResolvedBudget
from kvcache.evict import PromptEvictor
from kvcache.layout import CacheLayout, LayerLayout
from kvcache.method import Method
from kvcache.objectives import NEED_LOGITS, OBJECTIVES, prune_both, prune_key, prune_value, token_worth
from kvcache.prefill import LayerPrefill, Prefill
from kvcache.select import keep_counts, protect_ends
from kvcache.window import window_attention
from lorekv.deletion import attend_futures
from lorekv.lookahead import sample_futures
from workers.fork import Fork, Prompt, PromptForks
from workers.models import LoadedModel


def random_prompt(tokens: int, window: int, layers: int = 1, heads: int = 2, group: int = 2, seed: int = 0) -> Prefill:
    """Random keys, values, window queries and projections, in fp32; it cannot be continued."""
    g = torch.Generator().manual_seed(tokens + 1000 * seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g)

    made = [
        LayerPrefill(
            random(heads, tokens, 8) * 2,
            random(heads, tokens, 8),
            random(heads * group, min(window, tokens), 8) * 2,
            None,
            random(12, heads * group, 8),
            8**-0.5,
        )
        for _ in range(layers)
    ]
    layout = CacheLayout(tuple(LayerLayout("growing", heads * group, heads, 8, 8) for _ in made), 4)
    return Prefill(made, layout, tokens, torch.zeros(3), lambda *_: (Tensor(), Tensor()), lambda _: pytest.fail("ran"))


def resolved(prefill: Prefill, budget: int | str) -> ResolvedBudget:
    text = f"{budget} tokens" if isinstance(budget, int) else budget
    return Budget.parse(text).resolve(prefill.tokens, 8, "prompt", prefill.layout)


def kept_by(method: PromptEvictor, prefill: Prefill, budget: int | str) -> list[list[list[int]]]:
    """[layers][heads] of positions."""
    with torch.inference_mode():
        (examined,) = method.examine([prefill], ["0"])
        kept = method.keep(prefill, resolved(prefill, budget), examined)
    return [[head.tolist() for head in layer] for layer in kept]


def total(kept: list[list[list[int]]]) -> int:
    return sum(len(head) for layer in kept for head in layer)


@lru_cache(maxsize=8)
def loaded(build: Callable[[], LoadedModel]) -> LoadedModel:
    return build()


def prefilled(model: LoadedModel, tokens: int = 60, method: Method | None = None, chunk: int = 64) -> Prefill:
    forks = [Fork("", one, Budget.parse("unlimited"), "0") for one in (method or GVote(), SnapKV())]
    with torch.inference_mode():
        return PromptForks(model, chunk).prefill(Prompt("", prompt_ids(tokens), [], 4, forks))


def window_parts(layer: LayerPrefill, head: int, window: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Logits and causal attention of one KV head's queries, values and outputs, by loops in fp64. [G, w, n]"""
    group = layer.queries.shape[0] // len(layer.keys)  # type: ignore[union-attr]
    keys, values = layer.keys[head].double(), layer.values[head].double()
    queries = layer.queries[head * group : (head + 1) * group, -window:].double()  # type: ignore[index]
    logits = queries @ keys.T * layer.scale
    attention = torch.zeros_like(logits)
    for place in range(queries.shape[1]):
        seen = len(keys) - queries.shape[1] + place + 1
        attention[:, place, :seen] = torch.softmax(logits[:, place, :seen], -1)
    return logits, attention, values, attention @ values


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


# DefensiveKV


def defensive_by_hand(prefill: Prefill, budget: int, window: int, kernel: int, share: float, bias: str) -> list[Any]:
    """Scores with the first stage on top, as the card words it, by loops in fp64. [layers] of [H_kv, n - w]"""
    found, prefix = [], prefill.tokens - window
    for layer in prefill.layers:
        heads, group = len(layer.keys), layer.output_projection.shape[1] // len(layer.keys)
        scores, means, own_share = [], [], []
        for head in range(heads):
            _, attention, values, _ = window_parts(layer, head, window)
            rows = attention[..., :prefix].flatten(0, 1)
            risks = []
            for row in rows:
                reach = kernel // 2
                pooled = torch.stack([row[max(0, i - reach) : i + reach + 1].sum() / kernel for i in range(prefix)])
                risks.append(pooled * row.sum() / pooled.sum())
            risk = torch.stack(risks).max(0).values
            norm = sum(
                (values[:prefix] @ layer.output_projection[:, head * group + one].double().T).abs().sum(-1) / group
                for one in range(group)
            )
            scores.append((risk.clamp(min=float(risk.mean())), norm))
            means.append(rows.mean(0))
            own_share.append(1 - float(rows.sum(1).mean()))
        if bias == "repo":
            own_share = [float(torch.stack(means)[:, -window:].sum(1).mean())] * heads
        norms = sum(norm for _, norm in scores)
        final = torch.stack([risk * norm / norms for risk, norm in scores])
        best = float(final.max())
        for head, mean in enumerate(means):
            mass, left = 0.0, mean / mean.sum()
            for token in left.argsort(descending=True)[: budget - window].tolist():
                mass += float(left[token])
                if mass >= share - own_share[head]:
                    break
                final[head, token] = best + 1e-9
        found.append(final)
    return found


@pytest.mark.parametrize("bias", ["paper", "repo"])
@pytest.mark.parametrize(("budget", "share"), [(20, 0.9), (30, 0.5), (30, 0.9)])
def test_defensivekv_keeps_what_brute_force_keeps(bias: Any, budget: int, share: float) -> None:
    settings = {"window": 6, "kernel": 5, "first_stage": share, "bias": bias}
    prefill = random_prompt(60, 6, layers=3)
    by_hand = defensive_by_hand(prefill, budget, 6, 5, share, bias)
    window = [*range(54, 60)]

    def best(rows: Tensor) -> list[list[int]]:
        places = [(head, token) for token in range(54) for head in range(len(rows))]  # ties by position, then head
        chosen = sorted(places, key=lambda place: -float(rows[place]))[: len(rows) * (budget - 6)]
        return [sorted(token for own, token in chosen if own == head) + window for head in range(len(rows))]

    assert kept_by(DefensiveKV(**settings), prefill, budget) == [best(rows) for rows in by_hand]  # type: ignore[arg-type]
    of_model = best(torch.cat(by_hand))
    found = kept_by(LayerDefensiveKV(**settings), prefill, budget)  # type: ignore[arg-type]
    assert [head for layer in found for head in layer] == of_model


def test_the_two_readings_of_the_bias_differ() -> None:
    prefill = random_prompt(60, 6)
    masses = [DefensiveKV(window=6, bias=bias)._risk(prefill.layers[0], 60).mass for bias in ("paper", "repo")]
    assert masses[0][0] != masses[0][1], "the window's own share differs from head to head"
    assert masses[1][0] == masses[1][1]


@given(st.integers(1, 60), st.integers(1, 12), st.integers(0, 40), st.integers(1, 3), st.integers(0, 3))
def test_defensive_totals_are_exact(tokens: int, window: int, more: int, layers: int, seed: int) -> None:
    prefill = random_prompt(tokens, window, layers=layers, seed=seed)
    budget = min(window + more, tokens)
    ends = set(range(max(tokens - window, 0), tokens))
    by_layer = kept_by(DefensiveKV(window=window), prefill, budget)
    of_model = kept_by(LayerDefensiveKV(window=window), prefill, budget)
    assert all(sum(map(len, layer)) == 2 * budget for layer in by_layer)
    assert total(of_model) == layers * 2 * budget
    for head in (head for layer in (*by_layer, *of_model) for head in layer):
        assert head == sorted(set(head))
        assert ends <= set(head)


def test_layers_of_different_sizes_do_not_trade_tokens() -> None:
    prefill = random_prompt(40, 6, layers=3)
    wide = prefill.layers[1]
    prefill.layers[1] = replace(
        wide, values=torch.cat([wide.values] * 2, -1), output_projection=torch.cat([wide.output_projection] * 2, -1)
    )
    counts = [sum(map(len, layer)) for layer in kept_by(LayerDefensiveKV(window=6), prefill, 15)]
    assert counts[1] == 2 * 15
    assert counts[0] + counts[2] == 2 * 2 * 15
    assert counts[0] != counts[2]


def test_layer_defensivekv_of_one_layer_is_defensivekv() -> None:
    prefill = random_prompt(60, 8)
    assert kept_by(LayerDefensiveKV(window=8), prefill, 21) == kept_by(DefensiveKV(window=8), prefill, 21)


def test_defensivekv_of_one_query_and_equal_norms_is_adakv_without_safeguard() -> None:
    """Where all that is kept lies above the heads' means: below them tokens tie."""
    prefill = random_prompt(60, 1, group=1)
    prefill.layers[0].values[:] = torch.randn(8)
    prefill.layers[0].output_projection[:, 1] = prefill.layers[0].output_projection[:, 0]
    plain = DefensiveKV(window=1, kernel=1, first_stage=0)
    adakv = kept_by(AdaKV(window=1, kernel=1, alpha=0), prefill, 3)
    assert kept_by(plain, prefill, 3) == adakv
    attention = torch.stack([window_parts(prefill.layers[0], head, 1)[1][0, 0, :59] for head in range(2)])
    kept = torch.stack([attention[head, token] for head in range(2) for token in adakv[0][head][:-1]])
    assert float(kept.min()) > float(attention.mean(1).max())
    assert len(adakv[0][0]) != len(adakv[0][1])


def test_a_defensive_score_is_no_less_than_any_querys_and_pooling_keeps_row_sums() -> None:
    prefill = random_prompt(60, 6)
    layer = prefill.layers[0]
    (scores,) = DefensiveKV(window=6).scores(prefill, "0")
    norms = layer.projected_value_norms[:, :54]
    for head in range(2):
        rows = window_parts(layer, head, 6)[1][..., :54].flatten(0, 1)
        pooled = torch.nn.functional.avg_pool1d(rows[None], 5, 1, 2)[0]
        pooled *= rows.sum(-1, keepdim=True) / pooled.sum(-1, keepdim=True)
        share = norms[head] / norms.sum(0)
        assert bool((scores[head, :54] >= (pooled * share).max(0).values * (1 - 1e-5)).all())


# LAQ


def dense_draft(model: LoadedModel, tokens: int, length: int, kept: list[list[list[int]]] | None) -> dict[int, Tensor]:
    """Queries of ``length`` greedy tokens after a prompt, by passes over everything. The first comes from the whole
    prompt."""
    ids = prompt_ids(tokens)
    for drafted in range(length + 1):
        step = Dense(tokens, kept)
        logits = dense_pass(model, ids, step)
        if drafted < length:
            ids = [*ids, int(logits[-1].argmax())]
    return {layer: queries[:, tokens:] for layer, queries in step.queries.items()}


@pytest.mark.parametrize("build", [tiny_llama, tiny_qwen], ids=["llama", "qwen"])
def test_a_draft_from_the_whole_cache_makes_the_answers_own_queries(build: Callable[[], LoadedModel]) -> None:
    model = loaded(build)
    prefill = replace(prefilled(model, 40), stop_ids=frozenset())
    with torch.inference_mode():
        found = draft_queries(prefill, 5)
    for layer, expected in dense_draft(model, 40, 5, None).items():
        torch.testing.assert_close(found[layer], expected, rtol=1e-3, atol=1e-4)


def test_laq_drafts_from_what_snapkv_keeps_and_scores_the_whole_prompt() -> None:
    """Against a dense pass that hides what SnapKV evicts from the draft, query by query."""
    model = loaded(tiny_llama)
    prefill = replace(prefilled(model, 50), stop_ids=frozenset())
    evicted = kept_by(SnapKV(window=8), prefill, 20)
    drafted = dense_draft(model, 50, 4, evicted)
    found = kept_by(LAQPlusPlus(window=8, lookahead=4, stage2_window=3, recent=5), prefill, 20)
    full = kept_by(LAQPlusPlus(window=8, lookahead=4, stage2_window=3, recent=5), prefill, 50)
    assert full == [[[*range(50)]] * 2] * 3
    for index, layer in enumerate(prefill.layers):
        for head in range(2):
            attention = window_parts(layer, head, 3)[1].sum(1)
            own = drafted[index].unflatten(0, (2, -1))[head].double()
            attention += torch.softmax(own @ layer.keys[head].double().T * layer.scale, -1).sum(1)
            pooled = torch.nn.functional.max_pool1d(attention[:, :45], 7, 1, 3).mean(0)
            ranked = sorted(range(45), key=lambda token: (-round(float(pooled[token]), 6), token))
            assert found[index][head] == [*sorted(ranked[:15]), *range(45, 50)]


def test_laq_without_a_draft_is_snapkv() -> None:
    prefill = prefilled(loaded(tiny_llama), 60)
    snapkv = kept_by(SnapKV(window=32), prefill, 40)
    assert kept_by(LAQPlusPlus(lookahead=0, stage2_window=32, recent=32), prefill, 40) == snapkv
    assert kept_by(LAQ(lookahead=0), prefill, 40) == snapkv
    silent = replace(prefill, stop_ids=frozenset(range(128)))
    assert kept_by(LAQ(), silent, 40) == snapkv
    assert kept_by(LAQ(), prefill, 40) != snapkv


def test_a_draft_ends_before_a_stop_token() -> None:
    prefill = replace(prefilled(loaded(tiny_llama), 60), stop_ids=frozenset())
    with torch.inference_mode():
        whole = draft_queries(prefill, 6)
        spoken = sample_futures([prefill], 1, 6, 1e-4, ["0"])[0].tokens[0].tolist()
        ended = draft_queries(replace(prefill, stop_ids=frozenset({spoken[3]})), 6)
    assert spoken[3] not in spoken[:3]
    assert torch.equal(ended[1], whole[1][:, :3])


def test_laq_on_the_whole_cache_is_a_greedy_future_of_lorekv() -> None:
    """Its attention, renormalised over the prompt, without pooling."""
    prefill = replace(prefilled(loaded(tiny_llama), 60), stop_ids=frozenset())
    with torch.inference_mode():
        found = LAQ(kernel=1, recent=0).scores(prefill, "0")
        greedy = sample_futures([prefill], 1, 8, 1e-4, ["0"])[0]
        for index, layer in enumerate(prefill.layers):
            queries = greedy.queries[index].unflatten(1, (2, -1))
            for head in range(2):
                own = greedy.keys[index][:, head], greedy.values[index][:, head]
                of_head = queries[:, head].transpose(0, 1)
                seen = attend_futures(of_head, layer.keys[head], layer.values[head], *own, layer.scale).probabilities
                expected = (seen / seen.sum(-1, keepdim=True)).sum(1).mean(0)
                torch.testing.assert_close(found[index][head], expected, rtol=1e-3, atol=1e-5)


def test_the_published_mask_hides_the_prompt_end_from_the_draft() -> None:
    prefill = replace(prefilled(loaded(tiny_llama), 60), stop_ids=frozenset())
    with torch.inference_mode():
        drafted = draft_queries(prefill, 8)
        published = LAQ(kernel=1, recent=0, repo_mask=True).scores(prefill, "0")[0]
        corrected = LAQ(kernel=1, recent=0).scores(prefill, "0")[0]
        masked = window_attention(drafted[0].unflatten(0, (2, -1))[0], prefill.layers[0].keys[0], 16**-0.5)
    torch.testing.assert_close(published[0], masked.sum(1).mean(0))
    assert float(published[0, -7:].sum()) < float(corrected[0, -7:].sum())


# GVote


@pytest.mark.parametrize("build", [tiny_llama, tiny_qwen, tiny_gemma4, tiny_qwen35, tiny_phi])
def test_hidden_states_are_observed_and_make_the_models_own_queries(build: Callable[[], LoadedModel]) -> None:
    """A plain pass gives the hidden states; projected at their positions they are the queries that prefill recorded."""
    model, hidden, handles = loaded(build), {}, []
    for index in model.layout.growing:
        attention = model.forward.get_decoder().layers[index].self_attn

        def see(module: Any, arguments: Any, options: Any, index: int = index) -> None:
            hidden[index] = options["hidden_states"][0]

        handles.append(attention.register_forward_pre_hook(see, with_kwargs=True))
    whole = prefilled(model, 60, chunk=64)
    for handle in handles:
        handle.remove()
    chunked = prefilled(model, 60, chunk=16)
    assert whole.project_queries is not None
    for place, index in enumerate(model.layout.growing):
        states = hidden[index].double()
        for prefill in (whole, chunked):
            moments = prefill.layers[place].hidden
            assert moments is not None
            torch.testing.assert_close(moments.mean.double(), states.mean(0), rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(moments.variance.double(), states.var(0, correction=0), rtol=1e-3, atol=1e-5)
        projected = whole.project_queries(place, hidden[index][-32:], torch.arange(28, 60))
        torch.testing.assert_close(projected, whole.layers[place].queries, rtol=1e-4, atol=1e-5)
    assert all(layer.hidden is None for layer in prefilled(model, 20, Full()).layers)


def test_gvote_keeps_everything_at_nucleus_one_and_never_less_than_the_current_query_needs() -> None:
    prefill = prefilled(loaded(tiny_llama), 60)
    assert kept_by(GVote(nucleus=1), prefill, "unlimited") == [[[*range(60)]] * 2] * 3
    alone = kept_by(GVote(samples=0), prefill, "unlimited")
    voted = kept_by(GVote(), prefill, "unlimited")
    assert total(alone) < total(voted)
    for index, layer in enumerate(prefill.layers):
        for head in range(2):
            attention = window_parts(layer, head, 1)[1][:, 0]
            sizes = nucleus_sizes(attention, 0.95).tolist()
            union = {0}
            for row, size in zip(attention, sizes, strict=True):
                best = row.sort(descending=True)
                assert float(best.values[:size].sum()) >= 0.95 > float(best.values[: size - 1].sum())
                union |= set(best.indices[:size].tolist())
            assert set(alone[index][head]) == union
            assert union <= set(voted[index][head])


def test_queries_are_drawn_from_the_prompts_gaussian_at_the_next_position() -> None:
    prefill, asked = prefilled(loaded(tiny_llama), 60), []
    spied = replace(prefill, project_queries=lambda *arguments: asked.append(arguments))
    GVote(samples=3000)._drawn(spied, spied.layers[1], 1, "0")
    ((index, hidden, positions),) = asked
    moments = prefill.layers[1].hidden
    assert moments is not None
    assert index == 1
    assert positions.unique().tolist() == [60]
    deviation = moments.variance.sqrt()
    assert float(((hidden.mean(0) - moments.mean) / deviation).abs().max()) < 5 / 3000**0.5
    assert float((hidden.std(0) / deviation - 1).abs().max()) < 0.1


def test_without_variance_all_drawn_queries_vote_alike_and_seeds_decide_the_rest() -> None:
    prefill = prefilled(loaded(tiny_llama), 60)
    method = GVote()
    first, again, other = (method.examine([prefill], [seed])[0] for seed in ("0", "0", "1"))
    assert all(torch.equal(one, two) for one, two in zip(first, again, strict=True))
    assert not all(torch.equal(one, two) for one, two in zip(first, other, strict=True))
    still = [replace(layer, hidden=replace(layer.hidden, scatter=layer.hidden.scatter * 0)) for layer in prefill.layers]
    fixed = replace(prefill, layers=still)
    few, many = (kept_by(GVote(samples=samples), fixed, "unlimited") for samples in (1, 9))
    assert few == many
    (votes,) = GVote(samples=9).examine([fixed], ["0"])
    (own,) = GVote(samples=0).examine([fixed], ["0"])
    assert all(bool(((one - mine) % 9 == 0).all()) for one, mine in zip(votes, own, strict=True))


def test_a_budget_is_gvotes_ceiling_and_its_row_tells_both_shares() -> None:
    prefill = prefilled(loaded(tiny_llama), 60)
    method = GVote(samples=2, nucleus=0.5)
    with torch.inference_mode():
        (votes,) = method.examine([prefill], ["0"])
        whole, capped = (method.compress(prefill, resolved(prefill, budget), votes) for budget in ("unlimited", 10))
    free, kept = (kept_by(method, prefill, budget) for budget in ("unlimited", 10))
    assert any(len(head) < 10 for layer in free for head in layer), "the ceiling is no target"
    assert any(len(head) > 10 for layer in free for head in layer)
    for own, mine, score in zip(chain(*free), chain(*kept), torch.cat(votes), strict=True):
        assert len(mine) == min(10, len(own))
        assert 0 in mine
        left = [float(score[token]) for token in own if token not in mine]
        assert not left or max(left) <= min(float(score[token]) for token in mine if token)
    assert whole.facts["kept_share"] == pytest.approx(total(free) / 360)
    assert capped.facts["kept_share"] == pytest.approx(total(kept) / 360)
    assert whole.facts["voted_share"] == capped.facts["voted_share"] == sum(int((v >= 1).sum()) for v in votes) / 360


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
