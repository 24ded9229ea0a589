"""Thirty blows to one sweep: to actors, nodes and the driver, with MLflow gone, the disk full and a part cut off.

Whatever happens, the final rows are those of the same sweep left in peace.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml
from servers import mlflow_server
from test_driver import ENVIRONMENT, TESTS
from tiny_model import save_tiny_model

from pipeline.store import Store

pytestmark = pytest.mark.slow

BLOWS = ["actor"] * 18 + ["node killed"] * 3 + ["node terminated"] * 3 + ["driver"] * 6
METHODS = ["full", "snapkv", "streaming_llm", "qevict"]
SAMPLES = 300
FULL_DISK_S = 10.0
PASSING = {
    *("job_id", "attempt", "finished_at", "prefill_s", "compress_s", "decode_s", "batch_rows"),
    *("peak_device_bytes", "slack_bytes"),
}
"""Columns in which any two runs differ."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A head without actors and two nodes with one each, whose loss is noticed within seconds."""
    from ray.cluster_utils import Cluster

    (tmp_path / "marks").mkdir()
    monkeypatch.setenv("PYTHONPATH", ENVIRONMENT["PYTHONPATH"])
    monkeypatch.setenv("MARKS", str(tmp_path / "marks"))
    checks = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 500, "health_check_failure_threshold": 10}
    head = {"num_cpus": 0, "include_dashboard": False, "_system_config": checks}
    started = Cluster(initialize_head=True, head_node_args=head)
    for _ in range(2):
        started.add_node(num_cpus=1)
    yield started
    started.shutdown()


class Besieged:
    """A sweep in a process of its own that is started again whenever it is killed, and the blows it takes."""

    def __init__(self, file: Path, cluster: Any, marks: Path, chance: random.Random) -> None:
        self._file, self._cluster, self._marks, self._chance = file, cluster, marks, chance
        self._log = file.with_suffix(".log")
        self._struck_alone: set[int] = set()
        self.driver = self.start()

    def start(self) -> subprocess.Popen[bytes]:
        with open(self._log, "ab") as log:
            command = [sys.executable, str(TESTS / "marked_worker.py"), "run", str(self._file)]
            environment = {**ENVIRONMENT, "MARKS": str(self._marks)}
            return subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)

    @property
    def said(self) -> str:
        return self._log.read_text(errors="replace")

    def strike(self, blow: str) -> None:
        """At some moment while an actor is at work."""
        self.busy()
        time.sleep(self._chance.uniform(0.5, 2.0))
        if blow == "actor":
            self.kill_an_actor()
        elif blow == "driver":
            self.kill_the_driver()
        else:
            self.lose_a_node(signal.SIGTERM if blow == "node terminated" else signal.SIGKILL)

    def busy(self) -> list[int]:
        """Processes at work, as soon as there are any."""
        deadline = time.monotonic() + 120
        while True:
            assert self.driver.poll() is None, f"the sweep ended with {self.driver.returncode}: {self.said}"
            assert time.monotonic() < deadline, self.said
            pids = [int(mark.name) for mark in self._marks.iterdir() if mark.name.isdigit()]
            if working := [pid for pid in pids if alive(pid)]:
                return working
            time.sleep(0.05)

    def kill_an_actor(self) -> None:
        """Stopped first, so that what it is at stays true. A lone sample is never hit twice: that would be poison."""
        while True:
            pid = self._chance.choice(self.busy())
            try:
                os.kill(pid, signal.SIGSTOP)
                samples = json.loads((self._marks / str(pid)).read_text())
            except (ProcessLookupError, FileNotFoundError):
                continue  # it has just ended, or ended its job
            alone = set(samples) if len(samples) == 1 else set()
            if alone & self._struck_alone:
                os.kill(pid, signal.SIGCONT)
                time.sleep(0.2)
                continue
            self._struck_alone |= alone
            os.kill(pid, signal.SIGKILL)
            return

    def lose_a_node(self, signum: int) -> None:
        node = self._chance.choice(list(self._cluster.worker_nodes))
        if signum == signal.SIGTERM:
            (raylet,) = node.all_processes["raylet"]
            raylet.process.send_signal(signum)
            raylet.process.wait(60)
        self._cluster.remove_node(node, allow_graceful=False)
        self._cluster.add_node(num_cpus=1)

    def fill_the_disk(self) -> None:
        """For ten seconds from the first write that fails."""
        (self._marks / "full").touch()
        while "No space left on device" not in self.said:
            self.busy()
            time.sleep(0.2)
        time.sleep(FULL_DISK_S)
        (self._marks / "full").unlink()

    def kill_the_driver(self, meanwhile: Any = lambda: None) -> None:
        self.driver.kill()
        self.driver.wait()
        meanwhile()
        self.driver = self.start()


def alive(pid: int) -> bool:
    """Not yet reaped counts as gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def write(folder: Path, model: Path, cluster: Any, **changes: Any) -> Path:
    folder.mkdir()
    content = {
        "name": "besieged",
        "models": [{"label": "tiny", "source": str(model), "dtype": "float32"}],
        "contexts": [256],
        "samples": SAMPLES,
        "tasks": [{"name": "niah_single_1", "max_new_tokens": 8}],
        "methods": METHODS,
        "budgets": ["60%"],
        "cluster": {"address": cluster.address, "max_actors": 2, "cpus_per_actor": 1, "samples_per_job": 4},
        "output": str(folder / "out"),
        **changes,
    }
    (folder / "sweep.yaml").write_text(yaml.safe_dump(content))
    return folder / "sweep.yaml"


def final_rows(folder: Path) -> list[dict[str, Any]]:
    rows = Store(str(folder / "out")).rows().to_pylist()
    return [{name: row[name] for name in row if name not in PASSING} for row in rows]


def cut_off(parts: Path) -> Path:
    """A part that lost its second half."""
    part = max(parts.glob("*.parquet"))
    content = part.read_bytes()
    part.write_bytes(content[: len(content) // 2])
    return part


def test_no_result_is_lost_or_doubled_by_thirty_blows(tmp_path: Path, model: Path, cluster: Any) -> None:
    marks = tmp_path / "marks"
    (marks / "hurry").touch()
    peace = write(tmp_path / "peace", model, cluster, mlflow={"enabled": False})
    command = [sys.executable, str(TESTS / "marked_worker.py"), "run", str(peace)]
    done = subprocess.run(command, env={**ENVIRONMENT, "MARKS": str(marks)}, capture_output=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (marks / "hurry").unlink()

    chance = random.Random(7)
    blows = chance.sample(BLOWS, len(BLOWS))
    half = len(blows) // 2
    with ExitStack() as mlflow:
        words = ["mlflow", "server", "--host", "127.0.0.1", "--workers", "1", "--backend-store-uri", "sqlite:///m.db"]
        address = mlflow.enter_context(mlflow_server(words, {}, tmp_path))
        siege = write(tmp_path / "siege", model, cluster, mlflow={"tracking_uri": address})
        sweep = Besieged(siege, cluster, marks, chance)
        try:
            for number, blow in enumerate(blows):
                if number == half:
                    mlflow.close()
                    sweep.fill_the_disk()
                sweep.strike(blow)
            parts = tmp_path / "siege" / "out" / "parts"
            damaged: list[Path] = []
            sweep.kill_the_driver(meanwhile=lambda: damaged.append(cut_off(parts)))
            (marks / "hurry").touch()
            code = sweep.driver.wait(180)
        finally:
            sweep.driver.kill()
            sweep.driver.wait()
    assert code == 0, sweep.said
    assert f"{damaged[0]} is damaged" in sweep.said
    assert damaged[0].with_name(f"{damaged[0].name}.corrupt").exists()
    assert f"MLflow at {address}" in sweep.said
    assert "Traceback" not in sweep.said

    expected, found = final_rows(tmp_path / "peace"), final_rows(tmp_path / "siege")
    assert len(expected) == SAMPLES * len(METHODS)
    assert {row["status"] for row in found} == {"ok"}
    assert found == expected
    store = Store(str(tmp_path / "siege" / "out"))
    written = Counter(map(tuple, (row.values() for row in store.attempts(("cell_id", "sample_id")).to_pylist())))
    assert set(written.values()) == {1}, "a row that was on disk was run again"
    losses = store.losses()
    assert any(loss.counted for loss in losses), "crashes are counted"
    assert any(not loss.counted for loss in losses), "losses of nodes are not"
