"""Prepared samples on disk, so that every process that works on a cell reads the same ones.

A file is named by the hash of everything that its samples depend on, except how many they are: the first N samples are
the same whatever N is. It is written under a temporary name and renamed, so writers may race; a file that does not
read back as it was written is made again.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
from dataclasses import asdict
from pathlib import Path

from tasks.sample import Sample
from tasks.sources import DataSources, content_hash
from tasks.task import Task
from tasks.tokens import Tokenizer

log = logging.getLogger(__name__)


def prepare(
    task: Task,
    tokenizer: Tokenizer,
    tokenizer_fingerprint: str,
    sources: DataSources,
    context: int | None,
    seed: int,
    count: int,
    overhead: int,
    folder: Path,
) -> list[Sample]:
    """The first ``count`` samples (fewer where there are fewer), from ``folder`` where they are there already."""
    seed = seed if task.seeded else 0
    key = content_hash([task.name, task.recipe(sources), tokenizer_fingerprint, context, seed, overhead])
    path = folder / f"{task.name}-{context or 'own'}-{key[:16]}.jsonl"
    available = task.available(sources)
    count = count if available is None else min(count, available)
    samples = _read(path)
    if samples is None or len(samples) < count:
        samples = task.samples(tokenizer, sources, context, seed, count, overhead)
        _write(path, samples)
    return samples[:count]


def _read(path: Path) -> list[Sample] | None:
    """The samples of a file; None where there is no such file, or not a sound one."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return None
    except UnicodeDecodeError:
        lines = ["not text"]
    try:
        return [_sample(json.loads(line), index) for index, line in enumerate(lines)]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        log.warning("%s is damaged (%s): its samples are made again", path, error)
        return None


def _write(path: Path, samples: list[Sample]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            for sample in samples:
                file.write(json.dumps({"sample_id": sample.sample_id, **asdict(sample)}) + "\n")
        os.replace(temporary, path)
    except OSError:
        Path(temporary).unlink(missing_ok=True)
        raise


def _sample(record: dict[str, object], index: int) -> Sample:
    sample_id = record.pop("sample_id")
    for name in ("references", "stop"):
        record[name] = tuple(record[name])  # type: ignore[arg-type]
    sample = Sample(**record)  # type: ignore[arg-type]
    if sample.sample_id != sample_id or sample.index != index:
        raise ValueError(f"line {index + 1} is not the sample that was written")
    return sample
