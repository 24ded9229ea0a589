"""MLflow beside a sweep: what is written, that writing twice changes nothing, and that it never stands in the way."""

from __future__ import annotations

import json
import logging
import math
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from threading import Event
from time import monotonic, sleep
from typing import Any

import pandas as pd
import pytest
from row_factory import Output, make_cell, make_output, make_rows, make_sweep

from pipeline.mlflow_calls import Stopped, in_parallel, mlflow_client
from pipeline.mlflow_metrics import metric_name
from pipeline.mlflow_runs import CHILD, KIND, SWEEP_ID, sweep_id
from pipeline.mlflow_views import links, views
from pipeline.report import Report, build_report
from pipeline.tracking import Tracker, TrackingError, replay, tracking_uri

mlflow = pytest.importorskip("mlflow")
from mlflow.protos.databricks_pb2 import INVALID_PARAMETER_VALUE  # noqa: E402


@pytest.fixture(scope="session")
def migrated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty MLflow database: its migrations take seconds, so they run once."""
    file = tmp_path_factory.mktemp("mlflow") / "mlflow.db"
    mlflow_client(f"sqlite:///{file}").search_experiments()
    return file


@pytest.fixture
def folder(tmp_path: Path, migrated: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An output folder with a database in it; the environment names no other server."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.delenv("RAY_JOB_CONFIG_JSON_ENV_VAR", raising=False)
    shutil.copy(migrated, tmp_path / "mlflow.db")
    return tmp_path


@pytest.fixture(scope="module")
def output() -> Output:
    """A sweep over two seeds in which one method failed on a sample."""
    made = make_output(tasks=("niah", "vt"), samples=6, data_seeds=(0, 1), budgets=("10%", "128 tokens"))
    rows = made.rows
    lost = (rows["method"] == "snapkv") & (rows["budget"] == "10%") & (rows["sample_id"] == "vt-1-3")
    rows.loc[lost, ["status", "error", "score"]] = ["failed", "torch.OutOfMemoryError: CUDA out of memory", None]
    return made


def sweep_in(folder: Path, **fields: Any) -> dict[str, Any]:
    return make_sweep(output=str(folder), **fields)


def report_of(output: Output, sweep: dict[str, Any]) -> Report:
    return build_report(output.rows, output.cells, sweep)


def runs_in(folder: Path, name: str = "unit") -> tuple[Any, list[Any]]:
    """The sweep's run and its children."""
    client = mlflow_client(f"sqlite:///{folder / 'mlflow.db'}")
    runs = client.search_runs([client.get_experiment_by_name(name).experiment_id], max_results=1000)
    (parent,) = (run for run in runs if run.data.tags[KIND] == "sweep")
    return parent, [run for run in runs if run.data.tags[KIND] == "configuration"]


def child(children: list[Any], method: str, budget: str) -> Any:
    (found,) = (run for run in children if (run.data.params["method"], run.data.params["budget"]) == (method, budget))
    return found


@pytest.fixture
def tracked(folder: Path, output: Output) -> tuple[Path, Report]:
    """A whole sweep, tracked from start to close."""
    sweep = sweep_in(folder)
    tracker = Tracker.start(None, sweep, output.cells)
    tracker.progress(30, 0, 120, done_cells=2)
    report = report_of(output, sweep)
    tracker.finish(report, report.write(folder / "report"), "FAILED")
    tracker.close(60)
    return folder, report


def test_the_parent_has_the_sweeps_tags_counts_and_macro_averages(tracked: tuple[Path, Report]) -> None:
    folder, report = tracked
    parent, children = runs_in(folder)
    assert parent.info.status == "FAILED"
    assert parent.data.tags[SWEEP_ID] == sweep_id(report.sweep)
    assert parent.data.tags["protocol.question"] == "compressed"
    assert parent.data.tags["version.torch"] == "2.13.0"
    assert (parent.data.params["cells"], parent.data.params["samples"], parent.data.params["methods"]) == (
        "20",
        "120",
        "3",
    )
    full = report.summary.boards[0].baseline.macro
    assert parent.data.metrics["macro/full/100pct"] == pytest.approx(100 * full.value)
    assert parent.data.metrics["macro_low/full/100pct"] == pytest.approx(100 * full.interval.low)
    assert "macro/snapkv/10pct" not in parent.data.metrics
    assert "macro/qevict/128 tokens" in parent.data.metrics
    assert len(children) == 5


def test_progress_is_a_series_of_steps(tracked: tuple[Path, Report]) -> None:
    folder, _ = tracked
    parent, _ = runs_in(folder)
    client = mlflow_client(f"sqlite:///{folder / 'mlflow.db'}")
    series = {
        name: sorted((point.step, point.value) for point in client.get_metric_history(parent.info.run_id, name))
        for name in ("rows_done", "rows_failed", "cells_done")
    }
    assert series == {
        "rows_done": [(30, 30), (120, 120)], "rows_failed": [(30, 0), (120, 1)], "cells_done": [(30, 2), (120, 19)],
    }  # fmt: skip


def test_a_child_holds_what_filters_need_and_the_reports_own_figures(tracked: tuple[Path, Report]) -> None:
    folder, report = tracked
    parent, children = runs_in(folder)
    run = child(children, "qevict", "10%")
    (result,) = (one for one in report.summary.results if (one.label, one.configuration.budget) == ("qevict", "10%"))
    described = {"model": "small-model", "method": "qevict", "budget": "10%", "budget_number": "10", "context": "4096"}
    described |= {"budget_unit": "percent", "question": "compressed", "budget_base": "prompt", "growth": "grow"}
    assert described.items() <= run.data.params.items()
    assert described.items() <= run.data.tags.items()
    assert run.data.tags["mlflow.parentRunId"] == parent.info.run_id
    assert run.info.status == "FINISHED"
    metrics = run.data.metrics
    assert metrics["task/vt"] == pytest.approx(100 * result.tasks["vt"].estimate.value)
    assert metrics["quality/macro"] == pytest.approx(100 * result.macro.value)
    assert metrics["quality/macro_low"] == pytest.approx(100 * result.macro.interval.low)
    assert metrics["quality/delta_to_full"] == pytest.approx(100 * result.against_full.macro.value)
    assert metrics["memory/kv_share_prefill"] == pytest.approx(0.1, abs=1e-4)
    assert metrics["memory/kv_bytes_peak"] == pytest.approx(result.memory.bytes_peak)
    assert metrics["cost/shared_decode_s"] == pytest.approx(0.8)
    assert child(children, "qevict", "128 tokens").data.params["budget_unit"] == "tokens"


def test_seeds_are_steps_and_their_mean_is_the_score(tracked: tuple[Path, Report]) -> None:
    folder, _ = tracked
    run = child(runs_in(folder)[1], "qevict", "10%")
    history = mlflow_client(f"sqlite:///{folder / 'mlflow.db'}").get_metric_history(run.info.run_id, "by_seed/vt")
    assert [point.step for point in history] == [0, 1]
    assert sum(point.value for point in history) / 2 == pytest.approx(run.data.metrics["task/vt"])


def test_a_configuration_with_a_failed_row_has_failed_with_its_kind_of_error(tracked: tuple[Path, Report]) -> None:
    run = child(runs_in(tracked[0])[1], "snapkv", "10%")
    assert (run.info.status, run.data.tags["error_type"]) == ("FAILED", "OutOfMemoryError")
    assert run.data.metrics["samples/failed"] == 1
    assert "quality/macro" not in run.data.metrics
    assert run.data.tags["complete"] == "1 of 2"


def test_files_lie_under_the_output_and_can_be_read_back(tracked: tuple[Path, Report]) -> None:
    folder, report = tracked
    parent, _ = runs_in(folder)
    client = mlflow_client(f"sqlite:///{folder / 'mlflow.db'}")
    run_id = parent.info.run_id
    assert {item.path for item in client.list_artifacts(run_id)} == {"sweep.yaml", "report.html", "tables"}
    assert {item.path for item in client.list_artifacts(run_id, "tables")} == {
        "tables/leaderboard.json",
        *(f"tables/table.{kind}" for kind in ("md", "csv", "tex")),
    }
    (page,) = (folder / "mlartifacts").rglob("report.html")
    assert page.read_text(encoding="utf-8") == report.html()


def datasets_of(folder: Path) -> dict[str, str]:
    """Name to digest, of the parent."""
    inputs = [one.dataset for one in runs_in(folder)[0].inputs.dataset_inputs]
    assert len(inputs) == len({one.name for one in inputs})
    return {one.name: one.digest for one in inputs}


def test_the_samples_of_every_task_are_datasets_with_digests_of_their_contents(
    tracked: tuple[Path, Report], output: Output
) -> None:
    folder, report = tracked
    found = datasets_of(folder)
    assert set(found) == {"niah, 4,096 tokens", "vt, 4,096 tokens"}
    other = output.rows.assign(sample_id=output.rows["sample_id"] + "'")
    digests = [build_report(rows, output.cells, report.sweep).provenance.tasks for rows in (output.rows[::-1], other)]
    same, changed = ({f"{task.task}, 4,096 tokens": task.digest for task in tasks} for tasks in digests)
    assert same == found
    assert not set(changed.values()) & set(found.values())
    replay(None, report.sweep, output.cells, report, [], "FAILED")
    assert datasets_of(folder) == found


def test_files_that_tasks_were_read_from_are_datasets_with_their_checksums(folder: Path, output: Output) -> None:
    files = {"a/b.jsonl": {"from": "cache", "path": "/there/b.jsonl", "sha256": "ab" * 32, "pinned": True}}
    sweep = sweep_in(folder, data={"files": files})
    replay(None, sweep, output.cells, report_of(output, sweep), [])
    assert datasets_of(folder)["a/b.jsonl"] == ("ab" * 32)[:36]


def test_replay_writes_what_live_tracking_wrote_and_adds_no_twins(tracked: tuple[Path, Report], output: Output) -> None:
    folder, report = tracked

    def state() -> dict[str, Any]:
        parent, children = runs_in(folder)
        client = mlflow_client(f"sqlite:///{folder / 'mlflow.db'}")
        return {
            run.data.tags.get(CHILD, "parent"): (
                run.info.run_id, run.info.status, run.data.params, run.data.tags, run.data.metrics,
                {name: len(client.get_metric_history(run.info.run_id, name)) for name in run.data.metrics},
            )
            for run in (parent, *children)
        }  # fmt: skip

    before = state()
    for _ in range(2):
        replay(None, report.sweep, output.cells, report, [], "FAILED")
    assert state() == before


def test_a_configuration_that_did_not_change_costs_a_replay_no_call(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make_output(samples=4)
    sweep = sweep_in(folder)
    report = report_of(made, sweep)
    replay(None, sweep, made.cells, report, [])
    parent, children = runs_in(folder)
    written: list[str] = []
    for name in ("log_batch", "set_terminated", "set_tag", "create_run"):
        monkeypatch.setattr(mlflow.MlflowClient, name, lambda client, run_id, *more: written.append(run_id))
    replay(None, sweep, made.cells, report, [])
    assert len(children) == 5
    assert set(written) == {parent.info.run_id}


def test_replay_alone_fills_an_empty_store(folder: Path, output: Output) -> None:
    sweep = sweep_in(folder)
    replay(None, sweep, output.cells, report_of(output, sweep), [])
    parent, children = runs_in(folder)
    assert (parent.info.status, len(children)) == ("FINISHED", 5)


def test_a_figure_that_no_longer_holds_is_nan_until_it_holds_again(folder: Path, output: Output) -> None:
    sweep = sweep_in(folder)
    replay(None, sweep, output.cells, report_of(output, sweep), [])
    more = make_cell("qevict", "10%", "a new task", 6)
    wider = Output(output.rows, [*output.cells, more], sweep)
    replay(None, sweep, wider.cells, report_of(wider, sweep), [])
    parent, children = runs_in(folder)
    run = child(children, "qevict", "10%")
    assert math.isnan(run.data.metrics["quality/macro"])
    assert math.isnan(parent.data.metrics["macro/qevict/10pct"])
    assert not math.isnan(run.data.metrics["task/vt"])
    report = report_of(output, sweep)
    replay(None, sweep, output.cells, report, [])
    macro = next(one.macro for one in report.summary.results if one.label == "qevict")
    assert child(runs_in(folder)[1], "qevict", "10%").data.metrics["quality/macro"] == pytest.approx(100 * macro.value)


def test_a_repaired_configuration_is_no_longer_failed(folder: Path, output: Output) -> None:
    sweep = sweep_in(folder)
    replay(None, sweep, output.cells, report_of(output, sweep), [])
    rows = output.rows.copy()
    rows.loc[rows["status"] == "failed", ["status", "error", "score"]] = ["ok", "", 1.0]
    whole = Output(rows, output.cells, sweep)
    replay(None, sweep, output.cells, report_of(whole, sweep), [])
    run = child(runs_in(folder)[1], "snapkv", "10%")
    assert run.info.status == "FINISHED"
    assert "error_type" not in run.data.tags


def test_a_limited_sweep_is_tagged_partial_until_it_is_complete(folder: Path) -> None:
    cell = make_cell("full", "100%", "vt", 4)

    def tags(limit: int | None, rows: int) -> set[str]:
        sweep = sweep_in(folder, limit=limit)
        cells = [{**cell, "asked": limit or 4}]
        replay(None, sweep, cells, build_report(make_rows(cell, [0.5] * rows), cells, sweep), [])
        parent, [one] = runs_in(folder)
        return {parent.data.tags["partial"], one.data.tags["partial"]}

    assert tags(2, 2) == {"yes"}
    assert tags(None, 4) == {"no"}


def test_a_sweep_that_continues_goes_on_in_its_own_run(folder: Path, output: Output) -> None:
    sweep = sweep_in(folder)
    for _ in range(2):
        tracker = Tracker.start(None, sweep, output.cells)
        tracker.close(60)
    parent, _ = runs_in(folder)
    assert parent.info.status == "RUNNING"


def test_two_outputs_of_one_name_share_an_experiment_but_no_run(folder: Path, output: Output) -> None:
    uri = f"sqlite:///{folder / 'mlflow.db'}"
    for place in ("one", "two"):
        sweep = sweep_in(folder / place)
        replay(uri, sweep, output.cells, report_of(output, sweep), [])
    client = mlflow_client(uri)
    experiment = client.get_experiment_by_name("unit").experiment_id
    assert len(client.search_runs([experiment], f"tags.`{KIND}` = 'sweep'")) == 2
    assert len(client.search_runs([experiment], f"tags.`{KIND}` = 'configuration'")) == 10


def test_many_configurations_and_settings_fit_into_mlflows_limits(folder: Path) -> None:
    settings = {f"setting {index} (%)": index for index in range(150)}
    cells = [make_cell("m" * 200, f"{share}%", f"task {'t' * 200}", 2, settings=settings) for share in range(1, 4)]
    rows = pd.concat([make_rows(cell, [1.0, 0.0]) for cell in cells])
    sweep = sweep_in(folder)
    replay(None, sweep, cells, build_report(rows, cells, sweep), [])
    assert len(runs_in(folder)[1]) == 3


def test_the_ray_job_is_a_tag(folder: Path, output: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    job = {"runtime_env": {}, "metadata": {"job_submission_id": "sweep-unit-1", "job_name": "unit"}}
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", json.dumps(job))
    Tracker.start(None, sweep_in(folder), output.cells).close(60)
    assert runs_in(folder)[0].data.tags["ray.submission_id"] == "sweep-unit-1"


# ---- never in the way


@pytest.fixture
def dead_server() -> str:
    """An address that refuses connections."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{held.getsockname()[1]}"


@pytest.fixture
def silent_server() -> Iterator[str]:
    """An address that takes connections and never answers."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        yield f"http://127.0.0.1:{held.getsockname()[1]}"


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_dead_server_is_a_warning_with_the_way_out(
    folder: Path, output: Output, dead_server: str, caplog: pytest.LogCaptureFixture
) -> None:
    sweep = sweep_in(folder)
    report = report_of(output, sweep)
    started = monotonic()
    tracker = Tracker.start(dead_server, sweep, output.cells)
    tracker.progress(1, 0, 10)
    tracker.finish(report, [], "FINISHED")
    assert monotonic() - started < 0.5
    tracker.close(20)
    assert monotonic() - started < 15
    *first, last = warnings(caplog)
    assert len(first) <= 1, "one more where the first try was over before the sweep"
    assert dead_server in last
    assert "`kvsweep replay` fills MLflow in later" in last


def test_close_waits_no_longer_than_it_is_told(
    folder: Path, output: Output, silent_server: str, caplog: pytest.LogCaptureFixture
) -> None:
    tracker = Tracker.start(silent_server, sweep_in(folder), output.cells)
    started = monotonic()
    tracker.close(1.0)
    assert monotonic() - started < 3
    assert any("has not taken everything within 1 s" in text for text in warnings(caplog))


def test_a_database_that_cannot_be_opened_is_a_warning(
    folder: Path, output: Output, caplog: pytest.LogCaptureFixture
) -> None:
    (folder / "a file").touch()
    tracker = Tracker.start(f"sqlite:///{folder}/a file/mlflow.db", sweep_in(folder), output.cells)
    tracker.progress(1, 0, 10)
    tracker.close(60)
    assert "a file/mlflow.db: FileExistsError" in warnings(caplog)[-1]


class Outage:
    """While ``on``, MLflow refuses what is asked of it, as a client sees a server that is away."""

    def __init__(self) -> None:
        self.on = False
        self.refused = 0

    def guard(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("create_run", "log_batch", "search_runs", "set_terminated", "update_run"):
            whole = getattr(mlflow.MlflowClient, name)
            monkeypatch.setattr(mlflow.MlflowClient, name, self._guarded(whole))

    def _guarded(self, whole: Any) -> Any:
        def call(*positional: Any, **named: Any) -> Any:
            if self.on:
                self.refused += 1
                raise mlflow.MlflowException("connection refused")
            return whole(*positional, **named)

        return call


@pytest.fixture
def outage(monkeypatch: pytest.MonkeyPatch) -> Outage:
    made = Outage()
    made.guard(monkeypatch)
    monkeypatch.setattr("pipeline.tracking.PAUSE_S", 0.05)
    monkeypatch.setattr("pipeline.tracking.PROGRESS_EVERY_S", 0.0)
    return made


def wait_until(true: Any) -> None:
    deadline = monotonic() + 20
    while not true():
        assert monotonic() < deadline
        sleep(0.01)


def begun(folder: Path) -> bool:
    client = mlflow_client(f"sqlite:///{folder / 'mlflow.db'}")
    found = client.get_experiment_by_name("unit")
    return found is not None and any(
        "cells" in run.data.params and run.info.status == "RUNNING"
        for run in client.search_runs([found.experiment_id], f"tags.`{KIND}` = 'sweep'")
    )


@pytest.mark.parametrize("from_the_start", [True, False])
def test_an_outage_is_caught_up_with_while_the_sweep_goes_on(
    folder: Path, output: Output, outage: Outage, from_the_start: bool, caplog: pytest.LogCaptureFixture
) -> None:
    sweep = sweep_in(folder)
    outage.on = from_the_start
    tracker = Tracker.start(None, sweep, output.cells)
    if not from_the_start:
        wait_until(lambda: begun(folder))
        outage.on = True
    for done in (10, 20, 30):
        tracker.progress(done, 0, 120)
    wait_until(lambda: outage.refused >= 3)
    outage.on = False
    wait_until(lambda: begun(folder) and "rows_done" in runs_in(folder)[0].data.metrics)
    report = report_of(output, sweep)
    tracker.finish(report, [], "FINISHED")
    tracker.close(60)
    parent, children = runs_in(folder)
    assert (parent.info.status, len(children)) == ("FINISHED", 5)
    history = mlflow_client(f"sqlite:///{folder / 'mlflow.db'}").get_metric_history(parent.info.run_id, "rows_done")
    assert sorted(point.step for point in history) == [10, 20, 30, 120]
    (warning,) = warnings(caplog)
    assert "connection refused; the sweep goes on, and it is tried again" in warning


def test_an_outage_among_the_children_leaves_no_twins(
    folder: Path, output: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The third call for a child fails once: what was created before it is found again."""
    monkeypatch.setattr("pipeline.tracking.PAUSE_S", 0.05)
    monkeypatch.setattr("pipeline.mlflow_runs.writers", lambda uri: 4)
    sweep, whole, calls = sweep_in(folder), mlflow.MlflowClient.set_terminated, []

    def third_fails(*positional: Any) -> None:
        calls.append(positional)
        if len(calls) == 3:
            raise mlflow.MlflowException("connection refused")
        whole(*positional)

    monkeypatch.setattr(mlflow.MlflowClient, "set_terminated", third_fails)
    tracker = Tracker.start(None, sweep, output.cells)
    tracker.finish(report_of(output, sweep), [], "FINISHED")
    wait_until(lambda: len(calls) > 5)
    tracker.close(60)
    parent, children = runs_in(folder)
    assert (parent.info.status, len(children)) == ("FINISHED", 5)
    assert len({run.data.tags[CHILD] for run in children}) == 5
    assert {run.info.status for run in children} == {"FINISHED", "FAILED"}


def test_of_a_child_that_was_created_twice_one_stays(folder: Path, output: Output) -> None:
    """As when the answer is lost on its way, and the client asks again."""
    sweep = sweep_in(folder)
    replay(None, sweep, output.cells, report_of(output, sweep), [])
    client, (_, children) = mlflow_client(f"sqlite:///{folder / 'mlflow.db'}"), runs_in(folder)
    client.create_run(children[0].info.experiment_id, tags=children[0].data.tags)
    assert len(runs_in(folder)[1]) == 6
    replay(None, sweep, output.cells, report_of(output, sweep), [])
    _, again = runs_in(folder)
    assert sorted(run.data.tags[CHILD] for run in again) == sorted(run.data.tags[CHILD] for run in children)
    assert {run.info.status for run in again} == {"FINISHED", "FAILED"}


def test_what_mlflow_refuses_holds_nothing_else_up(
    folder: Path, output: Output, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refused(*_: object) -> None:
        raise mlflow.MlflowException("no such metric", INVALID_PARAMETER_VALUE)

    monkeypatch.setattr("pipeline.mlflow_runs.SweepRuns.progress", refused)
    sweep = sweep_in(folder)
    tracker = Tracker.start(None, sweep, output.cells)
    tracker.progress(1, 0, 120)
    tracker.finish(report_of(output, sweep), [], "FINISHED")
    tracker.close(60)
    parent, children = runs_in(folder)
    assert (parent.info.status, len(children)) == ("FINISHED", 5)
    assert "takes no such thing: MlflowException: no such metric; the rest goes on" in warnings(caplog)[0]


def test_a_refused_child_holds_neither_the_others_up_nor_the_end(
    folder: Path, output: Output, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    whole, calls = mlflow.MlflowClient.log_batch, []

    def one_refused(*positional: Any) -> None:
        calls.append(positional)
        if len(calls) == 3:  # the parent's two, then the first child's
            raise mlflow.MlflowException("no such metric", INVALID_PARAMETER_VALUE)
        whole(*positional)

    monkeypatch.setattr(mlflow.MlflowClient, "log_batch", one_refused)
    sweep = sweep_in(folder)
    tracker = Tracker.start(None, sweep, output.cells)
    tracker.finish(report_of(output, sweep), [], "FINISHED")
    tracker.close(60)
    parent, children = runs_in(folder)
    assert (parent.info.status, len(children)) == ("FINISHED", 5)
    assert [run.info.status for run in children].count("RUNNING") == 1
    assert "takes no such thing: MlflowException: no such metric; the rest goes on" in warnings(caplog)[0]
    calls.clear()
    with pytest.raises(TrackingError, match="no such metric"):
        replay(None, sweep, output.cells, report_of(output, sweep), [])
    replay(None, sweep, output.cells, report_of(output, sweep), [])
    assert not [run for run in runs_in(folder)[1] if run.info.status == "RUNNING"]


def test_of_a_parent_that_was_created_twice_the_one_that_was_begun_stays(folder: Path, output: Output) -> None:
    sweep = sweep_in(folder)
    replay(None, sweep, output.cells, report_of(output, sweep), [])
    client, (parent, _) = mlflow_client(f"sqlite:///{folder / 'mlflow.db'}"), runs_in(folder)
    begun_tags = {key: text for key, text in parent.data.tags.items() if key in (KIND, SWEEP_ID)}
    client.create_run(parent.info.experiment_id, tags=begun_tags)
    replay(None, sweep, output.cells, report_of(output, sweep), [])
    assert runs_in(folder)[0].info.run_id == parent.info.run_id


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # it ends the thread
def test_a_fault_of_ours_is_told_and_says_how_to_write_what_is_missing(
    folder: Path, output: Output, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("pipeline.mlflow_runs.SweepRuns.results", lambda *_: {}["nothing"])
    sweep = sweep_in(folder)
    tracker = Tracker.start(None, sweep, output.cells)
    tracker.finish(report_of(output, sweep), [], "FINISHED")
    tracker.close(60)
    (record,) = [one for one in caplog.records if one.levelname == "ERROR"]
    assert "is told nothing more; `kvsweep replay`" in record.getMessage()
    assert "KeyError" in str(record.exc_text)


def test_a_sweep_that_is_stopped_is_killed_until_it_continues_and_is_finished_at_last(
    folder: Path, output: Output
) -> None:
    sweep = sweep_in(folder)
    tracker = Tracker.start(None, sweep, output.cells)
    wait_until(lambda: begun(folder))
    tracker.stop("KILLED", 60)
    assert runs_in(folder)[0].info.status == "KILLED"
    tracker = Tracker.start(None, sweep, output.cells)
    wait_until(lambda: begun(folder))
    tracker.finish(report_of(output, sweep), [], "FINISHED")
    tracker.close(60)
    tracker.stop("KILLED")
    parent, children = runs_in(folder)
    assert (parent.info.status, len(children)) == ("FINISHED", 5)


def test_a_stop_passes_over_what_is_not_written_yet(
    folder: Path, output: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep = sweep_in(folder)
    tracker = Tracker.start(None, sweep, output.cells)
    tracker.finish(report_of(output, sweep), [], "FINISHED")
    whole, created = mlflow.MlflowClient.create_run, Event()

    def slow(*positional: Any) -> Any:
        run = whole(*positional)
        if KIND in positional[3] and positional[3][KIND] == "configuration":
            created.set()
            sleep(1)
        return run

    monkeypatch.setattr(mlflow.MlflowClient, "create_run", slow)
    assert created.wait(30)
    tracker.stop("KILLED", 30)
    parent, children = runs_in(folder)
    assert (parent.info.status, len(children)) == ("KILLED", 1)


def test_a_stop_waits_for_no_server(
    folder: Path, output: Output, silent_server: str, outage: Outage, caplog: pytest.LogCaptureFixture
) -> None:
    tracker = Tracker.start(silent_server, sweep_in(folder), output.cells)
    sleep(0.5)
    started = monotonic()
    tracker.stop("KILLED")
    assert monotonic() - started < 4
    assert "was not told within 2 s that the sweep stopped" in warnings(caplog)[-1]
    tracker = Tracker.start(None, sweep_in(folder), output.cells)
    wait_until(lambda: begun(folder))
    outage.on = True
    started = monotonic()
    tracker.stop("KILLED")
    assert monotonic() - started < 4


def test_the_first_failure_of_calls_made_together_ends_them() -> None:
    made: list[int] = []

    def call(number: int) -> None:
        made.append(number)
        if number == 2:
            raise OSError("away")

    calls = [lambda number=number: call(number) for number in range(1000)]
    with pytest.raises(OSError, match="away"):
        in_parallel(calls, 1, Event())
    assert made == [0, 1, 2]
    made.clear()
    in_parallel([calls[number] for number in range(3, 1000)], 8, Event())
    assert sorted(made) == list(range(3, 1000))
    stopped = Event()
    stopped.set()
    with pytest.raises(Stopped):
        in_parallel(calls, 8, stopped)
    with pytest.raises(KeyError):  # a fault of ours, which MLflow never raises
        in_parallel([lambda: {}["nothing"], *calls[3:]], 8, Event())


def test_replay_says_what_is_wrong_with_a_dead_server(folder: Path, output: Output, dead_server: str) -> None:
    sweep = sweep_in(folder)
    with pytest.raises(TrackingError, match=dead_server):
        replay(dead_server, sweep, output.cells, report_of(output, sweep), [])


def test_tracking_can_be_off(tmp_path: Path, output: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    sweep = sweep_in(tmp_path)
    tracker = Tracker.start("off", sweep, output.cells)
    tracker.progress(1, 0, 10)
    tracker.finish(report_of(output, sweep), [], "FINISHED")
    tracker.close()
    assert list(tmp_path.iterdir()) == []


def test_tracking_prints_nothing(
    tmp_path: Path, output: Output, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    sweep = sweep_in(tmp_path)
    replay(None, sweep, output.cells, report_of(output, sweep), [])
    assert (tmp_path / "mlflow.db").exists()
    assert capfd.readouterr() == ("", "")


# ---- addresses, names and views


def test_the_sweeps_setting_comes_before_the_environment_and_both_before_the_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    assert tracking_uri(None, str(tmp_path)) == f"sqlite:///{tmp_path}/mlflow.db"
    assert tracking_uri(None, f"file://{tmp_path}") == f"sqlite:///{tmp_path}/mlflow.db"
    assert tracking_uri(None, "s3://bucket/sweep") == "off"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://there:5000")
    assert tracking_uri(None, str(tmp_path)) == "http://there:5000"
    assert tracking_uri("http://here:5000", str(tmp_path)) == "http://here:5000"


@pytest.mark.parametrize(
    ("parts", "name"),
    [
        (("macro", "qevict@x", "10%"), "macro/qevict_x/10pct"),
        (("task", "niah (multi), k=3"), "task/niah _multi_ k_3"),
        (("task", "..", "a//b"), "task/_/a_b"),
        (("task", "größe"), "task/gr_e"),
    ],
)
def test_metric_names_hold_only_what_mlflow_takes(parts: tuple[str, ...], name: str) -> None:
    from mlflow.utils.validation import _validate_metric_name

    assert metric_name(*parts) == name
    _validate_metric_name(name)


def test_long_metric_names_stay_apart() -> None:
    one, two = (metric_name("task", "t" * 300 + end) for end in "ab")
    assert one != two
    assert len(one) <= 250


def test_saved_views_are_installed_in_the_form_that_the_page_reads(tracked: tuple[Path, Report]) -> None:
    client = mlflow_client(f"sqlite:///{tracked[0] / 'mlflow.db'}")
    tags = client.get_experiment_by_name("unit").tags
    installed = {key: json.loads(value) for key, value in tags.items() if key.startswith("mlflow.sharedViewState.")}
    assert sorted(view["name"] for view in installed.values()) == ["Failures", "Leaderboard", "Score against budget"]
    for view in installed.values():
        assert isinstance(view["createdAt"], int)
        assert {"searchFilter", "orderByKey", "selectedColumns"} <= json.loads(view["state"]).keys()
    leaderboard = json.loads(installed["mlflow.sharedViewState.kvsweep-leaderboard"]["state"])
    assert "metrics.`macro/full/100pct`" in leaderboard["selectedColumns"]


def test_the_filters_of_the_saved_views_find_the_runs_they_are_for(tracked: tuple[Path, Report]) -> None:
    client = mlflow_client(f"sqlite:///{tracked[0] / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("unit").experiment_id
    found = {name: len(client.search_runs([experiment], state["searchFilter"])) for name, state in views({}).values()}
    assert found == {"Leaderboard": 1, "Score against budget": 5, "Failures": 1}


def test_links_are_full_and_open_the_right_layout() -> None:
    address = links("http://mlflow:5000/", "7")["Score against budget"]
    assert address.startswith("http://mlflow:5000/#/experiments/7/runs?")
    assert {"workflowType=machine_learning", "compareRunsMode=CHART"} <= set(address.partition("?")[2].split("&"))
