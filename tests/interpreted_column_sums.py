"""The column-sum kernels in Triton's interpreter against the plain path. Run by test_triton_interpreter.py."""

from __future__ import annotations

import pytest
import torch

from kvcache.kernels import column_sums
from kvcache.kernels.column_sums import _add_fused, _add_plain

SCALE = 0.2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("chunks", [[200], [64, 1, 135], [129, 71]], ids=str)
def test_chunks_add_up_to_the_plain_sums(chunks: list[int], group: int, dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(group)
    total, heads, dim = sum(chunks), 2, 64
    queries, keys = torch.randn(heads * group, total, dim, generator=g), torch.randn(heads, total, dim, generator=g)
    queries, keys = queries.to(dtype), keys.to(dtype)
    expected, found = torch.zeros(2, heads * group, total).unbind()
    start = 0
    for chunk in chunks:
        now = queries[:, start : start + chunk], keys[:, : start + chunk]
        _add_plain(expected, *now, start, SCALE)
        _add_fused(found, *now, start, SCALE, None)
        start += chunk
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.sum(1), torch.full((heads * group,), float(total)), rtol=1e-4, atol=0)


def test_saved_log_sums_replace_the_first_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    g = torch.Generator().manual_seed(5)
    queries, keys = torch.randn(2, 70, 64, generator=g), torch.randn(1, 100, 64, generator=g)
    scores = (queries @ keys.transpose(1, 2) * SCALE).masked_fill(
        torch.arange(100) > 30 + torch.arange(70)[:, None], -torch.inf
    )
    expected, found = torch.zeros(2, 2, 100).unbind()
    _add_plain(expected, queries, keys, 30, SCALE)
    monkeypatch.setattr("kvcache.kernels.triton_column_sums.row_log_sums", None)
    column_sums._add_fused(found, queries, keys, 30, SCALE, scores.logsumexp(-1))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
