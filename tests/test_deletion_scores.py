"""LORE-KV's scores in one call: against real deletion, and against the query-by-query reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lorekv_cases import WINDOW, lorekv, prefilled
from models import tiny_llama, tiny_qwen
from torch import Tensor

from kvcache.prefill import Prefill
from lorekv.deletion import projection_grams
from lorekv.kernels import deletion_scores as module
from lorekv.kernels.deletion_scores import deletion_scores
from lorekv.lookahead import Futures, sample_futures
from lorekv.reliability import particle_weights
from lorekv.scoring import future_cost, window_cost
from lorekv.scoring_queries import ScoringQueries, attend_own, window_queries, with_futures

Scores = tuple[Tensor, Tensor]
ERROR = 1e-5
"""Norm of the difference over the norm of what is expected."""


def looked_ahead(build: Callable[..., Any], **changes: Any) -> tuple[Prefill, Futures]:
    """A prompt, and five futures of seven tokens of which one ends early."""
    prefill = prefilled(build(**changes), 90)
    with torch.inference_mode():
        free = sample_futures([prefill], 5, 7, 1.0, ["0"])[0]
        prefill.stop_ids = frozenset({int(free.tokens[2, 3])})
        return prefill, sample_futures([prefill], 5, 7, 1.0, ["0"])[0]


def both(prefill: Prefill, futures: Futures, index: int, support: str = "prompt_and_own") -> tuple[Scores, Scores]:
    """Costs of window and futures in one layer: found, and by the reference."""
    layer, method = prefill.layers[index], lorekv(support=support)
    grams = projection_grams(layer.output_projection, len(layer.keys))
    weights = particle_weights(futures, 1.0, 1.0)
    asked = with_futures(window_queries(layer, WINDOW), index, layer, futures, weights, own=support == "prompt_and_own")
    found = deletion_scores(asked, layer.keys, layer.values, grams, layer.scale)
    of_futures = future_cost(method, index, layer, grams, futures, weights)
    return found, (window_cost(method, layer, grams), of_futures)


@pytest.mark.parametrize("support", ["prompt_and_own", "prompt"])
@pytest.mark.parametrize("build", [tiny_llama, tiny_qwen], ids=["llama", "qwen"])
def test_scores_equal_the_reference_on_a_model(build: Callable[..., Any], support: str) -> None:
    prefill, futures = looked_ahead(build)
    assert int(futures.lengths.min()) < 7
    for index in range(3):
        for found, expected in zip(*both(prefill, futures, index, support), strict=True):
            assert (found - expected).norm() <= ERROR * expected.norm()


def test_bf16_models_keep_the_same_tokens_as_by_the_reference() -> None:
    prefill, futures = looked_ahead(tiny_llama, dtype=torch.bfloat16)
    for index in range(3):
        for found, expected in zip(*both(prefill, futures, index), strict=True):
            assert (found - expected).norm() <= ERROR * expected.norm()
            for budget in (4, 16, 40):
                assert torch.equal(found.topk(budget).indices, expected.topk(budget).indices)


def random_case(tokens: int = 40, window: int = 3, futures: int = 4, dims: tuple[int, int] = (8, 6)) -> Any:
    """Two KV heads of three query heads each; the output projection too."""
    g = torch.Generator().manual_seed(tokens)
    count = window + futures
    early = torch.arange(count) < window
    asked = ScoringQueries(
        torch.randn(6, count, dims[0], generator=g),
        torch.where(early, tokens - window + 1 + torch.arange(count), tokens),
        torch.rand(count, generator=g),
        torch.randn(6, count, generator=g).masked_fill(early, -torch.inf),
        torch.randn(6, count, dims[1], generator=g).masked_fill(early[:, None], 0),
        window,
    )
    projection = torch.randn(20, 6, dims[1], generator=g)
    return asked, torch.randn(2, tokens, dims[0], generator=g), torch.randn(2, tokens, dims[1], generator=g), projection


@pytest.mark.parametrize("scale", [0.1, 0.3, 1.0])
def test_scores_are_what_real_deletion_does_to_the_residual_stream(scale: float) -> None:
    """Every token is left out in turn, for every query; in fp64. At the largest scale one token has up to 98 %."""
    asked, keys, values, projection = random_case()
    found = torch.stack(deletion_scores(asked, keys, values, projection_grams(projection, 2), scale))
    expected = torch.zeros(2, 2, 40, dtype=torch.float64)
    for head in range(6):
        kv = head // 3
        for query in range(7):
            scores = torch.cat([keys[kv] @ asked.queries[head, query] * scale, asked.own_log_sums[head, query, None]])
            scores[asked.visible[query] : 40] = -torch.inf
            seen = torch.cat([values[kv], asked.own_output[head, query, None]]).double()
            whole = torch.softmax(scores.double(), -1) @ seen
            for token in range(40):
                left = torch.softmax(scores.double().index_fill(0, torch.tensor(token), -torch.inf), -1) @ seen
                change = projection[:, head].double() @ (left - whole)
                expected[int(query >= 3), kv, token] += asked.weights[query] * change.norm()
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5)


def test_how_queries_are_blocked_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second block begins inside the window."""
    asked, keys, values, projection = random_case(window=20, futures=30)
    given = asked, keys, values, projection_grams(projection, 2), 0.3
    at_once = deletion_scores(*given)
    monkeypatch.setattr(module, "ATTENDED", 16 * 40)
    monkeypatch.setattr(module, "TOKENS_PER_PRODUCT", 7)
    torch.testing.assert_close(deletion_scores(*given), at_once, rtol=1e-5, atol=1e-6)


def test_without_futures_the_windows_costs_are_the_same_and_theirs_are_zero() -> None:
    prefill, futures = looked_ahead(tiny_llama)
    layer = prefill.layers[0]
    grams = projection_grams(layer.output_projection, len(layer.keys))
    alone = deletion_scores(window_queries(layer, WINDOW), layer.keys, layer.values, grams, layer.scale)
    (of_window, _), _ = both(prefill, futures, 0)
    torch.testing.assert_close(alone[0], of_window, rtol=1e-5, atol=1e-7)
    assert not alone[1].any()


def test_a_prompt_shorter_than_the_window_is_scored_by_all_its_queries() -> None:
    prefill = prefilled(tiny_llama(), WINDOW - 3)
    asked = window_queries(prefill.layers[0], WINDOW)
    assert asked.visible.tolist() == [1, 2, 3, 4, 5]
    assert asked.weights.tolist() == [pytest.approx(1 / 15)] * 5


def test_attention_to_own_tokens_joins_the_prompts_as_one_softmax() -> None:
    queries, own_keys, own_values = torch.randn(2, 4, 3, 8), torch.randn(2, 2, 3, 8), torch.randn(2, 2, 3, 8)
    log_sums, output = attend_own(queries, own_keys, own_values, 0.3)
    for future in range(2):
        for head in range(4):
            for step in range(3):
                scores = own_keys[future, head // 2, : step + 1] @ queries[future, head, step] * 0.3
                expected = torch.softmax(scores, -1) @ own_values[future, head // 2, : step + 1]
                place = future * 3 + step
                torch.testing.assert_close(log_sums[head, place], scores.logsumexp(-1))
                torch.testing.assert_close(output[head, place], expected)
