"""The report of a timing sweep: medians over repeats, ratios inside a repeat, and no scores."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from row_factory import make_sweep

from pipeline.commands import compare, replay
from pipeline.efficiency import efficiency
from pipeline.efficiency_report import EfficiencyReport, efficiency_report
from pipeline.efficiency_tables import efficiency_table
from pipeline.errors import SweepProblem
from pipeline.store import Store
from workers.row import Row


def cell(method: str, budget: str, **other: Any) -> dict[str, Any]:
    return {
        **{"cell_id": f"{method} {budget}", "model": "small", "method": method, "settings": {}, "budget": budget},
        **{"context": 256, "task": "timing", "data_seed": 0, "method_seed": 0, "batch": 4, "label": method},
        **{"expected": 3, "impossible": "", **other},
    }


def runs(of: dict[str, Any], tpots: Sequence[float | None], rounds: Sequence[str] = "abc", **fields: Any) -> list[Row]:
    """A row per repeat; TTFT is ten steps, decoding nine."""
    return [
        Row(
            of["cell_id"],
            f"repeat {index}",
            status="ok" if tpot else "failed",
            error="" if tpot else "OutOfMemoryError: no room",
            **{key: of[key] for key in ("model", "method", "budget", "context", "task")},
            sample_index=index,
            sample_meta=json.dumps({"round": rounds[index], "threads": 2}),
            **{"prompt_tokens": 256, "output_tokens": 10, "batch_rows": 4, "row_width": 4, "timing": "isolated"},
            **{
                "ttft_s": tpot and 10 * tpot,
                "tpot_s": tpot,
                "decode_s": 9 * (tpot or 0),
                "prefill_s": 8 * (tpot or 0),
                "compress_s": 1 * (tpot or 0),
                "admit_s": 1 * (tpot or 0),
                "kv_bytes_prefill": 400,
                "kv_bytes_end": 500,
                "kv_bytes_peak": 600,
                "workspace_bytes": 50,
                "kv_share": 0.25,
                "peak_device_bytes": 2**30,
                "device": "cpu",
                "node": "one",
                "finished_at": 1_780_000_000.0,
                **fields,
            },
        )
        for index, tpot in enumerate(tpots)
    ]


def report_of(cells: list[dict[str, Any]], *parts: list[Row], **other: Any) -> EfficiencyReport:
    frame = pd.DataFrame([dataclasses.asdict(row) for part in parts for row in part])
    timing = {"prompt_tokens": [256], "new_tokens": 10, "batch": [4], "repeats": 3, "warmup": 1}
    return efficiency_report(frame, cells, make_sweep(timing=timing, **other))


FULL, QEVICT = cell("full", "100%"), cell("qevict", "20%")


def test_ratios_are_taken_inside_a_repeat() -> None:
    """A machine that gets four times slower moves every time and no ratio."""
    made = report_of([FULL, QEVICT], runs(FULL, [0.01, 0.02, 0.04]), runs(QEVICT, [0.005, 0.010, 0.020]))
    _, qevict = made.found[0].results
    assert (qevict.repeats, qevict.pairs) == (3, 3)
    for name, ratio in (("ttft_s", 0.5), ("tpot_s", 0.5), ("throughput", 2.0), ("peak_device_bytes", 1.0)):
        spread = qevict.ratios[name]
        assert (spread.median, spread.least, spread.most) == pytest.approx((ratio, ratio, ratio))
    spread = qevict.figures["tpot_s"]
    assert (spread.median, spread.least, spread.most) == (0.010, 0.005, 0.020)


def test_throughput_counts_all_tokens_of_the_batch_over_the_whole_run() -> None:
    made = report_of([FULL], runs(FULL, [0.01, 0.01, 0.01]))
    assert made.found[0].results[0].figures["throughput"].median == pytest.approx(4 * 10 / (0.10 + 0.09))


def test_only_what_ran_side_by_side_is_compared() -> None:
    made = report_of([FULL, QEVICT], runs(FULL, [0.01, 0.01, 0.01], "abx"), runs(QEVICT, [0.005, 0.005, 0.001]))
    _, qevict = made.found[0].results
    assert (qevict.repeats, qevict.pairs) == (3, 2)
    assert qevict.ratios["tpot_s"].least == pytest.approx(0.5)


@pytest.mark.parametrize(("lost", "again"), [(QEVICT, FULL), (FULL, QEVICT)], ids=["a method", "the full cache"])
def test_no_ratio_mixes_two_runs_of_a_repeat(tmp_path: Path, lost: dict[str, Any], again: dict[str, Any]) -> None:
    """A repeat is cut short and runs again, and one method fails the second time: its good row of the first run stays
    beside the second run's row of the other."""
    store = Store(str(tmp_path))
    early, late = {"finished_at": 1.0, "attempt": 1}, {"finished_at": 2.0, "attempt": 2}
    store.add(runs(lost, [0.01, 0.01], "ab", **early) + runs(again, [0.02, 0.02], "ab", **early))
    store.add(runs(lost, [None, 0.01], "xy", **late) + runs(again, [0.08, 0.02], "xy", **late))
    store.flush()
    made = efficiency_report(store.rows().to_pandas(), [FULL, QEVICT], make_sweep(timing={"new_tokens": 10}))
    _, qevict = made.found[0].results
    assert (qevict.repeats, qevict.pairs) == (2, 1)
    ratio = 0.5 if lost is QEVICT else 2.0
    assert (qevict.ratios["tpot_s"].least, qevict.ratios["tpot_s"].most) == pytest.approx((ratio, ratio))


def test_the_table_has_every_method_with_its_ratios() -> None:
    made = report_of([FULL, QEVICT], runs(FULL, [0.01, 0.02, 0.04]), runs(QEVICT, [0.005, 0.010, 0.020]))
    table = efficiency_table(made.found[0], 10)
    assert table.title == "small, prompts of 256 tokens, batch 4"
    titles = [column.title for column in table.columns]
    full, qevict = ([str(one) for one in row.cells] for row in table.rows)
    assert titles[:10] == [
        *("Method", "Budget", "TTFT s", "TTFT/full", "TPOT ms", "TPOT/full"),
        *("Tokens/s", "Rate/full", "Peak memory", "Peak/full"),
    ]
    assert full[:6] == ["full", "100%", "0.200 [0.100, 0.400]", "–", "20.00 [10.00, 40.00]", "–"]
    assert qevict[2:6] == ["0.100 [0.050, 0.200]", "0.50 [0.50, 0.50]", "10.00 [5.00, 20.00]", "0.50 [0.50, 0.50]"]
    assert qevict[7:13] == [
        *("2.00 [2.00, 2.00]", "1.00 GiB", "1.00 [1.00, 1.00]"),
        *("600 B", "50 B", "3"),
    ]
    tones = [one.tone for one in table.rows[1].cells]
    assert (tones[3], tones[5], tones[7], tones[9]) == ("better", "better", "better", "")


def test_the_report_shows_efficiency_and_no_scores(tmp_path: Path) -> None:
    made = report_of([FULL, QEVICT], runs(FULL, [0.01] * 3), runs(QEVICT, [0.02, 0.02, None]))
    assert made.status() == "1 of 2 cells complete, 6 of 6 rows, 1 failed"
    files = {path.name: path.read_text(encoding="utf-8") for path in made.write(tmp_path)}
    assert set(files) == {"report.html", "table.md", "table.csv", "table.tex"}
    for text in files.values():
        assert "qevict" in text
        assert "Macro" not in text
        assert not re.search(r"\bnan\b", text)
    assert "OutOfMemoryError" in files["table.md"]
    assert "OutOfMemoryError" in files["report.html"]
    assert "Stages: small, prompts of 256 tokens, batch 4" in files["table.md"]
    assert r"\toprule" in files["table.tex"]
    records = list(csv.DictReader(io.StringIO(files["table.csv"])))
    assert [(one["method"], one["pairs"], one["failed"]) for one in records] == [
        ("full", "3", "0"),
        ("qevict", "2", "1"),
    ]
    assert float(records[1]["tpot_s_ratio"]) == pytest.approx(2)
    assert records[1]["kv_bytes_end"] == "500.0"


def test_what_spoils_a_comparison_is_said() -> None:
    elsewhere = runs(QEVICT, [0.01] * 3, "xyz", node="two", over_budget=True)
    made = report_of([FULL, QEVICT], runs(FULL, [0.01] * 3), elsewhere)
    assert [flag.title for flag in made.flags] == ["Several machines", "Over budget"]
    assert not made.found[0].results[1].ratios
    alone = report_of([QEVICT], runs(QEVICT, [0.01]))
    assert [flag.title for flag in alone.flags] == ["No baseline", "Few repeats"]
    within = report_of([FULL], runs(FULL, [0.01] * 3), protocol={"growth": "bounded"})
    assert [flag.title for flag in within.flags] == ["Bounded growth"]


def test_what_cannot_run_or_has_not_yet_has_its_line() -> None:
    never = cell("snapkv", "1%", impossible="too small")
    made = report_of([FULL, QEVICT, never], runs(FULL, [0.01] * 3))
    assert made.status() == "1 of 2 cells complete, 3 of 6 rows, 1 cells impossible"
    assert "| small, prompts of 256 tokens, batch 4 | snapkv at 1% | too small |" in made.markdown()
    rows = efficiency_table(made.found[0], 10).rows
    assert len({len(row.cells) for row in rows}) == 1
    for text in (made.html(), made.latex(), made.csv()):
        assert "snapkv" in text


def test_settings_stand_apart_and_in_the_plans_order() -> None:
    places = [(512, 4), (512, 1), (256, 4), (256, 1)]
    cells = [cell("full", "100%", cell_id=f"{place}", context=place[0], batch=place[1]) for place in places]
    frame = pd.DataFrame([dataclasses.asdict(row) for one in cells for row in runs(one, [0.01] * 3)])
    found = efficiency(frame, cells)
    assert [(one.setting.prompt_tokens, one.setting.batch) for one in found] == places
    assert all(one.results[0].repeats == 3 for one in found)


def test_times_are_neither_compared_nor_tracked_as_scores(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    store.add(runs(FULL, [0.01] * 3))
    store.flush()
    store.save_plan(
        "name: unit\n", {"name": "unit", "cells": [FULL], "timing": {"new_tokens": 10, "repeats": 3, "warmup": 1}}
    )
    with pytest.raises(SweepProblem, match="has no scores"):
        compare(str(tmp_path), "full", "full", allow_protocols=False)
    with pytest.raises(SweepProblem, match="MLflow is kept for scores"):
        replay(str(tmp_path), None)
