"""Fetching data sets from their pinned sources: a file is there whole and with the right checksum, or not at all."""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
import urllib.request
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from shutil import copyfileobj
from typing import IO, Any
from urllib.error import URLError

from tasks.catalogue import HUB, DataSet, fetchable
from tasks.sources import DataError, checksum_file, checksums, fingerprint

TIMEOUT_S = 30.0
CHUNK = 2**20
YES = ("1", "ON", "YES", "TRUE")

log = logging.getLogger("kvsweep.data")


class DownloadError(DataError):
    """A data set that cannot be fetched: from where, and why."""


def open_url(url: str) -> Any:
    """A response to read from. ``HF_ENDPOINT`` and the usual proxy variables hold; ``HF_HUB_OFFLINE`` forbids."""
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in YES:
        raise OSError("HF_HUB_OFFLINE is set")
    return urllib.request.urlopen(url, timeout=TIMEOUT_S)


@dataclass(frozen=True)
class Downloader:
    """Fetches into ``folder``, which has the layout of a data folder."""

    folder: Path
    open_url: Callable[[str], Any] = open_url

    def fetch(self, entry: DataSet) -> list[Path]:
        """Fetch what is not there yet, or not as it was; returns what is new."""
        if not fetchable(entry):
            raise DownloadError(f"{entry.name} cannot be fetched; it comes from {entry.source}: {entry.by_hand}")
        wanted = checksums(self.folder, entry) | {file.path: file.sha256 for file in entry.files if file.sha256}
        missing = [file for file in entry.files if not _is(self.folder / file.path, wanted.get(file.path))]
        if not missing:
            return []
        try:
            if entry.archive is not None:
                self._unpack(entry, [file.path for file in missing])
            for file in missing:
                if file.url:
                    with self._downloaded(file.url, file.sha256 or "") as temporary:
                        _move(temporary, self.folder / file.path)
            self._write_checksums(entry)
        except OSError as error:
            raise DownloadError(f"{self.folder} cannot be written: {error}") from error
        return [self.folder / file.path for file in missing]

    def _unpack(self, entry: DataSet, paths: list[str]) -> None:
        archive = entry.archive
        assert archive is not None
        with self._downloaded(archive.url, archive.sha256) as temporary, zipfile.ZipFile(temporary) as members:
            lacking = {path for path in paths if path.removeprefix(f"{archive.folder}/") not in members.namelist()}
            if lacking:
                raise DownloadError(f"{archive.url} does not hold {', '.join(sorted(lacking))}")
            for path in paths:
                with members.open(path.removeprefix(f"{archive.folder}/")) as member, self._temporary() as (file, name):
                    copyfileobj(member, file, CHUNK)
                    file.close()
                    _move(name, self.folder / path)

    @contextmanager
    def _downloaded(self, url: str, sha256: str) -> Iterator[Path]:
        """The file behind an address for as long as the context lasts, if it has the right checksum."""
        address = url.replace(HUB, (os.environ.get("HF_ENDPOINT") or HUB).rstrip("/"), 1)
        log.info("fetching %s", address)
        digest = hashlib.sha256()
        with self._temporary() as (file, name):
            try:
                with self.open_url(address) as response:
                    while chunk := response.read(CHUNK):
                        digest.update(chunk)
                        file.write(chunk)
            except (OSError, HTTPException, ValueError) as error:
                reason = error.reason if type(error) is URLError else error
                raise DownloadError(
                    f"{address} cannot be fetched: {reason}; check the network, or put the files into a data folder"
                ) from error
            file.close()
            if digest.hexdigest() != sha256:
                raise DownloadError(
                    f"{address} served something else: its sha256 is {digest.hexdigest()}, not {sha256}"
                )
            yield name

    @contextmanager
    def _temporary(self) -> Iterator[tuple[IO[bytes], Path]]:
        self.folder.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=".fetching-", dir=self.folder)
        try:
            with os.fdopen(handle, "wb") as file:
                yield file, Path(name)
        finally:
            Path(name).unlink(missing_ok=True)

    def _write_checksums(self, entry: DataSet) -> None:
        lines = [f"{fingerprint(self.folder / file.path)}  {file.path}\n" for file in entry.files]
        with self._temporary() as (file, name):
            file.write("".join(lines).encode())
            file.close()
            _move(name, checksum_file(self.folder, entry))


def _is(path: Path, sha256: str | None) -> bool:
    return sha256 is not None and path.is_file() and fingerprint(path) == sha256


def _move(temporary: Path, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary.chmod(0o644)
    os.replace(temporary, path)
