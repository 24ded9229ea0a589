"""Tasks taken apart in the report: needle grids, length bins, further metrics; incomplete tasks stand apart."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import pandas as pd
import pytest
from row_factory import Output, make_cell, make_rows, make_sweep

from pipeline.appendix import bins_table, details_tables
from pipeline.breakdown import MOST_DEPTHS, grids, titles
from pipeline.report import Report, build_report
from pipeline.table import Table

DEPTHS = (0.0, 50.0, 100.0)
BINS = ("0-4k", "4-8k", "8k+")


def report_of(*parts: tuple[dict[str, Any], pd.DataFrame]) -> Report:
    return build_report(pd.concat([rows for _, rows in parts]), [cell for cell, _ in parts], make_sweep())


def needles(
    method: str, budget: str, scores: Sequence[float | None], context: int = 4096, expected: int | None = None
) -> tuple[dict[str, Any], pd.DataFrame]:
    """A cell of the needle grid: sample i at depth i % 3."""
    cell = make_cell(method, budget, "niah", len(scores) if expected is None else expected, context=context)
    meta = [json.dumps({"depth": DEPTHS[index % 3], "depth_real": 1.5}) for index in range(len(scores))]
    return cell, make_rows(cell, scores, sample_meta=meta)


def binned(
    method: str, task: str, scores: Sequence[float | None], expected: int | None = None
) -> tuple[dict[str, Any], pd.DataFrame]:
    budget = "100%" if method == "full" else "10%"
    cell = make_cell(method, budget, task, len(scores) if expected is None else expected, context=0)
    meta = [json.dumps({"bin": BINS[index % 3]}) for index in range(len(scores))]
    return cell, make_rows(cell, scores, sample_meta=meta)


def solved(method: str, scores: Sequence[float | None], **fields: Any) -> tuple[dict[str, Any], pd.DataFrame]:
    cell = make_cell(method, "10%", "gsm8k", fields.pop("expected", len(scores)), context=0)
    told = [
        json.dumps({"strict": 0.0, "flexible": score or 0.0, "marker": index % 2}) for index, score in enumerate(scores)
    ]
    return cell, make_rows(
        cell, scores, **{"details": told, "finish_reason": ["length", *["stop"] * (len(scores) - 1)], **fields}
    )


def cells_of(table: Table, method: str, group: str) -> dict[str, str]:
    """A row's cells by the titles of their columns."""
    [row] = [row for row in table.rows if row.group == group and row.cells[0].text == method]
    return {column.title: str(cell) for column, cell in zip(table.columns, row.cells, strict=True)}


# ---- needle grids


@pytest.fixture
def grid_report() -> Report:
    return report_of(
        needles("full", "100%", [1, 1, 1, 1, 1, 1]),
        needles("full", "100%", [1, 1, 0.5, 1, 1, 1], context=8192),
        needles("snapkv", "10%", [1, 0.5, 0, 0, 0.5, 1]),
        needles("snapkv", "10%", [1, 0, 0, 1], context=8192, expected=6),
    )


def test_a_place_of_the_grid_is_the_mean_of_its_needles(grid_report: Report) -> None:
    [grid] = grids(grid_report.views)
    assert (grid.task, grid.lengths, grid.depths) == ("niah", (4096, 8192), DEPTHS)
    full, snapkv = grid.panels
    assert {place: part.value for place, part in full.parts.items() if place[0] == 8192} == {
        (8192, 0.0): 1.0,
        (8192, 50.0): 1.0,
        (8192, 100.0): 0.75,
    }
    assert [(snapkv.parts[4096, depth].value, snapkv.parts[4096, depth].samples) for depth in DEPTHS] == [
        (0.5, 2),
        (0.5, 2),
        (0.5, 2),
    ]


def test_a_panel_s_mean_is_over_its_places_and_refused_while_a_length_is_incomplete(grid_report: Report) -> None:
    [grid] = grids(grid_report.views)
    full, snapkv = grid.panels
    assert full.mean == pytest.approx((5 + 0.75) / 6)
    assert (snapkv.mean, snapkv.open_lengths) == (None, {8192})


def test_a_depth_without_samples_leaves_the_panel_without_a_mean() -> None:
    [grid] = grids(report_of(needles("full", "100%", [1, 1, 1]), needles("snapkv", "10%", [1, 1])).views)
    assert [panel.mean for panel in grid.panels] == [1.0, None]


def test_failed_needles_are_in_no_place() -> None:
    [grid] = grids(report_of(needles("full", "100%", [None, 1, 1, 1, 1, 1])).views)
    [panel] = grid.panels
    assert panel.parts[4096, 0.0].samples == 1
    assert panel.mean is None


def test_the_map_writes_every_value_and_frames_what_is_incomplete(grid_report: Report) -> None:
    page = grid_report.html()
    assert "niah, depth by length" in page
    assert "mean 95.8" in page
    for words in (
        "full at 100%, 8,192 tokens, depth 100%: 75.0, n = 2",
        "snapkv at 10%, 4,096 tokens, depth 50%: 50.0, n = 2",
        "snapkv at 10%, 8,192 tokens, depth 0%: 100.0, n = 2 so far",
    ):
        assert f"<title>{words}</title>" in page
    assert not re.search(r"<(image|script)", page)
    assert re.search(r">\(100\)</text>|>\(100\)<", page)


def test_depths_that_are_each_sample_s_own_make_no_grid() -> None:
    cell = make_cell("full", "100%", "qa", MOST_DEPTHS + 1)
    meta = [json.dumps({"depth": index + 0.5}) for index in range(MOST_DEPTHS + 1)]
    made = report_of((cell, make_rows(cell, [1.0] * len(meta), sample_meta=meta)))
    assert grids(made.views) == []
    assert "depth by length" not in made.html()


def test_rows_of_different_numerics_are_in_no_view() -> None:
    cell, rows = needles("full", "100%", [1, 1, 1])
    made = report_of((cell, rows.assign(numerics=["a", "b", "a"])))
    assert made.views == ()


def test_facts_of_another_kind_are_passed_over() -> None:
    cell = make_cell("full", "100%", "own", 2)
    made = report_of((cell, make_rows(cell, [1.0, 0.0], sample_meta=json.dumps({"depth": "deep", "bin": 3}))))
    [view] = made.views
    assert (view.depths, view.bins, view.details) == ({}, {}, {})


# ---- length bins


def test_bins_are_means_with_their_numbers_and_averaged_over_tasks() -> None:
    made = report_of(binned("full", "qa", [1, 1, 0, 1]), binned("full", "sum", [0.5, 0, 1]))
    [board] = made.summary.boards
    table = bins_table(board, made.views)
    assert table is not None
    assert [column.title for column in table.columns[3:]] == list(BINS)
    assert cells_of(table, "full", "qa") == {
        **{"Method": "full", "Budget": "100%", "Task": "qa"},
        **{"0-4k": "100.0 (2)", "4-8k": "100.0 (1)", "8k+": "0.0 (1)"},
    }
    assert [cells_of(table, "full", "all")[one] for one in BINS] == ["75.0", "50.0", "50.0"]


def test_an_incomplete_task_is_shown_grey_and_in_no_mean() -> None:
    made = report_of(
        *(binned("full", task, [1, 1, 1]) for task in ("qa", "sum")),
        *(binned("snapkv", task, [1, 1, 1], expected) for task, expected in (("qa", 3), ("sum", 9))),
    )
    [board] = made.summary.boards
    table = bins_table(board, made.views)
    assert table is not None
    assert [cells_of(table, "snapkv", "all")[one] for one in BINS] == ["1 of 2"] * 3
    [row] = [row for row in table.rows if row.group == "sum" and row.cells[0].text == "snapkv"]
    assert [cell.tone for cell in row.cells[3:]] == ["muted"] * 3
    assert "By length" in made.html()
    assert "By length" in made.markdown()


def test_bins_stand_in_the_order_of_length() -> None:
    assert titles([{"8k+": 1, "12-16k": 1}, {"0-4k": 1, "4-8k": 1}]) == ["0-4k", "4-8k", "8k+", "12-16k"]


# ---- further metrics


def test_further_metrics_stand_beside_the_score_with_the_share_cut_off() -> None:
    made = report_of(solved("snapkv", [1.0, 0.0, 1.0, 1.0]))
    [board] = made.summary.boards
    [table] = details_tables(board, made.views)
    row = cells_of(table, "snapkv", "10%")
    assert {key: row[key] for key in ("Score", "strict", "flexible", "marker", "At limit", "n")} == {
        **{"Score": "75.0", "strict": "0.0", "flexible": "75.0", "marker": "50.0"},
        **{"At limit": "25.0%", "n": "4"},
    }
    assert "gsm8k: " in made.markdown()


def test_further_metrics_of_an_incomplete_task_say_how_much_is_there() -> None:
    made = report_of(solved("snapkv", [1.0, 0.0], expected=9))
    [board] = made.summary.boards
    [table] = details_tables(board, made.views)
    assert cells_of(table, "snapkv", "10%")["n"] == "2 of 9"
    assert {cell.tone for cell in table.rows[0].cells[2:-1]} == {"muted"}


def test_a_metric_that_only_some_rows_tell_says_of_how_many() -> None:
    made = report_of(solved("snapkv", [1.0, 0.0], details=["{}", json.dumps({"strict": 1.0})]))
    [board] = made.summary.boards
    [table] = details_tables(board, made.views)
    assert cells_of(table, "snapkv", "10%")["strict"] == "100.0 (1)"


def test_tasks_with_nothing_further_to_tell_add_nothing() -> None:
    cell = make_cell("full", "100%", "vt", 3)
    made = report_of((cell, make_rows(cell, [1.0, 1.0, 0.0])))
    assert "Inside the tasks" not in made.html()


def test_the_same_rows_in_any_order_give_the_same_views(grid_report: Report) -> None:
    parts = [needles("full", "100%", [1, 0.5, 0.3, 0.7]), binned("full", "qa", [1, 0.1, 0.2])]
    output = Output(pd.concat([rows for _, rows in parts]), [cell for cell, _ in parts], make_sweep())
    again = build_report(output.rows.sample(frac=1, random_state=1), output.cells, output.sweep)
    assert again.html() == build_report(*output).html()
