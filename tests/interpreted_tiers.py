"""The tiered attention kernels in Triton's interpreter against the plain path. Run by test_triton_interpreter.py."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from kvcache.kernels.paged_attention import PagePartials, attend_pages, merge_pages
from kvcache.quant import quantize
from qevict.capacity import Capacities
from qevict.kernels.code_attention import CodePages, attend_code_pages
from qevict.kernels.tiered_attention import FullPages, PageTables, attend_tiers, plan_launch, rotary_rows
from qevict.routing import assign_tiers

SCALE = 0.11
ERROR = {torch.float32: 1e-5, torch.float16: 4e-3}
"""Norm of the difference over the norm of what is expected."""


@dataclass
class Case:
    """Pages of two tiers with some slots free and some partly filled, owned by rows of different lengths."""

    queries: Tensor
    rows: Tensor
    full_of: dict[int, Tensor]
    codes_of: dict[int, Tensor]
    full: FullPages
    codes: CodePages
    windows: Tensor
    rotary: Tensor
    bits: int

    @property
    def slots(self) -> int:
        return self.windows.shape[1]


def case(dim: int, group: int, window: int, bits: int, dtype: torch.dtype, heads: int = 2, code_pages: int = 7) -> Case:
    g = torch.Generator().manual_seed(dim + group + window + bits)
    slots, full_pages = 64 // window, 5
    full_of = {0: torch.tensor([3, 0]), 2: torch.tensor([4]), 3: torch.tensor([2])}
    codes_of = {0: torch.tensor([5, 1, 2]), 2: torch.tensor([6]), 3: torch.tensor([], dtype=torch.int64)}
    keys, values = (torch.randn(full_pages, heads, slots, window, dim, generator=g) for _ in range(2))
    fill = torch.randint(0, window + 1, (full_pages, slots), generator=g).to(torch.uint8)
    fill[:, 0] = 1
    coded_keys = quantize(torch.randn(code_pages, heads, slots, dim, window, generator=g) * 2 + 0.5, bits)
    coded_values = quantize(torch.randn(code_pages, heads, slots, window, dim, generator=g), bits)
    windows = torch.randperm(code_pages * slots, generator=g).view(code_pages, slots).int() + 1
    windows[torch.rand(code_pages, slots, generator=g) < 0.2] = 0
    angles = torch.arange(code_pages * slots * window)[:, None] / 100 ** (torch.arange(dim // 2) / (dim // 2))
    rotary = torch.stack([angles.cos(), angles.sin()]).unflatten(1, (-1, window)).transpose(2, 3).contiguous()
    return Case(
        torch.randn(3, heads * group, dim, generator=g).to(dtype),
        torch.tensor([0, 2, 3]),
        full_of,
        codes_of,
        FullPages(keys.to(dtype), values.to(dtype), fill),
        CodePages(*vars(coded_keys).values(), *vars(coded_values).values()),
        windows,
        rotary,
        bits,
    )


def fused(given: Case, pool_rows: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    """Output, and what the windows of both tiers received."""
    tables = PageTables.of(pool_rows, given.full_of, given.codes_of, torch.device("cpu"))
    scores = torch.zeros(len(given.full.fill), given.slots), torch.zeros(len(given.windows), given.slots)
    output = attend_tiers(
        given.queries,
        given.rows,
        tables,
        given.full,
        given.codes,
        given.windows,
        scores,
        rotary_rows(given.rotary, given.queries.dtype),
        given.bits,
        SCALE,
    )
    return output, *scores


def plain(given: Case) -> tuple[Tensor, Tensor, Tensor]:
    heads, window, dim = given.full.keys.shape[1], given.full.keys.shape[3], given.queries.shape[-1]
    group, pages = given.queries.shape[1] // heads, len(given.full.fill) + len(given.windows)
    row_of_page = torch.zeros(pages, dtype=torch.int64)
    order = []
    for index, row in enumerate(given.rows.tolist()):
        mine = torch.cat([given.full_of[row], given.codes_of[row] + len(given.full.fill)])
        row_of_page[mine] = index
        order.append((mine * heads + torch.arange(heads)[:, None]).flatten())
    queries = given.queries.unflatten(1, (heads, group))[row_of_page]
    valid = (torch.arange(window) < given.full.fill[..., None]).flatten(1).repeat_interleave(heads, 0)
    keys, values = (part.flatten(2, 3).flatten(0, 1) for part in (given.full.keys, given.full.values))
    split = len(given.full.fill)
    of_full = attend_pages(queries[:split].flatten(0, 1), keys, values, valid, SCALE, given.slots)
    of_codes = attend_code_pages(queries[split:], given.codes, given.windows - 1, given.rotary, given.bits, SCALE)
    partials = PagePartials(*(torch.cat([getattr(of_full, k), getattr(of_codes, k)]) for k in vars(of_full)))
    owners = (row_of_page[:, None] * heads + torch.arange(heads)).flatten()
    merged = merge_pages(partials, owners, torch.cat(order), len(given.rows) * heads)
    received = (merged.share[..., None] * partials.mass).unflatten(0, (-1, heads)).sum((1, 2)) / (heads * group)
    owned = torch.zeros(pages, dtype=torch.bool)
    owned[torch.cat([pages_of for pages_of in order]) // heads] = True
    received[~owned] = 0
    return merged.output.view(len(given.rows), heads * group, dim), received[:split], received[split:]


SHAPES = [
    (64, 4, 8, 2),
    (128, 4, 8, 2),
    (64, 1, 8, 4),
    (64, 8, 16, 2),
    (64, 3, 4, 2),
    (64, 2, 32, 2),
    (64, 2, 4, 4),
    (128, 7, 16, 4),
]


def assert_close(given: Case, pool_rows: int = 4) -> None:
    for found, expected in zip(fused(given, pool_rows), plain(given), strict=True):
        assert (found - expected).norm() <= ERROR[given.queries.dtype] * expected.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
@pytest.mark.parametrize(("dim", "group", "window", "bits"), SHAPES)
def test_output_and_window_mass_equal_the_plain_path(
    dim: int, group: int, window: int, bits: int, dtype: torch.dtype
) -> None:
    assert_close(case(dim, group, window, bits, dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
def test_mass_sums_to_one_over_all_windows(dtype: torch.dtype) -> None:
    """Half the query heads sharply peaked, half nearly uniform."""
    given = case(64, 4, 8, 2, dtype)
    given.queries *= torch.tensor([6.0, 0.05]).repeat(4)[:, None].to(dtype)
    _, full, codes = fused(given)
    for row in (0, 2, 3):
        received = full[given.full_of[row]].sum() + codes[given.codes_of[row]].sum()
        torch.testing.assert_close(received, torch.tensor(1.0), rtol=0, atol=1e-3)


def test_an_odd_number_of_heads_is_served_one_by_one() -> None:
    assert_close(case(64, 2, 8, 2, torch.float16, heads=3))


def test_a_rows_output_has_the_same_bits_alone_and_beside_others() -> None:
    given = case(64, 2, 8, 2, torch.float16)
    together, _, _ = fused(given)
    for index, row in enumerate(given.rows.tolist()):
        alone = replace(given, queries=given.queries[index : index + 1], rows=given.rows[index : index + 1])
        alone.full_of = {row: given.full_of[row]}
        alone.codes_of = {row: given.codes_of[row]}
        assert torch.equal(fused(alone)[0][0], together[index])


@pytest.mark.parametrize(("pool_rows", "splits"), [(1, 7), (64, 2)])
def test_the_number_of_splits_does_not_matter(pool_rows: int, splits: int) -> None:
    """A tier of several splits, the last one shorter."""
    given = case(64, 2, 8, 2, torch.float32)
    given.rows, given.queries = given.rows[:1], given.queries[:1]
    given.full_of, given.codes_of = {0: torch.tensor([0, 4, 2, 1, 3])}, {0: torch.arange(7)}
    tables = PageTables.of(pool_rows, given.full_of, given.codes_of, torch.device("cpu"))
    launch = plan_launch(given.queries, tables, given.full, given.codes, given.bits)
    assert launch.splits == splits
    assert_close(given, pool_rows)


def test_what_lies_in_free_slots_has_no_effect() -> None:
    given = case(64, 2, 8, 2, torch.float32)
    before = fused(given)
    free = given.windows <= 0
    for name in ("key_codes", "key_scale", "value_codes", "value_scale"):
        getattr(given.codes, name).transpose(1, 2)[free] = 77
    empty = torch.arange(8) >= given.full.fill[..., None]
    for pages in (given.full.keys, given.full.values):
        pages.permute(0, 2, 3, 1, 4)[empty] = 1e4
    for after, expected in zip(fused(given), before, strict=True):
        assert torch.equal(after, expected)


def test_fp16_arithmetic_routes_windows_as_eager_attention_does() -> None:
    """Prompt scores as long prompts leave them, then a routing interval of decode steps: at most one window in a
    thousand gets another tier."""
    given = case(64, 4, 8, 2, torch.float16, heads=1, code_pages=64)
    given.codes_of, given.full_of = {0: torch.arange(64)}, {0: torch.tensor([0])}
    given.windows = torch.arange(512).view(64, 8).int() + 1
    given.rows, given.queries = given.rows[:1], given.queries[:1]
    g = torch.Generator().manual_seed(1)
    prompt = torch.empty(512).exponential_(generator=g) * 8
    by_kernel, by_eager = prompt.clone(), prompt.clone()
    for _ in range(2):
        given.queries = torch.randn(given.queries.shape, generator=g).half()
        by_kernel += 4 * fused(given)[2].flatten()
        by_eager += 4 * plain(given)[2].flatten()
    room = Capacities(full=60, quantized=300, protected_slots=0, recent=0, strict=True, promotion="residency")
    windows, everything = torch.arange(512)[None], torch.ones(1, 512, dtype=torch.bool)
    tiers = [assign_tiers(scores[None], windows, everything, everything, room) for scores in (by_kernel, by_eager)]
    assert (tiers[0] == tiers[1]).float().mean() >= 0.999
