"""The command line: quick help, one message per problem, the right exit code."""

from __future__ import annotations

import csv
import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import stub_worker
from test_spec import write

import pipeline.driver
import pipeline.plan
import pipeline.run
from pipeline import commands
from pipeline.cli import main
from pipeline.store import Store
from tasks import registry
from tasks.task import TaskError
from workers.job import ModelSpec

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(autouse=True)
def _stubs(monkeypatch: pytest.MonkeyPatch) -> None:
    stub_worker.install(monkeypatch)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # the command line sets its own


def python(*arguments: object) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, *map(str, arguments)], env=environment, cwd=ROOT, capture_output=True, text=True, check=False
    )


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; from pipeline.cli import main; main(['--help']); main(['run', '--help']);"
        "heavy = {'torch', 'transformers', 'ray', 'pyarrow', 'pandas', 'mlflow', 'numpy', 'matplotlib'};"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)"
    )
    done = python("-c", code)
    assert done.returncode == 0, done.stderr
    assert "kvsweep" in done.stdout


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"smaples": 5}, "smaples: unknown key; did you mean samples?"),
        ({"methods": ["full", "windwo"]}, "methods[1]: unknown method 'windwo'; did you mean window?"),
        ({"budgets": [0]}, "budgets[0]: a budget must be above 0"),
        ({"budgets": ["130%"]}, "budgets[0]: a budget is at most 100 %"),
        ({"models": [{"label": "a", "source": "missing/a"}]}, "models[0].source: model 'a': no such folder missing/a"),
        ({"data_dir": "/no/such/folder"}, "data_dir: there is no folder /no/such/folder"),
        ({"seeds": [2**70]}, "seeds[0]: Input should be less than"),
        ({"budgets": [f"{10**20} tokens"]}, "budgets[0]: a budget has at most"),
        ({"methods": [{"name": "window", "decay": float("nan")}]}, "methods[0].decay: must be a finite number"),
        ({"cluster": {"cpus_per_actor": float("inf")}}, "cluster.cpus_per_actor: Input should be a finite number"),
        ({"output": "s3://KEY:SECRET@bucket/x"}, "output: holds a password"),
        ({"mlflow": {"tracking_uri": "http://me:secret@host"}}, "mlflow.tracking_uri: holds a password"),
    ],
)
@pytest.mark.parametrize("command", ["run", "plan"])
def test_bad_input_is_one_line_with_file_and_field(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str, changes: dict[str, Any], said: str
) -> None:
    file = write(tmp_path, **{"output": str(tmp_path / "out"), **changes})
    assert main([command, str(file)]) == 2
    told = capsys.readouterr()
    assert told.err.startswith(f"{file}: {said}")
    assert len(told.err.splitlines()) == 1
    assert told.out == ""
    assert not (tmp_path / "out").exists()


def test_a_data_folder_on_the_command_line_goes_before_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path, data_dir=str(tmp_path))
    assert main(["plan", str(file), "--data-dir", str(tmp_path / "none")]) == 2
    assert capsys.readouterr().err == f"{file}: data_dir: there is no folder {tmp_path / 'none'}\n"


def test_debug_shows_where(tmp_path: Path) -> None:
    file = write(tmp_path, budgets=["130%"])
    quiet, loud = python("-m", "pipeline", file), python("-m", "pipeline", file, "--debug")
    assert (quiet.returncode, "Traceback" in quiet.stderr) == (2, False)
    assert "Traceback" in loud.stderr


def test_a_fault_of_its_own_is_one_line(tmp_path: Path) -> None:
    code = (
        "import sys, pipeline.commands as commands; from pipeline.cli import main\n"
        "def broken(*given): raise ZeroDivisionError('at\\nlarge')\n"
        "commands.status = broken; sys.exit(main(sys.argv[1:]))"
    )
    done = python("-c", code, "status", "x")
    assert done.returncode == 1
    assert done.stderr == (
        "kvsweep failed, which is a fault of its own: ZeroDivisionError: at large; --debug shows where\n"
    )


def test_a_file_alone_means_run(tmp_path: Path) -> None:
    done = python("-m", "pipeline", tmp_path / "none.yaml", "--limit", "3")
    assert done.returncode == 2
    assert done.stderr == f"{tmp_path / 'none.yaml'}: cannot be read: No such file or directory\n"


def test_an_unknown_option_is_bad_input(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "x.yaml", "--limti", "3"]) == 2
    assert "No such option: --limti" in capsys.readouterr().err


def test_an_interrupt_ends_with_its_code(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*given: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(commands, "status", interrupted)
    assert main(["status", "x"]) == 130


def test_plan_says_what_is_done_what_is_left_and_what_cannot_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path, samples=4, contexts=[1024, 8192], budgets=["1%", "10%"], output=str(tmp_path / "out"))
    assert main(["plan", str(file), "--cells"]) == 0
    text = capsys.readouterr().out
    assert "6 cells, 8 rows asked for, 0 done, 8 left in 1 job" in text
    assert "cannot run: 1 cell (window at 1%): 8 tokens do not hold the window of 32" in text
    assert "context 8192 is beyond the model's 4096 positions" in text
    assert "memory: tiny peaks at" in text
    assert "on one device (rough, from operation counts)" in text
    assert not (tmp_path / "out").exists()


def test_plan_counts_what_is_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(tmp_path, samples=4, methods=["full"], output=str(tmp_path / "out"))
    opened = commands.open_sweep(file, commands.RunOptions())
    store = Store(str(tmp_path / "out"))
    store.add([stub_worker.row(opened.grid.cells[0].cell_id, index) for index in (0, 2)])
    store.flush()
    assert main(["plan", str(file)]) == 0
    assert "1 cell, 4 rows asked for, 2 done, 2 left in 1 job" in capsys.readouterr().out
    assert main(["plan", str(file), "--limit", "1"]) == 0
    assert "1 cell, 1 rows asked for, 1 done, 0 left in 0 jobs" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["status", "report", "replay"])
def test_a_folder_without_a_sweep_is_bad_input(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    assert main([command, str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"{tmp_path} is not the output of a sweep: it has no plan.json\n"


def test_methods_are_listed_with_their_settings(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["methods"]) == 0
    text = capsys.readouterr().out
    assert "window: 32" in text
    assert "Keeps the last tokens." in text


def test_tasks_and_groups_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tasks"]) == 0
    text = capsys.readouterr().out
    for name in ("gsm8k", "narrativeqa", "longbench-12", "ruler-11"):
        assert name in text


def test_a_package_with_a_bad_task_is_one_message(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(registry, "_entry_points", lambda: [EntryPoint("vt", "theirs:Task", registry.ENTRY_POINTS)])
    registry._registered.cache_clear()
    assert main(["tasks"]) == 2
    registry._registered.cache_clear()
    assert capsys.readouterr().err.startswith("the package theirs registers the task 'vt' (theirs:Task), and that name")


# Data


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Nothing in it, and no network."""
    monkeypatch.setenv("KVSWEEP_CACHE", str(tmp_path / "kvsweep"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return tmp_path / "kvsweep" / "data"


def own_task(folder: Path, *records: dict[str, Any], **settings: Any) -> dict[str, Any]:
    (folder / "own.jsonl").write_text("\n".join(map(json.dumps, records)))
    return {"name": "own", "file": "own.jsonl", "metric": "string_match_all", "max_new_tokens": 8, **settings}


def test_data_sets_are_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "list", "--data-dir", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "gsm8k: GSM8K: the test split" in text
    assert "by hand" in text
    assert f"looked in: data folder {tmp_path}, then cache" in text
    assert main(["data", "list", "--data-dir", str(tmp_path / "none")]) == 2
    assert capsys.readouterr().err == f"--data-dir: data_dir: there is no folder {tmp_path / 'none'}\n"


@pytest.mark.parametrize("command", [["plan"], ["run"], ["data", "check"]], ids=" ".join)
def test_missing_data_stop_a_sweep_before_anything_else(
    tmp_path: Path, cache: Path, capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    file = write(tmp_path, tasks=["gsm8k"], output=str(tmp_path / "out"), data_dir=str(tmp_path))
    assert main([*command, str(file)]) == 2
    told = capsys.readouterr()
    assert len(told.err.splitlines()) == 1
    tried = f"task gsm8k needs the file {tmp_path}/gsm8k/test.jsonl, which is not there; tried the data folder "
    assert tried in told.err
    assert f"the cache {cache}" in told.err
    assert ("the Hub (" in told.err) == (command != ["data", "check"])
    assert "run `kvsweep data fetch gsm8k`, or put it there" in told.err
    assert not (tmp_path / "out").exists()


def test_a_sweeps_data_are_checked_record_by_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    task = own_task(tmp_path, {"prompt": "1 + 1?", "references": "2"})
    file = write(tmp_path, tasks=["vt", task])
    assert main(["data", "check", str(file)]) == 0
    assert "1 samples" in capsys.readouterr().out
    own_task(tmp_path, {"prompt": "1 + 1?", "references": "2"}, {"prompt": "", "references": "2"})
    assert main(["data", "check", str(file)]) == 2
    assert capsys.readouterr().err == f"task own: {tmp_path}/own.jsonl, line 2: prompt is empty\n"


def test_another_file_than_the_pinned_one_is_told_by_plan_and_refused_by_check(
    tmp_path: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "gsm8k").mkdir()
    (tmp_path / "gsm8k" / "test.jsonl").write_text('{"question": "1 + 1?", "answer": "#### 2"}')
    task = {"name": "gsm8k", "allow_partial": True}
    file = write(tmp_path, tasks=[task], output=str(tmp_path / "out"), data_dir=str(tmp_path))
    assert main(["plan", str(file)]) == 0
    order = f"data, looked for in data folder {tmp_path}, then cache {cache}, then Hub: "
    assert f"{order}data folder: gsm8k/test.jsonl (not the pinned file)" in capsys.readouterr().out
    assert main(["data", "check", str(file)]) == 2
    assert capsys.readouterr().err.startswith(f"{tmp_path}/gsm8k/test.jsonl is not the pinned file: its sha256 is ")


# Running


@pytest.fixture(scope="module")
def _ray() -> Iterator[None]:
    import ray

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(ROOT / "tests")]))
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield
    ray.shutdown()


@pytest.fixture
def stub_run(_ray: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """`run` with actors that compute nothing."""
    monkeypatch.setattr(pipeline.run, "Worker", stub_worker.StubWorker)
    monkeypatch.setattr(pipeline.run.samples, "make_samples", stub_worker.samples())


def test_a_limited_run_is_partial_until_the_rest_is_there(
    tmp_path: Path, stub_run: None, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    file = write(tmp_path, samples=4, methods=["full"], output=str(out), mlflow={"enabled": False})
    store = Store(str(out))

    def marks() -> dict[str, Any]:
        [record] = csv.DictReader((out / "table.csv").read_text().splitlines())
        manifest = store.manifest()
        return {
            "asked": (manifest["limit"], manifest["cells"][0]["asked"]),
            "rows": store.rows()["sample_limit"].to_pylist(),
            "csv": (record["partial"], record["macro"] != "", record["scored"]),
            "table": "partial, 2 of 4" in (out / "table.md").read_text(),
            "warned": "Partial" in (out / "report.html").read_text(),
        }

    assert main(["run", str(file), "--limit", "2"]) == 0
    assert "partial: run with --limit 2" in capsys.readouterr().out
    partial = {"csv": ("True", False, "2"), "table": True, "warned": True}
    assert marks() == {"asked": (2, 2), "rows": [2, 2], **partial}
    assert main(["run", str(file)]) == 0
    assert "partial: run" not in capsys.readouterr().out
    complete = {"csv": ("False", True, "4"), "table": False, "warned": False}
    assert marks() == {"asked": (None, 4), "rows": [2, 2, 0, 0], **complete}
    assert main(["run", str(file), "--limit", "2"]) == 0
    assert marks() == {"asked": (2, 2), "rows": [2, 2, 0, 0], **complete}


@pytest.mark.parametrize(
    ("behaviour", "options", "models", "code"),
    [
        ({}, [], ["tiny"], 0),
        ({1: "fail"}, [], ["tiny"], 1),
        ({1: "fail"}, ["--failures-ok"], ["tiny"], 0),
        ({}, [], ["broken", "tiny"], 1),
        ({}, ["--failures-ok"], ["broken", "tiny"], 0),
        ({}, ["--failures-ok"], ["broken"], 1),
        ({index: "fail" for index in range(4)}, ["--failures-ok"], ["tiny"], 3),
    ],
    ids=["all done", "rows failed", "which is ok", "no model", "which is ok too", "nothing ran", "breaker"],
)
def test_every_end_has_its_exit_code(
    tmp_path: Path,
    stub_run: None,
    monkeypatch: pytest.MonkeyPatch,
    behaviour: dict[int, str],
    options: list[str],
    models: list[str],
    code: int,
) -> None:
    monkeypatch.setattr(pipeline.run.samples, "make_samples", stub_worker.samples(behaviour))
    file = write(
        tmp_path,
        samples=4,
        models=[{"label": source, "source": source} for source in models],
        output=str(tmp_path / "out"),
        mlflow={"enabled": False},
        cluster={"max_failures": 3, "samples_per_job": 1},
    )
    assert main(["run", str(file), *options]) == code


def test_failed_rows_stay_failed_until_asked_for(
    tmp_path: Path, stub_run: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(pipeline.run.samples, "make_samples", stub_worker.samples({1: "fail"}))
    file = write(tmp_path, samples=4, output=str(tmp_path / "out"), mlflow={"enabled": False})
    assert main(["run", str(file)]) == 1
    monkeypatch.setattr(pipeline.run.samples, "make_samples", stub_worker.samples())
    assert main(["run", str(file)]) == 1
    assert "2 rows failed: see the report; run again with --retry-failed once the cause is mended" in (
        capsys.readouterr().out
    )
    assert main(["run", str(file), "--retry-failed"]) == 0


def test_a_prompt_beyond_the_model_ends_a_run_before_any_actor_starts(
    tmp_path: Path, stub_run: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def too_long(request: Any) -> Any:
        raise TaskError(f"task {request.task}, sample 0 (a-1): a prompt of 9000 tokens is more than the model's 4096")

    monkeypatch.setattr(pipeline.run.samples, "make_samples", too_long)
    monkeypatch.setattr(pipeline.driver.Driver, "run", lambda driver: pytest.fail("the driver started"))
    task = own_task(tmp_path, {"id": "a-1", "prompt": "Long", "references": "2"})
    file = write(tmp_path, tasks=[task], output=str(tmp_path / "out"), mlflow={"enabled": False})
    assert main(["run", str(file)]) == 2
    told = [line for line in capsys.readouterr().err.splitlines() if "tokens" in line]
    assert len(told) == 1
    assert "sample 0 (a-1): a prompt of 9000 tokens is more than the model's 4096" in told[0]


def test_a_tokenizer_without_a_chat_template_ends_a_run_before_any_actor_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = dataclasses.replace(stub_worker.describe(ModelSpec("tiny", "tiny")), chat_template=False)
    monkeypatch.setattr(pipeline.plan, "describe", lambda spec: plain)
    file = write(tmp_path, output=str(tmp_path / "out"))
    for command in ("plan", "run"):
        assert main([command, str(file)]) == 2
        told = capsys.readouterr().err
        assert told.startswith(f"{file}: models[0]: the tokenizer of tiny has no chat template")
        assert len(told.splitlines()) == 1


def test_the_doctor_names_versions_and_devices(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    for fact in ("torch", "transformers", "ray", "CPU", "GPU", "attention"):
        assert fact in text
