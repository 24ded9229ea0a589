"""Attention of decode rows over both tiers, on a GPU: three launches whatever the batch (a fourth for the ledger).

    attend_full, attend_codes    every split of every (row, KV head): partial outputs, and what each window received
    combine                      one (row, query head): output and log-sum-exp
    add_scores                   one (row, run of pages): the windows' scores (Eq. 1)

How many pages a split has depends on the pool alone, so a row's output does not depend on the rows beside it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from kvcache.kernels import dispatch, owned_attention
from kvcache.kernels.owned_attention import padded
from kvcache.layout import LayerLayout
from qevict.kernels.code_attention import CodePages

PAGE, CHUNKS = 64, 2
WARPS, STAGES = 2, 2
WINDOWS = (4, 8, 16, 32)
FULL_SPLIT, CODE_SPLIT = 12, 36
"""Pages of a split, for batches that fill a GPU without more: 768 and 2,304 tokens."""

SCORED_PAGES = 8
"""Whose scores one program brings up to date."""


@dataclass(frozen=True)
class FullPages:
    """Full-precision pages of one layer: keys [P, H_kv, s, Ω, d], values [P, H_kv, s, Ω, d_v], fill [P, s] uint8."""

    keys: Tensor
    values: Tensor
    fill: Tensor


@dataclass(frozen=True)
class PageTables:
    """The pages of every row, padded: full [rows, F], codes [rows, C] and how many they are [rows]; all int32."""

    full: Tensor
    full_count: Tensor
    codes: Tensor
    code_count: Tensor

    @classmethod
    def of(cls, rows: int, full: dict[int, Tensor], codes: dict[int, Tensor], device: torch.device) -> PageTables:
        return cls(*_table(rows, full, device), *_table(rows, codes, device))


def _table(rows: int, pages: dict[int, Tensor], device: torch.device) -> tuple[Tensor, Tensor]:
    widest = max((len(of_row) for of_row in pages.values()), default=0)
    table = torch.zeros(rows, widest, dtype=torch.int32, device=device)
    for row, of_row in pages.items():
        table[row, : len(of_row)] = of_row
    counts = [len(pages[row]) if row in pages else 0 for row in range(rows)]
    return table, torch.tensor(counts, dtype=torch.int32, device=device)


def fuses(layout: LayerLayout, window: int, device: torch.device) -> bool:
    """Whether the kernels serve this shape here; where not, the plain path does."""
    return window in WINDOWS and owned_attention.fuses(layout.key_dim, layout.value_dim, device)


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Of the arithmetic on codes. fp16 for bf16 models too: it holds the codes exactly and three bits more besides."""
    return torch.float32 if dtype == torch.float32 else torch.float16


def rotary_rows(rotary: Tensor, dtype: torch.dtype) -> Tensor:
    """The tables as the kernel reads them: [2, W, d / 2, Ω] -> [2, W, Ω, d / 2], a row per position."""
    return rotary.transpose(2, 3).to(compute_dtype(dtype)).contiguous()


def attend_tiers(
    queries: Tensor,
    rows: Tensor,
    tables: PageTables,
    full: FullPages,
    codes: CodePages,
    windows: Tensor,
    scores: tuple[Tensor, Tensor] | None,
    rotary: Tensor,
    bits: int,
    scale: float,
) -> Tensor:
    """Attention of one new token per row; adds what each window received, mean over query heads, to ``scores``.

    Args:
        queries: [r, H_q, d].
        rows: [r], the rows they belong to.
        windows: [P, s] int32, window + 1 in each ledger slot, 0 where it is free.
        scores: [P, s] fp32 of the full-precision and the ledger slots, changed in place, if they are wanted.
        rotary: from :func:`rotary_rows`.

    Returns:
        [r, H_q, d_v] fp32.
    """
    launch = plan_launch(queries, tables, full, codes, bits)
    return launch.run(queries, rows, tables, full, codes, windows, scores, rotary, scale)


def pages_per_split(rows: int) -> tuple[int, int]:
    """Of the two tiers. Small batches are split finer, or most of the device would wait."""
    return max(1, FULL_SPLIT * min(rows, 8) // 8), max(4, CODE_SPLIT * min(rows, 8) // 8)


@dataclass(frozen=True)
class Launch:
    """Sizes of one step's launches; what they move follows from them."""

    rows: int
    heads: int
    group: int
    key_dim: int
    value_dim: int
    window: int
    bits: int
    full_width: int
    code_width: int
    full_pages: int
    code_pages: int

    @property
    def full_splits(self) -> int:
        return -(-self.full_width // self.full_pages)

    @property
    def splits(self) -> int:
        return self.full_splits + -(-self.code_width // self.code_pages)

    @property
    def pair(self) -> int:
        """KV heads that one program serves in the tier of codes."""
        return 2 - self.heads % 2

    @property
    def slots(self) -> int:
        return PAGE // self.window

    def run(
        self,
        queries: Tensor,
        rows: Tensor,
        tables: PageTables,
        full: FullPages,
        codes: CodePages,
        windows: Tensor,
        scores: tuple[Tensor, Tensor] | None,
        rotary: Tensor,
        scale: float,
    ) -> Tensor:
        from triton import knobs

        from qevict.kernels import triton_tiers as kernels

        width = self.full_width + self.code_width
        owners = self.rows * self.heads
        empty = queries.new_empty
        partial = empty(owners, self.splits, self.group, self.value_dim, dtype=torch.float32)
        stats = empty(owners, self.splits, 2, self.group, dtype=torch.float32)
        mass = empty(self.rows, width, self.heads, self.slots, self.group, dtype=torch.float32)
        peaks = empty(self.rows, width, self.heads, CHUNKS, self.group, dtype=torch.float32)
        output = empty(self.rows, self.heads * self.group, self.value_dim, dtype=torch.float32)
        log_sums = empty(self.rows, self.heads * self.group, dtype=torch.float32)
        queries, rows = queries.contiguous(), rows.int()
        sizes = {"H": self.heads, "G": self.group, "HEADS": padded(self.group), "OMEGA": self.window}
        dims = {"D": self.key_dim, "DV": self.value_dim, "num_stages": STAGES}
        outputs = (partial, stats, mass, peaks, scale * math.log2(math.e))
        if self.full_width:
            kernels.attend_full[owners, self.full_splits](
                queries, rows, tables.full, tables.full_count, full.keys, full.values, full.fill, *outputs,
                self.full_width, width, self.splits,
                PAGES=self.full_pages, FULL=dispatch.triton_dtype(full.keys.dtype), num_warps=WARPS, **sizes, **dims,
            )  # fmt: skip
        if self.code_width:
            packed = rotary.dtype == torch.float16 and not knobs.runtime.interpret
            kernels.attend_codes[owners // self.pair, self.splits - self.full_splits](
                queries, rows, tables.codes, tables.code_count,
                codes.key_codes, codes.key_scale, codes.key_offset,
                codes.value_codes.view(torch.int32).view(torch.uint32), codes.value_scale, codes.value_offset,
                windows, rotary[0], rotary[1], *outputs,
                self.code_width, width, self.full_splits, self.splits,
                PAGES=self.code_pages, BITS=self.bits, PAIR=self.pair, PACKED=packed,
                COMPUTE=dispatch.triton_dtype(rotary.dtype),
                num_warps=WARPS * self.pair, **sizes, **dims,
            )  # fmt: skip
        counts = (tables.full_count, tables.code_count)
        kernels.combine[(owners * self.group,)](
            partial, stats, rows, *counts, output, log_sums, self.full_splits, self.splits,
            H=self.heads, G=self.group, DV=self.value_dim, FULL_PAGES=self.full_pages, CODE_PAGES=self.code_pages,
            num_warps=1,
        )  # fmt: skip
        if scores is not None:
            kernels.add_scores[self.rows, -(-width // SCORED_PAGES)](
                mass, peaks, log_sums, rows, tables.full, tables.full_count, tables.codes, tables.code_count, *scores,
                self.full_width, self.code_width, PAGES=SCORED_PAGES,
                H_PADDED=1 << (self.heads - 1).bit_length(), num_warps=1, **sizes,
            )  # fmt: skip
        return output


def plan_launch(queries: Tensor, tables: PageTables, full: FullPages, codes: CodePages, bits: int) -> Launch:
    """Sizes of a step for these rows; the split depends on how many rows the pool can hold."""
    heads, _, window, key_dim = full.keys.shape[1:]
    full_pages, code_pages = pages_per_split(len(tables.full))
    return Launch(
        rows=len(queries),
        heads=heads,
        group=queries.shape[1] // heads,
        key_dim=key_dim,
        value_dim=full.values.shape[-1],
        window=window,
        bits=bits,
        full_width=tables.full.shape[1],
        code_width=tables.codes.shape[1],
        full_pages=full_pages,
        code_pages=code_pages,
    )
