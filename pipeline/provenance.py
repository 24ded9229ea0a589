"""What rows say about how they came to be: data, devices, versions, failures."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pipeline.summary import error_kind

if TYPE_CHECKING:
    import pandas as pd

FEW_VALUES = 4
"""A fact with more values than this varies from sample to sample: it says nothing about the task."""

NAMES = ("_id", "id", "document")
"""Facts that name a sample and tell nothing of its kind, however few there are."""


@dataclass(frozen=True)
class TaskFacts:
    """What a task's samples were. ``facts`` are the samples' own words on wording, haystack, source ..."""

    task: str
    context: int
    metrics: tuple[str, ...]
    samples: int
    prompt_tokens: tuple[int, int, int]
    """Least, median, most."""
    facts: Mapping[str, tuple[str, ...]]
    benchmark_size: int
    """Samples that the published benchmark has; 0 where it has no number of its own."""
    digest: str
    """Of the samples' ids, which are hashes of their contents: the same for the same samples in any order."""


@dataclass(frozen=True)
class Failure:
    """Failed rows with the same error, numbers apart."""

    kind: str
    example: str
    count: int
    configurations: Mapping[str, int]
    tasks: Mapping[str, int]
    nodes: Mapping[str, int]


@dataclass(frozen=True)
class Provenance:
    tasks: tuple[TaskFacts, ...]
    counts: Mapping[str, Mapping[str, int]]
    """Rows by device, numerics, dtype, attention, row width."""
    versions: Mapping[str, tuple[str, ...]]
    first: float
    last: float
    """When the first and the last row were finished, seconds since 1970; 0 where nothing was."""


def provenance(rows: pd.DataFrame) -> Provenance:
    kinds = ("device", "numerics", "dtype", "attention", "row_width")
    times = rows.loc[rows["finished_at"] > 0, "finished_at"]
    return Provenance(
        tasks=tuple(
            _task_facts(str(task), int(context), of_task[of_task["context"] == context])
            for task, of_task in rows.groupby("task", sort=False)
            for context in sorted(of_task["context"].unique())
        ),
        counts={kind: _counts(rows[kind]) for kind in kinds if len(rows)},
        versions=_distinct(rows["versions"].unique()),
        first=float(times.min()) if len(times) else 0.0,
        last=float(times.max()) if len(times) else 0.0,
    )


def failures(rows: pd.DataFrame, labels: Mapping[str, str]) -> list[Failure]:
    """Failed rows gathered by error, most frequent first. ``labels``: what a cell is called, by its id."""
    failed = rows[~rows["scored"]]
    texts = failed["error"].where(failed["error"].str.strip() != "", "the metric gave no score")
    found = []
    for _, part in failed.assign(error=texts).groupby(texts.map(_without_numbers)):
        example = str(part["error"].iloc[0])
        called = part["cell_id"].map(dict(labels))
        kind = error_kind(example)
        found.append(Failure(kind, example, len(part), _counts(called), _counts(part["task"]), _counts(part["node"])))
    return sorted(found, key=lambda failure: -failure.count)


def _task_facts(task: str, context: int, rows: pd.DataFrame) -> TaskFacts:
    samples = rows.drop_duplicates("sample_id")
    lengths = samples.loc[samples["prompt_tokens"] > 0, "prompt_tokens"]
    spread = (int(lengths.min()), int(lengths.median()), int(lengths.max())) if len(lengths) else (0, 0, 0)
    facts = _distinct(samples["sample_meta"])
    told = {key: values for key, values in facts.items() if len(values) <= FEW_VALUES and key not in NAMES}
    metrics = tuple(sorted(set(samples["metric"].astype(str)) - {""}))
    size = max((int(json.loads(text).get("benchmark_size", 0)) for text in samples["sample_meta"]), default=0)
    digest = hashlib.sha256("\n".join(sorted(samples["sample_id"])).encode()).hexdigest()[:16]
    return TaskFacts(task, context, metrics, len(samples), spread, told, size, digest)


def _distinct(texts: Any) -> dict[str, tuple[str, ...]]:
    """JSON objects to the distinct values of each key that holds words."""
    seen: dict[str, dict[str, None]] = {}
    for text in texts:
        for key, value in json.loads(text).items():
            if isinstance(value, str | bool):
                seen.setdefault(key, {})[str(value)] = None
    return {key: tuple(values) for key, values in seen.items()}


def _counts(column: pd.Series[Any]) -> dict[str, int]:
    return dict(Counter(str(value) for value in column if str(value)).most_common())


def _without_numbers(error: str) -> str:
    return re.sub(r"0x[0-9a-f]+|\d+(\.\d+)?", "#", error)
