"""The kernels of LORE-KV's scores in Triton's interpreter against the plain path. Run by test_triton_interpreter.py."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from lorekv.kernels import deletion_scores
from lorekv.kernels.deletion_scores import _score_fused, _score_plain, split_prompt
from lorekv.scoring_queries import ScoringQueries

SCALE = 0.2
Case = tuple[ScoringQueries, Tensor, Tensor, Tensor]


def case(
    tokens: int = 140,
    window: int = 9,
    futures: int = 26,
    group: int = 2,
    dims: tuple[int, int] = (64, 64),
    dtype: torch.dtype = torch.float32,
) -> Case:
    """Two KV heads; the window's queries see the prompt causally, those of futures have tokens of their own besides."""
    g = torch.Generator().manual_seed(tokens + group)
    heads, count = 2 * group, window + futures

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g)

    early = torch.arange(count) < window
    asked = ScoringQueries(
        random(heads, count, dims[0]).to(dtype),
        torch.where(early, tokens - window + 1 + torch.arange(count), tokens),
        torch.rand(count, generator=g),
        (random(heads, count) * 3).masked_fill(early, -torch.inf),
        random(heads, count, dims[1]).masked_fill(early[:, None], 0),
        window,
    )
    keys, values = random(2, tokens, dims[0]).to(dtype), random(2, tokens, dims[1]).to(dtype)
    projection = random(2, group, dims[1], 100)
    return asked, keys, values, projection @ projection.transpose(2, 3)


def assert_same(given: Case, error: float = 1e-5) -> None:
    for found, expected in zip(_score_fused(*given, SCALE), _score_plain(*given, SCALE), strict=True):
        assert expected.any()
        assert (found - expected).norm() <= error * expected.norm()
        top = expected.shape[1] // 10
        assert torch.equal(found.topk(top).indices.sort().values, expected.topk(top).indices.sort().values)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
@pytest.mark.parametrize(("group", "dims"), [(3, (32, 64)), (1, (128, 128))])
def test_scores_equal_the_plain_paths(group: int, dims: tuple[int, int], dtype: torch.dtype) -> None:
    """In fp16 too: products with fp32 numbers are taken in two halves."""
    assert_same(case(group=group, dims=dims, dtype=dtype))


@pytest.mark.parametrize(("window", "futures", "tokens"), [(32, 64, 130), (1, 1, 64), (40, 3, 41)])
def test_numbers_of_queries_and_tokens_need_not_fill_blocks(window: int, futures: int, tokens: int) -> None:
    assert_same(case(tokens, window, futures))


def test_without_futures_theirs_are_zero() -> None:
    given = case(futures=0)
    of_window, of_futures = _score_fused(*given, SCALE)
    torch.testing.assert_close(of_window, _score_plain(*given, SCALE)[0], rtol=1e-5, atol=1e-5)
    assert not of_futures.any()


def test_a_prompt_may_be_attended_to_in_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The window's first queries see nothing of the last split."""
    monkeypatch.setattr(deletion_scores, "split_prompt", lambda tokens, partial_size: (4, 64))
    assert_same(case(tokens=190, window=20))


def test_partial_outputs_are_no_larger_than_the_scores() -> None:
    for tokens in (1, 64, 4096, 32_768, 131_072):
        splits, length = split_prompt(tokens, 96 * 128)
        assert splits == 1 or splits * 96 * 128 <= tokens
        assert (splits - 1) * length < tokens <= splits * length


def test_where_one_token_takes_nearly_all_attention_its_cost_stays_exact() -> None:
    asked, keys, values, grams = case()
    peaked = replace(asked, queries=asked.queries * 3)
    assert_same((peaked, keys, values, grams), 2e-4)


def test_large_projections_and_values_stay_within_fp16() -> None:
    asked, keys, values, grams = case(dtype=torch.float16)
    assert_same((asked, keys, values * 100, grams * 1e8))


def test_keys_and_values_may_be_part_of_a_longer_cache() -> None:
    asked, keys, values, grams = case()
    longer = [torch.cat([part, torch.full_like(part, torch.nan)], 1)[:, : part.shape[1]] for part in (keys, values)]
    for found, expected in zip(
        _score_fused(asked, *longer, grams, SCALE), _score_fused(asked, keys, values, grams, SCALE), strict=True
    ):
        assert torch.equal(found, expected)
