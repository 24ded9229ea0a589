"""Where task files come from: resolved in one place, in one order, every file fingerprinted.

    data folder   what the sweep or the command line names
    cache         what was fetched from the pinned sources before
    Hub           the pinned sources themselves: fetched into the cache, verified, then read from there

Nothing is replaced silently. A file that a task must have and that is in none of these is a :class:`DataError` naming
all that was tried and what would help; a file that a task may have (official wording, a haystack) is looked for where
no network is needed, and the recipe says what came of it.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

from tasks.catalogue import DataSet, data_set_of, fetchable
from tasks.task import TaskError

DATA_FOLDER, CACHE, HUB, OWN = "data folder", "cache", "Hub", "own file"


class DataError(TaskError):
    """A data file that is missing or malformed: which one, and what would fix it."""


class MissingData(DataError):
    """A file that was found nowhere."""


class Hub(Protocol):
    """Brings a whole data set into the cache, or raises :class:`DataError`."""

    def fetch(self, entry: DataSet) -> object: ...


@dataclass(frozen=True)
class Found:
    """Where a file was found. ``matches``: whether it is the pinned source's; None where its checksum is not known."""

    place: str
    path: Path
    sha256: str
    matches: bool | None


@dataclass(frozen=True)
class DataSources:
    """Files below ``data_dir``, then below ``cache_dir``, then what ``hub`` brings there. None: not looked in."""

    data_dir: Path | None = None
    cache_dir: Path | None = None
    hub: Hub | None = None
    _places: dict[str, tuple[str, Path]] = field(default_factory=dict, init=False, repr=False, compare=False)
    _failed: dict[str, str] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self._folders()

    def find(self, relative: str) -> Path | None:
        """The file, or None where it is neither in the data folder nor in the cache."""
        for place, folder in self._folders():
            if (folder / relative).is_file():
                return self._note(relative, place, folder / relative)
        return None

    def require(self, relative: str, needed_by: str) -> Path:
        """The file, fetched if need be; an error that names the task and all that was tried where it is not there."""
        path = self.find(relative) or self._fetch(relative)
        if path is None:
            raise MissingData(self._missing(relative, needed_by))
        return path

    def listing(self, folder: str, pattern: str) -> list[str]:
        """Names, for ``find``, of the files of a sub-folder that match: sorted, all from one place, or none."""
        for _, root in self._folders():
            files = (path for path in (root / folder).glob(pattern) if path.is_file())
            if found := sorted(files, key=lambda path: path.name):
                return [path.relative_to(root).as_posix() for path in found]
        return []

    def every(self, names: Iterable[str]) -> list[Path]:
        """The files of these names, from :meth:`listing`."""
        return [path for name in names if (path := self.find(name)) is not None]

    def own(self, path: Path, needed_by: str) -> Path:
        """A file that the sweep itself names."""
        if not path.is_file():
            raise MissingData(f"{needed_by} needs the file {path}, which is not there")
        return self._note(str(path), OWN, path)

    def order(self) -> list[str]:
        """The places looked in, in words."""
        return [*(f"{place} {folder}" for place, folder in self._folders()), *([HUB] if self.hub else [])]

    def found(self) -> dict[str, Found]:
        """Every file that was asked for so far and is there, by its path below a data folder.

        Raises :class:`DataError` for a file of the cache that is not what was fetched.
        """
        return {relative: self._verified(relative, *place) for relative, place in sorted(self._places.items())}

    def resolution(self) -> dict[str, Any]:
        """What :meth:`order` and :meth:`found` say, as JSON."""
        files = {
            relative: {"from": one.place, "path": str(one.path), "sha256": one.sha256, "pinned": one.matches}
            for relative, one in self.found().items()
        }
        return {"order": self.order(), "files": files}

    def _folders(self) -> list[tuple[str, Path]]:
        places = []
        if self.data_dir is not None:
            if not self.data_dir.is_dir():
                raise DataError(f"data_dir: there is no folder {self.data_dir}")
            places.append((DATA_FOLDER, self.data_dir))
        if self.cache_dir is not None:
            places.append((CACHE, self.cache_dir))
        return places

    def _note(self, relative: str, place: str, path: Path) -> Path:
        if relative not in self._places or self._places[relative][1] != path:  # fetched once stays fetched
            self._places[relative] = place, path
        return path

    def _fetch(self, relative: str) -> Path | None:
        entry = data_set_of(relative)
        if self.hub is None or self.cache_dir is None or entry is None or not fetchable(entry):
            return None
        if entry.name not in self._failed:
            try:
                self.hub.fetch(entry)
            except DataError as error:
                self._failed[entry.name] = str(error)
        path = self.cache_dir / relative
        return self._note(relative, HUB, path) if path.is_file() else None

    def _missing(self, relative: str, needed_by: str) -> str:
        entry = data_set_of(relative)
        tried = [f"the {place} {folder}" for place, folder in self._folders()]
        if self.hub is not None:
            tried.append(f"the Hub ({self._failed.get(entry.name if entry else '', 'it has no source for this file')})")
        fixes = [f"run `kvsweep data fetch {entry.name}`"] if entry and fetchable(entry) else []
        if self.data_dir is not None:
            what = f"{self.data_dir / relative}, which is not there"
            fixes.append("put it there")
        else:
            what = f"{relative}, and no data folder is given"
            fixes.append(f"give a data folder that holds {relative} (--data-dir)")
        looked = f"; tried {', '.join(tried)}" if tried else ""
        source = f"; it comes from {entry.source}: {entry.by_hand}" if entry and entry.by_hand else ""
        return f"{needed_by} needs the file {what}{looked}; {', or '.join(fixes)}{source}"

    def _verified(self, relative: str, place: str, path: Path) -> Found:
        entry = data_set_of(relative)
        file = entry.file(relative) if entry else None
        wanted = file.sha256 if file else None
        if wanted is None and place in (CACHE, HUB) and entry is not None and self.cache_dir is not None:
            wanted = checksums(self.cache_dir, entry).get(relative)
        found = fingerprint(path)
        if wanted not in (None, found) and place in (CACHE, HUB) and entry is not None:
            raise DataError(
                f"{path} is not the file that was fetched (its sha256 is {found}, not {wanted}): run `kvsweep data "
                f"fetch {entry.name}` to fetch it again"
            )
        return Found(place, path, found, None if wanted is None else found == wanted)


def checksums(folder: Path, entry: DataSet) -> dict[str, str]:
    """The sha256 of each file of a set, as written down when it was fetched into ``folder``."""
    try:
        lines = checksum_file(folder, entry).read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return {}
    return {path: digest for digest, _, path in (line.partition("  ") for line in lines)}


def checksum_file(folder: Path, entry: DataSet) -> Path:
    """In the format of ``sha256sum -c``."""
    return folder / f"{entry.name}.sha256"


def fingerprint(path: Path) -> str:
    """sha256 of the file's bytes."""
    status = path.stat()
    return _sha256(path, status.st_size, status.st_mtime_ns)


_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


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
    return [record for _, record in numbered_jsonl(path)]


def numbered_jsonl(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Line numbers, from 1, with the objects on them."""
    for number, line in enumerate(read_text(path).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise DataError(f"{path}, line {number} is not JSON: {error}") from error
        if not isinstance(record, dict):
            raise DataError(f"{path}, line {number}: expected an object with fields, got {line[:40]!r}")
        if _SURROGATE.search(line) and not _is_text(record):
            raise DataError(f"{path}, line {number}: half of a surrogate pair (\\ud800 to \\udfff) is no character")
        yield number, record


def _is_text(record: dict[str, Any]) -> bool:
    try:
        json.dumps(record, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def content_hash(content: object) -> str:
    """sha256 of a JSON-able value, independent of the order of its keys."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


@lru_cache(maxsize=256)
def _sha256(path: Path, size: int, modified: int) -> str:
    # Size and time of change are part of the key alone: a file that changes is read again.
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
