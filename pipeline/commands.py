"""What each command does, from its arguments to its output."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from pipeline import show
from pipeline.efficiency_report import EfficiencyReport
from pipeline.errors import SweepProblem
from pipeline.estimate import estimate
from pipeline.location import output_location
from pipeline.outputs import Output, read_output, read_plan
from pipeline.report import Report
from pipeline.run import Finished, RunOptions, open_sweep, run_sweep
from pipeline.signals import exit_on_sigterm
from pipeline.spec import load_text
from pipeline.status import read_status
from pipeline.store import Store, reached
from pipeline.tracking import OFF, Tracker, TrackingError
from pipeline.tracking import replay as replay_runs


def run(file: Path, options: RunOptions, failures_ok: bool) -> int:
    """Run, report, track; returns the exit code."""
    with exit_on_sigterm():
        return _run(file, options, failures_ok)


def _run(file: Path, options: RunOptions, failures_ok: bool) -> int:
    opened = open_sweep(file, options)
    tracker: Tracker | None = None

    def progress(done: int, failed: int, total: int) -> None:
        if tracker is not None:
            tracker.progress(done, failed, total)

    def planned() -> None:
        nonlocal tracker
        if opened.sweep.timing is not None:  # no data, and nothing in the background
            return
        show.show_data(opened.grid.data)
        tracker = _tracker(opened.store, opened.sweep.mlflow.tracking_uri if opened.sweep.mlflow.enabled else OFF)

    ended = "FAILED"
    try:
        finished = run_sweep(opened, options, on_plan=planned, on_progress=progress)
        code = finished.exit_code(failures_ok)
        if finished.outcome.signal is None:  # a signal leaves no time: the next run, or `report`, makes it
            _publish(opened.store, tracker, finished)
        else:
            ended = "KILLED"
    except (KeyboardInterrupt, SystemExit):
        ended = "KILLED"
        raise
    finally:
        if tracker is not None:
            tracker.stop(ended)
    show.show_end(finished)
    return code


def plan(file: Path, options: RunOptions, all_cells: bool) -> None:
    opened = open_sweep(file, options)
    made, costs, _ = opened.plan(options)
    show.show_plan(made, estimate(made, costs), opened.peaks(), all_cells)


def status(output: str, every_s: float | None = None) -> None:
    """With ``every_s``, again and again until all rows are there."""
    store = Store(output_location(output))
    while True:
        found = read_status(store)
        print(*found.lines(), sep="\n", flush=True)
        if every_s is None or found.complete:
            return
        time.sleep(every_s)


def report(output: str, papers: Sequence[str] = ()) -> None:
    store = Store(output_location(output))
    made = read_output(store).report()
    if papers:
        if not isinstance(made, Report):
            raise SweepProblem(f"{store.uri} is a timing sweep: the papers' tables that are here have scores")
        made = made.beside(papers)
    with _files(store, made) as files:
        show.console().print(made.rich())
        _say_where(store, files)


def compare(output: str, first: str, second: str, allow_protocols: bool) -> None:
    from pipeline.compare import CompareError
    from pipeline.compare import compare as compare_rows

    read = read_output(Store(output_location(output)))
    if read.timed:
        raise SweepProblem(f"{read.store.uri} is a timing sweep and has no scores: its report compares times")
    try:
        compared = compare_rows(read.rows, first, second, read.cells, allow_protocols)
    except CompareError as error:
        raise SweepProblem(str(error)) from None
    console = show.console()
    if console.is_terminal:
        console.print(compared.rich())
    else:
        print(compared.markdown())


def replay(output: str, tracking_uri: str | None) -> None:
    store = Store(output_location(output))
    read = read_output(store)
    made = read.report()
    if not isinstance(made, Report):
        raise SweepProblem(f"{store.uri} is a timing sweep: MLflow is kept for scores, its report has the times")
    with _files(store, made) as files:
        try:
            replay_runs(tracking_uri or _configured_uri(read), read.sweep, read.cells, made, files)
        except TrackingError as error:
            raise SweepProblem(str(error)) from None


def _tracker(store: Store, uri: str | None) -> Tracker:
    cells, sweep = read_plan(store)
    return Tracker.start(uri, sweep, cells)


def _configured_uri(read: Output) -> str | None:
    """What the sweep file that made the output says."""
    tracking = load_text(read.sweep["config_text"], "sweep.yaml").get("mlflow") or {}
    uri = tracking.get("tracking_uri") if isinstance(tracking, dict) else None
    return str(uri) if uri else None


def _publish(store: Store, tracker: Tracker | None, finished: Finished) -> None:
    made = read_output(store).report()
    with _files(store, made) as files:
        show.console().print(made.rich())
        _say_where(store, files)
        if tracker is not None and isinstance(made, Report):
            tracker.finish(made, files, "FAILED" if finished.outcome.stopped else "FINISHED")
            tracker.close()


@contextmanager
def _files(store: Store, made: Report | EfficiencyReport) -> Iterator[list[Path]]:
    """The report's files in the output, and on this machine for as long as the context lasts."""
    with TemporaryDirectory() as scratch:
        with reached(store.folder, "write"):
            files = made.write(store.folder.local or Path(scratch))
            if store.folder.local is None:
                for path in files:
                    store.folder.write(path.name, path.read_bytes())
        yield files


def _say_where(store: Store, files: list[Path]) -> None:
    for path in files:
        print(f"{path.suffix.lstrip('.'):5} {store.folder.path(path.name)}", file=sys.stdout)
