"""A lack of memory is nobody's own fault: it ends the job, so that less can be tried, and fails no sample."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from tiny_model import save_tiny_model

from kvcache.baselines.streaming_llm import StreamingLLM
from kvcache.pool import FamilyPool
from kvcache.prefill import Prefill
from tasks.sample import Sample
from workers.actor import Worker
from workers.engine import Engine
from workers.fork import PromptForks
from workers.job import CellSpec, EngineSpec, Job, ModelSpec, Protocol
from workers.memory import OutOfMemory, lacks_memory
from workers.row import Row

CELLS = (CellSpec("a", "full", {}, "100%"), CellSpec("b", "streaming_llm", {}, "50%"))


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Worker:
    made = Worker()
    made.load(ModelSpec("tiny", str(save_tiny_model(tmp_path_factory.mktemp("model"))), "float32"))
    return made


def rows(worker: Worker) -> list[Row]:
    words = " ".join(f"w{number}" for number in range(60))
    samples = tuple(
        Sample("vt", index, words, "", "", ("w1",), 4, "string_match_all", repeat=index) for index in range(2)
    )
    job = Job(
        "job",
        1,
        ModelSpec("tiny", "tiny", "float32"),
        EngineSpec(),
        Protocol(),
        samples,
        CELLS,
        {sample.sample_id: ("a", "b") for sample in samples},
        {},
    )
    return [row for batch in worker.run(job) for row in batch]


def raising(error: Exception) -> Any:
    def run(*given: object, **named: object) -> Any:
        raise error

    return run


STAGES = [(PromptForks, "prefill"), (StreamingLLM, "scores"), (Engine, "_forward")]
SHORT = [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("DefaultCPUAllocator: can't allocate memory")]


@pytest.mark.parametrize("error", [*SHORT, MemoryError()], ids=lambda error: type(error).__name__)
@pytest.mark.parametrize(("where", "name"), STAGES, ids=["prefill", "compression", "decoding"])
def test_it_ends_the_job_wherever_it_comes(
    worker: Worker, monkeypatch: pytest.MonkeyPatch, where: type, name: str, error: Exception
) -> None:
    monkeypatch.setattr(where, name, raising(error))
    with pytest.raises(OutOfMemory, match=type(error).__name__):
        rows(worker)
    monkeypatch.undo()
    assert [row.status for row in rows(worker)] == ["ok"] * 4, "the actor is as good as before"


def test_what_the_job_held_is_free_by_the_time_that_it_ends(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(*given: object, **named: object) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    def held() -> int:
        return sum(issubclass(type(one), (Engine, FamilyPool, Prefill)) for one in gc.get_objects())

    before = held()
    monkeypatch.setattr(Engine, "_forward", no_room)
    gc.disable()
    try:
        with pytest.raises(OutOfMemory) as raised:
            rows(worker)
        assert held() == before
    finally:
        gc.enable()
    assert raised.value.__cause__ is raised.value.__context__ is None


def test_any_other_fault_is_the_samples_own(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not lacks_memory(RuntimeError("shapes do not match"))
    monkeypatch.setattr(StreamingLLM, "scores", raising(RuntimeError("shapes do not match")))
    assert sorted((row.cell_id, row.status) for row in rows(worker)) == [
        *[("a", "ok")] * 2,
        *[("b", "failed")] * 2,
    ]
