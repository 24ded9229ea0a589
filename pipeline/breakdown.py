"""Tasks taken apart: scores by what the samples say of themselves (needle depth, length bin), and their other metrics.

What a sample says is in its row's ``sample_meta``, and the other metrics are in ``details``, so any task that writes
them is shown. A configuration whose task is incomplete keeps its parts, marked so, and is left out of every mean.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from statistics import fmean
from types import UnionType
from typing import TYPE_CHECKING, Any

from pipeline.results import Condition, Configuration, Result, Summary, TaskResult

if TYPE_CHECKING:
    import pandas as pd

DEPTH, GRID, BIN = "depth", "grid", "bin"
"""``grid`` is how many depths a task has; samples may be too few to reach all of them."""
MOST_DEPTHS = 40
"""Samples at more depths than these have no grid: each lies at a depth of its own."""


@dataclass(frozen=True)
class Part:
    """The mean over some scored samples, and how many they are."""

    value: float
    samples: int


@dataclass(frozen=True)
class View:
    """One task of one configuration. A mapping is empty where the rows carry no such thing."""

    result: Result
    task: TaskResult
    score: float
    """Of what is scored."""
    depths: Mapping[float, Part]
    grid: int
    bins: Mapping[str, Part]
    details: Mapping[str, Part]
    at_limit: Part
    """The share of predictions that were cut off at the generation limit."""

    @property
    def complete(self) -> bool:
        return self.task.state == "complete"


@dataclass(frozen=True)
class Panel:
    """One configuration's grid: parts by (length, depth). ``open_lengths``: where its task is incomplete."""

    result: Result
    parts: Mapping[tuple[int, float], Part]
    open_lengths: frozenset[int]
    places: int

    @property
    def mean(self) -> float | None:
        """The mean over the grid's places; None while one is missing or incomplete."""
        if self.open_lengths or len(self.parts) < self.places:
            return None
        return fmean(part.value for part in self.parts.values())


@dataclass(frozen=True)
class Grid:
    """A task's depths by lengths, for all configurations of one model and protocol (``condition``, length apart)."""

    task: str
    condition: Condition
    lengths: tuple[int, ...]
    depths: tuple[float, ...]
    panels: tuple[Panel, ...]


def take_apart(rows: pd.DataFrame, summary: Summary) -> tuple[View, ...]:
    """``rows``: the planned rows, measured. Configurations with rows of different numerics have no views."""
    scored = rows[rows["scored"]]
    configurations = scored["cell_id"].map(summary.configurations)
    held = {key: part for key, part in scored.groupby([configurations, scored["task"]], sort=False)}
    return tuple(
        _view(result, task, held[result.configuration, task.task])
        for result in summary.results
        for task in result.tasks.values()
        if task.state != "mixed numerics" and (result.configuration, task.task) in held
    )


def grids(views: Iterable[View]) -> list[Grid]:
    """The full cache first, then the plan's order."""
    gathered: dict[tuple[str, Condition], list[View]] = {}
    for view in views:
        if view.depths:
            condition = replace(view.result.configuration.condition, context=0)
            gathered.setdefault((view.task.task, condition), []).append(view)
    made = [_grid(task, condition, mine) for (task, condition), mine in gathered.items()]
    return [grid for grid in made if len(grid.depths) <= MOST_DEPTHS]


def titles(parts: Iterable[Mapping[str, Any]]) -> list[str]:
    """All keys, each once, in their order; those that begin with a number by it."""
    return sorted(dict.fromkeys(key for mapping in parts for key in mapping), key=_leading_number)


def _view(result: Result, task: TaskResult, rows: pd.DataFrame) -> View:
    facts = [_object(text) for text in rows["sample_meta"]]
    scores = rows["score"].tolist()
    return View(
        result=result,
        task=task,
        score=fmean(scores),
        depths=_parts(((fact.get(DEPTH), score) for fact, score in zip(facts, scores, strict=True)), int | float),
        grid=max((int(fact.get(GRID, 0)) for fact in facts), default=0),
        bins=_parts((fact.get(BIN), score) for fact, score in zip(facts, scores, strict=True)),
        details=_parts(pair for text in rows["details"] for pair in _object(text).items()),
        at_limit=Part(float((rows["finish_reason"] == "length").mean()), len(rows)),
    )


def _parts(values: Iterable[tuple[Any, float]], kind: type | UnionType = str) -> dict[Any, Part]:
    """By key; what has no key of this kind has no part."""
    gathered: dict[Any, list[float]] = {}
    for key, value in values:
        if isinstance(key, kind):
            gathered.setdefault(key, []).append(value)
    return {key: Part(fmean(mine), len(mine)) for key, mine in gathered.items()}


@lru_cache(maxsize=4096)
def _object(text: str) -> dict[str, Any]:
    return dict(json.loads(text))


def _grid(task: str, condition: Condition, views: Sequence[View]) -> Grid:
    lengths = tuple(sorted({view.result.configuration.condition.context for view in views}))
    depths = tuple(sorted({depth for view in views for depth in view.depths}))
    by_method: dict[Configuration, list[View]] = {}
    for view in sorted(views, key=lambda view: not view.result.configuration.is_baseline):
        by_method.setdefault(replace(view.result.configuration, condition=condition), []).append(view)
    places = len(lengths) * max(len(depths), *(view.grid for view in views))
    panels = tuple(_panel(mine, places) for mine in by_method.values())
    return Grid(task, condition, lengths, depths, panels)


def _panel(views: Sequence[View], places: int) -> Panel:
    lengths = [view.result.configuration.condition.context for view in views]
    parts = {
        (length, depth): part
        for length, view in zip(lengths, views, strict=True)
        for depth, part in view.depths.items()
    }
    missing = frozenset(length for length, view in zip(lengths, views, strict=True) if not view.complete)
    return Panel(views[0].result, parts, missing, places)


def _leading_number(title: str) -> float:
    digits = title[: len(title) - len(title.lstrip("0123456789"))]
    return float(digits or 0)
