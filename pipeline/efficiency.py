"""From the rows of isolated runs to efficiency: medians over repeats, and ratios to the full cache inside a repeat.

A setting is what may stand in one table: one model, one prompt length, one batch. Throughput is Eq. 10's: all tokens
that the batch generated, over the time from the first prompt to the last token.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pipeline.results import BASELINE
from pipeline.summary import planned_rows

if TYPE_CHECKING:
    import pandas as pd

FIGURES = (
    *("ttft_s", "tpot_s", "throughput", "peak_device_bytes", "prefill_s", "compress_s", "admit_s", "decode_s"),
    *("kv_bytes_prefill", "kv_bytes_end", "kv_bytes_peak", "kv_share", "workspace_bytes", "host_bytes"),
)
RATIOS = ("ttft_s", "tpot_s", "throughput", "peak_device_bytes")


@dataclass(frozen=True)
class Spread:
    """Over repeats."""

    median: float
    least: float
    most: float


@dataclass(frozen=True, order=True)
class Setting:
    model: str
    prompt_tokens: int
    batch: int

    def __str__(self) -> str:
        return f"{self.model}, prompts of {self.prompt_tokens:,} tokens, batch {self.batch:,}"


@dataclass(frozen=True)
class Timed:
    """A method at a budget in a setting. ``ratios``: to the full cache of the same repeats, ``pairs`` of them."""

    cell_id: str
    method: str
    label: str
    settings: str
    budget: str
    figures: Mapping[str, Spread]
    ratios: Mapping[str, Spread]
    repeats: int
    pairs: int
    expected: int
    asked: int
    failed: int
    over_budget: int
    impossible: str

    @property
    def is_baseline(self) -> bool:
        return self.method == BASELINE

    @property
    def name(self) -> str:
        return f"{self.label} at {self.budget}"


@dataclass(frozen=True)
class Efficiency:
    """One setting. ``machines``: what its rows ran on; more than one makes its medians doubtful."""

    setting: Setting
    results: tuple[Timed, ...]
    machines: tuple[str, ...]


def efficiency(rows: pd.DataFrame, cells: Sequence[Mapping[str, Any]]) -> tuple[Efficiency, ...]:
    """``rows`` of the store and ``cells`` of the plan to one result per setting, in the plan's order."""
    planned = timed_rows(rows, cells)
    grouped: dict[Setting, list[Mapping[str, Any]]] = {}
    for cell in cells:
        setting = Setting(str(cell["model"]), int(cell["context"]), int(cell["batch"]))
        grouped.setdefault(setting, []).append(cell)
    return tuple(_of_setting(setting, mine, planned) for setting, mine in grouped.items())


def timed_rows(rows: pd.DataFrame, cells: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """The rows that the plan asks for, with ``throughput``, and ``round``: what ran side by side has the same."""
    planned = planned_rows(rows, cells)
    meta = planned["sample_meta"].map(json.loads)
    return planned.assign(
        scored=planned["status"] == "ok",
        throughput=planned["batch_rows"] * planned["output_tokens"] / (planned["ttft_s"] + planned["decode_s"]),
        round=meta.map(lambda facts: facts.get("round", "")),
        threads=meta.map(lambda facts: str(facts.get("threads", ""))),
    )


def _of_setting(setting: Setting, cells: Sequence[Mapping[str, Any]], planned: pd.DataFrame) -> Efficiency:
    mine = planned[planned["cell_id"].isin([cell["cell_id"] for cell in cells])]
    done = mine[mine["scored"]]
    full = done[done["cell_id"].isin([cell["cell_id"] for cell in cells if cell["method"] == BASELINE])]
    where = done[["device", "node", "threads"]].drop_duplicates().itertuples(index=False)
    machines = tuple(f"{device} of {node}, {threads} threads" for device, node, threads in where)
    return Efficiency(setting, tuple(_timed(cell, mine, full) for cell in cells), machines)


def _timed(cell: Mapping[str, Any], rows: pd.DataFrame, full: pd.DataFrame) -> Timed:
    own = rows[rows["cell_id"] == cell["cell_id"]]
    done = own[own["scored"]]
    pairs = done.merge(full, on=["round", "sample_index"], suffixes=("", "_full"))
    return Timed(
        cell_id=str(cell["cell_id"]),
        method=str(cell["method"]),
        label=str(cell.get("label") or cell["method"]),
        settings=json.dumps(cell["settings"], sort_keys=True),
        budget=str(cell["budget"]),
        figures={name: _spread(done[name]) for name in FIGURES} if len(done) else {},
        ratios={name: _spread(pairs[name] / pairs[f"{name}_full"]) for name in RATIOS} if len(pairs) else {},
        repeats=len(done),
        pairs=len(pairs),
        expected=int(cell["expected"]),
        asked=int(cell.get("asked", cell["expected"])),
        failed=len(own) - len(done),
        over_budget=int(done["over_budget"].sum()),
        impossible=str(cell["impossible"]),
    )


def _spread(values: pd.Series[Any]) -> Spread:
    numbers = values.astype("float64")
    return Spread(float(numbers.median()), float(numbers.min()), float(numbers.max()))
