"""LORE-KV as a whole: where it is another method, what lookahead brings, what it leaves behind."""

from __future__ import annotations

import pytest
import torch
from lorekv_cases import WINDOW, lorekv, prefilled
from models import prompt_ids, tiny_llama
from torch import Tensor

from kvcache.baselines.full import Full
from kvcache.budget import Budget
from kvcache.select import keep_top, protect_ends
from lorekv.lookahead import sample_futures
from lorekv.scoring import Scored, score_prompt
from workers.engine import Engine
from workers.fork import Fork, Prompt
from workers.job import EngineSpec
from workers.models import LoadedModel


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return tiny_llama()


class Capture:
    """Plain attention that remembers queries and keys."""

    def __init__(self) -> None:
        self.seen: dict[int, tuple[Tensor, Tensor]] = {}

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        self.seen[layer] = queries[0], keys[0]
        group = queries.shape[1] // keys.shape[1]
        keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
        return torch.nn.functional.scaled_dot_product_attention(queries, keys, values, is_causal=True, scale=scale)


def test_one_greedy_future_scored_by_attention_alone_is_laqs_lookahead(model: LoadedModel) -> None:
    """Lookahead Q-cache: the attention that the queries of a greedy draft give to prompt tokens, from one dense pass
    over prompt and draft."""
    ids, steps = prompt_ids(60), 5
    draft: list[int] = []
    for _ in range(steps):
        with torch.inference_mode():
            logits = model.forward(input_ids=torch.tensor([ids + draft]), use_cache=False, kv_step=Capture()).logits
        draft.append(int(logits[0, -1].argmax()))
    prefill = prefilled(model)
    prefill.stop_ids = frozenset()
    capture = Capture()
    with torch.inference_mode():
        model.forward(input_ids=torch.tensor([ids + draft]), use_cache=False, kv_step=capture)
        futures = sample_futures([prefill], 1, steps, 1.0, ["0"], torch.tensor([draft]))[0]
        found = score_prompt(lorekv(objective="attention", mix=1.0, particles=1), prefill, futures).scores
    for index, (queries, keys) in capture.seen.items():
        for head in range(2):
            of_head = queries[3 * head : 3 * head + 3, 60:] @ keys[head].T * 16**-0.5
            later = torch.arange(65) > torch.arange(60, 65)[:, None]
            attention = torch.softmax(of_head.masked_fill(later, -torch.inf), -1)
            torch.testing.assert_close(found[index][head], attention[..., :60].mean((0, 1)), rtol=1e-3, atol=1e-6)


def test_the_gap_of_sampled_futures_is_centred_and_varies_as_the_varentropies_say(model: LoadedModel) -> None:
    """Over 1,000 futures: the mean sum of surprise over entropy is zero within four standard errors, its variance is
    the mean sum of varentropies."""
    prefill = prefilled(model, 30)
    prefill.stop_ids = frozenset()
    with torch.inference_mode():
        futures = sample_futures([prefill], 1000, 3, 1.0, ["0"])[0]
    sums = (-futures.log_probability - futures.entropy).sum(1)
    variance = float(futures.varentropy.sum(1).mean())
    assert abs(float(sums.mean())) < 4 * (variance / 1000) ** 0.5
    assert float(sums.var()) == pytest.approx(variance, rel=0.15)


def test_lookahead_comes_nearer_to_what_a_true_future_keeps() -> None:
    """Recall of the tokens that a future's own queries keep, over 100 prompts: window only, one future, four futures;
    the future itself recalls all."""
    model, recall = tiny_llama(num_hidden_layers=2), []
    control, method = lorekv(mix=0.0), lorekv(tokens=6)
    for first in range(0, 100, 4):
        prefills = [prefilled(model, 60, seed) for seed in range(first, first + 4)]
        seeds = [str(seed) for seed in range(first, first + 4)]
        with torch.inference_mode():
            truths = sample_futures(prefills, 1, 6, 1.0, [f"true {seed}" for seed in seeds])
            one, four = (sample_futures(prefills, count, 6, 1.0, seeds) for count in (1, 4))
            for prefill, truth, *sampled in zip(prefills, truths, one, four, strict=True):
                oracle = _kept(score_prompt(lorekv(mix=1.0), prefill, truth))
                found = [score_prompt(control, prefill), *(score_prompt(method, prefill, each) for each in sampled)]
                recall.append([_recall(_kept(each), oracle) for each in found])
                assert _recall(oracle, oracle) == 1
    without, single, several = torch.tensor(recall).mean(0).tolist()
    assert without < single < several < 1


def _kept(scored: Scored) -> Tensor:
    ends = protect_ends(60, 1, WINDOW)
    kept = [torch.zeros_like(scores, dtype=torch.bool) for scores in scored.scores]
    return (
        torch.cat(
            [
                mask.scatter(1, keep_top(scores, 20, ends), True)
                for mask, scores in zip(kept, scored.scores, strict=True)
            ]
        )
        & ~ends
    )


def _recall(found: Tensor, oracle: Tensor) -> float:
    return float((found & oracle).sum() / oracle.sum())


def test_a_budget_for_everything_gives_the_full_caches_tokens_and_no_random_number_is_drawn(
    model: LoadedModel,
) -> None:
    forks = [Fork(method.name, method, Budget.parse("unlimited"), "0") for method in (Full(), lorekv())]
    torch.manual_seed(11)
    state = torch.get_rng_state()
    found = {
        one.fork.key: one for one in Engine(model, EngineSpec(8, 64)).run([Prompt("", prompt_ids(50), [], 8, forks)])
    }
    assert found["lorekv"].tokens == found["full"].tokens
    assert torch.equal(torch.get_rng_state(), state)


def test_rows_hold_the_budget_and_say_what_was_sampled(model: LoadedModel) -> None:
    """No token of a future stays, and the next position is the prompt's length."""
    methods = {
        "plain": lorekv(),
        "control": lorekv(mix=0.0),
        "adaptive": lorekv(particles=8, stop_change=0.999),
        "uneven": lorekv(layer_budgets="global", head_exponent=1.0, key_diversity=0.2, structural=True),
    }
    forks = [Fork(label, method, Budget.parse("24 tokens"), "0") for label, method in methods.items()]
    found = {
        one.fork.key: one for one in Engine(model, EngineSpec(8, 64)).run([Prompt("", prompt_ids(50), [], 6, forks)])
    }
    for generation in found.values():
        assert generation.error == ""
        assert generation.at_prefill.held == model.layout.full_bytes(24)
        assert generation.held_tokens == 50 + len(generation.tokens) - 1
    facts = {label: one.method_facts for label, one in found.items()}
    assert facts["control"] == {}
    assert facts["plain"]["particles"] == facts["adaptive"]["particles"] == 4
    assert 1 <= facts["plain"]["effective_particles"] <= 4
    assert len(facts["plain"]["future_tokens"]) == 4
    assert all(0 <= length <= 16 for length in facts["plain"]["future_tokens"])
