"""From a sweep file to cells and jobs: what is done already, what cannot run, what is left and what it will cost.

    sweep file -> cells, one per (model, method, budget, context, task, seed), each named by a hash of all that can
                  change its number
               -> groups of cells that share their samples: one (model, task, context, data seed)
               -> jobs, shards of a group's samples, each sample with the cells it is still missing in

Torch-free: a model is known by its files' description alone. Done is what the output's rows say, nothing else.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import product, zip_longest
from pathlib import Path
from typing import Any

import pyarrow as pa

from kvcache.bounded import Bounded, grown
from kvcache.budget import Budget
from kvcache.method import Method, NotCalibrated
from pipeline.spec import SpecError, SweepFile, TaskEntry
from pipeline.store import final_samples
from tasks.prompt import uses_chat
from tasks.registry import get_task
from tasks.sources import DataSources
from tasks.task import Task, TaskError
from workers.description import ModelDescription, ModelError, calibrations_folder, describe
from workers.job import CellSpec, EngineSpec, ModelSpec, Protocol, TimingSpec

FULL = "full"
FULL_BUDGET = Budget.parse("100%")
NO_BUDGET = Budget.parse("unlimited")
TIMING = TaskEntry.model_construct(name="timing")
"""Stands where a task stands in groups of isolated runs; no registry knows it."""
TIMING_VERSION = 1
"""Of what is measured, and how."""


@dataclass(frozen=True)
class Cell:
    """One cell with its coordinates in clear; ``impossible`` says why it cannot run."""

    spec: CellSpec
    model: str
    task: str
    context: int
    data_seed: int
    samples: int
    """All samples of the cell: ``--limit`` takes the first of them and leaves the cell what it is."""
    impossible: str | None = None
    batch: int = 0
    """Rows of an isolated run; 0 for a cell that is scored."""

    @property
    def cell_id(self) -> str:
        return self.spec.cell_id

    def facts(self) -> dict[str, Any]:
        """The cell as JSON, as reports and trackers take it."""
        return {
            **vars(self.spec),
            "model": self.model,
            "task": self.task,
            "context": self.context,
            "data_seed": self.data_seed,
            "expected": self.samples,
            "impossible": self.impossible or "",
            "batch": self.batch,
        }


@dataclass(frozen=True)
class Group:
    """Cells of the same samples. ``context`` 0: the task's own lengths. With ``timing``, samples are repeats,
    ``context`` is the prompt's length alone, and the engine's row width is the batch."""

    model: ModelSpec
    task: TaskEntry
    context: int
    data_seed: int
    samples: int
    max_new_tokens: int
    engine: EngineSpec = field(default_factory=EngineSpec)
    timing: TimingSpec | None = None
    cells: tuple[Cell, ...] = ()

    @cached_property
    def key(self) -> tuple[str, str, int, int, int]:
        return self.model.label, self.task.name, self.context, self.data_seed, self.engine.row_width

    @property
    def batch(self) -> int:
        """Rows of an isolated run; 0 where cells are scored."""
        return self.engine.row_width if self.timing else 0

    @property
    def positions(self) -> int:
        """Most tokens of a prompt with those to generate, which a context counts; 0 where only the samples tell."""
        return self.context + self.max_new_tokens if self.timing else self.context

    def __str__(self) -> str:
        if self.timing:
            return f"timing at {self.context}, batch {self.batch}, on {self.model.label}"
        context = f" at {self.context}" if self.context else ""
        return f"{self.task.name}{context}, seed {self.data_seed}, on {self.model.label}"


@dataclass(frozen=True)
class Shard:
    """Some samples of a group, by index, and the ids of the cells that each of them is missing in."""

    group: Group
    pending: dict[int, tuple[str, ...]]

    @property
    def pairs(self) -> int:
        return sum(len(cells) for cells in self.pending.values())


@dataclass(frozen=True)
class Grid:
    """Everything that a sweep file means."""

    sweep: SweepFile
    descriptions: dict[str, ModelDescription]
    groups: tuple[Group, ...]
    data: dict[str, Any] = field(default_factory=dict)
    """Where the tasks' files were found: :meth:`tasks.sources.DataSources.resolution`."""

    @property
    def cells(self) -> list[Cell]:
        return [cell for group in self.groups for cell in group.cells]

    def manifest(self) -> dict[str, Any]:
        """The grid as JSON, but for its cells: what a report needs besides the rows."""
        return {
            "name": self.sweep.name,
            "protocol": asdict(self.sweep.protocol),
            "engine": asdict(self.sweep.engine),
            "timing": self.sweep.timing.model_dump() if self.sweep.timing else None,
            "data": self.data,
            "models": {
                model.label: asdict(model) | {"fingerprint": self.descriptions[model.label].fingerprint}
                for model in self.sweep.models
            },
        }


@dataclass(frozen=True)
class Plan:
    """A grid against the rows that its output holds."""

    grid: Grid
    limit: int | None
    jobs: tuple[Shard, ...]
    done: Counter[str]
    """Finished samples per cell, among those asked for."""

    @property
    def sweep(self) -> SweepFile:
        return self.grid.sweep

    def manifest(self) -> dict[str, Any]:
        """The grid's, with the limit of this run, and what it asks of each cell."""
        cells = [{**cell.facts(), "asked": self.asked(cell)} for cell in self.grid.cells]
        return {**self.grid.manifest(), "limit": self.limit, "cells": cells}

    def asked(self, cell: Cell) -> int:
        """Samples of this cell that this run is to have."""
        return 0 if cell.impossible else limited(cell.samples, self.limit)

    @property
    def total(self) -> int:
        """(cell, sample) pairs asked for."""
        return sum(self.asked(cell) for cell in self.grid.cells)

    @property
    def impossible(self) -> list[str]:
        """Why some cells cannot run, each reason once."""
        return list(dict.fromkeys(cell.impossible for cell in self.grid.cells if cell.impossible))

    @property
    def pending(self) -> int:
        return sum(job.pairs for job in self.jobs)


def limited(samples: int, limit: int | None) -> int:
    return samples if limit is None else min(samples, limit)


def expand(sweep: SweepFile, file: Path, sources: DataSources) -> Grid:
    """All groups and cells of a sweep. Raises :class:`SpecError` where a model or a task's files are missing."""
    descriptions = _describe_models(sweep, file)
    _check_tasks(sweep, file, sources)
    _check_chat_templates(sweep, file, descriptions)
    groups = [group for model in sweep.models for group in _groups(sweep, model, descriptions[model.label], sources)]
    grid = Grid(sweep, descriptions, tuple(groups), _resolution(sources, file))
    _refuse_twins(grid.cells, file)
    return grid


def make_plan(grid: Grid, rows: pa.Table, limit: int | None = None, retry_failed: bool = False) -> Plan:
    """What is done and what is left. ``rows``: all that the output holds (cell_id, sample_index, status at least)."""
    finished = whole_repeats(grid, final_samples(rows, retry_failed))
    wanted = {cell.cell_id: limited(cell.samples, limit) for cell in grid.cells}
    done = Counter(cell for cell, index in finished if index < wanted.get(cell, 0))
    jobs = tuple(_in_order(grid.sweep, grid.groups, finished, limit))
    return Plan(grid, limit, jobs, done)


def whole_repeats(grid: Grid, finished: set[tuple[str, int]]) -> set[tuple[str, int]]:
    """Without the repeats of isolated runs that some cell lacks: methods are compared inside a repeat, side by side, so
    one that was cut short runs again as a whole."""
    cut = set()
    for group in grid.groups:
        cells = [cell.cell_id for cell in group.cells if cell.impossible is None] if group.timing else []
        for index in range(group.samples):
            pairs = {(cell, index) for cell in cells}
            cut |= pairs if not pairs <= finished else set()
    return finished - cut


def failed_pairs(plan: Plan, rows: pa.Table) -> int:
    """Pairs asked for that have failed rows and no other."""
    good = final_samples(rows, retry_failed=True)
    final = whole_repeats(plan.grid, final_samples(rows, retry_failed=False))
    wanted = {(cell.cell_id, index) for cell in plan.grid.cells for index in range(plan.asked(cell))}
    return len((final - good) & wanted)


def cell_id(
    sweep: SweepFile,
    description: ModelDescription,
    group: Group,
    task: list[Any],
    method: list[Any],
    budget: Budget,
    method_seed: int,
) -> str:
    """The hash of all that can change a cell's number. ``task``: its name, version and data recipe; ``method``: its
    identity.

    Not in it: the number of samples, labels, library versions, anything about the cluster.
    """
    content = {
        "model": description.fingerprint,
        "tokenizer": description.tokenizer_fingerprint,
        "dtype": group.model.dtype,
        "attention": group.model.attention,
        "engine": _plain(group.engine),
        "protocol": _plain(sweep.protocol),
        "method": method,
        "budget": str(budget),
        "task": task,
        "context": group.context,
        "seeds": [group.data_seed, method_seed],
    }
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]


@lru_cache(maxsize=64)
def _plain(shapes: EngineSpec | Protocol) -> dict[str, Any]:
    """As every cell's hash takes them."""
    return asdict(shapes)


def _describe_models(sweep: SweepFile, file: Path) -> dict[str, ModelDescription]:
    descriptions = {}
    problems = []
    for index, model in enumerate(sweep.models):
        try:
            descriptions[model.label] = describe(model)
        except ModelError as error:
            problems.append((f"models[{index}].source", str(error)))
    if problems:
        raise SpecError(file, problems)
    return descriptions


def _resolution(sources: DataSources, file: Path) -> dict[str, Any]:
    try:
        return sources.resolution()
    except TaskError as error:
        raise SpecError(file, [("", str(error))]) from None


def _check_tasks(sweep: SweepFile, file: Path, sources: DataSources) -> None:
    problems = []
    for entry in sweep.tasks:
        task = get_task(entry.name, entry.settings)
        try:
            for context in _contexts(sweep, entry, task):
                task.check(sources, context or None)
        except TaskError as error:
            problems.append((f"tasks[{entry.place}]", f"{entry.name}: {error}"))
    if problems:
        raise SpecError(file, problems)


def _check_chat_templates(sweep: SweepFile, file: Path, descriptions: dict[str, ModelDescription]) -> None:
    chats = [entry.name for entry in sweep.tasks if _uses_chat(sweep, entry)]
    problems = [
        (
            f"models[{index}]",
            f"the tokenizer of {model.label} has no chat template, and {', '.join(chats)} put prompts into one: use an "
            "instruction-tuned model, or set protocol.chat_template: never",
        )
        for index, model in enumerate(sweep.models)
        if chats and descriptions[model.label].chat_template is False
    ]
    if problems:
        raise SpecError(file, problems)


def _uses_chat(sweep: SweepFile, entry: TaskEntry) -> bool:
    return uses_chat(get_task(entry.name, entry.settings).chat, sweep.protocol.chat_template)


def _refuse_twins(cells: list[Cell], file: Path) -> None:
    """Two entries that mean the same cell would each wait for the other's rows."""
    seen: dict[str, Cell] = {}
    for cell in cells:
        twin = seen.setdefault(cell.cell_id, cell)
        if twin is not cell:
            field, first, second = (
                ("models", twin.model, cell.model)
                if twin.model != cell.model
                else ("methods", twin.spec.label, cell.spec.label)
            )
            raise SpecError(file, [(field, f"{first} and {second} are the same but for their labels: keep one")])


def _contexts(sweep: SweepFile, entry: TaskEntry, task: Task) -> list[int]:
    return (entry.contexts or sweep.contexts) if task.contextual else [0]


def _groups(sweep: SweepFile, model: ModelSpec, description: ModelDescription, sources: DataSources) -> Iterator[Group]:
    """The groups of one model, with all their cells.

    A seed changes a task's samples where the task is seeded, and a method's choices where it is stochastic; where it
    changes neither, there is one cell for all seeds.
    """
    model = replace(model, revision=description.revision or model.revision)  # what is loaded is what was hashed
    choices = list(_choices(sweep, description, model))
    yield from _timing_groups(sweep, model, description, choices)
    for entry in sweep.tasks:
        task = get_task(entry.name, entry.settings)
        identity = [task.name, task.version, task.recipe(sources)]
        samples = limited(entry.samples or sweep.samples, task.available(sources))
        seeds: dict[int, list[int]] = {}
        for seed in sweep.seeds:
            seeds.setdefault(seed if task.seeded else 0, []).append(seed)
        for context in _contexts(sweep, entry, task):
            for data_seed, method_seeds in seeds.items():
                group = Group(model, entry, context, data_seed, samples, task.generation_limit, sweep.engine)
                cells = _cells(sweep, description, group, identity, method_seeds, choices)
                yield replace(group, cells=tuple(cells))


def _timing_groups(
    sweep: SweepFile, model: ModelSpec, description: ModelDescription, choices: list[_Choice]
) -> Iterator[Group]:
    """One group per length and batch, so that all methods of it run in turn on one device."""
    timing = sweep.timing
    if timing is None:
        return
    for tokens, batch in product(timing.prompt_tokens, timing.batch):
        engine, run = replace(sweep.engine, row_width=batch), TimingSpec(tokens, timing.new_tokens, timing.warmup)
        group = Group(model, TIMING, tokens, 0, timing.repeats, timing.new_tokens, engine, run)
        cells = _cells(sweep, description, group, [TIMING.name, TIMING_VERSION, asdict(run)], [0], choices)
        yield replace(group, cells=tuple(cells))


@dataclass(frozen=True)
class _Choice:
    """A method at a budget, with its calibration of a model, or why it cannot run on it."""

    label: str
    method: Method
    settings: dict[str, Any]
    identity: list[Any]
    budget: Budget
    uncalibrated: str | None
    verdicts: dict[tuple[int, int], str | None] = field(default_factory=dict)
    """Why not, by length and new tokens: many groups share them."""


def _cells(
    sweep: SweepFile,
    description: ModelDescription,
    group: Group,
    task: list[Any],
    seeds: list[int],
    choices: list[_Choice],
) -> Iterator[Cell]:
    for choice in choices:
        method, budget, shape = choice.method, choice.budget, (group.context, group.max_new_tokens)
        if shape not in choice.verdicts:
            why = choice.uncalibrated or _impossible(sweep, description, group, method, budget)
            choice.verdicts[shape] = why
        impossible = choice.verdicts[shape]
        for seed in dict.fromkeys(seed if method.stochastic else 0 for seed in seeds):
            name = cell_id(sweep, description, group, task, choice.identity, budget, seed)
            spec = CellSpec(name, method.name, choice.settings, str(budget), seed, choice.label)
            where = group.model.label, group.task.name, group.context, group.data_seed
            yield Cell(spec, *where, group.samples, impossible, group.batch)


def _choices(sweep: SweepFile, description: ModelDescription, model: ModelSpec) -> Iterator[_Choice]:
    """The full cache and methods with an operating point of their own once, every other method at every budget."""
    for entry in sweep.methods:
        method, uncalibrated = _fitted(entry.method(), description, model)
        once = FULL_BUDGET if method.name == FULL else NO_BUDGET if method.fixed else None
        for budget in sweep.budgets if once is None else [once]:
            yield _Choice(entry.shown, method, method.settings(), method.identity, budget, uncalibrated)


def _fitted(method: Method, description: ModelDescription, model: ModelSpec) -> tuple[Method, str | None]:
    """A method with its calibration of the model, or why there is none."""
    try:
        return method.fitted(description.fingerprint, model.source, calibrations_folder()), None
    except NotCalibrated as missing:
        return method, str(missing)


def _impossible(
    sweep: SweepFile, description: ModelDescription, group: Group, method: Method, budget: Budget
) -> str | None:
    method = grown(method, sweep.protocol.growth)
    if isinstance(method, Bounded) and method.cannot:
        return method.cannot
    if group.positions > description.max_positions:
        return f"context {group.positions} is beyond the model's {description.max_positions} positions"
    if not group.context:
        return None  # the task's own lengths: known only when its samples are
    longest = group.positions - group.max_new_tokens
    resolved = budget.resolve(longest, group.max_new_tokens, sweep.protocol.budget_base, description.layout)
    return method.impossible(resolved, description.layout)


def _in_order(
    sweep: SweepFile, groups: tuple[Group, ...], finished: set[tuple[str, int]], limit: int | None
) -> Iterator[Shard]:
    """Jobs by model, then the longest context first, then one of each task in turn.

    The longest first, so that what does not fit fails early; tasks in turn, so that an interrupted sweep has a bit of
    everything. Tasks with lengths of their own come last.
    """
    for model in sweep.models:
        own = [group for group in groups if group.model.label == model.label]
        for context in sorted({group.context for group in own}, reverse=True):
            shards = [
                list(_shards(group, finished, limited(group.samples, limit), _shard_size(sweep, group)))
                for group in own
                if group.context == context
            ]
            for turn in zip_longest(*shards):
                yield from (shard for shard in turn if shard is not None)


def _shard_size(sweep: SweepFile, group: Group) -> int:
    """All repeats of an isolated run go to one actor, which warms up once."""
    return group.samples if group.timing else sweep.cluster.samples_per_job


def _shards(group: Group, finished: set[tuple[str, int]], samples: int, size: int) -> Iterator[Shard]:
    possible = [cell for cell in group.cells if cell.impossible is None]
    pending = {}
    for index in range(samples):
        missing = tuple(cell.cell_id for cell in possible if (cell.cell_id, index) not in finished)
        if missing:
            pending[index] = missing
    indices = list(pending)
    for start in range(0, len(indices), size):
        yield Shard(group, {index: pending[index] for index in indices[start : start + size]})
