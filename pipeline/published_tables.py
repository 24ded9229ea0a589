"""The papers' own tables, beside which ``kvsweep report OUT --paper qevict:table3`` puts an output's scores.

A published cell stands beside every configuration of the same model, method and budget: QEvict (arXiv 2608.05326),
tables 2, 3 and 6; LORE-KV (arXiv 2610.07643), the averages that its text gives. The papers' prompts, templates and
samples are theirs: a number that lies outside our interval differs, and does not say why.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.resources import files
from statistics import fmean

from pipeline.errors import SweepProblem
from pipeline.figures import NOTHING, brackets, difference, name, points
from pipeline.results import Result, Summary
from pipeline.stats import Interval
from pipeline.table import Cell, Column, Row, Table
from tasks.groups import GROUPS

AVERAGE = "average"
QUANTISERS, THEIR_BUDGET = ("kivi", "kvquant", "zipcache"), "unlimited"
"""They run at an operating point of their own: the paper's memory column is what came out."""


@dataclass(frozen=True)
class Published:
    """One row of a paper's table. ``scores`` by task, as the paper writes them: 0 to 100."""

    model: str
    context: int
    method: str
    settings: Mapping[str, str]
    memory: str
    tasks: tuple[str, ...]
    scores: Mapping[str, float]
    stated: float | None = None
    """An average that the paper gives itself."""

    @property
    def average(self) -> float:
        return fmean(self.scores.values()) if self.stated is None else self.stated


@dataclass(frozen=True)
class PublishedTable:
    name: str
    source: str
    rows: tuple[Published, ...]


def published_names() -> list[str]:
    """What ``--paper`` takes."""
    found = (file.name for file in files("pipeline").joinpath("published").iterdir())
    return sorted(name.removesuffix(".csv").replace("_", ":", 1) for name in found if name.endswith(".csv"))


def published_table(name: str) -> PublishedTable:
    """Raises :class:`SweepProblem` for a name that is none of :func:`published_names`."""
    if name not in published_names():
        raise SweepProblem(f"--paper {name}: no such table; there are: {', '.join(published_names())}")
    text = files("pipeline").joinpath("published", f"{name.replace(':', '_')}.csv").read_text(encoding="utf-8")
    source, *lines = text.splitlines()
    return PublishedTable(name, source.lstrip("# "), tuple(_published(record) for record in csv.DictReader(lines)))


def beside_published(summary: Summary, sources: Mapping[str, str], table: PublishedTable) -> Table:
    """Ours beside the paper's, averages first; ``sources``: where each model label's weights come from.

    Raises :class:`SweepProblem` where nothing of the output is in the paper's table.
    """
    pairs = [(one, row) for one in summary.results for row in table.rows if _same(one, sources, row)]
    if not pairs:
        ours = ", ".join(
            dict.fromkeys(f"{one.configuration.condition.model} {_source(one, sources)}" for one in summary.results)
        )
        theirs = ", ".join(dict.fromkeys(row.model for row in table.rows))
        raise SweepProblem(
            f"--paper {table.name}: nothing here is in that table, which has {theirs} at the methods, budgets and "
            f"lengths of the paper; this output has {ours}"
        )
    titles = ("Model and context", "Method", "Budget", "Task")
    columns = [Column(title, False) for title in titles]
    columns += [Column("Ours", about="with its 95 % interval"), Column("Paper"), Column("Difference"), Column("n")]
    columns += [Column("Paper in our interval", False)]
    rows = [row for one, published in pairs for row in _rows(one, published)]
    words = (
        f"{table.source} Averages are unweighted means over the paper's tasks. Prompts, templates, samples and budget "
        "bases are each side's own; the paper's cells are shown without intervals."
    )
    return Table(f"Beside {table.name}", tuple(columns), tuple(rows), words)


def _published(record: Mapping[str, str]) -> Published:
    method, *settings = record["method"].split()
    stated = record.get(AVERAGE)
    given = ("model", "context", "method", "memory", "benchmark", AVERAGE, "low", "high")
    scores = {task: float(score) for task, score in record.items() if task not in given}
    return Published(
        model=record["model"],
        context=int(record["context"]),
        method=method,
        settings=dict(one.split("=", 1) for one in settings),
        memory=record["memory"],
        tasks=GROUPS[record["benchmark"]] if stated else tuple(scores),
        scores=scores,
        stated=float(stated) if stated else None,
    )


def _same(result: Result, sources: Mapping[str, str], row: Published) -> bool:
    configuration = result.configuration
    own = json.loads(configuration.settings)
    return (
        _source(result, sources).startswith(row.model)
        and configuration.condition.context == row.context
        and configuration.method == row.method
        and configuration.budget == (THEIR_BUDGET if row.method in QUANTISERS else row.memory)
        and all(own.get(key) == json.loads(value) for key, value in row.settings.items())
        and bool(set(row.tasks) & set(result.tasks))
    )


def _source(result: Result, sources: Mapping[str, str]) -> str:
    """``meta-llama/Llama-3.1-8B-Instruct`` without its owner."""
    label = result.configuration.condition.model
    return sources.get(label, label).rpartition("/")[2]


def _rows(result: Result, row: Published) -> Iterator[Row]:
    where = Cell(name(result.configuration.condition)), Cell(result.label), Cell(result.configuration.budget)
    group = f"{result.label} at {result.configuration.budget}"
    macro = result.macro
    yield Row((*where, Cell("average"), *_average_cells(result, row, macro.value, macro.interval)), group)
    for task, score in row.scores.items():
        mine = result.tasks.get(task)
        estimate = mine.estimate if mine else None
        cells = _cells(estimate.value if estimate else None, estimate.interval if estimate else None, score)
        count = f"{mine.scored:,}" if mine else "0"
        of = f"of {mine.expected:,}" if mine and mine.scored < mine.expected else ""
        yield Row((*where, Cell(task), *cells[:3], Cell(count, of), cells[3]), group)


def _average_cells(result: Result, row: Published, value: float | None, interval: Interval | None) -> list[Cell]:
    """The macro-average, where it is over the paper's tasks."""
    if set(row.tasks) != set(result.tasks):
        ours = len(set(row.tasks) & set(result.tasks))
        cells = [Cell(f"{ours} of {len(row.tasks)} tasks", tone="muted"), *_cells(None, None, row.average)[1:]]
    else:
        cells = _cells(value, interval, row.average)
        if value is None:
            cells[0] = Cell(result.macro_refused, tone="muted")
    return [*cells[:3], Cell(f"{result.scored:,}"), cells[3]]


def _cells(value: float | None, interval: Interval | None, published: float) -> list[Cell]:
    """Ours, the paper's, their difference, and whether the paper's is in our interval."""
    theirs = Cell(f"{published:.1f}")
    if value is None:
        return [Cell(NOTHING, tone="muted"), theirs, Cell(NOTHING, tone="muted"), Cell(NOTHING, tone="muted")]
    gap = Cell(difference(value - published / 100))
    if interval is None:
        return [Cell(points(value)), theirs, gap, Cell("no interval", tone="muted")]
    inside = interval.holds(published / 100)
    said = (
        Cell("yes") if inside else Cell("above it" if published / 100 > interval.high else "below it", tone="warning")
    )
    return [Cell(points(value), brackets(interval)), theirs, gap, said]
