"""Prepared samples on disk, so that every process that works on a cell reads the same ones.

A file is named by the hash of everything that its samples depend on, except how many they are: the first N samples are
the same whatever N is. Samples are made once: whoever makes them holds a lock on the file beside theirs, which the
system releases when its holder ends, however it ends, and all others wait and read. A file is written under a
temporary name and renamed. Its first line is a manifest with the sha256 of the rest: one that is damaged is made again.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import logging
import os
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
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
    key = content_hash([task.name, task.version, task.recipe(sources), tokenizer_fingerprint, context, seed, overhead])
    path = folder / f"{task.name}-{context or 'own'}-{key[:16]}.jsonl"
    available = task.available(sources)
    count = count if available is None else min(count, available)
    samples = _read(path, count)
    if samples is None:
        with _alone(path):
            samples = _read(path, count)
            if samples is None:
                samples = _told_apart(task.samples(tokenizer, sources, context, seed, count, overhead))
                _write(path, samples)
    return samples[:count]


def _told_apart(samples: list[Sample]) -> list[Sample]:
    """Data may hold the same question twice: each is a sample of its own, and its results are kept by its id."""
    seen: Counter[str] = Counter()
    apart = []
    for sample in samples:
        apart.append(replace(sample, repeat=seen[sample.sample_id]))
        seen[sample.sample_id] += 1
    return apart


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_suffix(".lock").open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOTSUP):
                raise
            log.warning("%s: this file system has no locks, so samples may be made more than once", path.parent)
        yield


def _read(path: Path, count: int) -> list[Sample] | None:
    """The samples of a file; None where there is no such file, not a sound one, or one with fewer than ``count``."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    try:
        manifest, _, lines = content.partition(b"\n")
        if json.loads(manifest)["sha256"] != hashlib.sha256(lines).hexdigest():
            raise ValueError("its sha256 is not that of its first line")
        samples = [_sample(json.loads(line), index) for index, line in enumerate(lines.splitlines())]
        return samples if len(samples) >= count else None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        log.warning("%s is damaged (%s): its samples are made again", path, error)
        return None


def _write(path: Path, samples: list[Sample]) -> None:
    lines = [json.dumps({"sample_id": sample.sample_id, **asdict(sample)}) + "\n" for sample in samples]
    body = "".join(lines).encode()
    manifest = {"samples": len(lines), "sha256": hashlib.sha256(body).hexdigest()}
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(json.dumps(manifest).encode() + b"\n" + body)
        os.replace(temporary, path)
    except OSError:
        Path(temporary).unlink(missing_ok=True)
        raise


def _sample(record: dict[str, object], index: int) -> Sample:
    sample_id = record.pop("sample_id")
    for name in ("references", "stop", "classes"):
        record[name] = tuple(record[name])  # type: ignore[arg-type]
    sample = Sample(**record)  # type: ignore[arg-type]
    if sample.sample_id != sample_id or sample.index != index:
        raise ValueError(f"line {index + 1} is not the sample that was written")
    return sample
