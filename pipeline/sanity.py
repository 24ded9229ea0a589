"""What an expert would check before believing a table: baselines that do not work, methods that evict nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from pipeline.figures import full_name, name, points, share
from pipeline.provenance import TaskFacts
from pipeline.results import Board, Result, Summary

if TYPE_CHECKING:
    import pandas as pd

FLOOR = 0.10
"""A full cache below this has nothing to lose: differences to it say little."""
FEW_SAMPLES = 20
IDENTICAL_FROM = 5
"""Fewer equal predictions than this are no sign of anything."""
NOT_COMPRESSED = ("100%", "unlimited")
GATES: dict[str, tuple[str, ...]] = {
    "the grid is complete": ("Incomplete", "Partial"),
    "no row failed": ("Failed rows",),
    "the full cache scores above the floor": ("No baseline", "Baseline incomplete", "Baseline below the floor"),
    "no method answers just as the full cache does": ("Identical to the full cache",),
    "no sample held more than its budget": ("Over budget",),
    "all rows were computed in one way": ("Different numerics",),
}
"""What a table must pass to be believed, and the flags that say it does not."""


@dataclass(frozen=True)
class Flag:
    """``warning``: do not use the number before this is understood. ``note``: know it when you read the number."""

    level: Literal["warning", "note"]
    title: str
    text: str


def flags(summary: Summary, rows: pd.DataFrame, tasks: Sequence[TaskFacts], sweep: Mapping[str, Any]) -> list[Flag]:
    """``rows`` are the planned rows of the sweep, measured; ``tasks`` is what they say of their data."""
    found = [flag for board in summary.boards for flag in _board_flags(board)]
    if summary.partial:
        text = (
            f"The last run asked for the first {sweep.get('limit')} samples of each cell (--limit), in file order: "
            "scores in grey are of these alone and enter no average. Run without --limit to go on with the rest."
        )
        found.append(Flag("warning", "Partial", text))
    elif summary.cells_done < summary.cells - summary.cells_impossible:
        missing = summary.cells - summary.cells_impossible - summary.cells_done
        text = f"{missing:,} cells are not complete; their tasks are in grey and enter no average."
        found.append(Flag("warning", "Incomplete", text))
    files = sweep.get("data", {}).get("files", {})
    other = [path for path, one in files.items() if one["pinned"] is False]
    if other:
        text = f"Files of the data folder that are not the pinned source's, by their sha256: {', '.join(other)}."
        found.append(Flag("warning", "Other data", text))
    found += _identical(summary, rows)
    own = dict.fromkeys(task.task for task in tasks if "own" in task.facts.get("wording", ()))
    if own:
        text = f"Prompts in kvsweep's own words, so scores are not comparable with published ones: {', '.join(own)}."
        found.append(Flag("note", "Own wording", text))
    short = [
        f"{task.task} {task.samples:,} of {task.benchmark_size:,}"
        for task in tasks
        if task.samples < task.benchmark_size
    ]
    if short:
        text = f"Scores over a part of the benchmark, not to be put beside published ones: {', '.join(short)}."
        found.append(Flag("warning", "Part of a benchmark", text))
    if summary.rows_outside:
        text = f"{summary.rows_outside:,} rows of the output belong to cells or samples outside this plan; not shown."
        found.append(Flag("note", "Rows outside the plan", text))
    return sorted(found, key=lambda flag: flag.level != "warning")


def gates(found: Sequence[Flag]) -> dict[str, bool]:
    """Each gate and whether it is passed."""
    raised = {flag.title for flag in found}
    return {gate: not raised & set(titles) for gate, titles in GATES.items()}


def _board_flags(board: Board) -> Iterator[Flag]:
    where = name(board.condition)
    yield from _mixed_numerics(board, where)
    if board.baseline is None:
        text = f"{where}: the full cache was not run, so no method is compared with it."
        yield Flag("warning", "No baseline", text)
    elif board.baseline.macro.value is None:
        text = f"{where}: the full cache has no score on every task: {board.baseline.macro_refused}."
        yield Flag("warning", "Baseline incomplete", text)
    else:
        low = [
            f"{task.task} {points(task.estimate.value)}"
            for task in board.baseline.tasks.values()
            if task.estimate and task.estimate.value < FLOOR
        ]
        if low:
            text = f"{where}: the full cache itself scores below {points(FLOOR)} on {', '.join(low)}."
            yield Flag("warning", "Baseline below the floor", text)
    held = [(result, result.memory) for result in board.results if result.memory]
    over = [
        f"{full_name(result)}, {memory.over_budget} of {memory.rows}" for result, memory in held if memory.over_budget
    ]
    if over:
        yield Flag("warning", "Over budget", f"{where}: samples that held more than was asked: {'; '.join(over)}.")
    failed = [f"{full_name(result)} {result.failed:,}" for result in board.results if result.failed]
    if failed:
        text = f"{where}: failed rows have no score, and what has any enters no average: {', '.join(failed)}."
        yield Flag("warning", "Failed rows", text)
    few = sorted(
        {
            f"{task.task} {task.estimate.units}"
            for result in board.results
            for task in result.tasks.values()
            if task.estimate and task.estimate.units < FEW_SAMPLES and not task.estimate.one_document
        }
    )
    if few:
        what = f"fewer than {FEW_SAMPLES} prompts, or documents that prompts share"
        text = f"{where}: {what}, so intervals are rough: {', '.join(few)}."
        yield Flag("note", "Few samples", text)
    if alone := board.one_document:
        text = (
            f"{where}: all prompts are about one document, which says nothing of others, so there is no interval and "
            f"no verdict: {', '.join(alone)}."
        )
        yield Flag("note", "One document", text)


def _mixed_numerics(board: Board, where: str) -> Iterator[Flag]:
    kinds = sorted({kind for result in board.results for kind in result.numerics})
    if len(kinds) < 2:
        return
    mixed = [full_name(result) for result in board.results if len(result.numerics) > 1]
    what = f"No score is given for {', '.join(mixed)}." if mixed else "They are not compared with each other."
    text = f"{where}: rows were computed in {len(kinds)} ways ({'; '.join(kinds)}). {what} Run the sweep on one kind."
    yield Flag("warning", "Different numerics", text)


def _identical(summary: Summary, rows: pd.DataFrame) -> Iterator[Flag]:
    """Methods that were asked to evict and answer every prompt exactly as the full cache does."""
    scored = rows[rows["scored"]]
    by_configuration = dict(tuple(scored.groupby(scored["cell_id"].map(summary.configurations), sort=False)))
    for board in summary.boards:
        baseline = by_configuration.get(board.baseline.configuration) if board.baseline else None
        if baseline is None:
            continue
        for result in board.results:
            own = by_configuration.get(result.configuration)
            if result is board.baseline or result.configuration.budget in NOT_COMPRESSED or own is None:
                continue
            count = _all_equal(own, baseline)
            if count >= IDENTICAL_FROM:
                yield Flag("warning", "Identical to the full cache", _identical_words(board, result, count))


def _all_equal(own: pd.DataFrame, baseline: pd.DataFrame) -> int:
    """How many predictions were compared, if all are equal; else 0."""
    keys = ["task", "data_seed", "sample_id"]
    pairs = own[[*keys, "prediction"]].merge(
        baseline[[*keys, "prediction"]].drop_duplicates(keys), on=keys, suffixes=("", "_full")
    )
    return len(pairs) if (pairs["prediction"] == pairs["prediction_full"]).all() else 0


def _identical_words(board: Board, result: Result, count: int) -> str:
    held = share(result.memory.share_prefill if result.memory else None)
    return (
        f"{name(board.condition)}: {full_name(result)} gives the full cache's prediction on all {count} samples while "
        f"holding {held} of the cache at the end of prefill. Check that it evicts, and that the task can tell."
    )
