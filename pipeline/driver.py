"""The driver: keeps actors busy with jobs, takes in rows as they come, and decides what a failure means.

    starting ──> idle ──> loading ──> idle ──> running ──> idle ...        one actor, at most one job in flight
        │                    │                    │
        └── never ready      └── load error       └── rows | end | exception of the job | the actor is gone

Ray restarts and retries nothing; :mod:`pipeline.work` holds the policy. Rows are handed to the store as they arrive, so
an actor's death costs only what it had not yet yielded.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayError, RayTaskError

from pipeline.cluster import ClusterError, actor_request, describe_cluster, error_text, living_nodes, node_is_alive
from pipeline.estimate import Costs
from pipeline.failed import failed_rows
from pipeline.feed import SampleFeed
from pipeline.lease import Lease
from pipeline.losses import Loss
from pipeline.plan import Plan
from pipeline.progress import ProgressReport
from pipeline.signals import stop_signals
from pipeline.slot import Slot
from pipeline.store import PATIENCE_S, Store, StoreError
from pipeline.work import Agenda, Outcome, Work
from workers.job import Job
from workers.memory import OutOfMemory
from workers.row import Row

WAIT_S = 0.5
SUSPECT_S = 60.0
"""How long an unreachable actor may take to be declared dead or alive."""
PROBE_EVERY_S = 1.0
START_TRIES = 3
DRAIN_S = 1.0
"""``ray job stop`` kills after three seconds."""
RECOUNT_S = 10.0
"""How often the cluster is asked whether it has grown."""


class Driver:
    """Runs a plan's jobs on a connected Ray."""

    def __init__(
        self,
        plan: Plan,
        store: Store,
        feed: SampleFeed,
        lease: Lease,
        costs: Costs,
        progress: ProgressReport,
        worker_class: type,
        on_progress: Callable[[int, int, int], None],
    ) -> None:
        self._plan, self._store, self._feed, self._lease = plan, store, feed, lease
        self._costs, self._progress, self._on_progress = costs, progress, on_progress
        self._cluster = plan.sweep.cluster
        self._request = actor_request(self._cluster, whole_node=plan.sweep.timing is not None)
        self._new_actor: Callable[[], Any] = ray.remote(worker_class).options(**self._request.options()).remote
        self._agenda = Agenda(plan.jobs, self._cluster.max_failures)
        self._slots: list[Slot] = []
        self._room = 0
        self._recount_at = 0.0
        self._start_failures = 0
        self._dry: set[str] = set()
        """Models for which there is nothing to take until samples come, or work comes back."""

    def run(self) -> Outcome:
        """Work until nothing is left, a signal arrives or the failures trip. What is finished is always written."""
        with stop_signals() as received:
            taken_over = False
            try:
                while (self._agenda.waiting or self._busy()) and not (received or self._agenda.tripped or taken_over):
                    self._turn()
                    taken_over = self._lease.lost
                self._drain(DRAIN_S if received else 0.0)
            finally:
                try:
                    self._write_out(received)
                finally:
                    for slot in self._slots:
                        ray.kill(slot.actor)
        if received:
            return self._outcome(signal.Signals(received[0]).name, received[0])
        if taken_over:
            return self._outcome("another driver took this output over", None)
        if self._agenda.tripped:
            return self._outcome(f"{self._cluster.max_failures} failures in a row with no success between them", None)
        return self._outcome("", None)

    def _write_out(self, received: list[int]) -> None:
        """Write what is finished. A full disk may be emptied meanwhile; a signal, then or before, ends the wait."""
        try:
            self._store.close(lambda: DRAIN_S if received else PATIENCE_S)
        except StoreError as error:
            if not received:
                raise
            self._progress.say(str(error))

    def _outcome(self, stopped: str, signum: int | None) -> Outcome:
        return Outcome(tuple(self._agenda.left_out), stopped, signum, self._store.unwritten)

    def _turn(self) -> None:
        self._feed.start(self._agenda.upcoming())
        self._hire()
        self._dispatch()
        self._release()
        self._watch()
        self._collect(WAIT_S)
        self._store.flush_if_due()
        self._progress.actors(sum(slot.phase != "starting" for slot in self._slots))
        self._progress.tick()

    def _busy(self) -> list[Slot]:
        return [slot for slot in self._slots if slot.work is not None]

    def _hire(self) -> None:
        """As many actors as there is work for, and room: on a cluster that grows by demand they are the demand."""
        if time.monotonic() >= self._recount_at:
            # What isolated runs measure must not share its machine, nor come from two of them.
            most = 1 if self._plan.sweep.timing else self._cluster.max_actors
            self._room = most or max(self._request.fits(), 1)
            self._recount_at = time.monotonic() + RECOUNT_S
        wanted = min(self._room, self._agenda.waiting + len(self._busy()))
        while len(self._slots) < wanted:
            actor = self._new_actor()
            self._slots.append(Slot(actor, actor.__ray_call__.remote(_node_id), around=living_nodes()))

    def _dispatch(self) -> None:
        for slot in self._slots:
            if slot.phase != "idle":
                continue
            if slot.model is not None and self._agenda.needs(slot.model):
                work = None if slot.model in self._dry else self._agenda.take(slot.model, self._feed.has)
                if work is not None:
                    self._start(slot, work)
                else:
                    self._dry.add(slot.model)
            elif self._agenda.next_model is not None:
                model = self._agenda.next_model
                slot.model = model.label
                slot.enter("loading", slot.actor.load.remote(model))

    def _start(self, slot: Slot, work: Work) -> None:
        slot.work = work
        slot.enter("running", slot.actor.run.options(num_returns="streaming").remote(self._job(work)))

    def _job(self, work: Work) -> Job:
        group = work.group
        samples = self._feed.samples(group, sorted(work.missing))
        pending: dict[str, tuple[str, ...]] = {}
        for sample in samples:  # two samples may be equal, and then share an id
            known = pending.get(sample.sample_id, ())
            pending[sample.sample_id] = tuple(dict.fromkeys((*known, *sorted(work.missing[sample.index]))))
        needed = {cell for cells in pending.values() for cell in cells}
        first, last = samples[0].index, samples[-1].index
        batch = f"x{group.batch}" if group.timing else ""
        return Job(
            job_id=f"{group.model.label}-{group.task.name}-{group.context}{batch}-{group.data_seed}-{first}-{last}",
            attempt=work.attempt,
            model=group.model,
            engine=group.engine,
            protocol=self._plan.sweep.protocol,
            samples=tuple(samples),
            cells=tuple(cell.spec for cell in group.cells if cell.cell_id in needed),
            pending=pending,
            coordinates={
                "task": group.task.name,
                "context": group.context,
                "data_seed": group.data_seed,
                "sample_limit": self._plan.limit or 0,
            },
            timing=group.timing,
        )

    def _release(self) -> None:
        """Let go of actors that nothing waits for, so that an idle node can be given back."""
        if self._agenda.waiting:
            return
        for slot in [slot for slot in self._slots if slot.work is None]:
            self._dismiss(slot)

    def _watch(self) -> None:
        """Things that never raise: an actor that finds no room, one that yields nothing, one out of reach."""
        starting = [slot for slot in self._slots if slot.phase == "starting"]
        if len(starting) == len(self._slots) and any(slot.age > self._cluster.ready_timeout_s for slot in starting):
            raise ClusterError(
                f"cluster: no actor could start within {self._cluster.ready_timeout_s:g} s: each asks for "
                f"{self._request}, and the cluster has {describe_cluster()}; ask for less (cpus_per_actor, "
                "gpus_per_actor), add nodes, or wait longer (ready_timeout_s)"
            )
        for slot in list(self._slots):
            if slot.phase == "suspect":
                self._probe(slot)
            elif not slot.condemned and (reason := slot.overdue(self._cluster)):
                self._progress.say(f"{slot.work.group if slot.work else slot.model}: {reason}: its actor is stopped")
                slot.condemned = reason
                ray.kill(slot.actor)

    def _probe(self, slot: Slot) -> None:
        if slot.age > SUSPECT_S:
            self._lost(slot, "ActorUnavailableError: the actor is out of reach", preempted=False)
        elif slot.waiting is None and time.monotonic() - slot.probed > PROBE_EVERY_S:
            slot.probed = time.monotonic()
            slot.waiting = slot.actor.__ray_ready__.remote()

    def _collect(self, timeout: float) -> bool:
        """Wait for one report and act on it. False if there was none."""
        by_reference = {slot.waiting: slot for slot in self._slots if slot.waiting is not None}
        references = [*by_reference, *self._feed.references]
        if not references:
            time.sleep(timeout)
            return False
        ready, _ = ray.wait(references, num_returns=1, timeout=timeout)
        for reference in ready:
            if reference in by_reference:
                slot = by_reference[reference]
                self._slots.append(self._slots.pop(self._slots.index(slot)))  # the others go first next time
                self._report(slot)
                if slot.condemned and slot.phase == "idle":
                    self._dismiss(slot)  # it had just finished, and is dead all the same
            else:
                self._samples_made(reference)
        return bool(ready)

    def _samples_made(self, reference: Any) -> None:
        group, problem = self._feed.collect(reference)
        self._dry.clear()
        if problem:
            self._progress.say(f"{group} is left out: {problem}")
            self._agenda.no_samples(group, problem)

    def _report(self, slot: Slot) -> None:
        """One report of an actor: what it means depends on what the actor was doing."""
        try:
            result = ray.get(next(slot.waiting) if slot.phase == "running" else slot.waiting)
        except StopIteration:
            self._job_ended(slot, "the job ended without a row for this sample")
        except RayTaskError as error:
            self._raised(slot, error_text(error), isinstance(error.cause, OutOfMemory))
        except ActorUnavailableError:
            if slot.phase != "suspect":
                slot.enter("suspect")
            slot.waiting = None  # asked again by and by: alive, or dead for good?
        except RayError as error:
            self._lost(slot, error_text(error), preempted=getattr(error, "preempted", False))
        else:
            self._reported(slot, result)

    def _reported(self, slot: Slot, result: Any) -> None:
        if slot.phase == "starting":
            slot.node, self._start_failures = result, 0
            slot.enter("idle")
        elif slot.phase == "loading":
            where = f"{result['device']} of {result['node']}"
            self._progress.say(f"{slot.model} is loaded on {where}, {result['load_s']:.1f} s")
            slot.enter("idle")
        elif slot.phase == "suspect":  # reachable again, but its stream is lost
            self._lost(slot, "ActorUnavailableError: the actor was out of reach", preempted=False)
        else:
            slot.since = time.monotonic()
            self._take_in(slot.work, result)

    def _take_in(self, work: Work | None, rows: list[Row]) -> None:
        assert work is not None
        taken = [row for row in rows if work.received(row.cell_id, row.sample_index)]
        for row in taken:
            failed = row.status != "ok"
            if failed:
                self._agenda.failed((work.group.key, row.sample_index))
            else:
                self._agenda.succeeded()
            self._progress.row(failed, self._costs.of_pair(work.group))
        self._store.add(taken)
        self._on_progress(self._progress.done, self._progress.failed, self._progress.total)

    def _job_ended(self, slot: Slot, error: str) -> None:
        """A job is over; what it left has failed."""
        work = slot.work
        assert work is not None
        slot.work = None
        slot.enter("idle")
        self._close(work, error)

    def _close(self, work: Work, error: str) -> None:
        if work.missing:
            samples = self._feed.samples(work.group, sorted(work.missing))
            self._take_in(work, failed_rows(self._plan, work, samples, error))
        self._agenda.finished(work)
        if not self._agenda.is_open(work.group):
            self._feed.forget(work.group)
            self._dry.clear()  # the next groups' samples may be there

    def _raised(self, slot: Slot, error: str, out_of_memory: bool) -> None:
        """An exception in the actor's code; the process lives on. Where memory ran out, the job has let go of what it
        held (:meth:`workers.actor.Worker.run`), and the model serves again; another may have left a bad state."""
        if slot.phase == "running":
            work, slot.work = slot.work, None
            assert work is not None
            if out_of_memory and slot.short and work.sent == 1 and work.missing:  # a fresh process has the last word
                self._note(slot, work, error, counted=False)
                self._dismiss(slot)
                self._agenda.lost(work)
            elif out_of_memory:
                slot.short = True
                slot.enter("idle")
                self._memory_short(slot, work, error)
            else:
                self._dismiss(slot)
                self._work_lost(slot, work, error, free=False)
        elif slot.phase == "loading":
            self._load_failed(slot, error)
            slot.model = None
            slot.enter("idle")
        else:
            self._lost(slot, error, preempted=False)

    def _load_failed(self, slot: Slot, error: str) -> None:
        assert slot.model is not None
        self._progress.say(f"{slot.model} cannot be loaded: {error}")
        last = self._agenda.load_failed(slot.model, error)
        attempt = self._agenda.load_failures(slot.model)
        self._store.note(Loss(time.time(), f"model {slot.model}", [], 0, attempt, error, True, slot.node or ""))
        if last:
            self._progress.say(f"{slot.model} is left out")

    def _lost(self, slot: Slot, error: str, preempted: bool) -> None:
        """The actor is gone. Its node's loss costs nothing; a death on a living node is a crash."""
        self._dismiss(slot)
        free = preempted or not (node_is_alive(slot.node) if slot.node else slot.around <= living_nodes())
        error = slot.condemned or error
        work, slot.work = slot.work, None
        if work is not None:
            self._work_lost(slot, work, error, free)
        elif slot.phase == "loading" and not free:
            self._load_failed(slot, error)
        elif slot.phase == "starting" and not free:
            self._start_failures += 1
            if self._start_failures >= START_TRIES:
                raise ClusterError(f"cluster: actors die as they start: {error}")

    def _work_lost(self, slot: Slot, work: Work, error: str, free: bool) -> None:
        self._note(slot, work, error, counted=not free)
        if not work.missing:
            self._close(work, "")
        elif free:
            self._progress.say(f"a node was lost: {len(work.missing)} samples of {work.group} run again")
            self._agenda.lost(work)
        else:
            self._progress.say(f"an actor failed on {work.group}: {error}")
            if self._agenda.crashed(work):
                self._close(work, f"it failed twice on this sample alone: {error}")

    def _memory_short(self, slot: Slot, work: Work, error: str) -> None:
        """What a job holds at once was too much for the device: less of it may fit."""
        self._note(slot, work, error, counted=False)
        if not work.missing:
            self._close(work, "")
        elif self._agenda.out_of_memory(work):
            self._close(work, f"out of memory by itself: {error}")
        else:
            self._progress.say(f"out of memory on {work.group}: what is left runs in halves")

    def _note(self, slot: Slot, work: Work, error: str, counted: bool) -> None:
        """Keep why this attempt ended, since the rows that come in the end do not say; its work may be taken again."""
        self._dry.clear()
        samples = sorted(work.missing)
        what, node = str(work.group), slot.node or ""
        self._store.note(Loss(time.time(), what, samples, work.pairs, work.attempt, error, counted, node))

    def _dismiss(self, slot: Slot) -> None:
        ray.kill(slot.actor)
        self._slots.remove(slot)

    def _drain(self, seconds: float) -> None:
        """Take what the actors have already yielded."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and self._collect(0.05):
            pass


def _node_id(worker: object) -> str:
    return str(ray.get_runtime_context().get_node_id())
