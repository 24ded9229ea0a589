"""LORE-KV's scores: reliability, objectives, aggregation, adaptive lookahead: each against a direct computation, and in
the limit where it is the default again."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lorekv_cases import lorekv, made_futures, prefilled, same
from models import tiny_llama
from torch import Tensor
from torch.nn.functional import cosine_similarity

from kvcache.objectives import token_worth
from kvcache.prefill import Prefill
from kvcache.select import protect_ends
from kvcache.window import window_attention
from lorekv.adaptive import changed_share, score_until_stable
from lorekv.deletion import Attended, attend_prompt, deletion_cost
from lorekv.lookahead import Futures, sample_futures
from lorekv.method import LoreKV
from lorekv.reliability import effective_particles, particle_weights, query_disagreement, typicality_energy
from lorekv.scoring import TAIL, pooled, query_costs, score_prompt, tail_mean
from workers.models import LoadedModel


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return tiny_llama()


@pytest.fixture(scope="module")
def prefill(model: LoadedModel) -> Prefill:
    return prefilled(model)


@pytest.fixture(scope="module")
def futures(prefill: Prefill) -> Futures:
    with torch.inference_mode():
        return sample_futures([prefill], 3, 5, 1.0, ["0"])[0]


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (lambda: LoreKV(mix=1.2), "mix is between 0 and 1"),
        (lambda: LoreKV(tail=-0.1), "tail is between 0 and 1"),
        (lambda: LoreKV(hard_filter=1), "hard_filter is a share below 1"),
        (lambda: LoreKV(disagreement=-1), "disagreement must be at least 0"),
        (lambda: LoreKV(kernel=4), "kernel must be odd"),
        (lambda: LoreKV(objective="loss"), "objective is one of deletion, attention"),  # type: ignore[arg-type]
        (lambda: LoreKV(objective="attention", squared=True), "squared is of the objective 'deletion'"),
    ],
)
def test_settings_without_meaning_are_refused(build: Callable[[], LoreKV], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        build()


# -- reliability -----------------------------------------------------------------------------------------------------


def two_futures(queries: Tensor | None = None) -> Futures:
    """Gaps 0.5 over two steps and -1 over one; varentropies 3 and 1."""
    surprise = torch.tensor([[2.0, 1.5], [1.0, 9.0]])
    entropy = torch.tensor([[1.0, 1.5], [2.0, 9.0]])
    varentropy = torch.tensor([[1.0, 2.0], [1.0, 9.0]])
    return made_futures(surprise, entropy, torch.tensor([2, 1]), varentropy, queries)


@pytest.mark.parametrize(
    ("typicality", "expected"),
    [("gap", [0.5, 1.0]), ("normalized", [0.5 / (math.sqrt(3) / 2), 1.0]), ("centred", [0.75, 0.75])],
)
def test_golden_typicality(typicality: str, expected: list[float]) -> None:
    found = typicality_energy(two_futures(), typicality)  # type: ignore[arg-type]
    torch.testing.assert_close(found, torch.tensor(expected), rtol=1e-5, atol=1e-5)


def test_golden_weights() -> None:
    """Energies .5 + 1.25 and 1 + 2."""
    found = particle_weights(two_futures(), 1.0, 1.0)
    torch.testing.assert_close(found, torch.softmax(torch.tensor([-1.75, -3.0]), 0))


def test_golden_disagreement() -> None:
    """Two futures agree and one is at a right angle to them, in one layer with one head. The references are means of
    the other two: at 45 degrees for those that agree, along the others for the third."""
    along = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    queries = along[:, None, None].expand(3, 1, 4, 2)
    futures = made_futures(torch.ones(3, 4), torch.ones(3, 4), torch.tensor([4, 4, 4]), queries=queries)
    expected = torch.tensor([1 - math.sqrt(0.5), 1 - math.sqrt(0.5), 1.0])
    torch.testing.assert_close(query_disagreement(futures), expected)
    weights = particle_weights(futures, 1.0, 1.0, disagreement=2.0)
    torch.testing.assert_close(weights, torch.softmax(-2 * expected, 0))


def test_disagreement_is_the_direct_mean_over_layers_and_heads(futures: Futures) -> None:
    found = query_disagreement(futures)
    for particle in range(3):
        cosines = []
        for queries in futures.queries:
            means = [queries[m, :, : int(futures.lengths[m])].mean(1) for m in range(3)]
            others = torch.stack([means[m] for m in range(3) if m != particle]).mean(0)
            cosines.append(cosine_similarity(means[particle], others, dim=-1))
        assert float(found[particle]) == pytest.approx(1 - float(torch.cat(cosines).mean()), abs=1e-5)


def test_one_future_disagrees_with_nobody() -> None:
    """One that was sampled alone, and one whose others ended at once."""
    alone = made_futures(torch.ones(1, 2), torch.ones(1, 2), torch.tensor([2]), queries=torch.randn(1, 3, 2, 4))
    assert query_disagreement(alone).tolist() == [0]
    left = made_futures(torch.ones(3, 2), torch.ones(3, 2), torch.tensor([0, 2, 0]), queries=torch.randn(3, 3, 2, 4))
    assert query_disagreement(left).tolist() == [0, 0, 0]
    assert particle_weights(left, 1.0, 1.0, disagreement=1.0).tolist() == [0, 1, 0]


def test_identical_futures_do_not_disagree(prefill: Prefill) -> None:
    with torch.inference_mode():
        given_twice = sample_futures([prefill], 3, 4, 1.0, ["0"], torch.tensor([[5, 9, 17, 30]] * 3))[0]
    assert float(query_disagreement(given_twice).abs().max()) < 1e-5


def test_a_hard_filter_counts_the_most_reliable_alike() -> None:
    entropy = torch.tensor([[3.0], [1.0], [4.0], [2.0], [9.0]])
    futures = made_futures(entropy, entropy, torch.tensor([1, 1, 1, 1, 0]))
    assert particle_weights(futures, 1.0, 1.0, hard_filter=0.5).tolist() == [0, 0.5, 0, 0.5, 0]
    assert particle_weights(futures, 1.0, 1.0, hard_filter=0.75).tolist() == [0, 1, 0, 0, 0]
    assert particle_weights(futures, 1.0, 1.0, hard_filter=0.2).tolist() == [0.25, 0.25, 0.25, 0.25, 0]


@given(st.lists(st.tuples(st.floats(0, 20), st.floats(0, 10), st.integers(0, 3)), min_size=1, max_size=9))
def test_weights_are_a_distribution_over_the_futures_that_have_tokens(entries: list[tuple[float, float, int]]) -> None:
    surprise, entropy = (
        torch.tensor([one[place] for one in entries]).float()[:, None].expand(-1, 3) for place in (0, 1)
    )
    lengths = torch.tensor([one[2] for one in entries])
    queries = torch.randn(len(entries), 2, 3, 4, generator=torch.Generator().manual_seed(len(entries)))
    futures = made_futures(surprise, entropy, lengths, queries=queries)
    for weights in (
        particle_weights(futures, 0.0, 0.0),
        particle_weights(futures, 1.0, 1.0, 1.0),
        particle_weights(futures, 1.0, 1.0, 0.0, "normalized"),
        particle_weights(futures, 1.0, 0.0, 0.0, "centred", 0.5),
    ):
        assert bool((weights[lengths == 0] == 0).all())
        assert float(weights.sum()) == pytest.approx(float((lengths > 0).any()), abs=1e-5)
        assert 0 <= effective_particles(weights) <= int((lengths > 0).sum()) + 1e-3


# -- objectives ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("objective", "shared"),
    [("attention", "attention"), ("value_norm", "value_norm"), ("andpro", "projection"), ("obcache", "prune_both")],
)
def test_an_objective_is_the_shared_one_on_the_windows_queries(prefill: Prefill, objective: str, shared: str) -> None:
    with torch.inference_mode():
        found = score_prompt(lorekv(objective=objective, mix=0.0), prefill).scores
        for layer, scores in zip(prefill.layers, found, strict=True):
            assert layer.queries is not None
            for head in range(2):
                queries = layer.queries[3 * head : 3 * head + 3]
                probabilities = window_attention(queries, layer.keys[head], layer.scale)
                logits = queries @ layer.keys[head].T * layer.scale
                output = probabilities @ layer.values[head]
                worth = token_worth(shared, probabilities, layer.values[head], output, logits)  # type: ignore[arg-type]
                torch.testing.assert_close(scores[head], worth.mean((0, 1)), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("objective", ["deletion", "attention", "value_norm", "andpro", "obcache"])
@pytest.mark.parametrize("support", ["prompt_and_own", "prompt"])
def test_futures_are_scored_as_a_direct_computation_says(
    prefill: Prefill, futures: Futures, objective: str, support: str
) -> None:
    """Query by query, in fp64, with the weights and lengths of the futures."""
    method = lorekv(objective=objective, support=support, mix=1.0)
    with torch.inference_mode():
        found = score_prompt(method, prefill, futures).scores[1]
    layer, weights = prefill.layers[1], particle_weights(futures, 1.0, 1.0)
    own = support == "prompt_and_own"
    for head in range(2):
        keys, values = layer.keys[head].double(), layer.values[head].double()
        expected = torch.zeros(prefill.tokens, dtype=torch.float64)
        for particle, length in enumerate(futures.lengths.tolist()):
            for step in range(length):
                seen_keys = torch.cat([keys, futures.keys[1][particle, head, : (step + 1) * own].double()])
                seen_values = torch.cat([values, futures.values[1][particle, head, : (step + 1) * own].double()])
                for query in range(3 * head, 3 * head + 3):
                    logits = seen_keys @ futures.queries[1][particle, query, step].double() * layer.scale
                    attention = torch.softmax(logits, 0)
                    output = attention @ seen_values
                    cost = _cost(objective, attention, seen_values, output, logits, layer.output_projection[:, query])
                    expected += weights[particle].double() / length * cost[: prefill.tokens] / 3
        torch.testing.assert_close(found[head].double(), expected, rtol=1e-3, atol=1e-6)


def _cost(objective: str, a: Tensor, v: Tensor, o: Tensor, z: Tensor, projection: Tensor) -> Tensor:
    return {
        "deletion": lambda: a / (1 - a) * ((o - v) @ projection.double().T).norm(dim=-1),
        "attention": lambda: a,
        "value_norm": lambda: a * v.norm(dim=-1),
        "andpro": lambda: a * (v @ o),
        "obcache": lambda: (a[:, None] * (v + z[:, None] * (v - o))).square().sum(-1),
    }[objective]()


@pytest.mark.parametrize(
    ("objective", "expected"),
    [
        ("deletion", [0.583095, 0.368671, 0.145774]),
        ("andpro", [0.25, 0.09, 0.0]),
        ("obcache", [0.11755, 0.03484, 0.03523]),
    ],
)
def test_golden_objectives(objective: str, expected: list[float]) -> None:
    """Three objectives, three orders, of one query; AnDPro's add up to the output's squared length, 0.34."""
    probabilities = torch.tensor([[[0.5, 0.3, 0.2]]])
    values = torch.tensor([[1.0, 0], [0, 1], [0, 0]])
    attended = Attended(probabilities, probabilities @ values, probabilities.log())
    found = query_costs(lorekv(objective=objective), attended, values, torch.eye(2)[None])
    torch.testing.assert_close(found[0, 0], torch.tensor(expected), rtol=0, atol=1e-5)


def test_orthonormal_columns_leave_the_projection_out(
    prefill: Prefill,
) -> None:
    """DropKV's cost: a/(1-a) ||o - v||, squared."""
    layer = prefill.layers[0]
    assert layer.queries is not None
    columns = torch.linalg.qr(torch.randn(96, 16, generator=torch.Generator().manual_seed(1))).Q
    attended = attend_prompt(layer.queries[:1], layer.keys[0], layer.values[0], layer.scale)
    cost = deletion_cost(attended, layer.values[0], (columns.T @ columns)[None])
    a = attended.probabilities
    unprojected = a / (1 - a) * (attended.output[:, :, None] - layer.values[0]).norm(dim=-1)
    torch.testing.assert_close(cost, unprojected, rtol=1e-3, atol=1e-5)
    projection, layer.output_projection = layer.output_projection, columns[:, None].expand(-1, 6, -1)
    try:
        found = score_prompt(lorekv(mix=0.0, squared=True), prefill).scores[0]
    finally:
        layer.output_projection = projection
    attended = attend_prompt(layer.queries[:3], layer.keys[0], layer.values[0], layer.scale)
    dropkv = deletion_cost(attended, layer.values[0], torch.eye(16).expand(3, -1, -1)).square().mean((0, 1))
    torch.testing.assert_close(found[0], dropkv, rtol=1e-3, atol=1e-6)


def test_gated_cost_equals_real_deletion_and_open_gates_change_nothing() -> None:
    g = torch.Generator().manual_seed(5)
    group, count, tokens, dim, hidden = 2, 3, 9, 4, 12
    probabilities = torch.softmax(torch.randn(group, count, tokens, generator=g, dtype=torch.float64), -1)
    values = torch.randn(tokens, dim, generator=g, dtype=torch.float64)
    projection = torch.randn(group, hidden, dim, generator=g, dtype=torch.float64)
    gates = torch.rand(group, count, dim, generator=g, dtype=torch.float64)
    gram, output = projection.transpose(1, 2) @ projection, probabilities @ values
    found = deletion_cost(Attended(probabilities, output, gates=gates), values, gram)
    for deleted in range(tokens):
        left = probabilities.index_fill(-1, torch.tensor([deleted]), 0)
        left = left / left.sum(-1, keepdim=True) @ values
        change = torch.einsum("gqd,ghd->gqh", gates * (left - output), projection)
        torch.testing.assert_close(found[..., deleted], change.norm(dim=-1), rtol=1e-9, atol=1e-9)
    open_gates = deletion_cost(Attended(probabilities, output, gates=torch.ones_like(gates)), values, gram)
    torch.testing.assert_close(open_gates, deletion_cost(Attended(probabilities, output), values, gram))


def test_gates_of_window_and_futures_reach_the_cost(prefill: Prefill, futures: Futures) -> None:
    """Gates of one half everywhere are a projection of half the size."""

    def found(gate: float, stretch: float) -> list[Tensor]:
        gated = replace(futures, gates=[torch.full_like(queries, gate) for queries in futures.queries])
        layers = [
            replace(
                layer,
                gates=torch.full_like(layer.queries, gate),  # type: ignore[arg-type]
                output_projection=layer.output_projection * stretch,
            )
            for layer in prefill.layers
        ]
        with torch.inference_mode():
            return score_prompt(lorekv(), replace(prefill, layers=layers), gated).scores

    half, plain = found(0.5, 1.0), found(1.0, 0.5)
    assert same(half, plain)
    assert not torch.allclose(half[0], found(1.0, 1.0)[0])


# -- aggregation -----------------------------------------------------------------------------------------------------


def test_the_tail_is_the_mean_of_the_costliest_queries() -> None:
    """Of ten equal queries one, of thirty three; of unequal weights as much of the last as fits."""
    costs = torch.rand(30, 7, generator=torch.Generator().manual_seed(0))
    ordered = costs.sort(0, descending=True).values
    torch.testing.assert_close(tail_mean(costs[:10], torch.full((10,), 0.1)), costs[:10].amax(0))
    torch.testing.assert_close(tail_mean(costs, torch.full((30,), 1 / 30)), ordered[:3].mean(0))
    found = tail_mean(torch.tensor([[1.0], [5.0], [3.0]]), torch.tensor([0.48, 0.04, 0.48]))
    assert float(found) == pytest.approx((0.04 * 5 + (TAIL - 0.04) * 3) / TAIL)


@given(st.integers(1, 12), st.integers(0, 10_000))
def test_the_tail_lies_between_mean_and_maximum(queries: int, seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    costs, weights = torch.rand(queries, 4, generator=g), torch.softmax(torch.randn(queries, generator=g), 0)
    tail = tail_mean(costs, weights)
    assert bool((tail >= weights @ costs - 1e-5).all())
    assert bool((tail <= costs.amax(0) + 1e-5).all())


def test_tail_zero_is_the_mean_and_one_the_tail_alone(prefill: Prefill, futures: Futures) -> None:
    with torch.inference_mode():
        mean, half, tail = (score_prompt(lorekv(tail=tail), prefill, futures).scores[0] for tail in (1e-9, 0.5, 1.0))
        default = score_prompt(lorekv(), prefill, futures).scores[0]
    torch.testing.assert_close(mean, default, rtol=1e-4, atol=1e-7)
    torch.testing.assert_close(half, (mean + tail) / 2, rtol=1e-4, atol=1e-7)
    assert bool((tail >= mean - 1e-6).all())
    assert not torch.allclose(tail, mean)


def test_pooling_takes_the_best_neighbour_that_may_go() -> None:
    scores = torch.tensor([[9.0, 1.0, 2.0, -3.0, 4.0, 0.0, 8.0]])
    protected = protect_ends(7, 1, 1)
    assert pooled(scores, 3, protected).tolist() == [[9.0, 2.0, 2.0, 4.0, 4.0, 4.0, 8.0]]
    assert torch.equal(pooled(scores, 1, protected), scores)


# -- adaptive lookahead ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("threshold", "used"), [(0.999, 4), (1e-9, 10)])
def test_futures_are_added_until_they_change_little(prefill: Prefill, threshold: float, used: int) -> None:
    method = lorekv(particles=10, tokens=3, stop_change=threshold)
    with torch.inference_mode():
        found = method.examine([prefill], ["0"])[0]
        fixed = lorekv(particles=used, tokens=3).examine([prefill], ["0"])[0]
    assert found.facts == fixed.facts
    assert found.facts["particles"] == len(found.facts["future_tokens"]) == used
    assert same(found.scores, fixed.scores)


def test_each_prompt_stops_by_itself(model: LoadedModel) -> None:
    prefills, seeds = [prefilled(model, 60, seed) for seed in range(5)], list("abcde")
    method = lorekv(particles=16, tokens=3, stop_change=0.1)
    with torch.inference_mode():
        together = score_until_stable(method, prefills, seeds)
        alone = [score_until_stable(method, [one], [seed])[0] for one, seed in zip(prefills, seeds, strict=True)]
    assert len({one.facts["particles"] for one in together}) > 1
    for one, other in zip(together, alone, strict=True):
        assert one.facts == other.facts
        assert same(one.scores, other.scores)


def test_the_change_is_the_share_of_new_tokens() -> None:
    before, after = torch.tensor([[[1, 1, 1, 1, 0]]]).bool(), torch.tensor([[[0, 1, 1, 1, 1]]]).bool()
    assert (changed_share(before, after), changed_share(after, after)) == (0.25, 0)
    assert changed_share(before & False, after & False) == 0
