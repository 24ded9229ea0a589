"""What a plan will take: from this output's own rows where there are any, else a rough figure from operation counts."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import pyarrow as pa

from pipeline.plan import Group, Plan
from workers.description import ModelDescription
from workers.job import TimingSpec

COLUMNS = (
    *("model", "task", "context", "sample_index", "status", "prefill_s", "compress_s", "decode_s", "batch_rows"),
    *("row_width", "timing", "ttft_s"),
)
CPU_SPEED = 1e11
GPU_SPEED = 1e14
"""Operations per second that a small CPU box and one GPU sustain, to one digit: for the rough figure alone."""
ROUGH_CONTEXT = 4096
"""A guess at the prompts of a task with lengths of its own."""


@dataclass(frozen=True)
class Cost:
    """Seconds on one device: ``sample`` once per prompt, ``pair`` for each of its cells."""

    sample: float
    pair: float
    measured: bool


class Costs:
    """The cost of a group's work, from the nearest rows: of its task at its context, else of any task there; for
    isolated runs those of its batch."""

    def __init__(self, plan: Plan, rows: pa.Table) -> None:
        self._plan = plan
        self._per_pair: dict[tuple[object, ...], float] = {}
        samples: dict[tuple[object, ...], list[float]] = defaultdict(list)
        pairs: dict[tuple[object, ...], list[float]] = defaultdict(list)
        runs: dict[tuple[object, ...], list[float]] = defaultdict(list)
        for row in rows.to_pylist():
            if row["status"] != "ok":
                continue
            if row["timing"] == "isolated":
                runs[row["model"], row["context"], row["row_width"]].append(row["ttft_s"] + row["decode_s"])
                continue
            for key in ((row["model"], row["context"], row["task"]), (row["model"], row["context"])):
                samples[key].append(row["prefill_s"])
                # Rows of one decode batch share its time.
                pairs[key].append(row["compress_s"] + row["decode_s"] / max(row["batch_rows"], 1))
        self._measured = {key: Cost(fmean(samples[key]), fmean(pairs[key]), True) for key in samples}
        self._runs = {key: fmean(seconds) for key, seconds in runs.items()}

    def of(self, group: Group) -> Cost:
        if group.timing:
            return self._of_run(group, group.timing)
        key = (group.model.label, group.context, group.task.name)
        found = self._measured.get(key) or self._measured.get(key[:2])
        if found is not None:
            return found
        description, width = self._plan.grid.descriptions[group.model.label], self._plan.sweep.engine.row_width
        return _rough(group, description, width, self._speed())

    def _of_run(self, group: Group, timing: TimingSpec) -> Cost:
        """A batch by itself, and its share of the warm-up."""
        found = self._runs.get((group.model.label, group.context, group.batch))
        one = _rough(group, self._plan.grid.descriptions[group.model.label], group.batch, self._speed())
        seconds = group.batch * (one.sample + one.pair) if found is None else found
        return Cost(0.0, seconds * (1 + timing.warmup / group.samples), found is not None)

    def of_pair(self, group: Group) -> float:
        """Seconds per row, the prompt's share included."""
        if group.key not in self._per_pair:
            cost = self.of(group)
            self._per_pair[group.key] = cost.pair + cost.sample / max(len(group.cells), 1)
        return self._per_pair[group.key]

    def _speed(self) -> float:
        gpus = self._plan.sweep.cluster.gpus_per_actor
        if gpus == "auto":
            return GPU_SPEED if Path("/dev/nvidia0").exists() else CPU_SPEED
        return GPU_SPEED * gpus if gpus else CPU_SPEED


@dataclass(frozen=True)
class Estimate:
    """Device seconds for what is left; ``measured``: the share of it that rests on earlier rows."""

    seconds: float
    measured: float


def estimate(plan: Plan, costs: Costs) -> Estimate:
    total = measured = 0.0
    for job in plan.jobs:
        cost = costs.of(job.group)
        seconds = cost.sample * len(job.pending) + cost.pair * job.pairs
        total += seconds
        measured += seconds if cost.measured else 0.0
    return Estimate(total, measured / total if total else 1.0)


def _rough(group: Group, description: ModelDescription, row_width: int, speed: float) -> Cost:
    """Two operations per parameter and token, and attention's four per query, key and channel.

    A decode step costs its whole width, however few rows there are to fill it.
    """
    tokens = group.context or ROUGH_CONTEXT
    channels = sum(layer.query_heads * layer.key_dim for layer in description.layout.layers)
    prefill = 2 * description.parameters * tokens + 2 * channels * tokens**2
    rows = min(row_width, max(group.samples * len(group.cells), 1))
    decode = group.max_new_tokens * (2 * description.parameters * row_width / rows + 4 * channels * tokens)
    return Cost(prefill / speed, decode / speed, False)
