"""docs/report.md: its commands and its lines of Python run on an output."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
from row_factory import make_output

from pipeline.cli import main
from pipeline.published_tables import published_names
from pipeline.store import Store
from workers.row import Row

PAGE = (Path(__file__).resolve().parents[1] / "docs" / "report.md").read_text(encoding="utf-8")
FIELDS = [field.name for field in dataclasses.fields(Row)]


@pytest.fixture
def output(tmp_path: Path) -> Path:
    """A sweep's folder under a name that needs no quotes."""
    made = make_output(
        ("snapkv", "qevict"), ("5%", "20%"), ("qasper", "trec"), samples=6, contexts=(0,), models=("llama", "qwen")
    )
    store = Store(str(tmp_path / "out"))
    store.add([Row(**row) for row in made.rows[FIELDS].to_dict("records")])
    store.flush()
    models = {
        "llama": {"source": "meta-llama/Llama-3.1-8B-Instruct"},
        "qwen": {"source": "Qwen/Qwen2.5-7B-Instruct"},
    }
    store.save_plan("name: unit\n", {**made.sweep, "models": models, "cells": made.cells})
    return tmp_path / "out"


def commands() -> list[str]:
    blocks = re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)
    return [line.partition("#")[0].strip() for block in blocks for line in block.splitlines()]


@pytest.mark.parametrize("command", commands())
def test_documented_commands_run(command: str, output: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [str(output) if word == "OUT" else word for word in command.split()]
    assert main(words[1:]) == 0
    assert "qevict" in capsys.readouterr().out


def test_a_report_beside_a_paper_says_so_in_its_files(output: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(output), "--paper", "qevict:table3", "--paper", "qevict:table6"]) == 0
    assert "Beside qevict:table3" in capsys.readouterr().out
    assert "Beside qevict:table6" in (output / "report.html").read_text(encoding="utf-8")
    assert main(["report", str(output), "--paper", "qevict:table1"]) == 2
    assert capsys.readouterr().err.startswith("--paper qevict:table1: no such table; there are: lorekv:averages")


def test_the_documented_lines_read_the_rows(output: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    exec(code.replace("results/quickstart", str(output)))
    assert "qasper" in capsys.readouterr().out


def test_the_page_names_every_paper_table_and_every_file_of_a_report(output: Path) -> None:
    main(["report", str(output)])
    made = {file.name for file in output.iterdir() if file.is_file()} - {"plan.json", "sweep.yaml"}
    assert set(re.findall(r"^\| `([\w.]+)` \|", PAGE, re.MULTILINE)) == made
    assert all(f"`{name}`" in PAGE for name in published_names())
