"""Bytes that a decode step's attention moves, counted from the sizes of its launches, beside what it needs at least.

counted         every load and store of every program of the step's launches; the rotary tables, which all rows, heads
                and layers share and which stay in the L2 cache, once per step
minimum         what is stored once: codes, scales, full-precision tokens, tables, scores (read and written), queries,
                output
reconstruction  the same tiers dequantised, rebuilt as one cache and attended to, as published implementations do
full            the keys and values of the uncompressed cache
"""

from __future__ import annotations

from dataclasses import dataclass

from kvcache.budget import Budget
from kvcache.layout import CacheLayout, LayerLayout
from qevict.kernels.tiered_attention import CHUNKS, PAGE, SCORED_PAGES, Launch, pages_per_split
from qevict.method import QEvict

FP32, FP16, INT32 = 4, 2, 4


@dataclass(frozen=True)
class Setting:
    """A batch of equal rows of QEvict on one layer of a model with the shape of Llama-3.1-8B."""

    rows: int
    context: int
    budget: str
    new_tokens: int = 128
    heads: int = 8
    group: int = 4
    dim: int = 128

    def launch(self) -> Launch:
        """Pages at full occupancy: every slot of the budget holds a window."""
        method, layer = QEvict(), LayerLayout("growing", self.heads * self.group, self.heads, self.dim, self.dim)
        layout = CacheLayout((layer,), FP16)
        budget = Budget.parse(self.budget).resolve(self.context, self.new_tokens, "prompt+max_new", layout)
        room = method.capacities(budget, layout)
        if room is None:
            raise ValueError(f"{self.budget} of {self.context} tokens does not hold sinks and recent tokens")
        slots = PAGE // method.window
        full_pages, code_pages = pages_per_split(self.rows)
        return Launch(
            rows=self.rows,
            heads=self.heads,
            group=self.group,
            key_dim=self.dim,
            value_dim=self.dim,
            window=method.window,
            bits=method.bits,
            full_width=-(-(room.protected_slots + room.full) // slots),
            code_width=-(-room.quantized // slots),
            full_pages=full_pages,
            code_pages=code_pages,
        )


@dataclass(frozen=True)
class Traffic:
    counted: int
    minimum: int
    reconstruction: int
    full: int


def traffic(setting: Setting) -> Traffic:
    launch = setting.launch()
    tokens = setting.context + setting.new_tokens
    return Traffic(counted(launch, tokens), minimum(launch, tokens), reconstruction(launch), full_cache(launch, tokens))


def counted(launch: Launch, positions: int) -> int:
    owners, query_heads = launch.rows * launch.heads, launch.rows * launch.heads * launch.group
    width = launch.full_width + launch.code_width
    split = launch.group * (launch.key_dim * FP16 + launch.value_dim * FP32 + 2 * FP32)  # query in, partial out
    mass = (launch.slots + CHUNKS) * launch.group * FP32
    attend = owners * (
        launch.splits * split
        + width * (mass + INT32)
        + launch.full_width * (_full_page(launch) + launch.slots)
        + launch.code_width * (_code_page(launch) + launch.slots * INT32)
    )
    output = query_heads * (launch.value_dim + 1) * FP32
    combine = owners * launch.splits * launch.group * (launch.value_dim + 2) * FP32 + output
    scores = launch.rows * width * (launch.heads * mass + INT32 + 2 * launch.slots * FP32)
    scores += launch.rows * -(-width // SCORED_PAGES) * launch.heads * launch.group * FP32
    return attend + combine + scores + _rotary(launch, positions)


def rotary_reads(launch: Launch) -> int:
    """What all programs read of the rotary tables, mostly from the L2 cache: once per token and pair of heads."""
    return launch.rows * launch.heads // launch.pair * launch.code_width * PAGE * launch.key_dim * FP16


def minimum(launch: Launch, positions: int) -> int:
    owners = launch.rows * launch.heads
    stored = owners * (launch.full_width * _full_page(launch) + launch.code_width * _code_page(launch))
    width = launch.full_width + launch.code_width
    tables = launch.rows * width * launch.slots * (1 + 2 * FP32) + launch.rows * launch.code_width * launch.slots * 3
    ends = owners * launch.group * (launch.key_dim * FP16 + launch.value_dim * FP32)
    return stored + tables + ends + _rotary(launch, positions)


def reconstruction(launch: Launch) -> int:
    """Codes read and written out in full precision; both tiers read and written as one cache; that cache read."""
    owners = launch.rows * launch.heads
    codes, whole = launch.code_width * _code_page(launch), launch.code_width * _full_page(launch)
    return owners * (codes + whole + 3 * (whole + launch.full_width * _full_page(launch)))


def full_cache(launch: Launch, tokens: int) -> int:
    return launch.rows * launch.heads * tokens * (launch.key_dim + launch.value_dim) * FP16


def _full_page(launch: Launch) -> int:
    return PAGE * (launch.key_dim + launch.value_dim) * FP16


def _code_page(launch: Launch) -> int:
    codes = PAGE * (launch.key_dim + launch.value_dim) * launch.bits // 8
    return codes + 2 * FP16 * (launch.slots * launch.key_dim + PAGE)


def _rotary(launch: Launch, positions: int) -> int:
    return positions * launch.key_dim * FP16 if launch.code_width else 0
