"""The Ray side of a sweep: connecting quietly, and what an actor asks for."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from pipeline.errors import SweepProblem
from pipeline.signals import sigterm_kept
from pipeline.spec import Cluster

ERROR_LENGTH = 500
COMMON_CAUSES = "Some common causes include"


class ClusterError(SweepProblem):
    """Ray cannot be reached, or has no room for an actor: what was asked, what there is."""

    exit_code = 3


@contextmanager
def connected(address: str | None) -> Iterator[None]:
    """A Ray session: the cluster at ``address`` (or RAY_ADDRESS), else one started on this machine for the sweep.

    Only the sweep's own lines reach the terminal; Ray's stay in its session's log folder.
    """
    address = address or os.environ.get("RAY_ADDRESS") or None
    ours = ray.is_initialized()
    if not ours:
        try:
            with sigterm_kept():
                ray.init(
                    address=address or "local",
                    include_dashboard=None if address else False,
                    log_to_driver=False,
                    logging_level=logging.ERROR,
                )
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise ClusterError(
                f"cluster.address: cannot connect to Ray at {address or 'this machine'}: {error}"
            ) from None
    try:
        yield
    finally:
        if not ours:
            ray.shutdown()


@dataclass(frozen=True)
class Request:
    """What one actor asks of a node."""

    cpus: float
    gpus: int
    resources: dict[str, float]
    labels: dict[str, str]
    hide_gpus: bool = False
    """On a node with GPUs, no GPUs asked for means none used."""

    def options(self) -> dict[str, Any]:
        """Ray's options. Ray retries nothing: the driver alone decides what runs again."""
        return {
            "num_cpus": self.cpus,
            "num_gpus": self.gpus,
            "resources": self.resources or None,
            "label_selector": self.labels or None,
            "runtime_env": {"env_vars": {"CUDA_VISIBLE_DEVICES": ""}} if self.hide_gpus else None,
            "max_restarts": 0,
            "max_task_retries": 0,
        }

    def fits(self) -> int:
        """How many such actors the cluster's nodes hold when nothing else runs there."""
        return sum(self._fit_on(node) for node in _nodes())

    def __str__(self) -> str:
        wanted = {"CPU": self.cpus, "GPU": self.gpus, **self.resources}
        labels = f" on a node labelled {self.labels}" if self.labels else ""
        return _amounts({name: amount for name, amount in wanted.items() if amount}) + labels

    def _fit_on(self, node: dict[str, Any]) -> int:
        if not _offers(node, self.labels, self.resources):
            return 0
        wanted = {"CPU": self.cpus, "GPU": self.gpus, **self.resources}
        return min(int(node["Resources"].get(name, 0) // amount) for name, amount in wanted.items() if amount)


def actor_request(cluster: Cluster, whole_node: bool = False) -> Request:
    """Resolve ``auto`` and ``null`` against the nodes that are there now.

    An actor that asks for no cores computes on one thread, so on a node without GPUs it asks for all of them, of the
    smallest node. With ``whole_node`` it asks for all cores of the largest node that may hold it: no smaller one does,
    and on that one Ray puts nothing beside it.
    """
    nodes = _nodes()
    if whole_node:
        nodes = [node for node in nodes if _offers(node, cluster.labels, cluster.resources)] or nodes
    gpus = cluster.gpus_per_actor
    if gpus == "auto":
        gpus = 1 if any(_gpus(node) for node in nodes) else 0
    cpus = cluster.cpus_per_actor
    if cpus is None:
        candidates = [node for node in nodes if _gpus(node) >= max(gpus, 1)] if gpus else nodes
        part = [gpus / _gpus(node) if gpus and not whole_node else 1 for node in candidates]
        shares = [_cpus(node) * share for node, share in zip(candidates, part, strict=True) if _cpus(node)]
        cpus = max(int(max(shares) if whole_node else min(shares)), 1) if shares else 1
    hide_gpus = gpus == 0 and any(_gpus(node) for node in nodes)
    return Request(cpus, gpus, cluster.resources, cluster.labels, hide_gpus)


def describe_cluster() -> str:
    """``2 nodes with 96 CPU, 8 GPU``."""
    nodes = _nodes()
    total: dict[str, float] = {}
    for node in nodes:
        for name in ("CPU", "GPU"):
            total[name] = total.get(name, 0) + node["Resources"].get(name, 0)
    return f"{len(nodes)} node{'s' if len(nodes) != 1 else ''} with {_amounts(total)}"


def node_is_alive(node_id: str | None) -> bool:
    """False only for a node that the cluster has given up."""
    return node_id is None or any(node["NodeID"] == node_id for node in _nodes())


def living_nodes() -> frozenset[str]:
    return frozenset(str(node["NodeID"]) for node in _nodes())


def on_this_node() -> NodeAffinitySchedulingStrategy:
    """The driver's own node: the data folder is there."""
    return NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)


def error_text(error: BaseException) -> str:
    """``ValueError: what it said`` on one line: what was raised in the worker, not Ray's wrapping of it."""
    cause = error.cause if isinstance(error, ray.exceptions.RayTaskError) else error
    said = str(cause)
    if isinstance(cause, ray.exceptions.RayActorError):
        # The facts of the death, without the actor's coordinates and the common causes of all deaths.
        said = " ".join(line for line in said.splitlines() if not line.startswith("\t")).split(COMMON_CAUSES)[0]
    text = " ".join(f"{type(cause).__name__}: {said}".split())
    return text if len(text) <= ERROR_LENGTH else f"{text[:ERROR_LENGTH]} ..."


def _nodes() -> list[dict[str, Any]]:
    return [node for node in ray.nodes() if node["Alive"]]


def _offers(node: dict[str, Any], labels: dict[str, str], resources: dict[str, float]) -> bool:
    """Whether a node carries these labels, and has so much of these resources."""
    labelled = all(node["Labels"].get(name) == value for name, value in labels.items())
    return labelled and all(node["Resources"].get(name, 0) >= amount for name, amount in resources.items())


def _cpus(node: dict[str, Any]) -> float:
    return float(node["Resources"].get("CPU", 0))


def _gpus(node: dict[str, Any]) -> float:
    return float(node["Resources"].get("GPU", 0))


def _amounts(amounts: dict[str, float]) -> str:
    return ", ".join(f"{amount:g} {name}" for name, amount in amounts.items())
