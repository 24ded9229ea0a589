"""MLflow beside a sweep: a view of it, written by the driver alone, in the background, and never in its way.

Calls are put in a queue and made, in their order, by a thread of their own. One that fails is made again, at growing
intervals, for as long as the sweep lasts, and those behind it wait: every call may be repeated. One that MLflow has
read and refuses is passed over. Nothing is lost for good: ``replay`` writes the same runs from the rows at any time.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Event, Thread
from time import monotonic
from typing import TYPE_CHECKING, Any

from pipeline.mlflow_calls import Stopped, failures, is_refusal
from pipeline.mlflow_metrics import macro_metrics
from pipeline.mlflow_runs import SweepRuns, local_folder, now
from pipeline.mlflow_views import install_views, links
from pipeline.store import without_secrets

if TYPE_CHECKING:
    from pipeline.report import Report

LOG = logging.getLogger("kvsweep.tracking")
PROGRESS_EVERY_S = 5.0
CLOSE_S, PER_RUN_S = 30.0, 0.5
STOP_S = 2.0
"""A signal leaves little time: ``ray job stop`` kills after three seconds."""
PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
OFF = "off"
HINT = "`kvsweep replay` fills MLflow in later"

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
    """Tracks one run of a sweep. No method raises, and none waits for MLflow, except ``close`` and ``stop``, for as
    long as they are told."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[Call | None] = SimpleQueue()
        self._thread: Thread | None = None
        self._runs: SweepRuns | None = None
        self._ending, self._stopping = Event(), Event()
        self._failed = False
        self._last_progress = 0.0
        self._counted: list[tuple[int, dict[str, float]]] = []
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
        figures: dict[str, float] = {"rows_done": done_rows, "rows_failed": failed_rows, "rows_total": total_rows}
        figures |= {} if done_cells is None else {"cells_done": done_cells}
        self._counted.append((now(), figures))
        self._call(self._progress)

    def finish(self, report: Report, files: Sequence[Path], status: str) -> None:
        """Results, files and the end of the parent run: ``FINISHED``, ``FAILED`` or ``KILLED``."""
        self._to_write = len(report.summary.results)
        self._call(lambda runs: _write(runs, report, files, status))
        self._call(self._views)

    def close(self, timeout: float | None = None) -> None:
        """Wait for what is still to be written, but no longer than ``timeout`` seconds: where nothing is said, half a
        minute, and half a second for each configuration. What fails now is not made again."""
        if self._thread is None:
            return
        timeout = CLOSE_S + PER_RUN_S * self._to_write if timeout is None else timeout
        self._end(timeout)
        if self._thread.is_alive() and not self._failed:
            self._failed = True
            LOG.warning(
                "MLflow at %s has not taken everything within %.0f s; %s", without_secrets(self._uri), timeout, HINT
            )
        self._thread = None

    def stop(self, status: str, timeout: float = STOP_S) -> None:
        """End the parent run before its time, ``KILLED`` or ``FAILED``, and pass over what else waits. After ``close``
        there is nothing to stop."""
        if self._thread is None:
            return
        self._stopping.set()
        with suppress(Empty):
            while True:
                self._queue.get_nowait()
        self._call(lambda runs: runs.end(status))
        self._end(timeout)
        if self._thread.is_alive():
            LOG.warning(
                "MLflow at %s was not told within %.0f s that the sweep stopped", without_secrets(self._uri), timeout
            )
        self._thread = None

    def _end(self, timeout: float) -> None:
        assert self._thread is not None
        self._ending.set()
        self._queue.put(None)
        self._thread.join(timeout)

    def _begin(self, sweep: Mapping[str, Any], cells: Sequence[Mapping[str, Any]]) -> None:
        self._runs = SweepRuns(self._uri, sweep, self._stopping)
        self._runs.begin(cells)
        LOG.info(
            "MLflow: experiment %s, run %s, at %s", sweep["name"], self._runs.parent_id, without_secrets(self._uri)
        )

    def _progress(self, runs: SweepRuns) -> None:
        """All counts since the last that MLflow took: after an outage they come together."""
        counted = list(self._counted)
        runs.progress(counted)
        del self._counted[: len(counted)]

    def _views(self, runs: SweepRuns) -> None:
        self.links = _announce(self._uri, runs)

    def _call(self, action: Callable[[SweepRuns], None]) -> None:
        self._put(lambda: action(self._runs) if self._runs else None)

    def _put(self, call: Call) -> None:
        if self._thread is not None and self._thread.is_alive() and not self._failed:
            self._queue.put(call)

    def _work(self) -> None:
        done = False
        try:
            while (call := self._queue.get()) is not None:
                with suppress(Stopped):
                    self._make(call)
            done = True
        finally:
            if not done:  # a fault of ours ends the thread: the sweep must not end as if all were written
                self._failed = True
                LOG.error("MLflow at %s is told nothing more; %s", without_secrets(self._uri), HINT, exc_info=True)

    def _make(self, call: Call) -> None:
        """Make a call, again and again where it fails, until the sweep ends: then once more, and no more after that.
        One that MLflow will not take however often it is made is passed over."""
        pause, where = PAUSE_S, without_secrets(self._uri)
        while not self._failed:
            last = self._ending.is_set()
            try:
                call()
            except failures() as error:
                if is_refusal(error) and self._runs:
                    LOG.warning("MLflow at %s takes no such thing: %s; the rest goes on", where, _first_line(error))
                    return
                if self._failed:  # said already, as `close` gave up waiting
                    return
                self._failed = last
                if last or pause == PAUSE_S:
                    then = HINT if last else "the sweep goes on, and it is tried again"
                    LOG.warning("MLflow at %s: %s; %s", where, _first_line(error), then)
                self._ending.wait(pause)
                pause = min(2 * pause, LONGEST_PAUSE_S)
                if self._stopping.is_set():
                    return
            else:
                if pause > PAUSE_S:
                    LOG.info("MLflow at %s answers again", where)
                return


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


def _write(runs: SweepRuns, report: Report, files: Sequence[Path], status: str) -> None:
    """What of the results is refused is raised once the rest is written."""
    refused = None
    try:
        runs.results(report)
    except failures() as error:
        if not is_refusal(error):
            raise
        refused = error
    runs.files(files)
    runs.end(status)
    if refused:
        raise refused
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
