"""Samples, made on the driver's node while the actors work: a few groups ahead, forgotten when their work is done."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

import ray

from pipeline.cluster import error_text, on_this_node
from pipeline.errors import SweepProblem
from pipeline.plan import Group, Plan, limited
from tasks.sample import Sample
from tasks.sources import DataSources
from workers.samples import SampleRequest

MakeSamples = Callable[[SampleRequest], list[Sample]]
AT_ONCE = max(1, (os.cpu_count() or 1) // 4)


class SampleFeed:
    """The data are on the driver's node, and making long prompts takes long: a task of its own per group."""

    def __init__(self, plan: Plan, sources: DataSources, make_samples: MakeSamples) -> None:
        self._plan = plan
        self._sources = sources
        self._make = ray.remote(make_samples).options(
            num_cpus=0, max_retries=1, scheduling_strategy=on_this_node(), name="samples"
        )
        self._ready: dict[tuple[object, ...], list[Sample]] = {}
        self._running: dict[Any, Group] = {}

    @property
    def references(self) -> list[Any]:
        """What to wait for, then to ``collect``."""
        return list(self._running)

    def has(self, group: Group) -> bool:
        return group.key in self._ready

    def samples(self, group: Group, indices: Iterable[int]) -> list[Sample]:
        made = self._ready[group.key]
        return [made[index] for index in indices]

    def start(self, groups: Iterable[Group]) -> None:
        """Make the samples of the first groups that have none yet."""
        running = {group.key for group in self._running.values()}
        for group in groups:
            if group.timing:
                self._ready.setdefault(group.key, _repeats(group))
                continue
            if len(self._running) >= AT_ONCE:
                return
            if group.key not in self._ready and group.key not in running:
                self._running[self._make.remote(self._request(group))] = group

    def collect(self, reference: Any) -> tuple[Group, str]:
        """Take in what a task made, or say why it could not."""
        group = self._running.pop(reference)
        try:
            samples = ray.get(reference)
        except ray.exceptions.RayError as error:
            return group, error_text(error)
        asked = limited(group.samples, self._plan.limit)
        if len(samples) < asked:
            return group, f"it has {len(samples)} samples, not {asked}: set samples for this task"
        self._ready[group.key] = samples
        return group, ""

    def make_own_lengths(self, groups: Iterable[Group]) -> None:
        """Make the samples of tasks with lengths of their own before anything expensive: only their texts tell
        whether a record is too long for the model. Raises :class:`SweepProblem` for one that is."""
        waiting = [group for group in groups if not group.context]
        while waiting or self._running:
            self.start(waiting)
            ready, _ = ray.wait(self.references, num_returns=1)
            group, problem = self.collect(ready[0])
            if problem:
                raise SweepProblem(f"{group}: {problem}")
            self.forget(group)
            waiting.remove(group)

    def forget(self, group: Group) -> None:
        self._ready.pop(group.key, None)

    def _request(self, group: Group) -> SampleRequest:
        return SampleRequest(
            group.model,
            self._plan.sweep.protocol,
            group.task.name,
            group.task.settings,
            group.context,
            group.data_seed,
            limited(group.samples, self._plan.limit),
            self._sources.data_dir,
            self._sources.cache_dir,
        )


def _repeats(group: Group) -> list[Sample]:
    """Isolated runs have no data: a sample is a number, from which the actor makes its prompts."""
    return [
        Sample(group.task.name, index, "", "", "", (), group.max_new_tokens, "", repeat=index)
        for index in range(group.samples)
    ]
