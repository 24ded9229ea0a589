"""The actor: one process on one device that holds a model and runs jobs, streaming rows to the driver.

A plain class, so that it can be used and tested without Ray; the driver wraps it. Starting is cheap and ``load`` is a
call of its own: a model that cannot be loaded comes back as an ordinary error instead of a dead process.
"""

from __future__ import annotations

import os
import queue
import time
from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any

from workers.job import Job, ModelSpec
from workers.memory import OutOfMemory, leave_nothing_behind, return_free_memory
from workers.provenance import provenance
from workers.row import Row


class Worker:
    """Holds at most one model."""

    def __init__(self) -> None:
        self._model: Any = None
        self._engine = ThreadPoolExecutor(1, thread_name_prefix="engine")
        self._provenance: dict[str, str] = {}

    def load(self, model: ModelSpec) -> dict[str, Any]:
        """Load a model in place of the present one. Says where it is, and how long that took."""
        from workers.models import load_model

        self._model = None  # the old model's memory is free before the new one is read
        started = time.monotonic()
        self._model = load_model(model)
        self._provenance = provenance(self._model.device)
        return {**self._provenance, "load_s": time.monotonic() - started, "pid": os.getpid()}

    def run(self, job: Job) -> Iterator[list[Row]]:
        """The rows of a job, in lists of what is finished. A sample's own exception is a failed row already.

        Raises :class:`~workers.memory.OutOfMemory` once what the job held is free again: the model serves the next job.
        """
        if job.timing is not None:
            from workers.timing import time_job as rows_of
        else:
            from workers.evaluate import run_job as rows_of

        lacking = ""
        try:
            for rows in batches(rows_of(self._model, job), self._engine):
                for row in rows:
                    row.job_id, row.attempt = job.job_id, job.attempt
                    for name, value in self._provenance.items():
                        setattr(row, name, value)
                yield rows
        except OutOfMemory as error:
            lacking = str(error)  # the words alone: the error's frames hold the caches that there was no room for
        if lacking:
            leave_nothing_behind(self._model.device)
            self._model.meter.restart()
            raise OutOfMemory(lacking)
        return_free_memory()


def batches(rows: Iterator[Row], engine: Executor) -> Iterator[list[Row]]:
    """Lists of the rows that are there: the producer never waits for the reader, no row waits for the next one."""
    finished: queue.SimpleQueue[Row | None] = queue.SimpleQueue()

    def produce() -> None:
        try:
            for row in rows:
                finished.put(row)
        finally:
            finished.put(None)

    ending = engine.submit(produce)
    more = True
    while more:
        ready = [finished.get()]
        while not finished.empty():
            ready.append(finished.get())
        more = ready[-1] is not None
        batch = [row for row in ready if row is not None]
        if batch:
            yield batch
    ending.result()
