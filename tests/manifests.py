"""What ``kubectl apply -k`` would send, read back for the tests."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
K8S = ROOT / "k8s"
OVERLAYS = sorted(path.parent for path in (K8S / "overlays").glob("*/kustomization.yaml"))
SWEEPS = sorted(path.parent for path in (K8S / "sweeps").glob("*/kustomization.yaml"))
Manifest = dict[str, Any]


@cache
def build(folder: Path) -> list[Manifest]:
    """The objects of a kustomization, made by kubectl or kustomize themselves."""
    for command in (["kubectl", "kustomize"], ["kustomize", "build"]):
        if shutil.which(command[0]):
            built = subprocess.run([*command, str(folder)], capture_output=True, text=True, timeout=60, check=False)
            assert built.returncode == 0, built.stderr
            return list(yaml.safe_load_all(built.stdout))
    pytest.skip("neither kubectl nor kustomize is installed")


def of_kind(objects: list[Manifest], kind: str) -> list[Manifest]:
    return [one for one in objects if one["kind"] == kind]


def named(objects: list[Manifest], kind: str, name: str) -> Manifest:
    (found,) = (one for one in of_kind(objects, kind) if one["metadata"]["name"] == name)
    return found


def cluster_spec(objects: list[Manifest]) -> Manifest:
    """Of the interactive cluster, or of the unattended sweep's."""
    for one in objects:
        if one["kind"] == "RayCluster":
            return dict(one["spec"])
        if one["kind"] == "RayJob":
            return dict(one["spec"]["rayClusterSpec"])
    raise AssertionError("no Ray cluster")


def ray_groups(objects: list[Manifest]) -> list[Manifest]:
    """The head's group, then the workers'."""
    spec = cluster_spec(objects)
    return [spec["headGroupSpec"], *spec["workerGroupSpecs"]]


def pod_templates(objects: list[Manifest]) -> Iterator[tuple[str, Manifest]]:
    for group in ray_groups(objects):
        yield f"ray {group.get('groupName', 'head')}", group["template"]
    for one in objects:
        if one["kind"] in ("Deployment", "StatefulSet"):
            yield one["metadata"]["name"], one["spec"]["template"]


def containers(objects: list[Manifest]) -> Iterator[tuple[str, Manifest, Manifest]]:
    """Where it is, the pod, the container."""
    for where, template in pod_templates(objects):
        for container in template["spec"]["containers"]:
            yield f"{where}: {container['name']}", template["spec"], container
