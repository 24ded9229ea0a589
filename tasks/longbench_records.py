"""LongBench's records: one JSONL file per task, checked before anything rests on it.

A file has the official number of records or is refused. A shorter one, and the sample that some data folders have
below ``longbench/ship``, count only where the setting ``allow_partial`` says so; the recipe of every cell names the
number, so that scores over parts are never taken for scores over all.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from tasks.sources import DataError, DataSources, fingerprint, read_jsonl, read_text

RECORDS = ("longbench/{name}.jsonl", "longbench/data/{name}.jsonl")
"""The second is how the official archive unpacks."""
SAMPLE = "longbench/ship/{name}.jsonl"
COLUMNS = ("input", "context", "answers", "length", "dataset", "language", "all_classes", "_id")


@dataclass(frozen=True)
class Record:
    """``length``: words of context, input and first answer."""

    id: str
    context: str
    input: str
    answers: tuple[str, ...]
    length: int


@dataclass(frozen=True)
class RecordFile:
    """``classes``: those of the last record, which the official scorer takes for all."""

    sha256: str
    records: tuple[Record, ...]
    classes: tuple[str, ...]


def load_records(
    name: str, official_count: int, labelled: bool, allow_partial: bool, sources: DataSources
) -> RecordFile:
    path = _find(name, allow_partial, sources)
    file = _read(path, fingerprint(path), name, labelled)
    found = len(file.records)
    if found > official_count or not file.records:
        raise DataError(f"{path} has {found} records, and LongBench's {name} has {official_count}: give that file")
    if found < official_count and not allow_partial:
        raise DataError(
            f"{path} has {found} records, and LongBench's {name} has {official_count}: give the whole file, or set "
            "allow_partial: true to run on these alone"
        )
    return file


def _find(name: str, allow_partial: bool, sources: DataSources) -> Path:
    places = (*RECORDS, SAMPLE) if allow_partial else RECORDS
    for place in places:
        path = sources.find(place.format(name=name))
        if path is not None:
            return path
    try:
        return sources.require(RECORDS[-1].format(name=name), f"task {name}")
    except DataError as error:
        sample = None if allow_partial else sources.find(SAMPLE.format(name=name))
        if sample is None:
            raise
        raise DataError(f"{error}; to run on the sample {sample} alone, set allow_partial: true") from error


@lru_cache(maxsize=4)
def _read(path: Path, sha256: str, name: str, labelled: bool) -> RecordFile:
    # The fingerprint is part of the key alone: a file that changes is read again.
    lines = [number for number, line in enumerate(read_text(path).split("\n"), start=1) if line.strip()]
    records: list[Record] = []
    classes: tuple[str, ...] = ()
    seen: dict[str, int] = {}
    for number, fields in zip(lines, read_jsonl(path), strict=True):
        where = f"{path}, line {number} (_id {fields.get('_id')!r})"
        problem = next(_problems(fields, name, labelled), None)
        if problem is None and fields["_id"] in seen:
            problem = f"the same _id is on line {seen[fields['_id']]}"
        if problem is not None:
            raise DataError(f"{where}: {problem}")
        seen[fields["_id"]] = number
        classes = tuple(fields["all_classes"]) if labelled else ()
        answers = tuple(fields["answers"])
        records.append(Record(fields["_id"], fields["context"], fields["input"], answers, fields["length"]))
    return RecordFile(sha256, tuple(records), classes)


def _problems(fields: dict[str, Any], name: str, labelled: bool) -> Iterator[str]:
    missing = [column for column in COLUMNS if column not in fields]
    if missing:
        yield f"there is no {', '.join(missing)}; LongBench's columns are {', '.join(COLUMNS)}"
        return
    if not isinstance(fields["_id"], str) or not fields["_id"]:
        yield "_id must be text"
    if fields["dataset"] not in (name, name.removesuffix("_e")):
        yield f"dataset is {fields['dataset']!r}, so this is not a record of {name}"
    if not isinstance(fields["input"], str):
        yield f"input must be text, not {fields['input']!r:.60}"
    if not isinstance(fields["context"], str):
        yield f"context must be text, not {fields['context']!r:.60}"
    elif not fields["context"].strip():
        yield "the context is empty"
    if not _is_list_of_texts(fields["answers"]):
        yield f"answers must be a list of at least one text, not {fields['answers']!r:.60}"
    if isinstance(fields["length"], bool) or not isinstance(fields["length"], int):
        yield f"length must be a whole number, not {fields['length']!r:.60}"
    if labelled and not _is_list_of_texts(fields["all_classes"]):
        yield f"all_classes must list the names that {name} chooses from, not {fields['all_classes']!r:.60}"


def _is_list_of_texts(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(entry, str) for entry in value)
