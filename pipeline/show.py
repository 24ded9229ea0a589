"""What the command line prints: plans, listings, the end of a run."""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.table import Table

from kvcache.method import method_class, method_names
from pipeline.estimate import Estimate
from pipeline.plan import Cell, Plan, limited
from pipeline.progress import duration
from pipeline.run import Finished
from pipeline.stats import minimum_detectable_effect
from tasks.groups import GROUPS, SUMMARIES
from tasks.registry import example_task, task_names

LOG_WIDTH = 140


def console() -> Console:
    """Wide where there is no terminal to fit. A label in brackets is a label, not markup."""
    plain = Console(markup=False)
    return plain if plain.is_terminal else Console(width=LOG_WIDTH, markup=False)


def show_plan(plan: Plan, left: Estimate, peaks: dict[str, int], all_cells: bool) -> None:
    out = console()
    out.print(_groups_table(plan))
    if all_cells:
        out.print(_cells_table(plan))
    for reason, cells in _impossible(plan.grid.cells).items():
        named = ", ".join(dict.fromkeys(f"{cell.spec.label} at {cell.spec.budget}" for cell in cells))
        out.print(f"cannot run: {_count(len(cells), 'cell')} ({named}): {reason}", highlight=False)
    done, total = sum(plan.done.values()), plan.total
    out.print(
        f"{_count(len(plan.grid.cells), 'cell')}, {total} rows asked for, {done} done, {plan.pending} left in "
        f"{_count(len(plan.jobs), 'job')}",
        highlight=False,
    )
    out.print(f"time: {_time(plan, left)}", highlight=False)
    if plan.sweep.timing is None:
        out.print(f"smallest difference that shows: {_detectable(plan)}", highlight=False)
    if plan.limit is not None:
        out.print(f"partial: the first {_count(plan.limit, 'sample')} of each cell (--limit)", highlight=False)
    if plan.sweep.timing is None:
        show_data(plan.grid.data)
    for model, peak in peaks.items():
        out.print(f"memory: {model} peaks at {_bytes(peak)}, predicted from its configuration", highlight=False)


def show_end(finished: Finished) -> None:
    """What did not run and why."""
    out = console()
    if not finished.plan.jobs:
        out.print(f"nothing was left to run: all {finished.plan.total} rows are there", highlight=False)
    for part in finished.outcome.left_out:
        out.print(f"left out: {part.what}, {_count(part.pairs, 'row')}: {part.reason}", highlight=False)
    if finished.outcome.stopped:
        kept, unwritten = "what is finished is kept", finished.outcome.unwritten
        kept += f" but for {_count(unwritten, 'row')} that could not be written" if unwritten else ""
        out.print(f"stopped: {finished.outcome.stopped}; {kept}, run the same command to go on", highlight=False)
    elif finished.failed:
        again = "run again with --retry-failed once the cause is mended"
        out.print(f"{_count(finished.failed, 'row')} failed: see the report; {again}", highlight=False)


def show_methods() -> None:
    table = Table("method", "settings", "what it is")
    for name in method_names():
        method = method_class(name)
        settings = "\n".join(f"{field.name}: {_default(field)}" for field in dataclasses.fields(method))
        table.add_row(name, settings, _first_line(method.__doc__), end_section=True)
    console().print(table)


def show_tasks() -> None:
    table = Table("task", "context", "seeds", "metric", "new tokens", "what it is")
    for name in task_names():
        task = example_task(name)
        table.add_row(
            name,
            "any" if task.contextual else "its own",
            "fresh samples" if task.seeded else "same samples",
            task.metric,
            str(task.generation_limit),
            task.summary,
        )
    console().print(table)
    groups = Table("group", "tasks", "what it is")
    for name, members in GROUPS.items():
        groups.add_row(name, f"{len(members)}: {', '.join(members)}", SUMMARIES[name], end_section=True)
    console().print(groups)


def show_data(found: dict[str, Any]) -> None:
    """Where the files of a sweep's tasks are: :meth:`tasks.sources.DataSources.resolution`."""
    out = console()
    places: dict[str, list[str]] = defaultdict(list)
    for path, one in found["files"].items():
        places[one["from"]].append(f"{path} (not the pinned file)" if one["pinned"] is False else path)
    told = [f"{place}: {', '.join(paths)}" for place, paths in places.items()] or ["no files are needed"]
    order = ", then ".join(found["order"])
    out.print(f"data, looked for in {order}: {'; '.join(told)}", highlight=False, soft_wrap=True)


def _groups_table(plan: Plan) -> Table:
    table = Table("model", "context", "task", "seeds", "cells", "samples", "rows done", title=plan.sweep.name)
    merged: dict[tuple[str, int, str], list[Cell]] = defaultdict(list)
    for cell in plan.grid.cells:
        merged[cell.model, cell.context, _task(cell)].append(cell)
    for (model, context, task), cells in merged.items():
        seeds = Counter(label for label, *_ in {(one.spec.label, one.data_seed, one.spec.method_seed) for one in cells})
        done, asked = sum(plan.done[cell.cell_id] for cell in cells), sum(plan.asked(cell) for cell in cells)
        possible = sum(not cell.impossible for cell in cells)
        table.add_row(
            model,
            str(context or "own"),
            task,
            str(max(seeds.values())),  # a method that its seed does not change has fewer
            f"{possible}" if possible == len(cells) else f"{possible} of {len(cells)}",
            str(max((plan.asked(cell) for cell in cells), default=0)),
            f"{done}/{asked}",
        )
    return table


def _cells_table(plan: Plan) -> Table:
    table = Table("cell", "model", "context", "task", "method", "budget", "seeds", "rows done")
    for cell in plan.grid.cells:
        table.add_row(
            cell.cell_id,
            cell.model,
            str(cell.context or "own"),
            _task(cell),
            cell.spec.label,
            cell.spec.budget,
            f"{cell.data_seed}, {cell.spec.method_seed}",
            "impossible" if cell.impossible else f"{plan.done[cell.cell_id]}/{plan.asked(cell)}",
        )
    return table


def _task(cell: Cell) -> str:
    return f"{cell.task}, batch {cell.batch}" if cell.batch else cell.task


def _impossible(cells: Iterable[Cell]) -> dict[str, list[Cell]]:
    by_reason: dict[str, list[Cell]] = defaultdict(list)
    for cell in cells:
        if cell.impossible:
            by_reason[cell.impossible].append(cell)
    return by_reason


def _detectable(plan: Plan) -> str:
    """By model and length; prompts of several data seeds are prompts like any others."""
    prompts: dict[tuple[str, int], dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for group in plan.grid.groups:
        prompts[group.model.label, group.context][group.task.name] += limited(group.samples, plan.limit)
    effects = [100 * minimum_detectable_effect(list(counts.values())) for counts in prompts.values()]
    span = f"{min(effects):.1f}" if max(effects) - min(effects) < 0.05 else f"{min(effects):.1f} to {max(effects):.1f}"
    return f"{span} points of a macro-average, in four sweeps of five, where a method changes 16 % of the answers"


def _time(plan: Plan, left: Estimate) -> str:
    if not plan.jobs:
        return "nothing is left"
    basis = "from earlier rows here" if left.measured == 1 else "rough, from operation counts"
    if 0 < left.measured < 1:
        basis = f"{left.measured:.0%} of it from earlier rows here, the rest rough, from operation counts"
    return f"about {duration(left.seconds)} on one device ({basis})"


def _default(field: dataclasses.Field[object]) -> str:
    return "required" if field.default is dataclasses.MISSING else str(field.default)


def _first_line(text: str | None) -> str:
    return (text or "").strip().partition("\n\n")[0].replace("\n", " ").replace("``", "")


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}{'' if number == 1 else 's'}"


def _bytes(number: int) -> str:
    value, units = float(number), ["B", "kB", "MB", "GB", "TB"]
    while value >= 1000 and len(units) > 1:
        value /= 1000
        units.pop(0)
    return f"{value:.3g} {units[0]}"
