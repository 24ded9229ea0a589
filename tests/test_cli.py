"""The command line: quick help, one message per problem, the right exit code."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import stub_worker
from test_spec import write

from pipeline import commands
from pipeline.cli import main
from pipeline.store import Store

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
        "def broken(output): raise ZeroDivisionError('at\\nlarge')\n"
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
    def interrupted(output: str) -> None:
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


def test_tasks_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tasks"]) == 0
    assert "gsm8k" in capsys.readouterr().out


def test_the_sources_of_each_task_are_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "--data-dir", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "niah_single_1" in text
    assert "test.jsonl" in text
    assert main(["data", "--data-dir", str(tmp_path / "none")]) == 2


def test_the_doctor_names_versions_and_devices(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    for fact in ("torch", "transformers", "ray", "CPU", "GPU", "attention"):
        assert fact in text
