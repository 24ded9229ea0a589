"""What the measurement of the driver does, on a small scale: it plans, runs and checks as it says."""

from __future__ import annotations

from pathlib import Path

import pytest

from perf import driver
from perf.driver import plan_grid, run_jobs


def test_the_grid_has_the_cells_that_it_was_written_to_have(tmp_path: Path) -> None:
    found = plan_grid(tmp_path, 1640)
    assert (found["cells"], found["pairs"], found["wrong"]) == (1640, 16400, [])


def test_every_row_is_there_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "EARLY", 50)
    found = run_jobs(tmp_path, 100, 16, on_ray=False)
    assert (found["jobs"], found["wrong"]) == (100, [])
    assert list(found["resident_mb"]) == ["50", "100"]
    assert 0 < found["ms_per_job"] < 1000


def test_a_run_that_lost_rows_reports_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["driver", "--cells", "1640", "--jobs", "100"])
    monkeypatch.setattr("pipeline.store.Store.flush", lambda store: store._pending.clear())
    assert driver.main() == 1
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.endswith("0 rows, 0 distinct\n")
