"""A task of one's own: a JSONL file of prompts with references, and a metric named in the sweep file.

    {"prompt": "...", "references": ["..."]}                          a prompt as it is
    {"context": "...", "question": "...", "references": "..."}        context, separator, question

Only the second form tells a protocol that compresses the context alone what the context is; it refuses the first. With
``max_length`` the middle of longer prompts is cut in LongBench's way (:mod:`tasks.truncate`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

from tasks import metrics
from tasks.groups import GROUPS
from tasks.sample import Sample, document_name
from tasks.sources import DataError, DataSources, fingerprint, numbered_jsonl
from tasks.task import TaskError, check_choice, check_context, check_limit, nearest
from tasks.tokens import Tokenizer
from tasks.truncate import cut_prompt

FIELDS = (
    *("prompt", "context", "question", "answer_prefix", "references"),
    *("id", "max_new_tokens", "stop", "classes", "meta"),
)

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True)
class Record:
    """``max_new_tokens`` None: the task's."""

    line: int
    context: str
    question: str
    answer_prefix: str
    references: tuple[str, ...]
    id: str
    max_new_tokens: int | None
    stop: tuple[str, ...]
    classes: tuple[str, ...]
    meta: Mapping[str, object] = field(compare=False)


@dataclass(frozen=True)
class JsonlTask:
    """``chat``: whether prompts go into the chat template; ``separator`` stands between a context and its question."""

    name: str
    file: str
    metric: str = ""
    max_new_tokens: int | None = None
    chat: bool = True
    max_length: int | None = None
    separator: str = "\n\n"

    version: ClassVar[int] = 1
    contextual: ClassVar[bool] = False
    seeded: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name) or self.name in GROUPS:
            why = "that of a group of tasks" if self.name in GROUPS else "letters, digits, '.', '_' and '-' alone"
            raise TaskError(f"task {self.name}: a task of your own needs another name; this one is not: {why}")
        if not isinstance(self.file, str) or not self.file:
            raise TaskError(f"task {self.name}: file must be the path of a JSONL file, not {self.file!r}")
        if not isinstance(self.metric, str) or self.metric not in metrics.METRICS:
            near = nearest(str(self.metric), metrics.METRICS)
            what = f"there is no metric {self.metric!r}{near}" if self.metric else "metric is required"
            raise TaskError(f"task {self.name}: {what}; there are {', '.join(metrics.METRICS)}")
        check_limit(self.name, self.max_new_tokens)
        check_choice(self.name, "chat", self.chat, (True, False))
        if self.max_length is not None and (type(self.max_length) is not int or self.max_length < 2):
            raise TaskError(
                f"task {self.name}: max_length must be a whole number of at least 2, not {self.max_length!r}"
            )
        if not isinstance(self.separator, str):
            raise TaskError(f"task {self.name}: separator must be text, not {self.separator!r}")

    @property
    def summary(self) -> str:
        return f"records of {self.file}"

    @property
    def generation_limit(self) -> int:
        """The largest of all records."""
        return max(self._limit(record) for record in self._read(Path(self.file)))

    def recipe(self, sources: DataSources) -> dict[str, object]:
        return {
            "task": self.name,
            "version": self.version,
            "records": fingerprint(self._path(sources)),
            "metric": self.metric,
            "max_new_tokens": self.max_new_tokens,
            "chat": self.chat,
            "max_length": self.max_length,
            "separator": self.separator,
        }

    def check(self, sources: DataSources, context: int | None) -> None:
        check_context(self.name, self.contextual, context)
        path = self._path(sources)
        for record in self._read(path):
            if record.max_new_tokens is None and self.max_new_tokens is None:
                raise DataError(
                    f"task {self.name}: {path}, line {record.line}: neither the record nor the task says max_new_tokens"
                )

    def available(self, sources: DataSources) -> int | None:
        return len(self._read(self._path(sources)))

    def samples(
        self, tokenizer: Tokenizer, sources: DataSources, context: int | None, seed: int, count: int, overhead: int
    ) -> list[Sample]:
        self.check(sources, context)
        records = self._read(self._path(sources))[:count]
        return [self._sample(index, record, tokenizer) for index, record in enumerate(records)]

    def _sample(self, index: int, record: Record, tokenizer: Tokenizer) -> Sample:
        context = record.context + self.separator if record.context else ""
        question = record.question
        shared = {"document": document_name(record.context)} if record.context else {}
        meta = {**shared, **record.meta, "file": Path(self.file).name, **({"id": record.id} if record.id else {})}
        if self.max_length is not None:
            cut = cut_prompt(context, question, tokenizer, self.max_length)
            context, question = cut.context, cut.question
            meta |= {"uncut_tokens": cut.tokens, "truncated": cut.truncated}
        return Sample(
            task=self.name,
            index=index,
            context=context,
            question=question,
            answer_prefix=record.answer_prefix,
            references=record.references,
            max_new_tokens=self._limit(record),
            metric=self.metric,
            stop=record.stop,
            chat=self.chat,
            classes=record.classes,
            meta=meta,
        )

    def _limit(self, record: Record) -> int:
        return record.max_new_tokens or self.max_new_tokens or 1

    def _path(self, sources: DataSources) -> Path:
        return sources.own(Path(self.file), f"task {self.name}")

    def _read(self, path: Path) -> tuple[Record, ...]:
        try:
            records = _records(path, fingerprint(path))
            _check_scorable(path, records, self.metric)
        except DataError as error:
            raise DataError(f"task {self.name}: {error}") from error
        return records


@lru_cache(maxsize=16)
def _records(path: Path, sha256: str) -> tuple[Record, ...]:
    """All records, each of them once."""
    # The fingerprint is part of the key alone: a file that changes is read again.
    records: list[Record] = []
    ids: dict[str, int] = {}
    contents: dict[str, int] = {}
    for line, fields in numbered_jsonl(path):
        where = f"{path}, line {line}"
        record = _record(line, fields, where)
        if record.id and ids.setdefault(record.id, line) != line:
            raise DataError(f"{where}: id {record.id!r} is that of line {ids[record.id]}: give each record its own")
        content = json.dumps({key: fields[key] for key in fields if key not in ("id", "meta")}, sort_keys=True)
        if contents.setdefault(content, line) != line:
            raise DataError(f"{where}: the same record as line {contents[content]}: remove one")
        records.append(record)
    if not records:
        raise DataError(f"{path} has no records")
    return tuple(records)


def _record(line: int, fields: Mapping[str, Any], where: str) -> Record:
    for name in fields:
        if name not in FIELDS:
            raise DataError(f"{where}: there is no field {name!r}{nearest(name, FIELDS)}; fields: {', '.join(FIELDS)}")
    if "prompt" in fields and ("context" in fields or "question" in fields):
        raise DataError(f"{where}: prompt stands for the whole text: leave it out, or context and question")
    whole = "prompt" in fields or not ("context" in fields or "question" in fields)
    limit = fields.get("max_new_tokens")
    if limit is not None and (type(limit) is not int or limit < 1):
        raise DataError(f"{where}: max_new_tokens must be a whole number of at least 1, not {limit!r}")
    given_id = fields.get("id", "")
    if type(given_id) not in (str, int):
        raise DataError(f"{where}: id must be text or a whole number, not {given_id!r}")
    meta = fields.get("meta", {})
    if not isinstance(meta, dict):
        raise DataError(f"{where}: meta must be an object, not {meta!r}")
    return Record(
        line,
        "" if whole else _text(fields, "context", where),
        _text(fields, "prompt" if whole else "question", where),
        _text(fields, "answer_prefix", where) if fields.get("answer_prefix") else "",
        _texts(fields, "references", where),
        str(given_id),
        limit,
        _texts(fields, "stop", where) if "stop" in fields else (),
        _texts(fields, "classes", where) if "classes" in fields else (),
        meta,
    )


def _text(fields: Mapping[str, Any], name: str, where: str) -> str:
    if name not in fields:
        others = "; a record has prompt, or context and question" if name != "answer_prefix" else ""
        raise DataError(f"{where}: {name} is missing{others}")
    text = fields[name]
    if not isinstance(text, str):
        raise DataError(f"{where}: {name} must be text, not {text!r}")
    if not text.strip():
        raise DataError(f"{where}: {name} is empty")
    return text


def _texts(fields: Mapping[str, Any], name: str, where: str) -> tuple[str, ...]:
    """A list of texts; one text stands for a list of it."""
    if name not in fields:
        raise DataError(f"{where}: {name} is missing")
    texts = [fields[name]] if isinstance(fields[name], str) else fields[name]
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
        raise DataError(f"{where}: {name} must be text, or a list of at least one text, not {fields[name]!r}")
    blank = [text for text in texts if not (text if name == "stop" else text.strip())]
    if blank:
        raise DataError(f"{where}: {name} holds an empty text, which every prediction would match")
    return tuple(texts)


@lru_cache(maxsize=16)
def _check_scorable(path: Path, records: tuple[Record, ...], metric: str) -> None:
    """Whether the metric can read the references: found out before hours of generation, not after."""
    for record in records:
        where = f"{path}, line {record.line}"
        if metric.startswith("classification") and not set(record.references) <= set(record.classes):
            raise DataError(f"{where}: metric {metric} needs classes, with the references among them")
        for reference in record.references:
            try:
                best = max(
                    metrics.score(metric, prediction, (reference,), record.classes)
                    for prediction in (reference, f"#### {reference}")
                )
            except (ArithmeticError, LookupError, ValueError) as error:
                raise DataError(
                    f"{where}: metric {metric} cannot read the reference {reference!r} ({error!r})"
                ) from error
            if not best:
                raise DataError(f"{where}: under metric {metric} no answer matches the reference {reference!r}")
