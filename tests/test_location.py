"""Where an output is, and what the command line may say of actors."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import NoReturn

import pytest
import stub_worker
import yaml
from test_spec import write

from pipeline import commands
from pipeline.errors import SweepProblem
from pipeline.location import ROOT, local_folder, output_location
from pipeline.run import RunOptions, open_sweep
from pipeline.spec import SpecError
from pipeline.store import Store


@pytest.fixture(autouse=True)
def _no_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ROOT, raising=False)
    stub_worker.install(monkeypatch)


@pytest.mark.parametrize(
    ("root", "place"),
    [
        ("/app", "/app/results/x"),
        ("/app/", "/app/results/x"),
        ("s3://bucket/kv", "s3://bucket/kv/results/x"),
        ("s3://bucket/", "s3://bucket/results/x"),
        ("s3://bucket?region=x", "s3://bucket/results/x?region=x"),
        ("file:///data", "file:///data/results/x"),
    ],
)
def test_a_relative_output_is_under_the_root(root: str, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ROOT, root)
    assert output_location("results/x") == place


@pytest.mark.parametrize("root", ["s3://", "file:///"])
def test_a_root_that_is_no_place_is_refused(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ROOT, root)
    with pytest.raises(SweepProblem, match="names no bucket or folder"):
        output_location("results/x")


def test_what_is_written_into_folders_alone_refuses_a_bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ROOT, str(tmp_path))
    assert local_folder("results/x") == tmp_path / "results/x"
    monkeypatch.setenv(ROOT, "s3://bucket")
    with pytest.raises(SweepProblem, match="give --output FOLDER"):
        local_folder("results/x")


def test_reading_commands_look_where_a_sweep_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    looked: list[str] = []

    def read(store: Store) -> NoReturn:
        looked.append(store.uri)
        raise SweepProblem("seen")

    monkeypatch.setenv(ROOT, str(tmp_path))
    monkeypatch.setattr(commands, "read_output", read)
    monkeypatch.setattr(commands, "read_status", read)
    for command in (
        lambda: commands.status("results/x"),
        lambda: commands.compare("results/x", "a", "b", False),
        lambda: commands.replay("results/x", None),
    ):
        with pytest.raises(SweepProblem, match="seen"):
            command()
    assert set(looked) == {f"{tmp_path}/results/x"}


def test_another_model_and_length_make_other_cells(tmp_path: Path) -> None:
    file = write(tmp_path)
    plain = open_sweep(file, RunOptions())
    asked = open_sweep(file, RunOptions(model="wheel:other", context=512))
    (model,) = asked.sweep.models
    assert (model.label, model.source, model.dtype) == ("other", "wheel:other", plain.sweep.models[0].dtype)
    assert {group.context for group in asked.grid.groups} == {512}
    assert not {cell.cell_id for cell in asked.grid.cells} & {cell.cell_id for cell in plain.grid.cells}


def test_a_timing_sweep_takes_no_more_than_one_actor(tmp_path: Path) -> None:
    file = tmp_path / "timing.yaml"
    content = yaml.safe_load(write(tmp_path).read_text()) | {"timing": {"prompt_tokens": [64], "new_tokens": 4}}
    for key in ("tasks", "contexts", "samples", "seeds"):
        content.pop(key, None)
    file.write_text(yaml.safe_dump(content))
    with pytest.raises(SpecError, match="leave out --max-actors"):
        open_sweep(file, RunOptions(max_actors=4))


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
