"""From rows to results, tables, flags and the page."""

from __future__ import annotations

import csv
import io
import json
import os
import re
from html.parser import HTMLParser
from pathlib import Path

import pandas as pd
import pytest
from row_factory import MODEL, Output, make_cell, make_output, make_rows, make_sweep

from pipeline import appendix, figures, sanity, stats, tables
from pipeline.compare import CompareError, compare
from pipeline.families import families_of, family_score, front
from pipeline.partition import Scores
from pipeline.plots import looks
from pipeline.report import Report, build_report
from pipeline.results import Result
from pipeline.summary import cells_of

RIGHT_OR_WRONG = [1.0, 0.0, 1.0, 1.0, 0.0, 1.0, 1.0, 0.0, 1.0, 1.0]
VOID = {"area", "base", "br", "col", "hr", "img", "input", "link", "meta", "source", "wbr"}


class Page(HTMLParser):
    """Refuses tags that do not close in order; keeps tags, attributes and text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert not self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def report_of(*parts: tuple[dict, pd.DataFrame], **sweep: object) -> Report:
    return build_report(pd.concat([rows for _, rows in parts]), [cell for cell, _ in parts], make_sweep(**sweep))


def part(method: str, budget: str, task: str = "vt", scores: list | None = None, **fields) -> tuple[dict, pd.DataFrame]:
    """A cell and its rows; fields of the cell's coordinates go to the cell, others to the rows."""
    scores = RIGHT_OR_WRONG if scores is None else scores
    coordinates = ("data_seed", "method_seed", "context", "settings", "label")
    own = {key: fields.pop(key) for key in coordinates if key in fields}
    cell = make_cell(method, budget, task, fields.pop("expected", len(scores)), **own)
    return cell, make_rows(cell, scores, **fields)


def only(report: Report, method: str, budget: str | None = None) -> Result:
    (found,) = (
        one
        for one in report.summary.results
        if one.configuration.method == method and budget in (None, one.configuration.budget)
    )
    return found


def flag_titles(report: Report) -> list[str]:
    return [flag.title for flag in report.flags]


@pytest.fixture(scope="module")
def output() -> Output:
    return make_output(tasks=("niah_single", "vt", "qa"), data_seeds=(0, 1), graded=("qa",))


@pytest.fixture(scope="module")
def report(output: Output) -> Report:
    return build_report(*output)


# ---- results


def test_scores_are_those_of_the_statistics_on_the_same_rows(output: Output, report: Report) -> None:
    for result in report.summary.results:
        mine = output.rows[
            (output.rows["method"] == result.configuration.method)
            & (output.rows["budget"] == result.configuration.budget)
        ]
        by_task = {
            task: Scores.of(rows["score"], rows["sample_id"], rows["data_seed"], rows["method_seed"])
            for task, rows in mine.groupby("task")
        }
        estimates, macro = stats.macro_of(by_task)
        assert {name: task.estimate for name, task in result.tasks.items()} == estimates
        assert (result.macro.value, result.macro.interval) == (
            pytest.approx(macro.value),
            stats.Interval(pytest.approx(macro.interval.low), pytest.approx(macro.interval.high), macro.interval.how),
        )


def test_every_method_is_compared_with_the_full_cache_and_holm_is_over_the_table(report: Report) -> None:
    (board,) = report.summary.boards
    compared = [result.against_full for result in board.results if not result.configuration.is_baseline]
    assert board.compared == len(compared) == 4
    assert [one.p_holm for one in compared] == stats.holm([one.p for one in compared])
    assert board.baseline.against_full is None


def test_failed_rows_are_counted_and_make_the_cell_incomplete() -> None:
    scores = [*RIGHT_OR_WRONG[:8], None, None]
    report = report_of(part("full", "100%"), part("snapkv", "10%", scores=scores))
    task = only(report, "snapkv").tasks["vt"]
    assert (task.state, task.scored, task.failed, task.estimate) == ("incomplete", 8, 2, None)
    assert task.partial == pytest.approx(5 / 8)
    assert only(report, "snapkv").macro_refused == "0 of 1"
    assert only(report, "snapkv").errors == {"OutOfMemoryError": 2}


def test_a_row_without_a_score_is_no_zero() -> None:
    report = report_of(part("snapkv", "10%", scores=[1.0, None, 1.0], status="ok", error=""))
    assert only(report, "snapkv").tasks["vt"].partial == 1.0
    assert only(report, "snapkv").failed == 1
    assert report.failures[0].example == "the metric gave no score"


def test_the_macro_average_over_an_incomplete_grid_is_refused_and_says_how_much_is_there() -> None:
    report = report_of(
        part("full", "100%"), part("full", "100%", "qa"), part("snapkv", "10%"),
        part("snapkv", "10%", "qa", expected=20),
    )  # fmt: skip
    snapkv = only(report, "snapkv")
    assert (snapkv.macro.value, snapkv.macro_refused, snapkv.against_full.verdict) == (None, "1 of 2", "incomplete")
    assert "1 of 2" in report.markdown()
    assert report.summary.cells_done == 3


def test_rows_of_different_numerics_never_share_a_score() -> None:
    mixed = ["torch 2.13 cpu"] * 5 + ["torch 2.13 cuda"] * 5
    report = report_of(part("full", "100%"), part("snapkv", "10%", numerics=mixed))
    snapkv = only(report, "snapkv")
    assert (snapkv.tasks["vt"].state, snapkv.macro_refused) == ("mixed numerics", "mixed numerics")
    assert snapkv.tasks["vt"].partial is None
    assert "Different numerics" in flag_titles(report)
    assert "mixed numerics" in report.html()


def test_tasks_of_different_numerics_have_no_common_macro_average() -> None:
    report = report_of(part("snapkv", "10%"), part("snapkv", "10%", "qa", numerics="torch 2.13 cuda"))
    assert only(report, "snapkv").tasks["qa"].estimate is not None
    assert only(report, "snapkv").macro_refused == "mixed numerics"


def test_methods_of_different_numerics_are_not_compared() -> None:
    report = report_of(part("full", "100%"), part("snapkv", "10%", numerics="torch 2.13 cuda"))
    against = only(report, "snapkv").against_full
    assert (against.verdict, against.p, against.macro.value) == ("not comparable", None, None)
    assert "torch 2.13 cpu; torch 2.13 cuda" in against.refused
    assert "Different numerics" in flag_titles(report)


def test_each_protocol_has_a_table_of_its_own() -> None:
    report = report_of(
        part("full", "100%"), part("snapkv", "10%"), part("snapkv", "20%", question="appended", scores=[1.0] * 10)
    )
    assert [board.condition.question for board in report.summary.boards] == ["appended", "compressed"]
    assert only(report, "snapkv", "20%").against_full is None
    assert only(report, "snapkv", "10%").against_full is not None


def test_two_settings_of_one_method_are_told_apart_by_what_differs() -> None:
    report = report_of(
        part("qevict", "10%", settings={"window": 8, "sinks": 4}),
        part("qevict", "10%", settings={"window": 32, "sinks": 4}),
    )
    assert [one.label for one in report.summary.results] == ["qevict (window=8)", "qevict (window=32)"]


def test_a_label_of_the_plan_is_used() -> None:
    report = report_of(part("qevict", "10%", label="qevict, wide"))
    assert report.summary.results[0].label == "qevict, wide"


def test_rows_outside_the_plan_are_left_out_and_said() -> None:
    planned, beyond = part("snapkv", "10%", expected=6), part("lorekv", "10%")
    report = build_report(pd.concat([planned[1], beyond[1]]), [planned[0]], make_sweep())
    assert only(report, "snapkv").scored == 6
    assert report.summary.rows_outside == 4 + 10
    assert "Rows outside the plan" in flag_titles(report)


def test_memory_is_measured_next_to_the_budget_asked() -> None:
    scores = [1.0, 0.0]
    held = {"kv_bytes_prefill": [10, 30], "kv_bytes_end": [30, 50], "kv_bytes_peak": [40, 60]}
    full = {"kv_bytes_full_prefill": 100, "kv_bytes_full": 200, "workspace_bytes": [2048, 4096], "host_bytes": 1024}
    report = report_of(part("snapkv", "10%", scores=scores, over_budget=[True, False], **held, **full))
    memory = only(report, "snapkv").memory
    assert (memory.share_prefill, memory.share_end, memory.share_peak) == pytest.approx((0.2, 0.2, 0.25))
    assert (memory.workspace_bytes, memory.largest_peak, memory.over_budget) == (3072, 60, 1)
    assert memory.host_bytes == 1024
    (board,) = report.summary.boards
    assert "3.0 KiB + 1.0 KiB on the host" in [str(cell) for cell in tables.main_table(board).rows[0].cells]


def test_costs_of_shared_and_isolated_runs_stay_apart() -> None:
    shared, isolated = part("snapkv", "10%"), part("snapkv", "10%", "qa", timing="isolated", ttft_s=0.5, tpot_s=0.01)
    report = report_of(shared, isolated)
    assert [cost.timing for cost in only(report, "snapkv").costs] == ["shared", "isolated"]
    assert "Shared run: not an efficiency measurement." in report.html()
    assert "10.00" in str(appendix.cost_table(report.summary.boards[0], "isolated").rows)


def test_an_output_without_rows_has_a_report() -> None:
    planned = make_output(samples=4)
    report = build_report(planned.rows.iloc[:0], planned.cells, planned.sweep)
    Page(report.html())
    assert report.status() == "0 of 10 cells complete, 0 of 40 rows"
    assert report.csv().count("\n") == 1 + 5


def test_a_plan_can_be_read_back_from_rows(output: Output) -> None:
    cells = {cell["cell_id"]: cell for cell in cells_of(output.rows)}
    assert cells == {cell["cell_id"]: {**cell, "found": 20} for cell in output.cells}


# ---- tables


def test_the_full_cache_leads_and_methods_follow_by_score_within_each_budget(report: Report) -> None:
    places = [(one.configuration.budget, one.macro.value) for one in tables.ranked(report.summary.boards[0])]
    assert [budget for budget, _ in places] == ["100%", "10%", "10%", "20%", "20%"]
    assert places[1][1] >= places[2][1]


def test_the_main_table_shows_the_numbers_of_the_statistics(report: Report) -> None:
    (board,) = report.summary.boards
    table = tables.main_table(board)
    titles = [column.title for column in table.columns]
    for row, result in zip(table.rows, tables.ranked(board), strict=True):
        cells = dict(zip(titles, row.cells, strict=True))
        macro, against = result.macro, result.against_full
        ends = f"[{100 * macro.interval.low:.1f}, {100 * macro.interval.high:.1f}]"
        assert str(cells["Macro"]) == f"{100 * macro.value:.1f} {ends}"
        assert {name: cells[name].text for name in board.tasks} == {
            name: f"{100 * task.estimate.value:.1f}" for name, task in result.tasks.items()
        }
        if against:
            delta = against.macro
            ends = f"[{100 * delta.interval.low:+.1f}, {100 * delta.interval.high:+.1f}]"
            assert str(cells["Δ full"]) == f"{100 * delta.value:+.1f} {ends}"
            assert cells["Verdict"].text == against.verdict
            assert cells["p"].text == figures.probability(against.p_holm)
        assert cells["KV prefill"].text == f"{100 * result.memory.share_prefill:.1f}%"
        assert cells["n"].text == "120"


def test_csv_holds_the_unrounded_figures(report: Report) -> None:
    read = list(csv.DictReader(io.StringIO(report.csv())))
    for line, result in zip(read, tables.ranked(report.summary.boards[0]), strict=True):
        assert float(line["macro"]) == 100 * result.macro.value
        assert float(line["macro_low"]) == 100 * result.macro.interval.low
        assert float(line["task/vt"]) == 100 * result.tasks["vt"].estimate.value
        assert line["verdict"] == (result.against_full.verdict if result.against_full else "")
        assert json.loads(line["settings"]) == {}


def test_csv_survives_pandas(report: Report) -> None:
    frame = pd.read_csv(io.StringIO(report.csv())).fillna({"verdict": ""})
    again = pd.DataFrame(tables.records(report.summary))
    pd.testing.assert_frame_equal(frame, again, check_dtype=False)


def test_markdown_rows_have_as_many_cells_as_the_head(report: Report) -> None:
    lines = [line for line in report.markdown().splitlines() if line.startswith("|")]
    assert len({len(re.findall(r"(?<!\\)\|", line)) for line in lines}) == 1


def test_markdown_headings_stand_alone() -> None:
    report = report_of(part("full", "100%"), part("snapkv", "10%", scores=[0.5]))
    assert report.flags
    lines = report.markdown().splitlines()
    assert [lines[place - 1 : place] for place, line in enumerate(lines) if line.startswith("###")] == [[""]]


def test_markdown_and_latex_escape_what_names_hold() -> None:
    report = report_of(part("snap_kv|x", "10%", "a&b_<i>"))
    assert r"snap\_kv\|x" in report.markdown()
    assert "<i>" not in report.markdown()
    assert r"a\&b\_$<$i$>$" in report.latex()
    assert r"10\%" in report.latex()


def test_the_papers_layout_marks_the_best_and_the_second_of_a_budget() -> None:
    best, second, third = [1.0] * 10, [1.0] * 9 + [0.0], [1.0] * 5 + [0.0] * 5
    report = report_of(
        part("full", "100%"), part("snapkv", "10%", scores=second), part("qevict", "10%", scores=best),
        part("adakv", "10%", scores=second), part("random", "10%", scores=third), part("snapkv", "20%"),
    )  # fmt: skip
    table = tables.papers_table(report.summary.boards[0])
    marks = {(row.cells[0].text, row.group): [cell.mark for cell in row.cells[2:]] for row in table.rows}
    assert marks == {
        ("full", "100%"): ["", ""], ("qevict", "10%"): ["best"] * 2, ("snapkv", "10%"): ["second"] * 2,
        ("adakv", "10%"): ["second"] * 2, ("random", "10%"): ["", ""], ("snapkv", "20%"): ["", ""],
    }  # fmt: skip
    assert r"\textbf{100.0} & \textbf{100.0} \\" in report.latex()
    assert r"\underline{90.0}" in report.latex()


def test_the_leaderboard_ranks_by_macro_average_within_a_budget(report: Report) -> None:
    read = json.loads(report.leaderboard())
    ((board,),) = [read["boards"]]
    assert [entry["rank"] for entry in board["entries"]] == [None, 1, 2, 1, 2]
    by_rank = {entry["rank"]: entry["macro"] for entry in board["entries"] if entry["budget"] == "10%"}
    assert by_rank[1] >= by_rank[2]
    assert [entry["label"] for entry in board["entries"]] == [
        result.label for result in tables.ranked(report.summary.boards[0])
    ]


def test_a_figure_that_cannot_be_is_null_on_the_leaderboard() -> None:
    report = report_of(part("full", "100%", kv_bytes_full=0))
    (entry,) = json.loads(report.leaderboard())["boards"][0]["entries"]
    assert (entry["kv_share_peak"], entry["kv_share_prefill"]) == (None, 1.0)


def test_an_incomplete_configuration_has_no_rank() -> None:
    report = report_of(part("full", "100%"), part("snapkv", "10%", expected=20), part("qevict", "10%"))
    entries = json.loads(report.leaderboard())["boards"][0]["entries"]
    assert {entry["method"]: entry["rank"] for entry in entries} == {"full": None, "qevict": 1, "snapkv": None}


def test_the_terminal_shows_macro_averages_and_status(report: Report) -> None:
    from rich.console import Console

    console = Console(width=140, file=io.StringIO())
    console.print(report.rich())
    shown = console.file.getvalue()
    value = figures.points(report.summary.boards[0].baseline.macro.value)
    assert value in shown
    assert report.status() in shown


# ---- flags and failures


def test_a_sound_sweep_raises_no_warning(report: Report) -> None:
    assert [flag.title for flag in report.flags if flag.level == "warning"] == []


def test_a_sound_sweep_passes_every_gate(report: Report) -> None:
    assert all(sanity.gates(report.flags).values())
    assert report.html().count("<li class='passed'>") == len(sanity.GATES)


def test_a_baseline_below_the_floor_is_a_warning() -> None:
    report = report_of(part("full", "100%", scores=[0.0] * 19 + [1.0]), part("snapkv", "10%", scores=[0.0] * 20))
    assert "Baseline below the floor" in flag_titles(report)
    assert not sanity.gates(report.flags)["the full cache scores above the floor"]


def test_a_grid_with_a_gap_does_not_pass_as_complete() -> None:
    report = report_of(part("full", "100%"), part("snapkv", "10%", expected=20))
    assert "Incomplete" in flag_titles(report)
    assert "✗ the grid is complete" in report.html()


def test_a_missing_baseline_is_a_warning() -> None:
    assert "No baseline" in flag_titles(report_of(part("snapkv", "10%")))


def test_a_method_that_answers_just_as_the_full_cache_is_a_warning_unless_it_keeps_everything() -> None:
    lazy, whole = part("snapkv", "10%"), part("lorekv", "unlimited")
    report = report_of(part("full", "100%"), lazy, whole)
    (flag,) = (flag for flag in report.flags if flag.title == "Identical to the full cache")
    assert "snapkv at 10%" in flag.text
    assert "10 samples while holding 10.0%" in flag.text


def test_rows_over_budget_are_a_warning_with_their_number() -> None:
    report = report_of(part("full", "100%"), part("snapkv", "10%", over_budget=[True, True] + [False] * 8))
    (flag,) = (flag for flag in report.flags if flag.title == "Over budget")
    assert "snapkv at 10%, 2 of 10" in flag.text


def test_prompts_in_own_words_are_a_note_and_official_ones_are_not() -> None:
    official = json.dumps({"wording": "official"})
    assert "Own wording" in flag_titles(report_of(part("full", "100%")))
    assert "Own wording" not in flag_titles(report_of(part("full", "100%", sample_meta=official)))


def test_failures_are_gathered_by_error_apart_from_numbers() -> None:
    errors = [f"torch.OutOfMemoryError: tried to allocate {size} MiB" for size in (20, 64)] + ["ValueError: odd"]
    report = report_of(part("full", "100%", scores=[None, None, None], error=errors))
    assert [(one.kind, one.count) for one in report.failures] == [("OutOfMemoryError", 2), ("ValueError", 1)]
    assert report.failures[0].configurations == {"full at 100%": 2}


def test_impossible_cells_are_listed_with_their_reasons() -> None:
    cell = make_cell("lorekv", "128 tokens", "vt", 10, impossible="128 tokens are fewer than the 160 it protects")
    base = part("full", "100%")
    report = build_report(base[1], [base[0], cell], make_sweep())
    assert only(report, "lorekv").macro_refused == "impossible"
    assert "fewer than the 160 it protects" in report.html()
    assert report.status() == "1 of 1 cells complete, 10 of 10 rows, 1 cells impossible"


# ---- the page


def test_the_page_is_well_formed_and_links_to_nothing_else(report: Report) -> None:
    text = report.html()
    page = Page(text)
    assert not {"script", "link", "iframe", "img", "object"} & set(page.tags)
    assert not re.search(r"(https?:)?//|@import|url\((?!#)", text)
    assert all((value or "").startswith("#") for name, value in page.attributes if name in ("href", "src"))


def test_ids_on_the_page_are_unique_and_every_reference_finds_its_own(output: Output) -> None:
    page = Page(build_report(*make_output(contexts=(2048, 4096), samples=6)).html())
    ids = [value for name, value in page.attributes if name == "id"]
    assert len(ids) == len(set(ids))
    used = {value[1:] for name, value in page.attributes if name == "href" and value}
    used |= {match for _, value in page.attributes for match in re.findall(r"url\(#([^)]+)\)", value or "")}
    assert used <= set(ids)


@pytest.mark.parametrize("field", ["error", "device", "node", "numerics", "finish_reason", "dtype"])
def test_what_rows_say_is_escaped(field: str) -> None:
    attack = "<script>alert('x')</script>\"'&"
    scores = [None if field == "error" else 1.0] * 3
    page = Page(report_of(part("full", "100%", scores=scores, **{field: attack})).html())
    assert "script" not in page.tags
    assert (attack in page.text) == (field not in ("finish_reason", "node"))


def test_names_settings_and_the_sweep_file_are_escaped() -> None:
    attack = "<script>alert(1)</script>"
    base = part("full", "100%", attack)
    meta = json.dumps({"haystack": attack})
    other = part(f"m{attack}", "10%", attack, settings={attack: attack}, label=f"l{attack}$", sample_meta=meta)
    text = report_of(base, other, name=attack, config_text=attack, versions={attack: attack}).html()
    page = Page(text)
    assert "script" not in page.tags
    assert page.text.count(attack) > 10


def test_the_page_says_what_was_run(report: Report) -> None:
    text = Page(report.html()).text
    for words in (MODEL, "torch 2.13 cpu (600)", "haystack: noise", "wording: own", "name: unit", "2.13.0"):
        assert words in text


def test_plots_hold_every_method_with_its_figures(report: Report) -> None:
    text = report.html()
    qevict = only(report, "qevict", "10%")
    assert text.count("<svg role='img'") == 6
    assert f"<title>qevict at 10%: {figures.points(qevict.macro.value)} " in text
    assert "currentColor" in text


def test_the_page_says_how_to_run_it_again() -> None:
    models = {"small": {"source": "owner/small", "revision": "abc", "dtype": "bfloat16"}}
    files = {"a.jsonl": {"from": "cache", "path": "/there/a.jsonl", "sha256": "5f" * 32, "pinned": True}}
    file = "name: unit\nmodels: [{label: small, source: owner/small}]\ncontexts: [4096]\n"
    sweep = {"models": models, "data": {"files": files}, "config_text": file, "limit": None}
    text = Page(report_of(part("full", "100%"), **sweep).html()).text
    for words in ("pip install -e . torch==2.13.0", "kvsweep run sweep.yaml --output", "name: unit", "5f" * 32):
        assert words in text
    assert "owner/small at abc, bfloat16" in text


def test_a_model_and_a_length_in_place_of_the_file_s_are_in_the_command() -> None:
    models = {"small": {"source": "wheel:small"}}
    file = "models:\n  - {label: big, source: owner/big}\ncontexts: [32768]\n"
    text = Page(report_of(part("full", "100%"), models=models, config_text=file).html()).text
    assert "kvsweep run sweep.yaml --model wheel:small --context 4096 --output" in text
    same = file.replace("owner/big", "wheel:small").replace("32768", "2048, 4096")
    text = Page(report_of(part("full", "100%"), models=models, config_text=same).html()).text
    assert "kvsweep run sweep.yaml --output" in text


def test_the_map_of_tasks_holds_every_score_with_its_difference_to_the_full_cache(report: Report) -> None:
    text = report.html()
    for result in report.summary.results:
        for task in result.tasks.values():
            ends = figures.brackets(task.estimate.interval)
            assert f"{figures.full_name(result)}, {task.task}: {figures.points(task.estimate.value)} {ends}" in text


def test_the_page_sets_measured_beside_asked() -> None:
    held = {"budget_bytes": 1000, "charged_bytes": 900, "kv_bytes_prefill": 950, "kv_bytes_full_prefill": 10_000}
    report = report_of(part("full", "100%"), part("snapkv", "10%", over_budget=[True] + [False] * 9, **held))
    table = appendix.budgets_table(report.summary.boards[0])
    cells = dict(zip([column.title for column in table.columns], map(str, table.rows[1].cells), strict=True))
    assert (cells["Asked"], cells["Charged / asked"], cells["Held / asked"]) == ("1000 B", "90.0%", "95.0%")
    assert cells["Held, prefill"] == "950 B (9.5%)"
    assert cells["Over budget"] == "1 of 10"


def test_the_front_holds_what_no_other_place_dominates() -> None:
    places = [(0.10, 0.5), (0.20, 0.5), (0.20, 0.7), (0.05, 0.1), (0.30, 0.7), (0.20, 0.7)]
    assert front(places) == [3, 0, 2, 5]
    assert front([]) == []


def test_a_family_has_a_score_once_its_tasks_are_complete() -> None:
    report = report_of(
        part("full", "100%", "qasper", scores=[1.0, 0.0]), part("full", "100%", "narrativeqa", scores=[1.0, 1.0]),
        part("snapkv", "10%", "qasper", scores=[1.0, 0.0]),
        part("snapkv", "10%", "narrativeqa", scores=[1.0], expected=2),
        part("full", "100%", "my task", scores=[1.0]),
    )  # fmt: skip
    (board,) = report.summary.boards
    families = families_of(board)
    assert families == {"Single-document QA": ("qasper", "narrativeqa"), "my task": ("my task",)}
    assert family_score(only(report, "full"), families["Single-document QA"]) == pytest.approx(0.75)
    assert family_score(only(report, "snapkv"), families["Single-document QA"]) is None


def test_samples_that_share_a_document_are_one_unit() -> None:
    named = [json.dumps({"document": f"d{index // 5}"}) for index in range(20)]
    report = report_of(part("full", "100%", scores=[1.0, 0.0] * 10, sample_meta=named))
    estimate = only(report, "full").tasks["vt"].estimate
    assert (estimate.interval.how, estimate.samples, estimate.units) == ("bootstrap of documents", 20, 4)


def test_a_task_about_one_document_has_no_interval_and_no_verdict() -> None:
    alone = [json.dumps({"document": "d"})] * 20
    cells = [make_cell(method, budget, "my task", 20) for method, budget in (("full", "100%"), ("snapkv", "10%"))]
    scores = [1.0] * 20, [0.0, 1.0] * 10
    parts = [(cell, make_rows(cell, own, sample_meta=alone)) for cell, own in zip(cells, scores, strict=True)]
    report = report_of(*parts)
    (board,) = report.summary.boards
    note = "[–]: no interval, since all prompts of my task are about one document."
    for table in (tables.main_table(board), tables.overview_table(board)):
        assert note in table.caption
    (full, snapkv) = tables.main_table(board).rows
    titles = [column.title for column in tables.main_table(board).columns]
    shown = dict(zip(titles, map(str, snapkv.cells), strict=True))
    assert [shown[title] for title in ("Macro", "Δ full", "Verdict")] == ["50.0 [–]", "-50.0 [–]", "too few documents"]
    assert str(full.cells[2]) == "100.0 [–]"
    flag = next(flag for flag in report.flags if flag.title == "One document")
    assert "my task" in flag.text
    assert not any(flag.title == "Few samples" for flag in report.flags)
    for text in (report.markdown(), report.html()):
        assert "all prompts of my task are about one document" in text
        assert "too few documents" in text
    record = next(csv.DictReader(io.StringIO(report.csv())))
    assert (record["macro"], record["macro_low"], record["task/my task_high"]) == ("100.0", "", "")
    compared = compare(pd.concat([rows for _, rows in parts]), "snapkv@10%", "full")
    assert "too few documents" in compared.markdown()
    assert note in tables.comparison_table(compared.pairs).caption


def test_documents_are_counted_near_an_edge_too() -> None:
    """One wrong answer of twenty in four documents says less than one of twenty prompts."""
    named = [json.dumps({"document": f"d{index // 5}"}) for index in range(20)]
    scores = [0.0] + [1.0] * 19
    by_document, by_prompt = (
        only(report_of(part("full", "100%", scores=scores, **meta)), "full").tasks["vt"].estimate.interval
        for meta in ({"sample_meta": named}, {})
    )
    assert by_document.how == by_prompt.how == "Wilson"
    assert by_document.low < by_prompt.low < by_prompt.high < by_document.high


def test_twenty_methods_look_different() -> None:
    drawn = looks(f"method {index}" for index in range(20))
    assert len(set(drawn.values())) == 20


def test_report_files_are_written(report: Report, tmp_path: Path) -> None:
    files = report.write(tmp_path / "report")
    assert [file.name for file in files] == ["report.html", "table.md", "table.csv", "table.tex", "leaderboard.json"]
    assert files[2].read_text(encoding="utf-8") == report.csv()


def test_a_report_that_cannot_be_written_leaves_each_file_as_it_was(
    report: Report, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [file.name for file in report.write(tmp_path)]
    for name in names:
        (tmp_path / name).write_text("earlier")

    def full_disk(descriptor: int) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(OSError, match="No space left"):
        report.write(tmp_path)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == dict.fromkeys(names, "earlier")


def test_the_same_rows_in_any_order_give_the_same_report(output: Output, report: Report) -> None:
    again = build_report(output.rows.sample(frac=1, random_state=1), output.cells, output.sweep)
    assert again.markdown() == report.markdown()
    assert again.csv() == report.csv()


# ---- compare


def test_two_methods_are_compared_at_every_budget_they_share(output: Output) -> None:
    compared = compare(output.rows, "qevict", "snapkv")
    assert [one.configuration.budget for one, _, _ in compared.pairs] == ["10%", "20%"]
    p_values = [comparison.p for *_, comparison in compared.pairs]
    assert [comparison.p_holm for *_, comparison in compared.pairs] == stats.holm(p_values)
    assert "qevict at 10%" in compared.markdown()


def test_a_terminal_shows_no_tasks_where_there_are_many(output: Output) -> None:
    compared = compare(output.rows, "qevict", "snapkv")
    tasks = len(output.rows["task"].unique())
    wide, narrow = (len(tables.comparison_table(compared.pairs, most).columns) for most in (tasks, tasks - 1))
    assert (wide, narrow) == (6 + tasks, 6)


def test_a_budget_may_be_named_on_each_side(output: Output) -> None:
    ((first, second, comparison),) = compare(output.rows, "qevict@20%", "qevict@10%").pairs
    assert (first.configuration.budget, second.configuration.budget) == ("20%", "10%")
    assert comparison.macro.value == pytest.approx(first.macro.value - second.macro.value)


def test_the_full_cache_is_compared_with_every_budget(output: Output) -> None:
    compared = compare(output.rows, "method=snapkv,context=4096", "full", cells=output.cells)
    assert len(compared.pairs) == 2


def test_comparing_protocols_is_refused_unless_allowed() -> None:
    here, there = part("snapkv", "10%"), part("qevict", "10%", question="appended")
    rows = pd.concat([here[1], there[1]])
    with pytest.raises(CompareError, match=r"different protocols \(question compressed and appended\)"):
        compare(rows, "snapkv", "qevict")
    assert len(compare(rows, "snapkv", "qevict", allow_protocols=True).pairs) == 1


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        ("nothing", "full", "'nothing' finds nothing; there are: full at 100%, snapkv at 10%"),
        ("colour=red", "full", "'colour' is no field; fields: model, context, method"),
        ("snapkv@10%", "method=qevict,context=2048", "finds nothing"),
        ("budget=10%,method=full", "qevict", "finds nothing"),
    ],
)
def test_a_selection_that_finds_nothing_says_what_there_is(output: Output, first: str, second: str, words: str) -> None:
    with pytest.raises(CompareError, match=re.escape(words)):
        compare(output.rows, first, second)


def test_selections_without_a_common_condition_are_refused() -> None:
    here, there = part("snapkv", "10%"), part("qevict", "20%")
    with pytest.raises(CompareError, match="no snapkv matches a qevict in model, context and budget"):
        compare(pd.concat([here[1], there[1]]), "snapkv", "qevict")
