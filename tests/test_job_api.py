"""An executable sweep as a job of a real Ray: submitted with arguments, watched, stopped half-way, submitted again."""

from __future__ import annotations

import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray_head import TOKEN, RayHead, ray_head
from tiny_model import save_tiny_model

from pipeline.store import Store

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[1]
ENDED = {"SUCCEEDED", "FAILED", "STOPPED"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the cluster puts relative outputs."""
    return tmp_path_factory.mktemp("root")


@pytest.fixture(scope="module")
def head(results: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayHead]:
    """Started in the repository, as in the image, with a package beside it that brings a method of its own."""
    plugin = broken_method(tmp_path_factory.mktemp("plugin"))
    settings = {"KVSWEEP_OUTPUT_ROOT": str(results), "RAY_JOB_STOP_WAIT_TIME_S": "30", "PYTHONPATH": str(plugin)}
    with ray_head(ROOT, **settings) as started:
        yield started


@pytest.fixture
def client(head: RayHead) -> Any:
    from ray.job_submission import JobSubmissionClient

    return JobSubmissionClient(head.address, headers={"Authorization": f"Bearer {TOKEN}"})


def broken_method(folder: Path) -> Path:
    """An installed package whose method fails on every sample."""
    (folder / "broken_method.py").write_text(
        "from dataclasses import dataclass\n"
        "from typing import ClassVar\n"
        "from kvcache.baselines.full import Full\n\n"
        "@dataclass(frozen=True)\n"
        "class Broken(Full):\n"
        "    name: ClassVar[str] = 'broken'\n\n"
        "    def compress(self, prefill, budget, examined):\n"
        "        raise ValueError('this method is broken')\n"
    )
    installed = folder / "broken_method-1.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: broken-method\nVersion: 1.0\n")
    (installed / "entry_points.txt").write_text("[kvsweep.methods]\nbroken = broken_method:Broken\n")
    return folder


def write(folder: Path, model: Path, name: str, **changes: Any) -> Path:
    """An executable sweep."""
    content = {
        "name": name,
        "output": f"results/{name}",
        "models": [{"label": "tiny", "source": str(model)}],
        "contexts": [512],
        "samples": 4,
        "tasks": [{"name": "niah_single_1", "max_new_tokens": 8}],
        "methods": ["full", "snapkv"],
        "budgets": ["20%"],
        "cluster": {"cpus_per_actor": 1, "samples_per_job": 4},
        "mlflow": {"enabled": False},
        **changes,
    }
    file = folder / f"{name}.yaml"
    file.write_text(f"#!/usr/bin/env -S python -m pipeline\n{yaml.safe_dump(content)}", encoding="utf-8")
    file.chmod(0o755)
    return file


def submit(head: RayHead, *words: object) -> subprocess.CompletedProcess[str]:
    """``ray job submit``, literally."""
    return subprocess.run(
        [sys.executable, "-m", "ray.scripts.scripts", "job", "submit", *map(str, words)],
        env=head.environment,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        check=False,
    )


def wait_for_end(client: Any, submission: str) -> Any:
    deadline = time.monotonic() + 180
    while client.get_job_status(submission) not in ENDED:
        assert time.monotonic() < deadline, client.get_job_logs(submission)
        time.sleep(0.5)
    return client.get_job_info(submission)


def attempts(output: Path) -> Counter[tuple[str, int]]:
    pairs = Store(str(output)).attempts(("cell_id", "sample_index")).to_pylist()
    return Counter((pair["cell_id"], pair["sample_index"]) for pair in pairs)


def test_a_sweep_is_stopped_in_the_middle_and_goes_on_in_another_job(
    head: RayHead, client: Any, model: Path, results: Path, tmp_path: Path
) -> None:
    file = write(tmp_path, model, "stopped", samples=400)
    words = ("--working-dir", ROOT, "--", file, "--max-actors", 1)
    told = submit(head, "--submission-id", "stopped-1", "--no-wait", *words)
    assert told.returncode == 0, told.stdout
    output = results / "results" / "stopped"
    deadline = time.monotonic() + 180
    while not list(output.glob("parts/*.parquet")):
        assert client.get_job_status("stopped-1") not in ENDED, client.get_job_logs("stopped-1")
        assert time.monotonic() < deadline
        time.sleep(0.2)
    assert client.get_job_status("stopped-1") == "RUNNING"
    assert client.stop_job("stopped-1")
    assert wait_for_end(client, "stopped-1").status == "STOPPED"
    assert "run the same command to go on" in client.get_job_logs("stopped-1")
    assert not (output / "lease.json").exists()
    kept = attempts(output).total()
    assert 0 < kept < 800

    told = submit(head, "--submission-id", "stopped-2", *words)
    assert told.returncode == 0, told.stdout
    info = client.get_job_info("stopped-2")
    assert (info.status, info.driver_exit_code) == ("SUCCEEDED", 0)
    log = client.get_job_logs("stopped-2")
    assert f"{kept}/800 rows" in log
    assert "\r" not in log
    assert "Traceback" not in log
    assert (attempts(output).total(), set(attempts(output).values())) == (800, {1})
    assert (output / "report.html").exists()


def test_failed_rows_are_a_result_and_are_not_run_again_by_a_retry(
    head: RayHead, client: Any, model: Path, results: Path, tmp_path: Path
) -> None:
    file = write(tmp_path, model, "poison", methods=["full", "broken"], mlflow={"enabled": True})
    assert submit(head, "--submission-id", "poison-1", "--", file).returncode == 1
    info = client.get_job_info("poison-1")
    assert (info.status, info.driver_exit_code) == ("FAILED", 1)
    before = attempts(results / "results" / "poison")
    assert before.total() == 8

    assert submit(head, "--submission-id", "poison-2", "--", file, "--failures-ok").returncode == 0
    info = client.get_job_info("poison-2")
    assert (info.status, info.driver_exit_code) == ("SUCCEEDED", 0)
    assert "nothing was left to run" in client.get_job_logs("poison-2")
    assert attempts(results / "results" / "poison") == before
    assert job_tag(results / "results" / "poison" / "mlflow.db") == "poison-1"


def job_tag(database: Path) -> str:
    from pipeline.mlflow_calls import mlflow_client
    from pipeline.mlflow_runs import KIND

    client = mlflow_client(f"sqlite:///{database}")
    experiments = [one.experiment_id for one in client.search_experiments()]
    (parent,) = client.search_runs(experiments, f"tags.`{KIND}` = 'sweep'")
    return str(parent.data.tags["ray.submission_id"])


def test_a_file_of_the_image_needs_no_working_directory_and_exit_codes_arrive(head: RayHead, client: Any) -> None:
    assert submit(head, "--submission-id", "bare", "--", "jobs/sweep.yaml", "--limti", "3").returncode == 1
    assert client.get_job_info("bare").driver_exit_code == 2
    assert "No such option: --limti" in client.get_job_logs("bare")


def test_a_client_without_the_token_is_refused(head: RayHead) -> None:
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(f"{head.address}/api/jobs/", timeout=10)
    assert refused.value.code == 401
