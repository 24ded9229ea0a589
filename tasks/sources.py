"""Where task files come from: one data folder, resolved in one place, every file fingerprinted.

Nothing is replaced silently. A file that a task must have and that is not there is a :class:`DataError` naming the
path; a file that a task may have (official wording, a haystack) is looked for, and the recipe says what came of it.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from tasks.task import TaskError


class DataError(TaskError):
    """A data file that is missing or malformed: which one, and what would fix it."""


@dataclass(frozen=True)
class DataSources:
    """Files below ``data_dir``; None: no folder, tasks use what is built in or the Hub."""

    data_dir: Path | None = None

    def __post_init__(self) -> None:
        self._folder()

    def find(self, relative: str) -> Path | None:
        """The file, or None where it is not there."""
        folder = self._folder()
        if folder is None:
            return None
        path = folder / relative
        return path if path.is_file() else None

    def require(self, relative: str, needed_by: str) -> Path:
        """The file; an error that names the task and the path where it is not there."""
        path = self.find(relative)
        if path is None:
            if self.data_dir is None:
                raise DataError(f"{needed_by} needs the file {relative}, and no data folder is given: set data_dir")
            raise DataError(f"{needed_by} needs the file {self.data_dir / relative}, which is not there")
        return path

    def listing(self, folder: str, pattern: str) -> list[Path]:
        """Files of a sub-folder that match, sorted by name; empty where there are none."""
        root = self._folder()
        if root is None:
            return []
        return sorted((path for path in (root / folder).glob(pattern) if path.is_file()), key=lambda path: path.name)

    def _folder(self) -> Path | None:
        if self.data_dir is not None and not self.data_dir.is_dir():
            raise DataError(f"data_dir: there is no folder {self.data_dir}")
        return self.data_dir


def fingerprint(path: Path) -> str:
    """sha256 of the file's bytes."""
    status = path.stat()
    return _sha256(path, status.st_size, status.st_mtime_ns)


def read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text: {error}") from error


def read_json(path: Path) -> Any:
    try:
        return json.loads(read_text(path))
    except json.JSONDecodeError as error:
        raise DataError(f"{path} is not JSON: {error}") from error


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """One JSON object a line; blank lines are skipped."""
    records = []
    for number, line in enumerate(read_text(path).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise DataError(f"{path}, line {number} is not JSON: {error}") from error
        if not isinstance(record, dict):
            raise DataError(f"{path}, line {number}: expected an object with fields, got {line[:40]!r}")
        records.append(record)
    return records


def content_hash(content: object) -> str:
    """sha256 of a JSON-able value, independent of the order of its keys."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


@lru_cache(maxsize=256)
def _sha256(path: Path, size: int, modified: int) -> str:
    # Size and time of change are part of the key alone: a file that changes is read again.
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
