"""MLflow beside a sweep: a view of it, written by the driver alone, in the background, and never in its way.

Calls are put in a queue and made by a thread of their own. The first failure is logged once and ends the tracking of
this run; nothing is lost, since ``replay`` writes the same runs from the rows at any time.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from time import monotonic
from typing import TYPE_CHECKING, Any

from pipeline.mlflow_metrics import macro_metrics
from pipeline.mlflow_runs import SweepRuns, local_folder
from pipeline.mlflow_views import install_views, links
from pipeline.store import without_secrets

if TYPE_CHECKING:
    from pipeline.report import Report

LOG = logging.getLogger("kvsweep.tracking")
PROGRESS_EVERY_S = 5.0
CLOSE_S, PER_RUN_S = 30.0, 0.5
OFF = "off"
HINT = "the sweep goes on; `kvsweep replay` fills MLflow in later"

Call = Callable[[], None]


class TrackingError(RuntimeError):
    """MLflow cannot be written: where, and what it said."""


def tracking_uri(setting: str | None, output: str) -> str:
    """The sweep's own setting, else ``MLFLOW_TRACKING_URI``, else a database in the output folder; ``off`` for none."""
    known = setting or os.environ.get("MLFLOW_TRACKING_URI")
    if known:
        return known
    folder = local_folder(output)
    return f"sqlite:///{folder / 'mlflow.db'}" if folder else OFF


class Tracker:
    """Tracks one run of a sweep. No method raises or waits for MLflow, except ``close``, for as long as it is told."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[Call | None] = SimpleQueue()
        self._thread: Thread | None = None
        self._runs: SweepRuns | None = None
        self._failed = False
        self._last_progress = 0.0
        self._to_write = 0
        self._uri = OFF
        self.links: dict[str, str] = {}
        """Addresses of the saved views, once a server has them."""

    @classmethod
    def start(cls, uri: str | None, sweep: Mapping[str, Any], cells: Sequence[Mapping[str, Any]]) -> Tracker:
        """Begin, or continue, the sweep's runs. ``uri`` None: as :func:`tracking_uri` says; ``off``: track nothing."""
        tracker = cls()
        tracker._uri = tracking_uri(uri, str(sweep["output"]))
        if tracker._uri == OFF:
            LOG.info("MLflow is off")
            return tracker
        tracker._thread = Thread(target=tracker._work, name="mlflow", daemon=True)
        tracker._thread.start()
        tracker._put(lambda: tracker._begin(sweep, cells))
        return tracker

    def progress(self, done_rows: int, failed_rows: int, total_rows: int, done_cells: int | None = None) -> None:
        """Live counts; calls that come too fast are dropped, the last counts come with ``finish``."""
        if monotonic() - self._last_progress < PROGRESS_EVERY_S:
            return
        self._last_progress = monotonic()
        figures = {"rows_done": done_rows, "rows_failed": failed_rows, "rows_total": total_rows}
        figures |= {} if done_cells is None else {"cells_done": done_cells}
        self._call(lambda runs: runs.progress(figures))

    def finish(self, report: Report, files: Sequence[Path], status: str) -> None:
        """Results, files and the end of the parent run: ``FINISHED``, ``FAILED`` or ``KILLED``."""
        self._to_write = len(report.summary.results)
        self._call(lambda runs: _write(runs, report, files, status))
        self._call(self._views)

    def close(self, timeout: float | None = None) -> None:
        """Wait for what is still to be written, but no longer than ``timeout`` seconds: where nothing is said, half a
        minute, and half a second for each configuration."""
        if self._thread is None:
            return
        timeout = CLOSE_S + PER_RUN_S * self._to_write if timeout is None else timeout
        self._queue.put(None)
        self._thread.join(timeout)
        if self._thread.is_alive() and not self._failed:
            self._failed = True
            LOG.warning(
                "MLflow at %s has not taken everything within %.0f s; %s", without_secrets(self._uri), timeout, HINT
            )

    def _begin(self, sweep: Mapping[str, Any], cells: Sequence[Mapping[str, Any]]) -> None:
        self._runs = SweepRuns(self._uri, sweep)
        self._runs.begin(cells)
        LOG.info(
            "MLflow: experiment %s, run %s, at %s", sweep["name"], self._runs.parent_id, without_secrets(self._uri)
        )

    def _views(self, runs: SweepRuns) -> None:
        self.links = _announce(self._uri, runs)

    def _call(self, action: Callable[[SweepRuns], None]) -> None:
        self._put(lambda: action(self._runs) if self._runs else None)

    def _put(self, call: Call) -> None:
        if self._thread is not None and self._thread.is_alive() and not self._failed:
            self._queue.put(call)

    def _work(self) -> None:
        while (call := self._queue.get()) is not None:
            if self._failed:
                continue
            try:
                call()
            except failures() as error:
                self._failed = True
                LOG.warning("MLflow at %s: %s; %s", without_secrets(self._uri), _first_line(error), HINT)


def replay(
    uri: str | None,
    sweep: Mapping[str, Any],
    cells: Sequence[Mapping[str, Any]],
    report: Report,
    files: Sequence[Path],
    status: str = "FINISHED",
) -> dict[str, str]:
    """Write a sweep's runs from its results, now. Run again, it updates the same runs. Returns the views' addresses.

    Raises :class:`TrackingError`.
    """
    address = tracking_uri(uri, str(sweep["output"]))
    if address == OFF:
        raise TrackingError(f"{sweep['output']} is no local folder: set MLFLOW_TRACKING_URI to a server")
    try:
        runs = SweepRuns(address, sweep)
        runs.begin(cells)
        _write(runs, report, files, status)
        return _announce(address, runs)
    except failures() as error:
        raise TrackingError(f"MLflow at {without_secrets(address)}: {_first_line(error)}") from error


def failures() -> tuple[type[Exception], ...]:
    """What MLflow lets through when its server, its database, its files or its own requirements fail."""
    from alembic.util.exc import CommandError
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import SQLAlchemyError

    return MlflowException, SQLAlchemyError, CommandError, OSError, ImportError, ValueError


def _write(runs: SweepRuns, report: Report, files: Sequence[Path], status: str) -> None:
    runs.results(report)
    runs.files(files)
    runs.end(status)
    from mlflow.exceptions import MlflowException

    try:
        install_views(runs.client, runs.experiment_id, macro_metrics(report.summary))
    except MlflowException as error:
        LOG.info("MLflow: the saved views were not written: %s", _first_line(error))


def _announce(uri: str, runs: SweepRuns) -> dict[str, str]:
    if not uri.startswith("http"):
        LOG.info("MLflow: see it with `mlflow server --backend-store-uri %s`", uri)
        return {}
    found = links(uri, runs.experiment_id)
    for name, address in found.items():
        LOG.info("MLflow: %s: %s", name, address)
    return found


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:300]}"
