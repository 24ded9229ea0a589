"""LORE-KV: the closed-form cost against real deletion, the lookahead against an ordinary forward pass."""

from __future__ import annotations

import pytest
import torch
from lorekv_cases import prefilled, same
from models import prompt_ids, tiny_llama, tiny_qwen
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvcache.budget import Budget
from lorekv.deletion import Attended, attend_futures, deletion_cost, projection_grams
from lorekv.lookahead import _inverse_cdf, _surprise, sample_futures
from lorekv.method import LoreKV
from lorekv.reliability import effective_particles, particle_weights
from lorekv.scoring import future_cost
from workers.engine import Engine
from workers.fork import Fork, Prompt
from workers.job import EngineSpec
from workers.models import LoadedModel


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return tiny_llama()


def test_cost_equals_real_deletion() -> None:
    """Delete every token in turn, renormalise, recompute the head's output and project it: in fp64, to 1e-10."""
    group, count, tokens, dim, hidden = 3, 5, 12, 6, 20
    g = torch.Generator().manual_seed(0)
    queries, keys = (
        torch.randn(*dims, generator=g, dtype=torch.float64) for dims in ((group, count, dim), (tokens, dim))
    )
    values = torch.randn(tokens, dim, generator=g, dtype=torch.float64)
    projection = torch.randn(hidden, group, dim, generator=g, dtype=torch.float64)
    scores = queries @ keys.T * dim**-0.5
    probabilities = torch.softmax(scores, -1)
    gram = (projection.permute(1, 2, 0) @ projection.permute(1, 0, 2)).contiguous()
    found = deletion_cost(Attended(probabilities, probabilities @ values), values, gram)
    for deleted in range(tokens):
        left = torch.softmax(scores.index_fill(-1, torch.tensor([deleted]), -torch.inf), -1)
        change = torch.einsum("gqd,hgd->gqh", left @ values - probabilities @ values, projection)
        torch.testing.assert_close(found[..., deleted], change.norm(dim=-1), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("stretch", "expected"),
    [((1.0, 1.0), [0.583095, 0.368671, 0.145774]), ((1.0, 2.0), [0.781025, 0.637117, 0.195256])],
)
def test_golden_costs(stretch: tuple[float, float], expected: list[float]) -> None:
    probabilities = torch.tensor([[[0.5, 0.3, 0.2]]], dtype=torch.float64)
    values = torch.tensor([[1, 0], [0, 1], [0, 0]], dtype=torch.float64)
    gram = torch.diag(torch.tensor(stretch, dtype=torch.float64).square())[None]
    found = deletion_cost(Attended(probabilities, probabilities @ values), values, gram)
    torch.testing.assert_close(found[0, 0], torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-6)


def test_equal_values_and_unattended_tokens_cost_nothing() -> None:
    probabilities = torch.tensor([[[0.6, 0.4, 0.0]]])
    same = torch.ones(3, 4)
    gram = torch.eye(4)[None]
    assert deletion_cost(Attended(probabilities, probabilities @ same), same, gram).abs().max() < 1e-3
    varied = torch.randn(3, 4)
    assert float(deletion_cost(Attended(probabilities, probabilities @ varied), varied, gram)[0, 0, 2]) == 0


def test_grams_are_the_projections_own() -> None:
    projection = torch.randn(20, 6, 8)
    grams = projection_grams(projection, 2)
    assert grams.shape == (2, 3, 8, 8)
    torch.testing.assert_close(grams[1, 2], projection[:, 5].T @ projection[:, 5])


def test_golden_entropy_and_varentropy() -> None:
    log_p, entropy, varentropy = _surprise(torch.tensor([[0.7, 0.2, 0.1]]).log(), torch.tensor([1]))[:, 0].tolist()
    assert log_p == pytest.approx(-1.609438, abs=1e-5)
    assert entropy == pytest.approx(0.801819, abs=1e-5)
    assert varentropy == pytest.approx(0.494387, abs=1e-5)


def test_draws_follow_the_distribution() -> None:
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log().expand(4000, -1)
    draws = torch.rand(4000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    shares = _inverse_cdf(logits, draws, 1.0).bincount(minlength=4) / 4000
    torch.testing.assert_close(shares, torch.tensor([0.5, 0.3, 0.15, 0.05]), rtol=0, atol=0.03)
    assert _inverse_cdf(torch.tensor([[-torch.inf, 0, -torch.inf]]), torch.tensor([0.0], dtype=torch.float64), 1.0) == 1


def test_surprise_in_excess_of_entropy_is_centred() -> None:
    """Under temperature 1 the mean of -log p - H is zero and its variance is the varentropy."""
    logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(3)) * 2
    many = logits.expand(20_000, -1)
    draws = torch.rand(20_000, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    log_p, entropy, varentropy = _surprise(many, _inverse_cdf(many, draws, 1.0))
    excess = -log_p - entropy
    assert abs(float(excess.mean())) < 4 * float(varentropy[0] / 20_000) ** 0.5
    assert float(excess.var()) == pytest.approx(float(varentropy[0]), rel=0.1)


def test_futures_are_a_prefix_of_more_and_longer_ones(model: LoadedModel) -> None:
    prefill = prefilled(model)
    with torch.inference_mode():
        few = sample_futures([prefill], 3, 4, 1.0, ["seed"])[0]
        many = sample_futures([prefill], 11, 9, 1.0, ["seed"])[0]
        other = sample_futures([prefill], 3, 4, 1.0, ["another seed"])[0]
    assert torch.equal(few.tokens, many.tokens[:3, :4])
    assert torch.equal(few.queries[1], many.queries[1][:3, :, :4])
    assert not torch.equal(few.tokens, other.tokens)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_futures_have_the_same_bits_whatever_is_sampled_beside_them(dtype: torch.dtype) -> None:
    model = tiny_llama(dtype=dtype)
    prompts = {str(tokens): prefilled(model, tokens, tokens) for tokens in (37, 60, 151, 600)}
    with torch.inference_mode():
        alone = {seed: sample_futures([prompt], 4, 6, 1.0, [seed])[0] for seed, prompt in prompts.items()}
        for seeds in (["37", "60", "151", "600"], ["600", "37"], ["151", "600", "60"]):
            beside = sample_futures([prompts[seed] for seed in seeds], 4, 6, 1.0, seeds)
            for seed, futures in zip(seeds, beside, strict=True):
                assert torch.equal(futures.tokens, alone[seed].tokens)
                assert torch.equal(futures.log_probability, alone[seed].log_probability)
                for kind in ("queries", "keys", "values"):
                    assert same(getattr(futures, kind), getattr(alone[seed], kind))


@pytest.mark.parametrize("build", [tiny_llama, tiny_qwen], ids=["llama", "qwen"])
def test_futures_equal_an_ordinary_forward_pass(build: type) -> None:
    """Teacher forcing: prompt and future in one dense pass give the same queries and log-probabilities."""
    model: LoadedModel = build()
    prefill = prefilled(model, 40)
    with torch.inference_mode():
        futures = sample_futures([prefill], 2, 6, 1.0, ["0"])[0]
    captured: dict[int, Tensor] = {}

    class Capture:
        def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
            captured[layer] = queries
            repeat = queries.shape[1] // keys.shape[1]
            keys, values = keys.repeat_interleave(repeat, 1), values.repeat_interleave(repeat, 1)
            return torch.nn.functional.scaled_dot_product_attention(queries, keys, values, is_causal=True, scale=scale)

    assert "kvsweep" in ALL_ATTENTION_FUNCTIONS
    for particle in range(2):
        length = int(futures.lengths[particle])
        tokens = torch.tensor([prompt_ids(40) + futures.tokens[particle, :length].tolist()])
        with torch.inference_mode():
            logits = model.forward(input_ids=tokens, use_cache=False, kv_step=Capture()).logits[0].float()
        for layer in range(3):
            found = futures.queries[layer][particle, :, :length]
            torch.testing.assert_close(found, captured[layer][0, :, 40:], rtol=1e-3, atol=1e-4)
        log_p = torch.log_softmax(logits[39:-1], -1).gather(-1, tokens[0, 40:, None])[:, 0]
        torch.testing.assert_close(futures.log_probability[particle, :length], log_p, rtol=1e-3, atol=1e-4)


def test_a_future_ends_before_a_stop_token(model: LoadedModel) -> None:
    prefill = prefilled(model)
    with torch.inference_mode():
        free = sample_futures([prefill], 4, 8, 1.0, ["0"])[0]
        stop = int(free.tokens[2, 3])
        prefill.stop_ids = frozenset({stop})
        ended = sample_futures([prefill], 4, 8, 1.0, ["0"])[0]
    for particle in range(4):
        before = free.tokens[particle].tolist()
        expected = before.index(stop) if stop in before else 8
        assert int(ended.lengths[particle]) == expected
        assert ended.tokens[particle, :expected].tolist() == before[:expected]
    weights = particle_weights(ended, 1.0, 1.0)
    assert float(weights.sum()) == pytest.approx(1)
    assert bool((weights[ended.lengths == 0] == 0).all())


def test_futures_that_all_end_at_once_leave_the_prompt_only_scores(model: LoadedModel) -> None:
    prefill = prefilled(model)
    prefill.stop_ids = frozenset(range(model.forward.config.vocab_size))
    with torch.inference_mode():
        control = LoreKV(window=8, mix=0.0).scores(prefill, "0")
        found = LoreKV(window=8, mix=0.9).scores(prefill, "0")
    assert all(torch.equal(one, other) for one, other in zip(control, found, strict=True))


def test_no_lookahead_is_the_prompt_only_control(model: LoadedModel) -> None:
    prefill = prefilled(model)
    with torch.inference_mode():
        control = LoreKV(window=8, mix=0.0).scores(prefill, "0")
        for same in (LoreKV(window=8, particles=0), LoreKV(window=8, mix=0.0, particles=8)):
            assert all(torch.equal(a, b) for a, b in zip(control, same.scores(prefill, "other"), strict=True))
        different = LoreKV(window=8, mix=0.5).scores(prefill, "0")
    assert not torch.equal(control[0], different[0])


def test_uniform_weights_are_exactly_uniform_and_identical_futures_are_one(model: LoadedModel) -> None:
    prefill = prefilled(model)
    given = torch.tensor([[5, 9, 17, 30]] * 3)
    with torch.inference_mode():
        futures = sample_futures([prefill], 3, 4, 1.0, ["0"], given)[0]
        single = sample_futures([prefill], 1, 4, 1.0, ["0"], given[:1])[0]
        assert (
            particle_weights(sample_futures([prefill], 3, 4, 1.0, ["0"])[0], 0.0, 0.0).tolist()
            == [pytest.approx(1 / 3)] * 3
        )
        weights = particle_weights(futures, 1.0, 1.0)
        method, layer = LoreKV(window=8), prefill.layers[0]
        grams = projection_grams(layer.output_projection, len(layer.keys))
        three = future_cost(method, 0, layer, grams, futures, weights)
        one = future_cost(method, 0, layer, grams, single, torch.ones(1))
    assert effective_particles(weights) == pytest.approx(3)
    torch.testing.assert_close(three, one, rtol=1e-4, atol=1e-6)


def test_future_attention_is_causal_over_its_own_tokens() -> None:
    queries, keys, values = torch.randn(2, 3, 4, 8), torch.randn(10, 8), torch.randn(10, 8)
    own_keys, own_values = torch.randn(3, 4, 8), torch.randn(3, 4, 8)
    found = attend_futures(queries, keys, values, own_keys, own_values, 0.3)
    for future in range(3):
        for step in range(4):
            seen_keys = torch.cat([keys, own_keys[future, : step + 1]])
            seen_values = torch.cat([values, own_values[future, : step + 1]])
            weights = torch.softmax(queries[:, future, step] @ seen_keys.T * 0.3, -1)
            place = future * 4 + step
            torch.testing.assert_close(found.probabilities[:, place], weights[:, :10], rtol=1e-4, atol=1e-6)
            torch.testing.assert_close(found.output[:, place], weights @ seen_values, rtol=1e-4, atol=1e-5)


def test_scaling_the_projection_changes_no_choice(model: LoadedModel) -> None:
    prefill = prefilled(model)
    method = LoreKV(window=8)
    with torch.inference_mode():
        before = method.scores(prefill, "0")
        for layer in prefill.layers:
            layer.output_projection = layer.output_projection * 4
        after = method.scores(prefill, "0")
    for one, other in zip(before, after, strict=True):
        assert torch.equal(one * 4, other)


def test_lookahead_leaves_no_trace_in_the_cache(model: LoadedModel) -> None:
    """A budget for everything: the full cache's tokens, and the next position is the prompt's length."""
    forks = [Fork(name, method, Budget.parse("unlimited"), "0") for name, method in (("lore", LoreKV(window=8)),)]
    (generation,) = Engine(model, EngineSpec(8, 64)).run([Prompt("", prompt_ids(50), [], 6, forks)])
    assert generation.at_prefill.held == model.layout.full_bytes(50)
    assert generation.held_tokens == 50 + len(generation.tokens) - 1
