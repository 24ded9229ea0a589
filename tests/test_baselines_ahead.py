"""Evictors that look ahead: LAQ drafts an answer, GVote draws likely queries."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import chain
from typing import Any

import pytest
import torch
from dense_passes import Dense, dense_pass
from models import prompt_ids, tiny_gemma4, tiny_llama, tiny_phi, tiny_qwen, tiny_qwen35
from output_prompts import kept_by, loaded, prefilled, resolved, total, window_parts
from torch import Tensor

from kvcache.baselines.full import Full
from kvcache.baselines.gvote import GVote, nucleus_sizes
from kvcache.baselines.laq import LAQ, LAQPlusPlus, draft_queries
from kvcache.baselines.snapkv import SnapKV
from kvcache.window import window_attention
from lorekv.deletion import attend_futures
from lorekv.lookahead import sample_futures
from workers.models import LoadedModel

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
