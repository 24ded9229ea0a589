"""A sweep on a cluster of several nodes, on this machine: it joins by address, and the loss of a node costs nothing."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import stub_worker
from test_driver import ENVIRONMENT, assert_nothing_was_run_twice, command, wait_for_a_part, write

from pipeline.run import RunOptions, open_sweep

pytestmark = pytest.mark.slow


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A head that holds no actors, as in Kubernetes."""
    from ray.cluster_utils import Cluster

    stub_worker.install(monkeypatch)
    monkeypatch.setenv("PYTHONPATH", ENVIRONMENT["PYTHONPATH"])
    monkeypatch.setenv("STUB_DELAY_S", "0.1")
    started = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    yield started
    started.shutdown()


def test_work_of_a_lost_node_runs_elsewhere_and_is_no_crash(tmp_path: Path, cluster: Any) -> None:
    first, _second = (cluster.add_node(num_cpus=1) for _ in range(2))
    file = write(tmp_path, samples=60, cluster={"address": cluster.address, "max_actors": 2, "max_failures": 1})
    process = command("run", file)
    wait_for_a_part(tmp_path, process)
    cluster.remove_node(first, allow_graceful=False)
    said, _ = process.communicate(timeout=120)
    assert process.returncode == 0, said
    assert "a node was lost" in said
    assert "Traceback" not in said
    opened = open_sweep(file, RunOptions())
    assert opened.store.rows().num_rows == 180
    assert_nothing_was_run_twice(opened)


@pytest.mark.parametrize("how", ["ray drain-node", "SIGTERM to its raylet"])
def test_a_pre_empted_node_costs_no_try(tmp_path: Path, cluster: Any, how: str) -> None:
    """A drained node takes nothing new, and goes when its cloud takes it away."""
    first, _second = (cluster.add_node(num_cpus=1) for _ in range(2))
    file = write(tmp_path, samples=100, cluster={"address": cluster.address, "max_actors": 2, "max_failures": 1})
    process = command("run", file)
    wait_for_a_part(tmp_path, process)
    if how == "SIGTERM to its raylet":
        (raylet,) = first.all_processes["raylet"]
        raylet.process.send_signal(signal.SIGTERM)
    else:
        drain = [sys.executable, "-m", "ray.scripts.scripts", "drain-node", "--node-id", first.node_id]
        drain += ["--address", cluster.address, "--reason", "DRAIN_NODE_REASON_PREEMPTION"]
        drain += ["--reason-message", "spot", "--deadline-remaining-seconds", "1"]
        subprocess.run(drain, check=True, capture_output=True, timeout=60)
        cluster.remove_node(first, allow_graceful=False)
    said, _ = process.communicate(timeout=180)
    assert process.returncode == 0, said
    assert "a node was lost" in said
    opened = open_sweep(file, RunOptions())
    assert opened.store.rows().num_rows == 300
    assert_nothing_was_run_twice(opened)
    losses = opened.store.losses()
    assert losses
    assert not any(loss.counted for loss in losses)


def test_a_node_that_comes_later_is_used(tmp_path: Path, cluster: Any) -> None:
    file = write(tmp_path, samples=8, cluster={"address": cluster.address, "ready_timeout_s": 60})
    process = command("run", file)
    time.sleep(6)
    assert process.poll() is None
    cluster.add_node(num_cpus=1)
    said, _ = process.communicate(timeout=120)
    assert process.returncode == 0, said


def test_actors_spread_over_nodes_with_gpus_and_a_node_that_is_killed_is_replaced(tmp_path: Path, cluster: Any) -> None:
    """The sweep starts before there is any GPU to see, as on a cluster that grows by demand."""
    settings = {
        "address": cluster.address,
        "gpus_per_actor": 1,
        "max_actors": 2,
        "ready_timeout_s": 60,
        "max_failures": 1,
    }
    file = write(tmp_path, samples=150, cluster=settings)
    process = command("run", file)
    nodes = [cluster.add_node(num_cpus=1, num_gpus=1) for _ in range(2)]
    wait_for_a_part(tmp_path, process)
    cluster.remove_node(nodes[0], allow_graceful=False)
    cluster.add_node(num_cpus=1, num_gpus=1)
    said, _ = process.communicate(timeout=180)
    assert process.returncode == 0, said
    assert said.count("tiny is loaded on stub") >= 3, "on both nodes, and on the one that came later"
    assert "a node was lost" in said
    opened = open_sweep(file, RunOptions())
    assert opened.store.rows().num_rows == 450
    assert_nothing_was_run_twice(opened)
