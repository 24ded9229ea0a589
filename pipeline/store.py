"""Results: immutable Parquet parts in a folder or bucket, read back as one table.

    OUTPUT/
      parts/<time>-<id>.parquet     rows, at most a few seconds apart; written once, never touched again
      parts/<...>.parquet.corrupt   a part that could not be read: set aside, its rows run again
      lost/<time>-<id>.json         attempts that ended without their rows, and why (pipeline.losses)
      sweep.yaml, plan.json         what was asked, and the cells that it means
      lease.json                    the driver that writes here now

What is done is what these parts say; there is no other state. A row may occur twice (a driver killed between a
write and its report): reading keeps one row per (cell, sample), the newest successful one first.
"""

from __future__ import annotations

import json
import logging
import time
import typing
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import MISSING, fields
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit, urlunsplit

import pyarrow as pa
import pyarrow.compute
import pyarrow.fs
import pyarrow.parquet as pq

from pipeline.errors import SweepProblem
from pipeline.files import put
from pipeline.losses import Loss
from workers.row import Row

SCHEMA_VERSION = 1
VERSION_KEY = b"kvsweep.schema"
FLUSH_ROWS = 64
FLUSH_S = 10.0
SPACING_S = 1.0
"""However fast rows come, parts are this far apart: each costs the driver time, and every reader more."""
MOST_ROWS = 4096
"""But no more rows than this are held for it."""
RETRY_S = 5.0
"""How long storage that failed is left alone."""
LOOK_S = 0.1
"""How often the wait for it looks up."""
PATIENCE_S = 300.0
"""How long writes may fail before the sweep does."""

log = logging.getLogger("kvsweep.store")


class StoreError(SweepProblem):
    """An output that cannot be read or written, and what to do about it."""


class StorageLost(StoreError):
    """Writes have failed for longer than a sweep waits: what was not written runs again."""

    exit_code = 3


@contextmanager
def reached(folder: Folder, action: Literal["read", "write"]) -> Iterator[None]:
    """Turns the storage's own errors into a :class:`StoreError`."""
    try:
        yield
    except OSError as error:
        raise StoreError(f"output: cannot {action} {folder.uri}: {_one_line(error)}") from None


class Folder:
    """A folder behind any URI that pyarrow understands, or a local path. Files appear whole or not at all."""

    def __init__(self, uri: str) -> None:
        try:
            if "://" in uri:
                self._filesystem, self._base = pa.fs.FileSystem.from_uri(uri)
                self.uri = without_secrets(uri).rstrip("/")
            else:
                self._filesystem, self._base = pa.fs.LocalFileSystem(), str(Path(uri).resolve())
                self.uri = self._base
        except (pa.ArrowInvalid, OSError) as error:
            raise StoreError(f"output: {without_secrets(uri)} cannot be opened: {_one_line(error)}") from None

    @property
    def local(self) -> Path | None:
        """The folder's path, where it is on this machine."""
        return Path(self._base) if self._filesystem.type_name == "local" else None

    def path(self, name: str) -> str:
        """Where ``name`` is, as a person would write it."""
        return f"{self.uri}/{name}"

    def read(self, name: str) -> bytes | None:
        try:
            with self._filesystem.open_input_stream(f"{self._base}/{name}") as stream:
                return bytes(stream.read())
        except FileNotFoundError:
            return None

    def write(self, name: str, content: bytes) -> None:
        """Put a file in place at once: a rename where there are renames, a single put on an object store."""
        final = f"{self._base}/{name}"
        if self._filesystem.type_name in ("s3", "gcs", "abfs"):
            with self._filesystem.open_output_stream(final) as stream:
                stream.write(content)
            return
        if self.local is not None:
            put(Path(final), content)
            return
        self._filesystem.create_dir(final.rsplit("/", 1)[0], recursive=True)
        temporary = f"{final}.{uuid.uuid4().hex[:8]}.tmp"
        with self._filesystem.open_output_stream(temporary) as stream:
            stream.write(content)
        self._filesystem.move(temporary, final)

    def rename(self, name: str, new_name: str) -> None:
        self._filesystem.move(f"{self._base}/{name}", f"{self._base}/{new_name}")

    def delete(self, name: str) -> None:
        try:
            self._filesystem.delete_file(f"{self._base}/{name}")
        except FileNotFoundError:
            return

    def list(self, folder: str, suffix: str) -> list[str]:
        """Names of the files in a folder, sorted."""
        selector = pa.fs.FileSelector(f"{self._base}/{folder}", allow_not_found=True)
        names = [f"{folder}/{info.base_name}" for info in self._filesystem.get_file_info(selector)]
        return sorted(name for name in names if name.endswith(suffix))


class Store:
    """The rows of one output. ``add`` collects rows; ``flush_if_due`` writes them within seconds."""

    def __init__(self, output: str) -> None:
        self.folder = Folder(output)
        self._pending: list[Row] = []
        self._losses: list[Loss] = []
        self._oldest = 0.0
        self._not_before = 0.0
        self._failing_since: float | None = None

    @property
    def uri(self) -> str:
        return self.folder.uri

    @property
    def unwritten(self) -> int:
        """Rows that are in memory alone."""
        return len(self._pending)

    def add(self, rows: Sequence[Row]) -> None:
        if not rows:
            return
        self._begin_to_wait()
        self._pending.extend(rows)
        self.flush_if_due()

    def note(self, loss: Loss) -> None:
        """Keep why an attempt was lost; it is written with the next rows, or as soon as rows would be."""
        self._begin_to_wait()
        self._losses.append(loss)

    def _begin_to_wait(self) -> None:
        if not (self._pending or self._losses):
            self._oldest = time.monotonic()

    def flush_if_due(self) -> None:
        """Write by number or age. Storage that is out of reach is tried again, for a while."""
        now = time.monotonic()
        aged = bool(self._pending or self._losses) and now - self._oldest >= FLUSH_S
        due = aged or len(self._pending) >= FLUSH_ROWS
        full = len(self._pending) >= MOST_ROWS and self._failing_since is None
        if full or (due and now >= self._not_before):
            self._try_to_flush(PATIENCE_S)

    def close(self, patience: Callable[[], float] = lambda: PATIENCE_S) -> None:
        """Write all that is left, trying for so many seconds: asked again and again, since a signal may shorten them.
        Raises :class:`StorageLost`."""
        while not self._try_to_flush(patience()):
            self._rest(patience)

    def _rest(self, patience: Callable[[], float]) -> None:
        """Until storage is to be tried again: sooner where that is the last try."""
        began, failing_since = time.monotonic(), self._failing_since or 0.0
        while (now := time.monotonic()) - began < RETRY_S and now - failing_since < patience():
            time.sleep(LOOK_S)

    def _try_to_flush(self, patience_s: float) -> bool:
        """False if storage failed, and is to be tried again. Raises :class:`StorageLost` at the end of patience."""
        now = time.monotonic()
        try:
            self.flush()
        except StoreError as error:
            self._failing_since = self._failing_since or now
            if now - self._failing_since >= patience_s:
                raise StorageLost(f"{error}; once it can, the same command runs again what was not written") from None
            self._not_before = now + RETRY_S
            log.warning("%s; %d rows are kept and written later", error, len(self._pending))
            return False
        self._failing_since = None
        self._not_before = now + SPACING_S
        return True

    def flush(self) -> None:
        """Write the collected rows as one part. They are kept if writing fails."""
        if self._pending:
            sink = pa.BufferOutputStream()
            pq.write_table(rows_table(self._pending), sink)
            with reached(self.folder, "write"):
                self.folder.write(f"parts/{_unique_name()}.parquet", sink.getvalue().to_pybytes())
            self._pending.clear()
        if self._losses:
            with reached(self.folder, "write"):
                self.folder.write(f"lost/{_unique_name()}.json", json.dumps(list(map(vars, self._losses))).encode())
            self._losses.clear()

    def losses(self) -> list[Loss]:
        """Attempts that ended without their rows, in the order in which they were noted."""
        with reached(self.folder, "read"):
            contents = [self.folder.read(name) for name in self.folder.list("lost", ".json")]
        kept = [Loss(**fields) for content in contents if content is not None for fields in json.loads(content)]
        return sorted(kept, key=lambda loss: loss.at)

    def rows(self) -> pa.Table:
        """One row per (cell, sample), the newest successful one first, in the order of cells and samples."""
        return newest_successful(self._read(columns=None))

    def attempts(self, columns: Sequence[str]) -> pa.Table:
        """Some columns of all rows ever written, repeats included."""
        return self._read(columns)

    def save_plan(self, sweep_file: str, manifest: dict[str, Any]) -> None:
        """Keep the sweep file's text and what it was expanded to."""
        with reached(self.folder, "write"):
            self.folder.write("sweep.yaml", sweep_file.encode())
            self.folder.write("plan.json", json.dumps(manifest).encode())

    def has_plan(self) -> bool:
        return self._plan() is not None

    def manifest(self) -> dict[str, Any]:
        content = self._plan()
        if content is None:
            raise StoreError(f"{self.uri} is not the output of a sweep: it has no plan.json")
        return dict(json.loads(content))

    def _plan(self) -> bytes | None:
        with reached(self.folder, "read"):
            return self.folder.read("plan.json")

    def _read(self, columns: Sequence[str] | None) -> pa.Table:
        with reached(self.folder, "read"), ThreadPoolExecutor(16) as threads:
            names = self.folder.list("parts", ".parquet")
            contents = list(threads.map(self.folder.read, names))
        schema = row_schema()
        wanted = schema if columns is None else pa.schema([schema.field(name) for name in columns])
        tables = [wanted.empty_table()]
        for name, content in zip(names, contents, strict=True):
            table = self._parse(name, content, wanted) if content is not None else None
            if table is not None:
                tables.append(table)
        return pa.concat_tables(tables)

    def _parse(self, name: str, content: bytes, wanted: pa.Schema) -> pa.Table | None:
        """A part's rows, or None for one that is damaged: it is named and set aside."""
        try:
            file = pq.ParquetFile(pa.BufferReader(content))
            version = int((file.schema_arrow.metadata or {}).get(VERSION_KEY, 0))
            table = file.read(columns=[column for column in wanted.names if column in file.schema_arrow.names])
        except (pa.ArrowException, OSError) as error:
            try:
                self.folder.rename(name, f"{name}.corrupt")
                fate = "set aside as .corrupt"
            except OSError as refusal:
                fate = f"left out, and in place ({_one_line(refusal)})"
            log.warning(
                "%s is damaged (%s): %s, its rows will run again", self.folder.path(name), _one_line(error), fate
            )
            return None
        if version > SCHEMA_VERSION:
            raise StoreError(f"{self.folder.path(name)} was written by a newer kvsweep: update this one")
        return _conform(table, wanted)


def rows_table(rows: Sequence[Row]) -> pa.Table:
    """Rows as the parts hold them."""
    schema = row_schema()
    columns = [pa.array([getattr(row, name) for row in rows], schema.field(name).type) for name in schema.names]
    return pa.Table.from_arrays(columns, schema=schema)


@lru_cache(maxsize=1)
def row_schema() -> pa.Schema:
    """The Parquet schema of :class:`workers.row.Row`, in the order of its fields."""
    types = typing.get_type_hints(Row)
    return pa.schema(
        [pa.field(field.name, _arrow_type(types[field.name])) for field in fields(Row)],
        metadata={VERSION_KEY: str(SCHEMA_VERSION).encode()},
    )


def _arrow_type(kind: Any) -> pa.DataType:
    if typing.get_origin(kind) is list:
        return pa.list_(_arrow_type(typing.get_args(kind)[0]))
    plain = {str: pa.string(), int: pa.int64(), float: pa.float64(), bool: pa.bool_()}
    options = [option for option in typing.get_args(kind) if option is not type(None)]  # X | None
    return plain[options[0] if options else kind]


def _conform(table: pa.Table, wanted: pa.Schema) -> pa.Table:
    """A part of an earlier schema, with the columns it lacks filled with their defaults."""
    defaults = {field.name: None if field.default is MISSING else field.default for field in fields(Row)}
    columns = [
        table[field.name].cast(field.type)
        if field.name in table.column_names
        else pa.array([defaults[field.name]] * table.num_rows, field.type)
        for field in wanted
    ]
    return pa.Table.from_arrays(columns, schema=wanted)


def newest_successful(rows: pa.Table) -> pa.Table:
    """Drop repeats of a (cell, sample): a successful row goes before a failed one, a newer before an older."""
    if rows.num_rows == 0:
        return rows
    order = pa.table(
        {
            "cell_id": rows["cell_id"],
            "sample_id": rows["sample_id"],
            "sample_index": rows["sample_index"],
            "failed": pa.compute.not_equal(rows["status"], "ok"),
            "finished_at": rows["finished_at"],
            "attempt": rows["attempt"],
            "row": pa.array(range(rows.num_rows), pa.int64()),
        }
    ).sort_by([("failed", "ascending"), ("finished_at", "descending"), ("attempt", "descending")])
    kept = order.group_by(["cell_id", "sample_id"], use_threads=False).aggregate(
        [("row", "first"), ("sample_index", "first")]
    )
    kept = kept.sort_by([("cell_id", "ascending"), ("sample_index_first", "ascending"), ("sample_id", "ascending")])
    return rows.take(kept["row_first"])


def final_samples(rows: pa.Table, retry_failed: bool) -> set[tuple[str, int]]:
    """The (cell, sample index) pairs that need no more work. A failed row is final unless failures are retried."""
    done: set[tuple[str, int]] = set()
    columns: Iterable[tuple[str, int, str]] = zip(
        rows["cell_id"].to_pylist(), rows["sample_index"].to_pylist(), rows["status"].to_pylist(), strict=True
    )
    for cell_id, index, status in columns:
        if status == "ok" or not retry_failed:
            done.add((cell_id, index))
    return done


def without_secrets(uri: str) -> str:
    """A URI as it may be shown: a user name and a password, or an access key, are left out."""
    parts = urlsplit(uri)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2])) if "@" in parts.netloc else uri


def _unique_name() -> str:
    """Sorted by time."""
    return f"{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}-{uuid.uuid4().hex[:12]}"


def _one_line(error: object) -> str:
    return " ".join(str(error).split())
