"""SnapKV and StreamingLLM: hand-computed values and brute force."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import avg_pool1d, max_pool1d

from kvcache.baselines.snapkv import SnapKV
from kvcache.baselines.streaming_llm import StreamingLLM
from kvcache.budget import Budget
from kvcache.layout import CacheLayout, LayerLayout
from kvcache.prefill import LayerPrefill, Prefill
from kvcache.ragged import RaggedCompressed
from kvcache.select import keep_top

LAYOUT = CacheLayout((LayerLayout("growing", 4, 2, 8, 8),), 4)
PREFIX = torch.tensor([[0.30, 0.02, 0.05, 0.40, 0.01, 0.06]])


def prompt(tokens: int, window: int) -> Prefill:
    g = torch.Generator().manual_seed(tokens)
    queries = torch.randn(4, min(window, tokens), 8, generator=g) * 2
    keys = torch.randn(2, tokens, 8, generator=g) * 2
    layer = LayerPrefill(keys, torch.randn(2, tokens, 8, generator=g), queries, None, Tensor(), 8**-0.5)
    return Prefill([layer], LAYOUT, tokens, torch.zeros(3), lambda *_: (Tensor(), Tensor()), lambda _: None)  # type: ignore[arg-type,return-value]


def kept(method: SnapKV | StreamingLLM, prefill: Prefill, budget: str) -> list[list[int]]:
    resolved = Budget.parse(budget).resolve(prefill.tokens, 8, "prompt", LAYOUT)
    compressed = method.compress(prefill, resolved, method.scores(prefill, "0"))
    assert isinstance(compressed, RaggedCompressed)
    return [head.tolist() for head in compressed.kept[0]]


def test_golden_pooling() -> None:
    """Maximum pooling makes a three-way tie, which lower positions win; average pooling drops the spike itself."""
    assert keep_top(max_pool1d(PREFIX, 3, 1, 1), 2).tolist() == [[2, 3]]
    averaged = avg_pool1d(PREFIX, 3, 1, 1)
    torch.testing.assert_close(
        averaged, torch.tensor([[0.1067, 0.1233, 0.1567, 0.1533, 0.1567, 0.0233]]), rtol=0, atol=1e-4
    )
    assert keep_top(averaged, 2).tolist() == [[2, 4]]


@pytest.mark.parametrize("settings", [{}, {"kernel": 1}, {"pooling": "avg", "kernel": 5}], ids=str)
@pytest.mark.parametrize("tokens", [20, 90])
def test_scores_equal_brute_force(settings: dict[str, object], tokens: int) -> None:
    """Query by query and head by head, as the paper words it."""
    method = SnapKV(window=8, **settings)  # type: ignore[arg-type]
    prefill = prompt(tokens, 8)
    layer = prefill.layers[0]
    assert layer.queries is not None
    (found,) = method.scores(prefill, "0")
    for head in range(2):
        pooled = []
        for query_head in (2 * head, 2 * head + 1):
            received = torch.zeros(tokens)
            for place in range(8):
                at = tokens - 8 + place
                logits = layer.keys[head, : at + 1] @ layer.queries[query_head, place] * layer.scale
                received[: at + 1] += torch.softmax(logits, 0)
            prefix = received[: tokens - 8].tolist()
            reach = method.kernel // 2
            around = [prefix[max(0, i - reach) : i + reach + 1] for i in range(len(prefix))]
            pool = max if method.pooling == "max" else lambda part: sum(part) / method.kernel
            pooled.append(torch.tensor([pool(part) for part in around]))
        torch.testing.assert_close(found[head, : tokens - 8], torch.stack(pooled).mean(0), rtol=1e-4, atol=1e-6)


def test_the_window_is_kept_and_counts_inside_the_budget() -> None:
    for head in kept(SnapKV(window=8), prompt(90, 8), "20 tokens"):
        assert len(head) == 20
        assert head[-8:] == list(range(82, 90))


def test_a_prompt_shorter_than_the_window_is_kept_whole() -> None:
    assert kept(SnapKV(window=32), prompt(20, 32), "100%") == [list(range(20))] * 2


def test_streaming_keeps_sinks_and_the_most_recent() -> None:
    assert kept(StreamingLLM(), prompt(30, 1), "10 tokens") == [[0, 1, 2, 3, *range(24, 30)]] * 2


@pytest.mark.parametrize("wrong", [{"kernel": 4}, {"window": 0}, {"pooling": "sum"}], ids=str)
def test_settings_that_mean_nothing_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="not"):
        SnapKV(**wrong)  # type: ignore[arg-type]
