"""The main tables: methods by budget with scores, differences and memory; and the same as plain records."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from pipeline.figures import (
    NOTHING,
    bounds,
    brackets,
    difference,
    full_name,
    name,
    points,
    probability,
    protocol_words,
    share,
    size,
)
from pipeline.results import PROTOCOL, Board, Result, Summary, TaskResult
from pipeline.stats import Comparison, Interval, Macro
from pipeline.table import Cell, Column, Mark, Row, Table, Tone


def main_table(board: Board) -> Table:
    """Methods by budget: a score per task, the macro-average, the paired difference to the full cache, memory."""
    seeds = any(result.macro.between_seeds for result in board.results)
    columns = [
        Column("Method", numeric=False),
        Column("Budget", numeric=False),
        Column("Macro", about="unweighted mean over tasks with its 95 % interval"),
        *([Column("Between seeds", about="95 % t-interval over seed means")] if seeds else []),
        Column("Δ full", about="difference to the full cache on the same samples, with its 95 % interval"),
        Column("Verdict", numeric=False, about="within noise: the interval of the difference holds 0, or p > 0.05"),
        Column("p", about="sign-flip permutation, Holm-corrected over this table"),
        Column("KV prefill", about="share of the full cache held at the end of prefill, measured"),
        Column("KV end", about="share of the full cache held at the end"),
        Column("KV peak", about="share of the full cache held at the peak"),
        Column("Workspace", about="copies that outlive a step, mean per sample"),
        Column("Over budget", about="samples that held more than was asked"),
        Column("n", about="scored samples, all tasks and seeds"),
        Column("Failed", about="samples without a score"),
        *(Column(task) for task in board.tasks),
    ]
    rows = [Row(tuple(_main_cells(result, board, seeds)), result.configuration.budget) for result in ranked(board)]
    family = f" p-values are Holm-corrected over the {board.compared} comparisons here." if board.compared else ""
    caption = f"{protocol_words(board.condition)}{family} {_no_interval(_macros(board), board.one_document)}"
    return Table(name(board.condition), tuple(columns), tuple(rows), caption.strip())


def papers_table(board: Board) -> Table:
    """The layout of the papers' tables: methods down by budget, tasks across, the best bold and the second underlined
    within a budget, the full cache apart. Only complete tasks take part."""
    rows = ranked(board)
    columns = [Column("Method", False), Column("KV memory"), *(Column(task) for task in board.tasks), Column("Avg.")]
    marks = {
        (place, task): mark
        for budget in board.budgets
        for task in (None, *board.tasks)
        for place, mark in _marks(
            {
                index: _plain_score(result, task)
                for index, result in enumerate(rows)
                if result.configuration.budget == budget and not result.configuration.is_baseline
            }
        )
    }
    made = []
    for index, result in enumerate(rows):
        held = share(result.memory.share_peak if result.memory else None)
        scores = [
            Cell(points(_plain_score(result, task)), mark=marks.get((index, task), "")) for task in (*board.tasks, None)
        ]
        made.append(Row((Cell(result.label), Cell(held), *scores), result.configuration.budget))
    words = "KV memory: share of the full cache held at its peak, measured; groups are of one budget asked."
    return Table(name(board.condition), tuple(columns), tuple(made), words)


def leaderboard(summary: Summary, sweep: Mapping[str, Any]) -> dict[str, Any]:
    """For other programs: the records of :func:`records`, ranked within model, context and protocol.

    ``rank`` is the place by macro-average among the configurations of one budget, 1 the best; None without one.
    """
    tasks = list(dict.fromkeys(task for board in summary.boards for task in board.tasks))
    boards = []
    for board in summary.boards:
        places: dict[str, int] = {}
        entries = []
        for result in ranked(board):
            placed = result.macro.value is not None and not result.configuration.is_baseline
            if placed:
                places[result.configuration.budget] = places.get(result.configuration.budget, 0) + 1
            rank = places[result.configuration.budget] if placed else None
            record = {key: None if value != value else value for key, value in _record(result, tasks).items()}  # no NaN
            entries.append({"rank": rank, **record})
        boards.append({"model": board.condition.model, "context": board.condition.context, "entries": entries})
    facts = {key: sweep.get(key) for key in ("name", "started", "versions", "protocol")}
    return {"sweep": facts, "scores": "times 100", "boards": boards}


def overview_table(board: Board) -> Table:
    """Methods down, budgets across: the macro-averages alone."""
    labels = list(dict.fromkeys(result.label for result in board.results))
    by_place = {(result.label, result.configuration.budget): result for result in board.results}
    rows = [
        Row(
            (
                Cell(label),
                *(
                    _macro_cell(by_place[label, budget]) if (label, budget) in by_place else Cell(NOTHING, tone="muted")
                    for budget in board.budgets
                ),
            )
        )
        for label in labels
    ]
    columns = (Column("Method", numeric=False), *(Column(budget) for budget in board.budgets))
    levels = [result.macro for result in board.results]
    return Table(name(board.condition), columns, tuple(rows), _no_interval(levels, board.one_document))


def comparison_table(compared: Sequence[tuple[Result, Result, Comparison]], most_tasks: int | None = None) -> Table:
    """First against second: macro difference and verdict, then each task's difference; none of these where there are
    more tasks than ``most_tasks``."""
    tasks = list(dict.fromkeys(task for first, second, _ in compared for task in (*first.tasks, *second.tasks)))
    if most_tasks is not None and len(tasks) > most_tasks:
        tasks = []
    columns = [Column(title, False) for title in ("Model and context", "First", "Second")]
    columns += [Column("Δ macro"), Column("Verdict", False), Column("p"), *(Column(f"Δ {task}") for task in tasks)]
    rows = []
    for first, second, comparison in compared:
        cells = [Cell(name(first.configuration.condition)), Cell(full_name(first)), Cell(full_name(second))]
        cells += _comparison_cells(comparison)
        for task in tasks:
            estimate = comparison.tasks.get(task)
            cells.append(
                Cell(difference(estimate.value), bounds(estimate.interval, difference))
                if estimate
                else Cell(NOTHING, "", "muted")
            )
        rows.append(Row(tuple(cells)))
    words = dict.fromkeys(comparison.refused for *_, comparison in compared if comparison.refused)
    estimates = [(task, one) for *_, comparison in compared for task, one in comparison.tasks.items()]
    alone = dict.fromkeys(task for task, one in estimates if one.one_document)
    words |= {_no_interval([comparison.macro for *_, comparison in compared], list(alone)): None}
    return Table("First minus second, paired by sample", tuple(columns), tuple(rows), " ".join(filter(None, words)))


def records(summary: Summary) -> list[dict[str, Any]]:
    """The main tables as plain figures, unrounded, for other programs: one record per configuration.

    Scores, intervals and differences are times 100; shares are fractions; None where there is no figure.
    """
    tasks = list(dict.fromkeys(task for board in summary.boards for task in board.tasks))
    return [_record(result, tasks) for board in summary.boards for result in ranked(board)]


def ranked(board: Board) -> list[Result]:
    """The full cache, then budget by budget the methods by macro-average, those without one last."""

    def place(result: Result) -> tuple[int, float]:
        value = result.macro.value
        return board.budgets.index(result.configuration.budget), float("inf") if value is None else -value

    return sorted(board.results, key=lambda result: (not result.configuration.is_baseline, *place(result)))


def _plain_score(result: Result, task: str | None) -> float | None:
    """A task's score, or the macro-average for None."""
    if task is None:
        return result.macro.value
    estimate = result.tasks[task].estimate
    return estimate.value if estimate else None


def _marks(scores: Mapping[int, float | None]) -> Iterator[tuple[int, Mark]]:
    """The best and the second-best distinct score as shown, of two and more."""
    shown = {index: points(score) for index, score in scores.items() if score is not None}
    best = sorted(set(shown.values()), key=float, reverse=True)[:2] if len(shown) > 1 else []
    titles: tuple[Mark, Mark] = ("best", "second")
    for mark, text in zip(titles, best, strict=False):
        yield from ((index, mark) for index, score in shown.items() if score == text)


def _macros(board: Board) -> Iterator[Macro]:
    for result in board.results:
        yield result.macro
        if result.against_full:
            yield result.against_full.macro


def _no_interval(macros: Iterable[Macro], one_document: Sequence[str]) -> str:
    """What ``[–]`` means, where it stands."""
    if all(macro.value is None or macro.interval for macro in macros):
        return ""
    why = (
        f"all prompts of {', '.join(one_document)} are about one document"
        if one_document
        else "samples or documents are too few"
    )
    return f"[{NOTHING}]: no interval, since {why}."


def _main_cells(result: Result, board: Board, seeds: bool) -> Iterable[Cell]:
    yield Cell(result.label)
    yield Cell(result.configuration.budget)
    yield _macro_cell(result)
    if seeds:
        yield Cell(brackets(result.macro.between_seeds) or NOTHING)
    yield from _comparison_cells(result.against_full)
    memory = result.memory
    if memory is None:
        yield from [Cell(NOTHING, tone="muted")] * 5
    else:
        yield from (Cell(share(value)) for value in (memory.share_prefill, memory.share_end, memory.share_peak))
        yield Cell(size(memory.workspace_bytes), f"+ {size(memory.host_bytes)} on the host" * (memory.host_bytes > 0))
        yield Cell(str(memory.over_budget), tone="warning" if memory.over_budget else "")
    yield Cell(f"{result.scored:,}", "" if result.scored == result.expected else f"of {result.expected:,}")
    yield Cell(str(result.failed), tone="warning" if result.failed else "")
    yield from (_task_cell(result.tasks[task]) for task in board.tasks)


def _task_cell(task: TaskResult) -> Cell:
    if task.estimate is not None:
        return Cell(points(task.estimate.value))
    if task.state in ("incomplete", "partial"):
        words = f"({'partial, ' if task.state == 'partial' else ''}{task.scored} of {task.expected})"
        return Cell(points(task.partial), words if task.scored else "", "muted")
    return Cell(NOTHING if task.state == "not planned" else task.state, tone="muted")


def _macro_cell(result: Result) -> Cell:
    if result.macro_refused:
        return Cell(result.macro_refused, tone="muted")
    return Cell(points(result.macro.value), bounds(result.macro.interval), _tone(result.against_full))


def _comparison_cells(comparison: Comparison | None) -> list[Cell]:
    """Difference, verdict, p."""
    if comparison is None or (comparison.macro.value is None and not comparison.refused):
        return [Cell(NOTHING, tone="muted")] * 3
    p = comparison.p if comparison.p_holm is None else comparison.p_holm
    return [
        _difference_cell(comparison.macro, _tone(comparison)),
        Cell(comparison.verdict, tone=_tone(comparison)),
        Cell(probability(p)),
    ]


def _difference_cell(macro: Macro, tone: Tone) -> Cell:
    return Cell(difference(macro.value), bounds(macro.interval, difference), tone)


def _tone(comparison: Comparison | None) -> Tone:
    if comparison is None:
        return ""
    tones: dict[str, Tone] = {"better": "better", "worse": "worse"}
    return tones.get(comparison.verdict, "muted")


def _record(result: Result, tasks: Iterable[str]) -> dict[str, Any]:
    condition, macro, against, memory = (
        result.configuration.condition,
        result.macro,
        result.against_full,
        result.memory,
    )
    record: dict[str, Any] = {"model": condition.model, "context": condition.context}
    record |= {key: getattr(condition, key) for key in PROTOCOL}
    record |= {"method": result.configuration.method, "label": result.label, "settings": result.configuration.settings}
    record |= {"budget": result.configuration.budget, "tasks_complete": macro.complete, "tasks": macro.tasks}
    record |= _figures("macro", macro.value, macro.interval)
    record |= _figures("between_seeds", None, macro.between_seeds, ("low", "high"))
    difference_to_full = against.macro if against else Macro(None, None, None, 0, 0)
    record |= _figures("delta", difference_to_full.value, difference_to_full.interval)
    record |= {"p": against.p if against else None, "p_holm": against.p_holm if against else None}
    record |= {"verdict": against.verdict if against else ""}
    for key in ("share_prefill", "share_end", "share_peak", "bytes_prefill", "bytes_end", "bytes_peak"):
        record[f"kv_{key}"] = getattr(memory, key) if memory else None
    for key in ("budget_bytes", "charged_bytes", "workspace_bytes", "host_bytes", "over_budget"):
        record[key] = getattr(memory, key) if memory else None
    record |= {"scored": result.scored, "expected": result.expected, "failed": result.failed}
    record |= {"partial": result.partial}
    for task in tasks:
        estimate = result.tasks[task].estimate if task in result.tasks else None
        record |= _figures(
            f"task/{task}", estimate.value if estimate else None, estimate.interval if estimate else None
        )
    return record


def _figures(
    title: str, value: float | None, interval: Interval | None, parts: Sequence[str] = ("value", "low", "high")
) -> dict[str, float | None]:
    figures = {
        title: value,
        f"{title}_low": interval.low if interval else None,
        f"{title}_high": interval.high if interval else None,
    }
    wanted = [title if part == "value" else f"{title}_{part}" for part in parts]
    return {key: None if (figure := figures[key]) is None else 100 * figure for key in wanted}
