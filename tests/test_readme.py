"""What the README and the sweeps in ``jobs/`` promise."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.cli import app
from pipeline.spec import load_sweep

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
JOBS = sorted((ROOT / "jobs").glob("*.yaml"))
COMMANDS = {command.name or command.callback.__name__ for command in app.registered_commands if command.callback}
COMMANDS |= {str(group.name) for group in app.registered_groups}


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def kvsweep(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pipeline", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_every_command_in_the_readme_exists_and_every_command_is_in_it() -> None:
    shown = {line.split()[1] for block in blocks("sh") for line in block.splitlines() if line.startswith("kvsweep ")}
    assert shown == COMMANDS


def test_the_readmes_sweep_is_a_sweep(tmp_path: Path) -> None:
    (text,) = blocks("yaml")
    (tmp_path / "readme.yaml").write_text(text)
    sweep = load_sweep(tmp_path / "readme.yaml")
    assert [entry.shown for entry in sweep.methods] == ["full", "snapkv", "qevict-half", "lorekv"]
    assert len(sweep.budgets) == 3


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
@pytest.mark.parametrize(
    ("target", "command"),
    [("sweep", "jobs/quickstart.yaml"), ("test", "-m pytest"), ("test-slow", "-m slow"), ("lint", "mypy")],
)
def test_the_make_targets_of_the_readme_run_what_they_say(target: str, command: str) -> None:
    assert f"make {target}" in README
    found = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True, check=True)
    assert command in found.stdout


def test_continuous_integration_runs_the_readmes_tests() -> None:
    assert "make test" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert os.access(ROOT / ".ci" / "run", os.X_OK)


@pytest.mark.parametrize("arguments", [("--help",), ("methods",), ("tasks",), ("doctor",)], ids=" ".join)
def test_commands_that_need_no_sweep_run(arguments: tuple[str, ...]) -> None:
    found = kvsweep(*arguments)
    assert found.returncode == 0, found.stderr
    assert found.stdout.strip()
    assert "Traceback" not in found.stderr


@pytest.mark.parametrize("job", JOBS, ids=lambda path: path.name)
def test_jobs_are_executable_sweeps(job: Path) -> None:
    """Otherwise a shell would read the YAML as a script, or refuse it."""
    text = job.read_bytes()
    assert text.startswith(b"#!/usr/bin/env -S python -m pipeline\n")
    assert b"\r" not in text
    assert os.access(job, os.X_OK)
    sweep = load_sweep(job)
    assert sweep.tasks or sweep.timing


def test_links_of_the_documentation_resolve() -> None:
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
