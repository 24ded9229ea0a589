"""Fixtures that all rooms share."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("kvsweep", deadline=None)  # machines that tests share with others have no steady clock
settings.load_profile("kvsweep")

REAL_MODELS = ("test_quickstart_model", "test_ruler_golden_model")


@pytest.fixture(autouse=True, scope="module")
def _threads(request: pytest.FixtureRequest) -> None:
    """Small products only wait for a second thread, and for very long where other programs run."""
    if torch := sys.modules.get("torch"):
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        share = max(1, cores // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))
        torch.set_num_threads(share if request.module.__name__ in REAL_MODELS else 1)


@pytest.fixture(scope="module")
def wall_time(request: pytest.FixtureRequest) -> Iterator[None]:
    """Prints what a module took, beside its ``GOAL_S``, and how fast the machine was just then. It fails nothing."""
    began = time.perf_counter()
    yield
    seconds = time.perf_counter() - began
    for _ in range(10_000_000):
        pass
    loop = time.perf_counter() - began - seconds
    capture = request.config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():
        print(
            f"\n{request.module.__name__}: {seconds:.0f} s, goal {request.module.GOAL_S} s "
            f"(ten million turns of an empty loop: {loop:.2f} s)"
        )


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder with real benchmark data: ``KVSWEEP_TEST_DATA``, or ``shared/data`` beside the checkout."""
    root = Path(__file__).resolve().parents[1]
    folder = Path(os.environ.get("KVSWEEP_TEST_DATA", root.parent / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(f"no benchmark data at {folder}; set KVSWEEP_TEST_DATA to a folder that holds it")
    return folder
