"""Where an output is, and what the command line may say of actors."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import stub_worker
from test_spec import write

from pipeline.location import ROOT, output_location
from pipeline.run import RunOptions, open_sweep


@pytest.fixture(autouse=True)
def _no_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ROOT, raising=False)
    stub_worker.install(monkeypatch)


@pytest.mark.parametrize(
    ("root", "place"),
    [("/app", "/app/results/x"), ("/app/", "/app/results/x"), ("s3://bucket/kv", "s3://bucket/kv/results/x")],
)
def test_a_relative_output_is_under_the_root(root: str, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ROOT, root)
    assert output_location("results/x") == place


@pytest.mark.parametrize("output", ["/data/x", "gs://bucket/x", "file:///data/x"])
def test_an_absolute_output_stands_for_itself(output: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ROOT, "/app")
    assert output_location(output) == output


def test_a_sweep_goes_to_the_root_and_so_does_the_command_lines_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ROOT, str(tmp_path))
    file = write(tmp_path)
    assert open_sweep(file, RunOptions()).store.uri == f"{tmp_path}/results/quick"
    assert open_sweep(file, RunOptions(output="elsewhere")).store.uri == f"{tmp_path}/elsewhere"


def test_a_job_whose_results_would_go_with_its_code_is_warned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    assert output_location("results/x") == "results/x"
    assert not caplog.records
    unpacked = tmp_path / "_ray_pkg_0123"
    unpacked.mkdir()
    monkeypatch.chdir(unpacked)
    with caplog.at_level(logging.WARNING):
        assert output_location("results/x") == "results/x"
    (record,) = caplog.records
    assert ROOT in record.getMessage()


def test_the_command_line_says_what_actors_ask_for_and_changes_no_cell(tmp_path: Path) -> None:
    file = write(tmp_path, cluster={"max_actors": 2, "samples_per_job": 3})
    asked = open_sweep(file, RunOptions(gpus_per_actor=0, max_actors=5))
    plain = open_sweep(file, RunOptions())
    changed = asked.sweep.cluster
    assert (changed.gpus_per_actor, changed.max_actors, changed.samples_per_job) == (0, 5, 3)
    assert (plain.sweep.cluster.gpus_per_actor, plain.sweep.cluster.max_actors) == ("auto", 2)
    assert [cell.cell_id for cell in asked.grid.cells] == [cell.cell_id for cell in plain.grid.cells]
