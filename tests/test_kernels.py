"""The attention references against dense softmax."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvcache.kernels.column_sums import _in_three, add_column_sums
from kvcache.kernels.paged_attention import attend_pages, merge_pages
from kvcache.layout import LayerLayout
from kvcache.sliding import SlidingRing
from kvcache.window import window_attention
from workers.continuation import shared_prefix_attention
from workers.softmax import attend_everything, causal_attention

SCALE = 0.3


def dense(queries: Tensor, keys: Tensor, start: int) -> Tensor:
    """Causal attention of queries at ``start ...``. [H_q, t, d], [H_kv, n, d] -> [H_q, t, n]"""
    keys = keys.repeat_interleave(len(queries) // len(keys), 0).double()
    scores = queries.double() @ keys.transpose(1, 2) * SCALE
    at = torch.arange(keys.shape[1])
    visible = at <= start + torch.arange(queries.shape[1])[:, None]
    return torch.softmax(scores.masked_fill(~visible, -torch.inf), -1)


@settings(max_examples=30)
@given(st.integers(1, 4), st.integers(1, 9), st.integers(0, 1000), st.sampled_from([1, 4]))
def test_pages_merge_to_dense_attention(owners: int, most: int, seed: int, segments: int) -> None:
    """Any number of pages per owner, partly filled, some free ones between; mass per segment adds up to one."""
    g = torch.Generator().manual_seed(seed)
    counts = torch.randint(1, most + 1, (owners,), generator=g).tolist()
    page, group, dim = 8, 3, 5
    fills = [[page] * (count - 1) + [int(torch.randint(1, page + 1, (1,), generator=g))] for count in counts]
    free = 3
    total = sum(counts) + free
    slots = torch.randperm(total, generator=g)[: sum(counts)]
    keys, values = torch.randn(total, page, dim, generator=g), torch.randn(total, page, dim, generator=g)
    queries = torch.randn(owners, group, dim, generator=g)
    owner, filled = torch.zeros(total, dtype=torch.int64), torch.zeros(total, dtype=torch.int64)
    owner[slots] = torch.repeat_interleave(torch.arange(owners), torch.tensor(counts))
    filled[slots] = torch.tensor([fill for fills_of_one in fills for fill in fills_of_one])
    valid = torch.arange(page) < filled[:, None]
    partials = attend_pages(queries[owner], keys, values, valid, SCALE, segments)
    merged = merge_pages(partials, owner, slots, owners)
    for one in range(owners):
        mine = slots[owner[slots] == one]
        flat = valid[mine].flatten()
        own_keys, own_values = keys[mine].flatten(0, 1)[flat], values[mine].flatten(0, 1)[flat]
        weights = torch.softmax(queries[one] @ own_keys.T * SCALE, -1)
        torch.testing.assert_close(merged.output[one], weights @ own_values, rtol=1e-4, atol=1e-5)
        received = (merged.share[mine][..., None] * partials.mass[mine]).sum((0, 2))
        torch.testing.assert_close(received, torch.ones(group))


@pytest.mark.parametrize("chunks", [[130], [64, 66], [1, 128, 1]], ids=str)
def test_column_sums_equal_dense_attention(chunks: list[int]) -> None:
    queries, keys = torch.randn(6, 130, 8), torch.randn(2, 130, 8)
    sums, start = torch.zeros(6, 130), 0
    for chunk in chunks:
        add_column_sums(sums, queries[:, start : start + chunk], keys[:, : start + chunk], start, SCALE)
        start += chunk
    torch.testing.assert_close(sums.double(), dense(queries, keys, 0).sum(1), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(sums.sum(1), torch.full((6,), 130.0))


@pytest.mark.parametrize("chunks", [[130], [64, 66], [1, 128, 1]], ids=str)
@pytest.mark.parametrize("size", [1, 20], ids=["flat", "peaked"])
def test_column_sums_of_bf16_prefill_equal_dense_attention(chunks: list[int], size: int) -> None:
    """With the log-sum-exps that prefill's own attention gives, as in a sweep. Peaked, some tokens receive next to
    nothing, and that is right too."""
    queries, keys = torch.randn(6, 130, 16) * size, torch.randn(2, 130, 16)
    queries, keys = queries.bfloat16(), keys.bfloat16()
    sums, start = torch.zeros(6, 130), 0
    for chunk in chunks:
        asked, seen = queries[:, start : start + chunk], keys[:, : start + chunk]
        _, log_sums = causal_attention(asked[None], seen[None], seen[None], SCALE, None)
        add_column_sums(sums, asked, seen, start, SCALE, log_sums[0])
        start += chunk
    torch.testing.assert_close(sums.double(), dense(queries, keys, 0).sum(1), rtol=3e-4, atol=1e-30)


def test_three_numbers_hold_what_one_wider_one_does() -> None:
    numbers = torch.cat([torch.randn(1000) * 10.0 ** torch.randint(-3, 4, (1000,)), torch.zeros(1)])
    assert torch.equal(_in_three(numbers).double().sum(-1), numbers.double())


@pytest.mark.parametrize(("window", "tokens"), [(1, 5), (8, 8), (8, 40)])
def test_window_attention_equals_dense_attention(window: int, tokens: int) -> None:
    queries, keys = torch.randn(3, window, 8), torch.randn(tokens, 8)
    found = window_attention(queries, keys, SCALE)
    torch.testing.assert_close(found.double(), dense(queries, keys[None], tokens - window), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize(("new", "visible"), [(12, 12), (5, 12), (1, 12)])
def test_prefill_attention_is_causal_and_slides(window: int | None, new: int, visible: int) -> None:
    queries, keys, values = torch.randn(1, 4, new, 8), torch.randn(1, 2, visible, 8), torch.randn(1, 2, visible, 8)
    weights = dense(queries[0], keys[0], visible - new)
    if window is not None:
        at = torch.arange(visible)
        gone = at <= torch.arange(visible - new, visible)[:, None] - window
        weights = weights.masked_fill(gone, 0)
        weights = weights / weights.sum(-1, keepdim=True)
    expected = weights @ values[0].repeat_interleave(2, 0).double()
    found, log_sums = causal_attention(queries, keys, values, SCALE, window)
    torch.testing.assert_close(found[0].double(), expected, rtol=1e-4, atol=1e-5)
    if window is None:
        scores = queries[0].double() @ keys[0].repeat_interleave(2, 0).double().transpose(1, 2) * SCALE
        unseen = torch.arange(visible) > torch.arange(visible - new, visible)[:, None]
        expected_sums = scores.masked_fill(unseen, -torch.inf).logsumexp(-1)
        torch.testing.assert_close(log_sums[0].double(), expected_sums, rtol=1e-5, atol=1e-5)
    else:
        assert log_sums is None


def test_a_ring_slides_like_dense_attention() -> None:
    """Rows at different positions, prompts shorter and longer than the window, a row that waits."""
    window, steps = 6, 15
    ring = SlidingRing(LayerLayout("sliding", 4, 2, 8, 8, window), 3, torch.device("cpu"), torch.float32)
    lengths = [3, 11, 6]
    keys = [torch.randn(2, length, 8) for length in lengths]
    values = [torch.randn(2, length, 8) for length in lengths]
    for row, length in enumerate(lengths):
        kept = min(length, window - 1)
        ring.write(row, keys[row][:, length - kept :], values[row][:, length - kept :], length)
    for step in range(steps):
        active = [row for row in range(3) if row != 1 or step % 2]
        queries, new_keys, new_values = torch.randn(3, 4, 1, 8), torch.randn(3, 2, 1, 8), torch.randn(3, 2, 1, 8)
        positions = torch.tensor([[one.shape[1]] for one in keys])
        counts = torch.tensor([int(row in active) for row in range(3)])
        found = ring.attend(queries, new_keys, new_values, positions, counts, SCALE)
        for row in active:
            keys[row] = torch.cat([keys[row], new_keys[row]], 1)
            values[row] = torch.cat([values[row], new_values[row]], 1)
            last_keys, last_values = keys[row][:, -window:], values[row][:, -window:]
            weights = dense(queries[row], last_keys, last_keys.shape[1] - 1)
            expected = weights @ last_values.repeat_interleave(2, 0).double()
            torch.testing.assert_close(found[row].double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("prefix", [0, 1, 30, 1031])
@pytest.mark.parametrize("value_dim", [8, 6], ids=["equal sizes", "smaller values"])
def test_a_shared_prefix_is_attended_like_a_private_one(prefix: int, value_dim: int) -> None:
    queries = torch.randn(5, 4, 1, 8)
    shared_keys, shared_values = torch.randn(2, prefix, 8), torch.randn(2, prefix, value_dim)
    own_keys, own_values = torch.randn(5, 2, 3, 8), torch.randn(5, 2, 3, value_dim)
    found = shared_prefix_attention(queries, shared_keys, shared_values, own_keys, own_values, SCALE)
    for row in range(5):
        keys, values = torch.cat([shared_keys, own_keys[row]], 1), torch.cat([shared_values, own_values[row]], 1)
        expected = dense(queries[row], keys, prefix + 2) @ values.repeat_interleave(2, 0).double()
        torch.testing.assert_close(found[row].double(), expected, rtol=1e-4, atol=1e-5)


def test_attention_of_futures_takes_queries_that_lie_across() -> None:
    """The CPU's operator reads them as if they did not, and says nothing."""
    torch.manual_seed(0)
    queries, keys, values = (torch.randn(1, 2, length, 16) for length in (3, 20, 20))
    across = queries.transpose(2, 3).contiguous().transpose(2, 3)
    assert across.stride(-1) != 1
    for found, expected in zip(
        attend_everything(across, keys, values, 0.25), attend_everything(queries, keys, values, 0.25), strict=True
    ):
        assert torch.equal(found, expected)
