"""The driver on a real local Ray, with actors that compute nothing: what is finished stays, what fails says why."""

from __future__ import annotations

import dataclasses
import errno
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import stub_worker
import yaml
from stub_worker import StubWorker
from test_spec import sweep

import pipeline.cluster
import pipeline.driver
import pipeline.store
from pipeline.cluster import ClusterError, Request
from pipeline.run import Finished, Opened, RunOptions, open_sweep, run_sweep
from pipeline.show import show_end
from pipeline.store import StorageLost
from tasks.sample import Sample
from tasks.sources import DataError
from workers.job import ModelSpec
from workers.samples import SampleRequest

TESTS = Path(__file__).parent
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS.parent), str(TESTS)])}
METHODS = ["full", "window", {"name": "window", "label": "wide", "window": 64}]


@pytest.fixture(scope="module", autouse=True)
def _ray() -> Iterator[None]:
    import ray

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", ENVIRONMENT["PYTHONPATH"])
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield
    ray.shutdown()


@pytest.fixture(autouse=True)
def _stubs(monkeypatch: pytest.MonkeyPatch) -> None:
    stub_worker.install(monkeypatch)


def write(folder: Path, **changes: Any) -> Path:
    """Twelve rows: four samples in two jobs, three cells each."""
    cluster = {"samples_per_job": 2, "cpus_per_actor": 1, "max_actors": 1, **changes.pop("cluster", {})}
    defaults = {"samples": 4, "methods": METHODS, "output": str(folder / "out"), "mlflow": {"enabled": False}}
    file = folder / "sweep.yaml"
    file.write_text(yaml.safe_dump(sweep(**{**defaults, **changes}, cluster=cluster)))
    return file


def drive(
    file: Path, make: Callable[[SampleRequest], list[Sample]] | None = None, **options: Any
) -> tuple[Opened, Finished]:
    chosen = RunOptions(**options)
    opened = open_sweep(file, chosen)
    return opened, run_sweep(opened, chosen, StubWorker, make or stub_worker.samples())


def results(opened: Opened) -> list[dict[str, Any]]:
    """The final table without what differs between any two runs."""
    passing = ("finished_at", "job_id", "attempt")
    return [{key: one[key] for key in one if key not in passing} for one in opened.store.rows().to_pylist()]


def statuses(opened: Opened) -> dict[int, set[str]]:
    """Sample index to the statuses of its rows."""
    found: dict[int, set[str]] = {}
    for one in opened.store.rows().to_pylist():
        found.setdefault(one["sample_index"], set()).add(one["status"])
    return found


def assert_nothing_was_run_twice(opened: Opened) -> None:
    pairs = opened.store.attempts(("cell_id", "sample_index")).to_pylist()
    assert max(Counter((pair["cell_id"], pair["sample_index"]) for pair in pairs).values()) == 1


def test_every_pair_gets_one_row(tmp_path: Path) -> None:
    opened, finished = drive(write(tmp_path))
    rows = opened.store.rows().to_pylist()
    assert {(one["cell_id"], one["sample_index"]) for one in rows} == {
        (cell.cell_id, index) for cell in opened.grid.cells for index in range(4)
    }
    assert {one["method"] for one in rows} == {"full", "window", "wide"}
    assert_nothing_was_run_twice(opened)
    assert finished.exit_code(failures_ok=False) == 0


def test_a_second_run_does_nothing(tmp_path: Path) -> None:
    opened, _ = drive(write(tmp_path))
    parts = opened.store.folder.list("parts", "")
    _, again = drive(write(tmp_path))
    assert again.plan.jobs == ()
    assert opened.store.folder.list("parts", "") == parts
    assert again.exit_code(failures_ok=False) == 0


def test_a_limit_is_a_beginning(tmp_path: Path) -> None:
    opened, first = drive(write(tmp_path), limit=1)
    assert statuses(opened) == {0: {"ok"}}
    _, rest = drive(write(tmp_path))
    assert sum(job.pairs for job in rest.plan.jobs) == 9
    assert_nothing_was_run_twice(opened)
    assert (first.exit_code(False), rest.exit_code(False)) == (0, 0)


def test_two_actors_share_the_work(tmp_path: Path) -> None:
    opened, _ = drive(write(tmp_path, samples=12, cluster={"max_actors": 2}))
    assert opened.store.rows().num_rows == 36
    assert_nothing_was_run_twice(opened)


def test_a_sample_that_fails_costs_its_own_rows(tmp_path: Path) -> None:
    opened, finished = drive(write(tmp_path), stub_worker.samples({1: "fail"}))
    assert statuses(opened) == {0: {"ok"}, 1: {"failed"}, 2: {"ok"}, 3: {"ok"}}
    assert {one["score"] for one in opened.store.rows().to_pylist() if one["status"] == "failed"} == {None}
    assert (finished.failed, finished.exit_code(False), finished.exit_code(True)) == (3, 1, 0)


def test_failed_rows_run_again_only_when_asked(tmp_path: Path) -> None:
    file = write(tmp_path)
    drive(file, stub_worker.samples({1: "fail"}))
    _, unasked = drive(file)
    assert (unasked.plan.jobs, unasked.exit_code(False)) == ((), 1)

    def mended(request: SampleRequest) -> list[Sample]:
        return [dataclasses.replace(one, question="") for one in stub_worker.samples({1: "fail"})(request)]

    _, asked = drive(file, mended, retry_failed=True)
    assert [list(job.pending) for job in asked.plan.jobs] == [[1]]
    assert asked.exit_code(False) == 0


def test_an_exception_of_a_job_costs_the_sample_to_blame_alone(tmp_path: Path) -> None:
    opened, _ = drive(write(tmp_path, samples=6, cluster={"samples_per_job": 3}), stub_worker.samples({1: "raise"}))
    assert statuses(opened) == {0: {"ok"}, 1: {"failed"}, 2: {"ok"}, 3: {"ok"}, 4: {"ok"}, 5: {"ok"}}
    errors = {one["error"] for one in opened.store.rows().to_pylist() if one["status"] == "failed"}
    assert errors == {"it failed twice on this sample alone: RuntimeError: the whole job went wrong"}


def test_a_failed_row_says_where_it_belongs(tmp_path: Path) -> None:
    opened, _ = drive(write(tmp_path), stub_worker.samples({0: "raise"}))
    row = next(one for one in opened.store.rows().to_pylist() if one["status"] == "failed" and one["method"] == "wide")
    expected = {"model": "tiny", "budget": "10%", "context": 1024, "task": "niah_single_1", "row_width": 64}
    assert {key: row[key] for key in expected} == expected
    assert row["settings"] == '{"decay": 1.0, "window": 64}'


def test_what_a_killed_actor_yielded_is_kept_and_the_rest_runs_again(tmp_path: Path) -> None:
    marks = tmp_path / "marks"
    marks.mkdir()
    opened, finished = drive(write(tmp_path), stub_worker.samples({1: "once"}, marks=marks))
    assert len(list(marks.iterdir())) == 1
    assert statuses(opened) == {0: {"ok"}, 1: {"ok"}, 2: {"ok"}, 3: {"ok"}}
    assert_nothing_was_run_twice(opened)
    attempts = {one["attempt"] for one in opened.store.rows().to_pylist() if one["sample_index"] == 1}
    assert attempts == {1, 2}
    assert finished.exit_code(False) == 0


def test_a_sample_that_always_kills_its_actor_is_found_and_fails_alone(tmp_path: Path) -> None:
    file = write(tmp_path, cluster={"samples_per_job": 4})
    opened, finished = drive(file, stub_worker.samples({2: "die"}))
    assert statuses(opened) == {0: {"ok"}, 1: {"ok"}, 2: {"failed"}, 3: {"ok"}}
    assert_nothing_was_run_twice(opened)
    errors = {one["error"] for one in opened.store.rows().to_pylist() if one["status"] == "failed"}
    assert len(errors) == 1
    assert errors.pop().startswith("it failed twice on this sample alone: ActorDiedError")
    assert finished.exit_code(False) == 1
    losses = opened.store.losses()
    assert [loss.attempt for loss in losses[:2]] == [1, 2]
    assert all({2, 3} <= set(loss.samples) for loss in losses[:2]), "samples before it may be there already"
    assert [loss.samples for loss in losses[2:]] == [[2], [2]]
    assert all(loss.counted and loss.reason.startswith("ActorDiedError") for loss in losses)


def test_the_loss_of_a_node_costs_no_try(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline.driver, "node_is_alive", lambda node: False)
    marks = tmp_path / "marks"
    marks.mkdir()
    file = write(tmp_path, cluster={"max_failures": 1})
    opened, finished = drive(file, stub_worker.samples({0: "once", 3: "once"}, marks=marks))
    assert len(list(marks.iterdir())) == 2
    assert opened.store.rows().num_rows == 12
    assert finished.exit_code(False) == 0
    assert [loss.counted for loss in opened.store.losses()] == [False, False]


@pytest.mark.parametrize("source", ["broken", "deadly"])
def test_a_model_that_does_not_load_is_left_out_alone(tmp_path: Path, source: str) -> None:
    models = [{"label": "bad", "source": source}, {"label": "tiny", "source": "tiny"}]
    opened, finished = drive(write(tmp_path, models=models))
    assert {one["model"] for one in opened.store.rows().to_pylist()} == {"tiny"}
    assert opened.store.rows().num_rows == 12
    (left,) = finished.outcome.left_out
    assert (left.what, left.pairs) == ("model bad", 12)
    assert ("the weights are broken" in left.reason) == (source == "broken")
    assert (finished.exit_code(failures_ok=False), finished.exit_code(failures_ok=True)) == (1, 0)
    assert [(loss.what, loss.attempt, loss.counted) for loss in opened.store.losses()] == [
        ("model bad", 1, True),
        ("model bad", 2, True),
    ]


def test_a_sweep_of_which_nothing_could_run_is_never_well(tmp_path: Path) -> None:
    _, finished = drive(write(tmp_path, models=[{"label": "bad", "source": "broken"}]))
    assert (finished.exit_code(failures_ok=False), finished.exit_code(failures_ok=True)) == (1, 1)


@pytest.mark.slow
def test_a_model_that_is_not_loaded_in_time_is_left_out(tmp_path: Path) -> None:
    models = [{"label": "endless", "source": "endless"}, {"label": "tiny", "source": "tiny"}]
    opened, finished = drive(write(tmp_path, models=models, cluster={"job_timeout_s": 2}))
    assert opened.store.rows().num_rows == 12
    assert [(left.what, left.reason) for left in finished.outcome.left_out] == [
        ("model endless", "not done after 2 s (job_timeout_s)")
    ]


def test_a_job_has_a_time_limit_and_keeps_what_it_yielded(tmp_path: Path) -> None:
    file = write(tmp_path, samples=2, cluster={"job_timeout_s": 2})
    opened, finished = drive(file, stub_worker.samples({1: "stall"}))
    rows = opened.store.rows().to_pylist()
    assert sorted(row["status"] for row in rows if row["sample_index"] == 1) == ["failed", "ok", "ok"]
    errors = {row["error"] for row in rows if row["status"] == "failed"}
    assert errors == {"it failed twice on this sample alone: not done after 2 s (job_timeout_s)"}
    assert_nothing_was_run_twice(opened)
    assert finished.exit_code(False) == 1


def test_what_needs_the_device_to_itself_is_halved_until_it_fits(tmp_path: Path) -> None:
    file = write(tmp_path, samples=8, cluster={"samples_per_job": 8, "max_failures": 1})
    opened, finished = drive(file, stub_worker.samples({5: "large"}))
    assert opened.store.rows()["status"].to_pylist() == ["ok"] * 24
    assert finished.exit_code(False) == 0
    assert [(loss.samples, loss.counted) for loss in opened.store.losses()] == [([5, 6, 7], False)]


class Counted(StubWorker):
    """Leaves a file for every load."""

    def load(self, model: ModelSpec) -> dict[str, Any]:
        (Path(os.environ["LOADS"]) / uuid.uuid4().hex).touch()
        return super().load(model)


@pytest.mark.parametrize(("behaviour", "loads"), [("large", 1), ("huge", 4), ("leaky", 2), ("once", 2)])
def test_a_model_is_loaded_again_after_a_death_and_for_the_last_word_on_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, behaviour: str, loads: int
) -> None:
    """What fits nowhere is judged, pair by pair, by a process that has not run out of memory before."""
    folder = tmp_path / "loads"
    folder.mkdir()
    monkeypatch.setattr(pipeline.cluster.Request, "options", with_variables(LOADS=str(folder)))
    options = RunOptions()
    opened = open_sweep(write(tmp_path, samples=8, cluster={"samples_per_job": 8}), options)
    run_sweep(opened, options, Counted, stub_worker.samples({5: behaviour}, marks=tmp_path))
    assert statuses(opened) == {index: {"failed" if (behaviour, index) == ("huge", 5) else "ok"} for index in range(8)}
    assert_nothing_was_run_twice(opened)
    assert len(list(folder.iterdir())) == loads


@pytest.mark.slow
def test_what_fits_nowhere_is_recorded_pair_by_pair_without_its_neighbours(tmp_path: Path) -> None:
    opened, finished = drive(write(tmp_path, cluster={"samples_per_job": 4}), stub_worker.samples({1: "huge"}))
    assert statuses(opened) == {0: {"ok"}, 1: {"failed"}, 2: {"ok"}, 3: {"ok"}}
    errors = {one["error"] for one in opened.store.rows().to_pylist() if one["status"] == "failed"}
    assert errors == {"out of memory by itself: OutOfMemory: no room"}
    assert_nothing_was_run_twice(opened)
    assert (finished.failed, finished.exit_code(False)) == (3, 1)


@contextmanager
def full_disk(
    opened: Opened, seconds: float, monkeypatch: pytest.MonkeyPatch, when_refused: Callable[[], object] = lambda: None
) -> Iterator[list[str]]:
    """Nothing can be written for so long, from the first try on. Yields the names that were tried meanwhile."""
    write, refused = opened.store.folder.write, []
    ends = [0.0]

    def full(name: str, content: bytes) -> None:
        if name.startswith("parts/"):
            if not ends[0]:
                ends[0] = time.monotonic() + seconds
                when_refused()
            if time.monotonic() < ends[0]:
                refused.append(name)
                raise OSError(errno.ENOSPC, "No space left on device")
        write(name, content)

    with monkeypatch.context() as patch:
        patch.setattr(opened.store.folder, "write", full)
        patch.setattr(pipeline.store, "RETRY_S", 0.2)
        yield refused


def test_a_disk_that_is_full_at_the_end_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = RunOptions()
    opened = open_sweep(write(tmp_path), options)
    with full_disk(opened, 1.0, monkeypatch) as refused:
        finished = run_sweep(opened, options, StubWorker, stub_worker.samples())
    assert len(refused) > 1
    assert opened.store.rows().num_rows == 12
    assert finished.exit_code(False) == 0


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_ends_the_wait_for_a_full_disk_and_the_rows_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], signum: int, code: int
) -> None:
    options = RunOptions()
    opened = open_sweep(write(tmp_path), options)
    sent = []

    def send() -> None:
        sent.append(time.monotonic())
        os.kill(os.getpid(), signum)

    with full_disk(opened, 120, monkeypatch, when_refused=lambda: threading.Timer(2.0, send).start()):
        monkeypatch.setattr(pipeline.store, "RETRY_S", 60.0)
        finished = run_sweep(opened, options, StubWorker, stub_worker.samples())
    assert time.monotonic() - sent[0] < 2
    assert (finished.exit_code(True), finished.outcome.unwritten) == (code, 12)
    show_end(finished)
    told = capsys.readouterr()
    assert "No space left on device" in told.err
    assert "what is finished is kept but for 12 rows that could not be written, run the same command" in told.out
    assert opened.store.attempts(("cell_id",)).num_rows == 0
    again, rest = drive(write(tmp_path))
    assert (again.store.rows().num_rows, rest.exit_code(False)) == (12, 0)


def test_storage_that_stays_away_ends_the_sweep_with_a_code_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = RunOptions()
    opened = open_sweep(write(tmp_path), options)
    monkeypatch.setattr(pipeline.driver, "PATIENCE_S", 0.3)
    with full_disk(opened, 60, monkeypatch), pytest.raises(StorageLost, match="No space left") as raised:
        run_sweep(opened, options, StubWorker, stub_worker.samples())
    assert raised.value.exit_code == 3
    assert opened.store.folder.read("lease.json") is None


def test_samples_that_cannot_be_made_leave_out_their_task(tmp_path: Path) -> None:
    def make(request: SampleRequest) -> list[Sample]:
        if request.task == "vt":
            raise DataError("there is nothing to ask")
        return stub_worker.samples()(request)

    opened, finished = drive(write(tmp_path, tasks=["niah_single_1", "vt"]), make)
    assert opened.store.rows().num_rows == 12
    (left,) = finished.outcome.left_out
    assert (left.what, left.pairs, left.reason) == (
        "vt at 1024, seed 0, on tiny",
        12,
        "DataError: there is nothing to ask",
    )


def test_failures_in_a_row_stop_the_sweep(tmp_path: Path) -> None:
    file = write(tmp_path, samples=10, cluster={"samples_per_job": 1, "max_failures": 3})
    opened, finished = drive(file, stub_worker.samples({index: "fail" for index in range(10)}))
    assert finished.outcome.stopped == "3 failures in a row with no success between them"
    assert finished.exit_code(failures_ok=True) == 3
    assert 3 <= len(statuses(opened)) < 10


def test_an_actor_that_yields_nothing_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(tmp_path, samples=1, cluster={"stall_timeout_s": 0.5})
    opened, finished = drive(file, stub_worker.samples({0: "hang"}))
    assert statuses(opened) == {0: {"failed"}}
    assert finished.exit_code(False) == 1


class Stillborn(StubWorker):
    """Dies as it starts, the first four times."""

    def __init__(self) -> None:
        births = Path(os.environ["BIRTHS"])
        (births / str(os.getpid())).touch()
        if len(list(births.iterdir())) < 5:
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("nodes_go", [True, False])
def test_actors_that_die_as_they_start_are_a_clear_message_unless_nodes_go_with_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nodes_go: bool
) -> None:
    births = tmp_path / "births"
    births.mkdir()
    names = itertools.count()
    monkeypatch.setattr(pipeline.driver, "living_nodes", lambda: frozenset({str(next(names) if nodes_go else 0)}))
    monkeypatch.setattr(pipeline.cluster.Request, "options", with_variables(BIRTHS=str(births)))
    options = RunOptions()
    opened = open_sweep(write(tmp_path), options)
    if nodes_go:
        assert run_sweep(opened, options, Stillborn, stub_worker.samples()).exit_code(False) == 0
        assert len(list(births.iterdir())) == 5
    else:
        with pytest.raises(ClusterError, match="cluster: actors die as they start: ActorDiedError") as raised:
            run_sweep(opened, options, Stillborn, stub_worker.samples())
        assert raised.value.exit_code == 3
        assert len(list(births.iterdir())) == 3


def with_variables(**variables: str) -> Callable[[Request], dict[str, Any]]:
    """An actor's options, with these in its environment."""
    plain = Request.options
    return lambda request: plain(request) | {"runtime_env": {"env_vars": variables}}


def test_an_actor_that_finds_no_room_is_a_clear_message(tmp_path: Path) -> None:
    file = write(tmp_path, cluster={"gpus_per_actor": 1, "ready_timeout_s": 1})
    message = r"no actor could start within 1 s: each asks for 1 CPU, 1 GPU, and the cluster has 1 node with 2 CPU"
    with pytest.raises(ClusterError, match=message):
        drive(file)


def command(*arguments: object, delay_s: float = 0.0) -> subprocess.Popen[str]:
    """The command line with the stubs, in a process and on a Ray of its own."""
    return subprocess.Popen(
        [sys.executable, str(TESTS / "stub_worker.py"), *map(str, arguments)],
        env={**ENVIRONMENT, "STUB_DELAY_S": str(delay_s)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def wait_for_a_part(folder: Path, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 60
    while not list(folder.glob("out/parts/*.parquet")):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_killed_driver_is_continued_without_repeats_and_keeps_others_out(tmp_path: Path) -> None:
    alone, killed = tmp_path / "alone", tmp_path / "killed"
    alone.mkdir()
    killed.mkdir()
    expected, _ = drive(write(alone, samples=60))

    file = write(killed, samples=60)
    first = command("run", file, delay_s=0.02)
    wait_for_a_part(killed, first)
    second = command("run", file)
    said, _ = second.communicate(timeout=60)
    assert second.returncode == 2
    assert f"is being written by another driver: process {first.pid} of" in said
    assert len(said.splitlines()) == 1
    first.kill()
    first.communicate(timeout=60)

    opened = open_sweep(file, RunOptions())
    kept = opened.store.attempts(("cell_id",)).num_rows
    assert 0 < kept < 180
    third = command("run", file)
    said, _ = third.communicate(timeout=120)
    assert third.returncode == 0, said
    assert "Traceback" not in said
    assert f"{kept}/180 rows" in said
    assert_nothing_was_run_twice(opened)
    assert results(opened) == results(expected)


def test_a_driver_that_is_stopped_before_it_runs_anything_gives_its_lease_back(tmp_path: Path) -> None:
    file = write(tmp_path, samples=60)
    process = command("run", file, delay_s=0.02)
    while not (tmp_path / "out" / "plan.json").exists():
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 143, said
    assert "Traceback" not in said
    assert not (tmp_path / "out" / "lease.json").exists()


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_stopped_driver_writes_what_is_finished(tmp_path: Path, signum: int, code: int) -> None:
    file = write(tmp_path, samples=60)
    process = command("run", file, delay_s=0.02)
    wait_for_a_part(tmp_path, process)
    time.sleep(0.5)
    before = time.monotonic()
    process.send_signal(signum)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == code, said
    assert time.monotonic() - before < 10
    assert "run the same command to go on" in said
    assert "Traceback" not in said
    opened = open_sweep(file, RunOptions())
    assert 64 < opened.store.attempts(("cell_id",)).num_rows < 180
    assert opened.store.folder.read("lease.json") is None
