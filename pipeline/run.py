"""One run of a sweep, from its file to its report: plan, connect, drive, report."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from pipeline.errors import SweepProblem
from pipeline.estimate import COLUMNS, Costs, estimate
from pipeline.lease import Lease
from pipeline.location import output_location
from pipeline.outputs import save_plan
from pipeline.plan import Grid, Plan, expand, failed_pairs, make_plan
from pipeline.progress import ProgressReport
from pipeline.spec import SpecError, SweepFile, load_sweep
from pipeline.store import Store
from pipeline.work import Outcome
from tasks.download import Downloader
from tasks.sample import Sample
from tasks.sources import DataSources
from tasks.task import TaskError
from workers import samples
from workers.actor import Worker
from workers.description import cache_folder
from workers.job import ModelSpec
from workers.memory import predict_peak
from workers.samples import SampleRequest

QUIET_RAY = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS_SKIP_REGEX": ".",  # what Ray prints about dead workers, in ten lines each, our own line says too
}
"""Read by Ray when it is imported. Its own logs go on in its session's folder."""
MakeSamples = Callable[[SampleRequest], list[Sample]]


@dataclass(frozen=True)
class RunOptions:
    """What the command line says beside the file."""

    output: str | None = None
    data_dir: Path | None = None
    address: str | None = None
    limit: int | None = None
    retry_failed: bool = False
    gpus_per_actor: int | None = None
    max_actors: int | None = None
    model: str | None = None
    context: int | None = None


@dataclass(frozen=True)
class Opened:
    """A sweep file that has been checked against models and data."""

    file: Path
    sweep: SweepFile
    grid: Grid
    store: Store
    sources: DataSources

    def peaks(self) -> dict[str, int]:
        """Peak bytes per model, predicted from its configuration alone."""
        peaks: dict[str, int] = {}
        for group in self.grid.groups:
            cells = [cell.spec for cell in group.cells if not cell.impossible]
            description = self.grid.descriptions[group.model.label]
            prompts = group.batch or min(group.samples, self.sweep.cluster.samples_per_job)
            size, protocol = (group.positions, group.max_new_tokens, prompts), self.sweep.protocol
            for together in [[cell] for cell in cells] if group.timing else [cells]:
                peak = predict_peak(description, group.engine, together, *size, protocol.budget_base, protocol.growth)
                peaks[group.model.label] = max(peak, peaks.get(group.model.label, 0))
        return peaks

    def plan(self, options: RunOptions) -> tuple[Plan, Costs, pa.Table]:
        """The plan, what it costs, and the rows (a few columns of them) that both rest on."""
        rows = self.store.attempts(("cell_id", *COLUMNS))
        plan = make_plan(self.grid, rows, options.limit, options.retry_failed)
        return plan, Costs(plan, rows), rows


def open_sweep(file: Path, options: RunOptions) -> Opened:
    """Check everything that can be checked without Ray and torch. Raises :class:`~pipeline.spec.SpecError`."""
    sweep = _as_asked(load_sweep(file), options)
    if sweep.timing and sweep.cluster.max_actors not in (None, 1):
        raise SpecError(file, [("", "isolated runs come from one actor at a time: leave out --max-actors")])
    data_dir = options.data_dir or (Path(sweep.data_dir) if sweep.data_dir else None)
    try:
        sources = data_sources(data_dir)
    except TaskError as error:
        raise SpecError(file, [("", str(error))]) from None
    store = Store(output_location(options.output or sweep.output))
    return Opened(file, sweep, expand(sweep, file, sources), store, sources)


def _as_asked(sweep: SweepFile, options: RunOptions) -> SweepFile:
    """The sweep with what the command line says of its actors, its model, and its contexts."""
    said = {"gpus_per_actor": options.gpus_per_actor, "max_actors": options.max_actors}
    of_actors = {name: value for name, value in said.items() if value is not None}
    changes: dict[str, Any] = {"cluster": sweep.cluster.model_copy(update=of_actors)}
    if options.model:
        changes["models"] = [ModelSpec.named_by_source(options.model, sweep.models[0].dtype)]
    if options.context and sweep.timing:
        changes["timing"] = sweep.timing.model_copy(update={"prompt_tokens": [options.context]})
    elif options.context:
        changes["contexts"] = [options.context] if sweep.contexts else []
        tasks = [task.model_copy(update={"contexts": task.contexts and [options.context]}) for task in sweep.tasks]
        changes["tasks"] = tasks
    return sweep.model_copy(update=changes)


def data_sources(data_dir: Path | None, fetch: bool = True) -> DataSources:
    """The data folder, then the cache, then, with ``fetch``, the pinned sources themselves."""
    cache = cache_folder() / "data"
    folder = Path(os.path.abspath(data_dir.expanduser())) if data_dir else None  # Ray's processes run elsewhere
    return DataSources(folder, cache.absolute(), Downloader(cache.absolute()) if fetch else None)


@dataclass(frozen=True)
class Finished:
    """What a run came to. ``failed`` counts the failed rows among all that the plan asks for, earlier ones included."""

    plan: Plan
    outcome: Outcome
    failed: int

    def exit_code(self, failures_ok: bool) -> int:
        if self.outcome.signal is not None:
            return 128 + self.outcome.signal
        if self.outcome.stopped:
            return 3
        left_out = sum(part.pairs for part in self.outcome.left_out)
        if failures_ok and left_out < self.plan.total:
            return 0
        return int(left_out > 0 or (self.failed > 0 and not failures_ok))


def run_sweep(
    opened: Opened,
    options: RunOptions,
    worker_class: type | None = None,
    make_samples: MakeSamples | None = None,
    on_plan: Callable[[], None] = lambda: None,
    on_progress: Callable[[int, int, int], None] = lambda done, failed, total: None,
) -> Finished:
    """Run what is left of a sweep. The output is held by a lease meanwhile.

    ``on_plan`` is called once the plan is in the output and nothing speaks against it, ``on_progress`` with the rows
    done, failed and asked for.
    """
    with Lease(opened.store.folder) as lease:
        plan, costs, rows = opened.plan(options)
        save_plan(opened.store, opened.file.read_text(encoding="utf-8"), plan.manifest())
        if not plan.total:
            raise SweepProblem(f"{opened.file}: nothing can run: {'; '.join(plan.impossible)}")
        if not plan.jobs:
            on_plan()
            return Finished(plan, Outcome(()), failed_pairs(plan, rows))
        failed = 0 if options.retry_failed else failed_pairs(plan, rows)
        progress = ProgressReport(plan.total, sum(plan.done.values()), failed, estimate(plan, costs).seconds)
        worker, maker = worker_class or Worker, make_samples or samples.make_samples
        outcome = _drive(opened, options, plan, costs, lease, progress, worker, maker, on_plan, on_progress)
    return Finished(plan, outcome, progress.failed)


def _drive(
    opened: Opened,
    options: RunOptions,
    plan: Plan,
    costs: Costs,
    lease: Lease,
    progress: ProgressReport,
    worker_class: type,
    make_samples: MakeSamples,
    on_plan: Callable[[], None],
    on_progress: Callable[[int, int, int], None],
) -> Outcome:
    for name, value in QUIET_RAY.items():
        os.environ.setdefault(name, value)
    # Ray takes half a second to import: plans and reports do without it.
    from pipeline.cluster import connected
    from pipeline.driver import Driver
    from pipeline.feed import SampleFeed

    with connected(options.address or opened.sweep.cluster.address), progress:
        feed = SampleFeed(plan, opened.sources, make_samples)
        feed.make_own_lengths({shard.group.key: shard.group for shard in plan.jobs}.values())
        on_plan()
        return Driver(plan, opened.store, feed, lease, costs, progress, worker_class, on_progress).run()
