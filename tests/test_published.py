"""The papers' tables: what the text says of them follows from their cells, and ours stand beside them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from row_factory import make_cell, make_rows, make_sweep

from pipeline.errors import SweepProblem
from pipeline.published_tables import Published, published_names, published_table
from pipeline.report import Report, build_report
from tasks.groups import LONGBENCH_12, RULER

EVICTION = ("streaming_llm", "snapkv", "adakv", "criticalkv", "defensivekv", "layer_defensivekv")
LLAMA, MISTRAL = "Llama-3.1-8B-Instruct", "Mistral-7B-Instruct-v0.2"


def rows_of(table: str, model: str, memory: str) -> dict[str, Published]:
    rows = [row for row in published_table(table).rows if row.model == model and row.memory == memory]
    return {row.method: row for row in rows}


def best_eviction(table: str, model: str, memory: str) -> float:
    return max(rows_of(table, model, memory)[method].average for method in EVICTION)


def report_for(*cells: tuple[dict[str, Any], list[float]], source: str = f"meta-llama/{LLAMA}") -> Report:
    models = {"llama": {"source": source}}
    parts = pd.concat([make_rows(cell, scores) for cell, scores in cells])
    return build_report(parts, [cell for cell, _ in cells], make_sweep(models=models))


def cell(method: str, budget: str, task: str, **fields: Any) -> dict[str, Any]:
    return make_cell(method, budget, task, 10, **{"model": "llama", "context": 0, **fields})


def shown(report: Report, table: str = "qevict:table3") -> list[dict[str, str]]:
    (made,) = report.beside([table]).published
    titles = [column.title for column in made.columns]
    return [dict(zip(titles, map(str, row.cells), strict=True)) for row in made.rows]


# ---- what the papers' texts say


@pytest.mark.parametrize(("model", "average", "eviction"), [(LLAMA, 46.4, 44.0), (MISTRAL, 37.8, 37.4)])
def test_longbench_averages_at_20_per_cent_follow_from_the_cells(model: str, average: float, eviction: float) -> None:
    assert round(rows_of("qevict:table3", model, "20%")["qevict"].average, 1) == average
    assert round(best_eviction("qevict:table3", model, "20%"), 1) == eviction


@pytest.mark.parametrize(("model", "gain"), [(LLAMA, 9.7), (MISTRAL, 4.7)])
def test_gains_at_5_per_cent_follow_from_the_cells(model: str, gain: float) -> None:
    ours = rows_of("qevict:table3", model, "5%")["qevict"].average
    assert ours - best_eviction("qevict:table3", model, "5%") == pytest.approx(gain, abs=0.051)


def test_rulers_average_follows_from_the_cells() -> None:
    assert round(rows_of("qevict:table2", LLAMA, "20%")["qevict"].average, 1) == 87.6
    assert best_eviction("qevict:table2", LLAMA, "20%") < 87.6


@pytest.mark.parametrize(("model", "gap"), [(LLAMA, 1.2), (MISTRAL, 1.8)])
def test_half_the_memory_of_the_best_quantiser_costs_what_the_text_says(model: str, gap: float) -> None:
    rows = published_table("qevict:table3").rows
    quantised = [row.average for row in rows if row.model == model and row.method in ("kivi", "zipcache", "kvquant")]
    assert max(quantised) - rows_of("qevict:table3", model, "10%")["qevict"].average == pytest.approx(gap, abs=0.051)


@pytest.mark.parametrize("name", [name for name in published_names() if name.startswith("qevict")])
def test_every_row_of_qevicts_tables_has_every_task(name: str) -> None:
    for row in published_table(name).rows:
        assert row.tasks == (RULER if name == "qevict:table2" else LONGBENCH_12)
        assert all(0 <= score <= 100 for score in row.scores.values())


def test_every_table_names_its_source() -> None:
    assert published_names() == ["lorekv:averages", "qevict:table2", "qevict:table3", "qevict:table6"]
    assert all("arXiv" in published_table(name).source for name in published_names())


# ---- ours beside them


def test_a_cell_of_ours_stands_beside_the_papers_with_difference_and_place() -> None:
    report = report_for(
        (cell("snapkv", "20%", "qasper"), [0.2, 0.3] * 5), (cell("snapkv", "20%", "trec"), [0.9, 0.8] * 5)
    )
    rows = {row["Task"]: row for row in shown(report)}
    assert rows["qasper"]["Ours"].startswith("25.0 [")
    assert (rows["qasper"]["Paper"], rows["qasper"]["Difference"]) == ("28.3", "-3.3")
    assert rows["qasper"]["Paper in our interval"] == "above it"
    assert (rows["trec"]["Paper"], rows["trec"]["Paper in our interval"]) == ("50.0", "below it")
    assert (rows["samsum"]["Ours"], rows["samsum"]["Paper"], rows["samsum"]["Difference"]) == ("–", "44.6", "–")
    assert rows["average"]["Ours"] == "2 of 12 tasks"


def test_averages_are_compared_over_the_papers_own_tasks() -> None:
    report = report_for(*((cell("snapkv", "20%", task), [0.3, 0.4] * 5) for task in LONGBENCH_12))
    average = shown(report)[0]
    assert average["Ours"].startswith("35.0 [")
    assert (average["Paper"], average["Difference"]) == ("36.3", "-1.3")


def test_quantisers_match_by_their_bits_and_eviction_by_its_budget() -> None:
    report = report_for(
        (cell("kivi", "unlimited", "qasper", settings={"bits": 2}), [0.5] * 10),
        (cell("kivi", "unlimited", "qasper", settings={"bits": 4}), [0.5] * 10),
        (cell("snapkv", "30%", "qasper"), [0.5] * 10),
    )
    assert {row["Method"] for row in shown(report)} == {"kivi (bits=2)"}


def test_the_tables_go_into_every_file(tmp_path: Path) -> None:
    report = report_for((cell("snapkv", "20%", "qasper"), [0.2, 0.3] * 5)).beside(["qevict:table3"])
    for text in (report.html(), report.markdown(), report.latex()):
        assert "Beside qevict:table3" in text
        assert "28.3" in text


def test_lorekvs_average_stands_beside_the_headline_settings_alone() -> None:
    common = {"mix": 0.5, "particles": 4, "tokens": 16, "disagreement": 0.0}
    cells = [cell("lorekv", "128 tokens", "qasper", settings=common)]
    cells += [cell("lorekv", "128 tokens", "qasper", settings={**common, "disagreement": 1.0})]
    report = report_for(*((one, [0.4] * 10) for one in cells), source="mistralai/Mistral-7B-Instruct-v0.2")
    (row,) = shown(report, "lorekv:averages")
    assert (row["Method"], row["Paper"], row["Ours"]) == ("lorekv (disagreement=0.0)", "40.3", "1 of 16 tasks")


def test_an_output_of_another_model_is_told_what_the_table_has() -> None:
    report = report_for((cell("snapkv", "20%", "qasper"), [0.2] * 10), source="wheel:small")
    with pytest.raises(SweepProblem, match=r"nothing here is in that table, which has Llama.*this output has llama"):
        report.beside(["qevict:table3"])


def test_an_unknown_table_is_told_which_there_are() -> None:
    with pytest.raises(SweepProblem, match="--paper qevict:table9: no such table; there are: lorekv:averages, qevict"):
        published_table("qevict:table9")
