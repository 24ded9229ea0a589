"""A limited run's results: told apart from complete and from interrupted ones, and never averaged with them."""

from __future__ import annotations

from typing import Any

import pandas as pd
from row_factory import make_cell, make_rows, make_sweep

from pipeline.report import Report, build_report
from pipeline.results import TaskResult


def report(asked: int | None, *held: tuple[dict[str, Any], int]) -> Report:
    """Cells with so many rows each, after a run with this limit."""
    cells = [{**cell, "asked": min(asked or cell["expected"], cell["expected"])} for cell, _ in held]
    rows = pd.concat([make_rows(cell, [0.5] * count) for cell, count in held], ignore_index=True)
    return build_report(rows, cells, make_sweep(limit=asked))


def full(task: str, **other: Any) -> dict[str, Any]:
    return make_cell("full", "100%", task, 10, **other)


def only(made: Report, task: str) -> TaskResult:
    [result] = made.summary.results
    return result.tasks[task]


def warned(made: Report) -> bool:
    return any(flag.title == "Partial" for flag in made.flags)


def test_what_the_limit_asked_for_is_partial_and_less_is_incomplete() -> None:
    partial, interrupted = report(2, (full("vt"), 2)), report(None, (full("vt"), 2))
    assert only(partial, "vt").state == "partial"
    assert only(interrupted, "vt").state == "incomplete"
    assert only(report(4, (full("vt"), 2)), "vt").state == "incomplete"
    assert (warned(partial), warned(interrupted)) == (True, False)
    assert partial.status().endswith("partial: run with --limit 2")
    for made in (partial, interrupted):
        assert only(made, "vt").partial == 0.5
        assert only(made, "vt").estimate is None


def test_a_limit_that_covers_all_leaves_nothing_partial() -> None:
    made = report(20, (full("vt"), 10))
    assert only(made, "vt").state == "complete"
    assert not warned(made)


def test_a_partial_task_keeps_its_complete_neighbour_from_an_average() -> None:
    made = report(2, (full("vt"), 10), (full("fwe"), 2))
    [result] = made.summary.results
    assert (result.tasks["vt"].state, result.tasks["fwe"].state) == ("complete", "partial")
    assert result.macro.value is None
    assert result.macro_refused == "partial, 1 of 2"
    assert "partial, 1 of 2" in made.markdown()


def test_complete_and_partial_seeds_have_no_common_mean() -> None:
    made = report(2, (full("vt"), 10), (full("vt", data_seed=1), 2))
    assert only(made, "vt").state == "partial"
    assert only(made, "vt").partial is None
    assert "– (partial, 12 of 20)" in made.markdown()


def test_plans_of_earlier_outputs_ask_for_all() -> None:
    cell = full("vt")
    made = build_report(make_rows(cell, [0.5] * 2), [cell], make_sweep())
    assert only(made, "vt").state == "incomplete"
