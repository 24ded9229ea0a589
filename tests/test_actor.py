"""The actor's shell: rows as they are there, with where they came from."""

from __future__ import annotations

import sys
import threading
import types
from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any

import pytest
from stub_worker import row

from workers.actor import Worker, batches
from workers.job import EngineSpec, Job, ModelSpec, Protocol
from workers.row import Row


@pytest.fixture
def engine() -> Iterator[Executor]:
    with ThreadPoolExecutor(1) as pool:
        yield pool


def test_rows_that_are_there_come_together_and_in_order(engine: Executor) -> None:
    rows = [row("c", index) for index in range(100)]
    found = list(batches(iter(rows), engine))
    assert [one for batch in found for one in batch] == rows
    assert all(found)


def test_a_row_does_not_wait_for_the_next(engine: Executor) -> None:
    taken = threading.Event()

    def slow() -> Iterator[Row]:
        yield row("c", 0)
        assert taken.wait(10)
        yield row("c", 1)

    stream = batches(slow(), engine)
    assert [one.sample_index for one in next(stream)] == [0]
    taken.set()
    assert [one.sample_index for one in next(stream)] == [1]


def test_rows_before_an_exception_are_kept_and_it_is_raised(engine: Executor) -> None:
    def broken() -> Iterator[Row]:
        yield row("c", 0)
        raise ValueError("no more")

    stream = batches(broken(), engine)
    assert [one.sample_index for one in next(stream)] == [0]
    with pytest.raises(ValueError, match="no more"):
        next(stream)


def test_no_rows_are_no_batches(engine: Executor) -> None:
    assert list(batches(iter(()), engine)) == []


def test_a_row_says_which_job_and_device_it_came_from(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    def module(name: str, **contents: Any) -> None:
        stand_in = types.ModuleType(name)
        vars(stand_in).update(contents)
        monkeypatch.setitem(sys.modules, name, stand_in)

    module("workers.models", load_model=lambda spec: types.SimpleNamespace(device=torch.device("cpu")))
    module("workers.evaluate", run_job=lambda model, job: iter([row("c", 0), row("d", 0)]))
    worker, model = Worker(), ModelSpec("tiny", "tiny")
    loaded = worker.load(model)
    job = Job("j", 2, model, EngineSpec(), Protocol(), (), (), {}, {})
    rows = [one for batch in worker.run(job) for one in batch]
    assert [(one.job_id, one.attempt) for one in rows] == [("j", 2), ("j", 2)]
    assert {(one.device, one.node, one.numerics) for one in rows} == {
        (loaded["device"], loaded["node"], loaded["numerics"])
    }
    assert f"torch {torch.__version__}" in rows[0].numerics
    assert '"transformers"' in rows[0].versions
