"""A model, methods, samples and an actor that compute nothing, for tests of the driver; run as a script, the command
line with all of them in place.

What a sample does to its actor is written in its question:

    fail      a failed row for each cell          raise   an exception of the whole job
    die       the process is killed, every time   once    the process is killed, the first time
    hang      no row, for a long time
    large     out of memory, unless it is alone  huge   out of memory
    stall     no last row, for a long time       leaky  out of memory, unless alone in a process that never was
"""

from __future__ import annotations

import dataclasses
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, ClassVar

import pytest

import kvcache.method
import pipeline.plan
from kvcache.budget import ResolvedBudget
from kvcache.layout import CacheLayout, LayerLayout
from kvcache.method import Method
from tasks.sample import Sample
from workers.description import ModelDescription, ModelError
from workers.job import Job, ModelSpec
from workers.memory import OutOfMemory
from workers.row import Row
from workers.samples import SampleRequest

LAYOUT = CacheLayout((LayerLayout("growing", 4, 2, 16, 16),) * 2, 2)


@dataclass(frozen=True)
class _Stub(Method):
    version: ClassVar[int] = 1

    def compress(self, prefill: Any, budget: ResolvedBudget, examined: Any) -> Any:
        raise NotImplementedError

    @property
    def family(self) -> str:
        return "stub"

    def new_pool(self, shape: Any) -> Any:
        raise NotImplementedError


@dataclass(frozen=True)
class Full(_Stub):
    """Keeps all."""

    name: ClassVar[str] = "full"


@dataclass(frozen=True)
class Window(_Stub):
    """Keeps the last tokens."""

    name: ClassVar[str] = "window"
    window: int = 32
    decay: float = 1.0

    def __post_init__(self) -> None:
        if self.window < 1:
            raise ValueError("window must be at least 1")

    def impossible(self, budget: ResolvedBudget, layout: CacheLayout) -> str | None:
        if budget.prompt_budget < self.window:
            return f"{budget.prompt_budget} tokens do not hold the window of {self.window}"
        return None


@dataclass(frozen=True)
class Dice(_Stub):
    """Keeps what chance says."""

    name: ClassVar[str] = "dice"
    stochastic: ClassVar[bool] = True


@dataclass(frozen=True)
class Codes(_Stub):
    """Holds what its settings say."""

    name: ClassVar[str] = "codes"
    fixed: ClassVar[bool] = True


METHODS = {method.name: method for method in (Full, Window, Dice, Codes)}


def describe(spec: ModelSpec) -> ModelDescription:
    if spec.source.startswith("missing"):
        raise ModelError(f"model {spec.label!r}: no such folder {spec.source}; give a folder or a Hub id")
    return ModelDescription(
        config={"hidden_size": 64, "intermediate_size": 256},
        dtype=spec.dtype,
        layout=LAYOUT,
        parameters=1000,
        max_positions=4096,
        vocabulary=100,
        fingerprint=f"weights of {spec.source}",
        tokenizer_fingerprint="tokenizer",
    )


def registered() -> dict[str, EntryPoint]:
    return {name: EntryPoint(name, f"{__name__}:{cls.__name__}", "kvsweep.methods") for name, cls in METHODS.items()}


def samples(
    behaviour: dict[int, str] | None = None, only: str = "", marks: Path | None = None
) -> Callable[[SampleRequest], list[Sample]]:
    """A maker of samples, some of which misbehave (in the task ``only``, or in all)."""

    def make(request: SampleRequest) -> list[Sample]:
        return [
            Sample(
                request.task,
                index,
                f"context {request.context} {request.data_seed} {index}",
                (behaviour or {}).get(index, "") if only in ("", request.task) else "",
                "",
                (f"answer {index}",),
                8,
                "exact",
                meta={"marks": str(marks)},
            )
            for index in range(request.count)
        ]

    return make


ARRIVAL_S = 0.5
"""What a row needs to leave a process that is about to die."""


class StubWorker:
    """The worker's interface with made-up rows, the same for the same cell and sample."""

    delay_s = float(os.environ.get("STUB_DELAY_S", "0"))
    ran_out = False

    def load(self, model: ModelSpec) -> dict[str, Any]:
        if model.source == "broken":
            raise ModelError(f"model {model.label!r}: the weights are broken")
        if model.source == "deadly":
            os.kill(os.getpid(), signal.SIGKILL)
        if model.source == "endless":
            time.sleep(60)
        return {"device": "stub", "node": socket.gethostname(), "numerics": "stub", "versions": "{}", "load_s": 0.0}

    def run(self, job: Job) -> Iterator[list[Row]]:
        for sample in job.samples:
            yield from self._sample(job, sample)

    def _sample(self, job: Job, sample: Sample) -> Iterator[list[Row]]:
        cells = {cell.cell_id: cell for cell in job.cells}
        if sample.question == "raise":
            raise RuntimeError("the whole job\nwent wrong")
        if sample.question == "hang":
            time.sleep(60)
        alone = len(job.samples) == 1
        fits = {"huge": False, "large": alone, "leaky": alone and not self.ran_out}
        if not fits.get(sample.question, True):
            self.ran_out = True
            raise OutOfMemory("no room")
        for number, cell_id in enumerate(job.pending[sample.sample_id]):
            if sample.question == "die" or (sample.question == "once" and number == 1 and _first_time(sample)):
                time.sleep(ARRIVAL_S if number else 0)
                os.kill(os.getpid(), signal.SIGKILL)
            last = number == len(job.pending[sample.sample_id]) - 1
            time.sleep(60 if sample.question == "stall" and last else self.delay_s)
            cell = cells[cell_id]
            failed = sample.question == "fail"
            yield [
                Row(
                    cell_id,
                    sample.sample_id,
                    job_id=job.job_id,
                    attempt=job.attempt,
                    status="failed" if failed else "ok",
                    error="ValueError: this sample fails" if failed else "",
                    model=job.model.label,
                    method=cell.label,
                    budget=cell.budget,
                    method_seed=cell.method_seed,
                    prediction=f"{cell_id} {sample.sample_id}",
                    references=list(sample.references),
                    score=None if failed else int(cell_id[:4], 16) / 65535,
                    metric=sample.metric,
                    sample_index=sample.index,
                    prompt_tokens=100,
                    output_tokens=4,
                    kv_bytes_full=1000,
                    kv_bytes_prefill=100,
                    kv_bytes_end=100,
                    kv_bytes_peak=100,
                    prefill_s=0.02,
                    decode_s=0.02,
                    batch_rows=2,
                    device="stub",
                    numerics="stub",
                    finished_at=time.time(),
                    **job.coordinates,
                )
            ]


def _first_time(sample: Sample) -> bool:
    mark = Path(str(sample.meta["marks"])) / sample.sample_id
    if mark.exists():
        return False
    mark.touch()
    return True


def install(patch: pytest.MonkeyPatch | None = None) -> None:
    """Put the stubs in place of the registry and the description of models; for good without ``patch``."""
    setter = patch.setattr if patch is not None else setattr
    setter(kvcache.method, "_registered", registered)
    setter(pipeline.plan, "describe", describe)


def row(cell_id: str, index: int, **values: Any) -> Row:
    """A finished row with these values."""
    plain = Row(cell_id, f"s{index}", sample_index=index, score=0.5, finished_at=1.0)
    return dataclasses.replace(plain, **values)


if __name__ == "__main__":
    import stub_worker  # the actors import this module by its name

    import pipeline.run
    from pipeline.cli import main

    stub_worker.install()
    pipeline.run.Worker = stub_worker.StubWorker
    pipeline.run.samples.make_samples = stub_worker.samples()
    sys.exit(main())
