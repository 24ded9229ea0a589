"""The store: rows in immutable parts, read back as one table; the lease on an output."""

from __future__ import annotations

import json
import logging
import os
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from stub_worker import row

import pipeline.lease
import pipeline.store
from pipeline.lease import FILE, Lease, LeaseHeld
from pipeline.losses import Loss
from pipeline.store import Folder, Store, StoreError, final_samples, newest_successful, row_schema
from workers.row import Row


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(str(tmp_path / "out"))


def parts(store: Store) -> list[str]:
    return store.folder.list("parts", ".parquet")


def table(*rows: Row) -> pa.Table:
    return pa.Table.from_pylist([asdict(one) for one in rows], schema=row_schema())


def test_a_row_reads_back_as_it_was_written(store: Store) -> None:
    written = row("c", 3, prediction="ünï", references=["a", "b"], ttft_s=None, over_budget=True, kv_bytes_full=2**40)
    store.add([written])
    store.flush()
    assert Row(**store.rows().to_pylist()[0]) == written


def test_the_schema_is_versioned_in_the_file(store: Store) -> None:
    store.add([row("c", 0)])
    store.flush()
    assert store.folder.local is not None
    assert pq.read_schema(store.folder.local / parts(store)[0]).metadata[b"kvsweep.schema"] == b"1"


def test_rows_are_written_by_number_and_by_age(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline.store, "FLUSH_ROWS", 3)
    monkeypatch.setattr(pipeline.store, "SPACING_S", 0.0)
    store.add([row("c", 0), row("c", 1)])
    assert parts(store) == []
    store.add([row("c", 2)])
    assert len(parts(store)) == 1
    store.add([row("c", 3)])
    monkeypatch.setattr(pipeline.store, "FLUSH_S", 0.0)
    store.flush_if_due()
    assert len(parts(store)) == 2


def test_parts_are_never_touched_again(store: Store) -> None:
    store.add([row("c", 0)])
    store.flush()
    assert store.folder.local is not None
    first = store.folder.local / parts(store)[0]
    before = first.read_bytes(), first.stat().st_mtime_ns
    store.add([row("c", 0, score=1.0)])
    store.flush()
    store.rows()
    assert (first.read_bytes(), first.stat().st_mtime_ns) == before


def test_rows_that_cannot_be_written_are_kept(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store.add([row("c", 0)])
    with monkeypatch.context() as broken:

        def full_disk(name: str, content: bytes) -> None:
            raise OSError("No space left on device")

        broken.setattr(store.folder, "write", full_disk)
        with pytest.raises(StoreError, match="No space left"):
            store.flush()
    store.flush()
    assert store.rows().num_rows == 1


def test_a_write_that_fails_leaves_nothing_behind(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store.add([row("c", 0)])

    def full_disk(descriptor: int) -> None:
        raise OSError("No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr(os, "fsync", full_disk)
        with pytest.raises(StoreError, match="No space left"):
            store.flush()
    assert store.folder.local is not None
    assert list((store.folder.local / "parts").iterdir()) == []


def test_parts_are_a_second_apart_however_many_rows_come(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline.store, "FLUSH_ROWS", 1)
    for index in range(10):
        store.add([row("c", index)])
    assert (len(parts(store)), store.unwritten) == (1, 9)
    store.close()
    assert store.rows().num_rows == 10


def test_why_attempts_were_lost_is_kept_with_the_rows(store: Store) -> None:
    losses = [Loss(float(at), "vt", [at], 2, 1, "ActorDiedError: it died", counted=True, node="n") for at in range(2)]
    for loss in reversed(losses):
        store.note(loss)
        store.flush()
    assert Store(store.uri).losses() == losses
    assert str(losses[1]) == "vt, samples 1, attempt 1: ActorDiedError: it died"


def test_storage_out_of_reach_is_tried_again_for_a_while(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(name: str, content: bytes) -> None:
        raise OSError("no route to host")

    monkeypatch.setattr(pipeline.store, "FLUSH_S", 0.0)
    monkeypatch.setattr(pipeline.store, "RETRY_S", 0.0)
    with monkeypatch.context() as broken:
        broken.setattr(store.folder, "write", unreachable)
        store.add([row("c", 0)])
        store.add([row("c", 1)])
        broken.setattr(pipeline.store, "PATIENCE_S", 0.0)
        with pytest.raises(StoreError, match="no route to host"):
            store.add([row("c", 2)])
    store.flush_if_due()
    assert store.rows().num_rows == 3


def test_any_uri_will_do(tmp_path: Path) -> None:
    store = Store(f"file://{tmp_path}/out")
    store.add([row("c", 0)])
    store.flush()
    assert Store(str(tmp_path / "out")).rows().num_rows == 1


def test_a_uri_of_no_filesystem_is_refused() -> None:
    with pytest.raises(StoreError, match="output: nowhere://x cannot be opened"):
        Store("nowhere://x")


def test_an_empty_output_has_no_rows(store: Store) -> None:
    assert store.rows().num_rows == 0
    assert store.rows().schema.names == row_schema().names


@pytest.mark.parametrize("damage", ["cut off", "overwritten", "empty"])
def test_a_damaged_part_is_named_and_set_aside(store: Store, caplog: pytest.LogCaptureFixture, damage: str) -> None:
    for index in range(2):
        store.add([row("c", index)])
        store.flush()
    assert store.folder.local is not None
    bad = store.folder.local / parts(store)[0]
    whole = bad.read_bytes()
    bad.write_bytes({"cut off": whole[: len(whole) // 2], "overwritten": b"\0" * len(whole), "empty": b""}[damage])
    with caplog.at_level(logging.WARNING):
        assert store.rows().num_rows == 1
    assert str(bad) in caplog.text
    assert not bad.exists()
    assert bad.with_name(f"{bad.name}.corrupt").exists()
    caplog.clear()
    assert store.rows().num_rows == 1
    assert caplog.text == ""


def test_a_part_without_later_columns_gets_their_defaults(store: Store) -> None:
    old = table(row("c", 0)).drop_columns(["timing", "workspace_bytes"])
    sink = pa.BufferOutputStream()
    pq.write_table(old, sink)
    store.folder.write("parts/old.parquet", sink.getvalue().to_pybytes())
    read = store.rows().to_pylist()[0]
    assert (read["timing"], read["workspace_bytes"]) == ("shared", 0)


def test_a_part_of_a_newer_version_is_refused(store: Store) -> None:
    sink = pa.BufferOutputStream()
    pq.write_table(table(row("c", 0)).replace_schema_metadata({b"kvsweep.schema": b"2"}), sink)
    store.folder.write("parts/new.parquet", sink.getvalue().to_pybytes())
    with pytest.raises(StoreError, match="written by a newer kvsweep"):
        store.rows()


def test_success_goes_before_failure_and_new_before_old() -> None:
    kept = newest_successful(
        table(
            row("c", 0, status="ok", finished_at=1.0, prediction="old"),
            row("c", 0, status="ok", finished_at=2.0, prediction="new"),
            row("c", 0, status="failed", finished_at=3.0, prediction="failed later"),
            row("c", 1, status="failed", finished_at=2.0, prediction="failed again"),
            row("c", 1, status="failed", finished_at=1.0, prediction="failed"),
        )
    )
    assert kept["prediction"].to_pylist() == ["new", "failed again"]


attempts = st.builds(
    row,
    st.sampled_from(["a", "b"]),
    st.integers(0, 2),
    status=st.sampled_from(["ok", "failed"]),
    finished_at=st.integers(0, 4).map(float),
    attempt=st.integers(1, 3),
)


@given(st.lists(attempts, max_size=20))
def test_one_row_per_cell_and_sample_is_the_best_of_its_attempts(rows: list[Row]) -> None:
    def rank(one: dict[str, Any]) -> tuple[bool, float, int]:
        return one["status"] == "ok", one["finished_at"], one["attempt"]

    kept = newest_successful(table(*rows)).to_pylist()
    keys = [(one["cell_id"], one["sample_index"]) for one in kept]
    assert keys == sorted({(one.cell_id, one.sample_index) for one in rows})
    for one in kept:
        rivals = [
            asdict(other) for other in rows if (other.cell_id, other.sample_id) == (one["cell_id"], one["sample_id"])
        ]
        assert rank(one) == max(map(rank, rivals))


def test_a_failed_row_is_final_unless_failures_are_retried() -> None:
    rows = table(row("c", 0), row("c", 1, status="failed"))
    assert final_samples(rows, retry_failed=False) == {("c", 0), ("c", 1)}
    assert final_samples(rows, retry_failed=True) == {("c", 0)}


def held(folder: Folder, **changes: Any) -> None:
    holder = {"token": "t", "machine": "elsewhere x", "pid": 7, "user": "ada", "renewed": time.time()}
    folder.write(FILE, json.dumps({**holder, **changes}).encode())


def test_a_second_driver_is_refused_and_told_who_holds_the_output(store: Store) -> None:
    held(store.folder)
    with pytest.raises(LeaseHeld, match=r"process 7 of ada on elsewhere, last seen 0 s ago"), Lease(store.folder):
        pass


def test_the_lease_is_given_back(store: Store) -> None:
    with Lease(store.folder):
        assert store.folder.read(FILE) is not None
    assert store.folder.read(FILE) is None


def test_a_lease_that_was_not_renewed_is_taken_over(store: Store) -> None:
    held(store.folder, renewed=time.time() - 61)
    with Lease(store.folder) as lease:
        assert not lease.lost


def test_a_lease_of_a_dead_process_here_is_taken_over(store: Store) -> None:
    with os.popen("echo $$") as shell:
        gone = int(shell.read())
    held(store.folder, machine=pipeline.lease._machine(), pid=gone)
    with Lease(store.folder) as lease:
        assert not lease.lost


def test_a_lease_of_a_living_process_here_is_respected(store: Store) -> None:
    held(store.folder, machine=pipeline.lease._machine(), pid=os.getppid())
    with pytest.raises(LeaseHeld), Lease(store.folder):
        pass


def test_a_driver_notices_that_it_was_replaced(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline.lease, "RENEW_S", 0.01)
    with Lease(store.folder) as lease:
        held(store.folder, token="another")
        deadline = time.monotonic() + 5
        while not lease.lost and time.monotonic() < deadline:
            time.sleep(0.01)
        assert lease.lost
    assert store.folder.read(FILE) is not None


def test_what_is_no_output_is_said(store: Store) -> None:
    with pytest.raises(StoreError, match=r"is not the output of a sweep: it has no plan\.json"):
        store.manifest()
