"""How far a sweep is, read from its output alone."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import stub_worker
from stub_worker import row
from test_spec import write

import pipeline.commands
from pipeline.cli import main
from pipeline.commands import RunOptions, open_sweep
from pipeline.lease import FILE
from pipeline.losses import Loss
from pipeline.outputs import read_output, save_plan
from pipeline.status import _rate, read_status
from pipeline.store import Store


@pytest.fixture(autouse=True)
def _stubs(monkeypatch: pytest.MonkeyPatch) -> None:
    stub_worker.install(monkeypatch)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """Two cells of four samples: one is complete, the other has a sample that failed and one that was run twice."""
    file = write(tmp_path, samples=4, output=str(tmp_path / "out"))
    opened = open_sweep(file, RunOptions())
    save_plan(opened.store, file.read_text(), opened.plan(RunOptions())[0].manifest())
    full, window = (cell.cell_id for cell in opened.grid.cells)
    now = time.time()
    rows = [row(full, index, finished_at=now - 30) for index in range(4)]
    rows += [row(window, 0, status="failed", score=None, finished_at=now - 9)]
    rows += [row(window, 1, finished_at=now - moment) for moment in (20, 10)]
    opened.store.add(rows)
    opened.store.flush()
    return opened.store


def lines(store: Store) -> list[str]:
    return list(read_status(store).lines())


def hold(store: Store, **changes: Any) -> None:
    holder = {"token": "t", "machine": "elsewhere x", "pid": 7, "user": "ada", "renewed": time.time(), **changes}
    store.folder.write(FILE, json.dumps(holder).encode())


def test_it_counts_what_the_report_counts(store: Store) -> None:
    assert lines(store)[0] == "1 of 2 cells complete, 6 of 8 rows, 1 failed"
    assert lines(store)[0] == read_output(store).report().status()


def test_it_says_who_writes_how_fast_and_for_how_long_still(store: Store) -> None:
    hold(store)
    assert lines(store)[1] == (
        "written by process 7 of ada on elsewhere, last seen 0 s ago, newest row 9 s ago, 0.2 rows/s, about 10 s left "
        "at this rate"
    )


def test_the_rate_is_of_the_last_two_minutes_or_of_all_time_since_the_first_row() -> None:
    now = 10_000.0
    assert _rate([now - moment for moment in (1, 2, 10)], now) == pytest.approx(3 / 10)
    assert _rate([now - moment for moment in (1, 60, 119, 121, 900)], now) == pytest.approx(3 / 120)
    assert _rate([now - 900], now) == 0.0
    assert _rate([now], now) == 1.0
    assert _rate([], now) == 0.0


@pytest.mark.parametrize("changes", [None, {"renewed": time.time() - 600}], ids=["no driver", "a driver that died"])
def test_it_says_that_nobody_writes(store: Store, changes: dict[str, Any] | None) -> None:
    if changes is not None:
        hold(store, **changes)
    assert lines(store)[1] == "nobody writes here now: run the sweep again to go on, newest row 9 s ago"


def test_it_says_what_attempts_were_lost_and_why(store: Store) -> None:
    store.note(Loss(1.0, "vt", [1, 2], 4, 1, "ActorDiedError: its node was lost", counted=False))
    store.note(Loss(2.0, "vt", [1], 2, 2, "RuntimeError: it broke", counted=True))
    store.flush()
    assert lines(store)[-1] == (
        "attempts lost: 2, 1 of them counted; the last: vt, samples 1, attempt 2: RuntimeError: it broke"
    )


def test_watching_ends_when_all_rows_are_there(
    store: Store, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cells = [cell["cell_id"] for cell in store.manifest()["cells"]]

    def meanwhile(seconds: float) -> None:
        assert seconds == 3
        store.add([row(cell, index) for cell in cells for index in range(4)])
        store.flush()

    monkeypatch.setattr(pipeline.commands.time, "sleep", meanwhile)
    assert main(["status", store.uri, "--watch", "--every", "3"]) == 0
    told = capsys.readouterr().out.splitlines()
    assert told[0] == "1 of 2 cells complete, 6 of 8 rows, 1 failed"
    assert told[-1] == "2 of 2 cells complete, 8 of 8 rows"
