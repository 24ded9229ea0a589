"""The tables behind the main ones: tasks taken apart, cost, settings, data, failures, what cannot run."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean

from pipeline.breakdown import Part, View, titles
from pipeline.figures import NOTHING, counted, name, points, seconds, share, size
from pipeline.provenance import Failure, TaskFacts
from pipeline.results import Board, Configuration, Summary
from pipeline.table import Cell, Column, Row, Table
from pipeline.tables import ranked


def bins_table(board: Board, views: Sequence[View]) -> Table | None:
    """Scores by the length bin that the samples themselves name; None where they name none."""
    held = {task: _views_of(task, board, views) for task in board.tasks}
    held = {task: mine for task, mine in held.items() if any(view.bins for view in mine.values())}
    if not held:
        return None
    bins = titles(view.bins for mine in held.values() for view in mine.values())
    rows = []
    for result in ranked(board):
        seen = [mine.get(result.configuration) for mine in held.values()]
        cells = [
            _mean_over_tasks([view.bins.get(one) if view and view.complete else None for view in seen]) for one in bins
        ]
        rows.append(Row((Cell(result.label), Cell(result.configuration.budget), Cell("all"), *cells), "all"))
    for task, mine in held.items():
        for result in ranked(board):
            if view := mine.get(result.configuration):
                start = (Cell(result.label), Cell(result.configuration.budget), Cell(task))
                rows.append(Row((*start, *(_part_cell(view, view.bins.get(one)) for one in bins)), task))
    columns = (*(Column(title, False) for title in ("Method", "Budget", "Task")), *(Column(one) for one in bins))
    words = (
        "Mean score by length bin, with the number of samples. All: the unweighted mean over tasks, or how many of "
        "them are complete. Grey: the task is incomplete."
    )
    return Table(f"By length: {name(board.condition)}", columns, tuple(rows), words)


def details_tables(board: Board, views: Sequence[View]) -> Iterator[Table]:
    """A table for each task whose metric tells more than a score."""
    for task in board.tasks:
        mine = _views_of(task, board, views)
        further = titles(view.details for view in mine.values())
        if not further:
            continue
        columns = [Column("Method", False), Column("Budget", False), Column("Score"), *(Column(one) for one in further)]
        columns += [Column("At limit", about="predictions cut off at the generation limit"), Column("n")]
        rows = []
        for result in ranked(board):
            if view := mine.get(result.configuration):
                cells = [Cell(result.label), Cell(result.configuration.budget)]
                cells += [_part_cell(view, Part(view.score, view.task.scored), plain=True)]
                cells += [_part_cell(view, view.details.get(one), plain=True) for one in further]
                cells += [Cell(share(view.at_limit.value), tone="" if view.complete else "muted")]
                cells += [Cell(f"{view.task.scored:,}", "" if view.complete else f"of {view.task.expected:,}")]
                rows.append(Row(tuple(cells), result.configuration.budget))
        words = "Means over the scored samples, times 100. Grey: the task is incomplete."
        yield Table(f"{task}: {name(board.condition)}", tuple(columns), tuple(rows), words)


def cost_table(board: Board, timing: str) -> Table | None:
    """Seconds by phase from one kind of run; None where there is none."""
    found = [(result, cost) for result in ranked(board) for cost in result.costs if cost.timing == timing]
    if not found:
        return None
    shared = timing == "shared"
    columns = [Column("Method", numeric=False), Column("Budget", numeric=False)]
    columns += [Column("Prefill s"), Column("Compress s"), Column("Decode s"), Column("Output tokens")]
    columns += [Column("Rows per batch")] if shared else [Column("TTFT s"), Column("TPOT ms"), Column("Peak device")]
    rows = []
    for result, cost in found:
        cells = [Cell(result.label), Cell(result.configuration.budget)]
        cells += [Cell(seconds(value)) for value in (cost.prefill_s, cost.compress_s, cost.decode_s)]
        cells.append(Cell(f"{cost.output_tokens:,.0f}"))
        if shared:
            cells.append(Cell(f"{cost.batch_rows:,.0f}"))
        else:
            tpot = NOTHING if cost.tpot_s is None else f"{1000 * cost.tpot_s:.2f}"
            cells += [Cell(seconds(cost.ttft_s)), Cell(tpot), Cell(size(cost.peak_device_bytes))]
        rows.append(Row(tuple(cells), result.configuration.budget))
    words = "Shared run: not an efficiency measurement." if shared else "Isolated run: one cell on a whole device."
    return Table(name(board.condition), tuple(columns), tuple(rows), f"{words} Medians per sample.")


def budgets_table(board: Board) -> Table | None:
    """What was asked, what the method charged itself, and what was measured; None without rows."""
    held = [(result, result.memory) for result in ranked(board) if result.memory]
    if not held:
        return None
    columns = [Column("Method", False), Column("Budget asked", False)]
    columns += [Column("Asked", about="bytes per sample on the budget's base, mean")]
    columns += [Column("Charged", about="by the method's own rule, which sets its capacities")]
    columns += [Column("Held, prefill"), Column("Held, end"), Column("Held, peak")]
    columns += [Column("Charged / asked"), Column("Held / asked", about="after prefill")]
    columns += [Column("Over budget", about="samples that held more than was asked")]
    rows = []
    for result, memory in held:
        cells = [Cell(result.label), Cell(result.configuration.budget), Cell(_bytes(memory.budget_bytes))]
        cells += [Cell(size(memory.charged_bytes))]
        amounts = (memory.bytes_prefill, memory.bytes_end, memory.bytes_peak)
        shares = (memory.share_prefill, memory.share_end, memory.share_peak)
        cells += [Cell(size(amount), f"({share(part)})") for amount, part in zip(amounts, shares, strict=True)]
        asked = memory.budget_bytes
        cells += [
            Cell(share(part / asked) if asked else NOTHING) for part in (memory.charged_bytes, memory.bytes_prefill)
        ]
        over = Cell(f"{memory.over_budget:,}", f"of {memory.rows:,}", "warning" if memory.over_budget else "")
        rows.append(Row((*cells, over), result.configuration.budget))
    words = (
        "Means over tasks of the samples' means; in brackets, the share of the full cache for the same tokens. Whether "
        "a sample is over its budget is judged on the budget's own base: the prompt, or prompt and generated tokens."
    )
    return Table(f"Budgets: {name(board.condition)}", tuple(columns), tuple(rows), words)


def settings_table(summary: Summary) -> Table:
    """Every method's settings, once."""
    seen = {(one.label, one.configuration.settings): one.configuration for one in summary.results}
    rows = [
        Row((Cell(label), Cell(configuration.method), Cell(settings_words(settings))))
        for (label, settings), configuration in seen.items()
    ]
    columns = (Column("Shown as", False), Column("Method", False), Column("Settings", False))
    return Table("Settings", columns, tuple(rows))


def impossible_table(summary: Summary) -> Table | None:
    """Cells that cannot run, gathered by reason."""
    gathered: dict[tuple[str, str, str], list[str]] = {}
    for board in summary.boards:
        for result in board.results:
            for task in result.tasks.values():
                if task.reason:
                    key = (name(board.condition), f"{result.label} at {result.configuration.budget}", task.reason)
                    gathered.setdefault(key, []).append(task.task)
    if not gathered:
        return None
    rows = [
        Row((Cell(where), Cell(method), Cell(", ".join(tasks)), Cell(reason)))
        for (where, method, reason), tasks in gathered.items()
    ]
    columns = tuple(Column(title, False) for title in ("Model and context", "Method", "Tasks", "Reason"))
    return Table("Impossible cells", columns, tuple(rows))


def failures_table(failures: Sequence[Failure]) -> Table | None:
    """Failed samples, one row per kind of error."""
    if not failures:
        return None
    columns = (Column("Samples"), *(Column(title, False) for title in ("Error", "Text", "Methods", "Tasks", "Nodes")))
    rows = [
        Row(
            (
                Cell(f"{one.count:,}"),
                Cell(one.kind),
                Cell(one.example),
                *(Cell(counted(counts)) for counts in (one.configurations, one.tasks, one.nodes)),
            )
        )
        for one in failures
    ]
    return Table("Failures", columns, tuple(rows), "Errors are the same but for the numbers in them.")


def data_table(tasks: Sequence[TaskFacts]) -> Table:
    """What the samples were: wording, haystack, source, as the samples themselves say."""
    columns = (
        Column("Task", False),
        Column("Context"),
        Column("Metric", False),
        Column("Prompts"),
        Column("Prompt tokens", about="median, least and most"),
        Column("Data", False),
    )
    rows = []
    for one in tasks:
        least, middle, most = one.prompt_tokens
        told = "; ".join(f"{key}: {', '.join(values)}" for key, values in one.facts.items())
        cells = [Cell(one.task), Cell(f"{one.context:,}" if one.context else "own"), Cell(", ".join(one.metrics))]
        cells += [Cell(f"{one.samples:,}"), Cell(f"{middle:,}", f"[{least:,}, {most:,}]"), Cell(told or NOTHING)]
        rows.append(Row(tuple(cells)))
    return Table("Data", columns, tuple(rows))


def _bytes(count: float) -> str:
    return size(count) if count else "no limit"


def settings_words(settings: str) -> str:
    return ", ".join(f"{key} = {json.dumps(value)}" for key, value in json.loads(settings).items()) or "none"


def _views_of(task: str, board: Board, views: Sequence[View]) -> Mapping[Configuration, View]:
    return {
        view.result.configuration: view
        for view in views
        if view.task.task == task and view.result.configuration.condition == board.condition
    }


def _mean_over_tasks(parts: Sequence[Part | None]) -> Cell:
    known = [part.value for part in parts if part]
    if len(known) < len(parts):
        return Cell(f"{len(known)} of {len(parts)}", tone="muted")
    return Cell(points(fmean(known)))


def _part_cell(view: View, part: Part | None, plain: bool = False) -> Cell:
    """``plain``: the number of samples is told only where it is not the task's."""
    if part is None:
        return Cell(NOTHING, tone="muted")
    aside = "" if plain and part.samples == view.task.scored else f"({part.samples:,})"
    return Cell(points(part.value), aside, "" if view.complete else "muted")
