"""How far a sweep is, from its output alone: the plan, the rows, who writes them, and the attempts that were lost.

Nothing is asked of the driver or of Ray, so it serves from any machine that reaches the output, while the sweep runs,
after it ended, and after it died.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute

from pipeline.lease import holder, named
from pipeline.losses import Loss
from pipeline.progress import duration
from pipeline.store import Store, newest_successful, reached

COLUMNS = ("cell_id", "sample_id", "sample_index", "status", "finished_at", "attempt")
LATELY_S = 120.0
"""What the present rate is taken over, or since the first row where that is less."""


@dataclass(frozen=True)
class Status:
    """``rows`` are final ones, failed ones included; ``rate`` is of rows per second lately, 0 where none came."""

    cells: int
    cells_done: int
    cells_impossible: int
    rows: int
    rows_asked: int
    failed: int
    limit: int | None
    newest: float | None
    rate: float
    writer: str
    losses: tuple[Loss, ...]

    @property
    def complete(self) -> bool:
        return self.rows >= self.rows_asked

    def lines(self) -> Iterator[str]:
        words = [f"{self.cells_done:,} of {self.cells:,} cells complete", f"{self.rows:,} of {self.rows_asked:,} rows"]
        words += [f"{self.failed:,} failed"] if self.failed else []
        words += [f"{self.cells_impossible:,} cells impossible"] if self.cells_impossible else []
        words += [f"partial: run with --limit {self.limit}"] if self.limit else []
        yield ", ".join(words)
        if not self.complete or self.writer:
            yield self._pulse()
        if self.losses:
            counted = sum(loss.counted for loss in self.losses)
            yield f"attempts lost: {len(self.losses)}, {counted} of them counted; the last: {self.losses[-1]}"

    def _pulse(self) -> str:
        words = [f"written by {self.writer}" if self.writer else "nobody writes here now: run the sweep again to go on"]
        words += [f"newest row {duration(time.time() - self.newest)} ago"] if self.newest else []
        if self.rate and self.writer:
            left = duration((self.rows_asked - self.rows) / self.rate)
            words += [f"{self.rate:.3g} rows/s", f"about {left} left at this rate"]
        return ", ".join(words)


def read_status(store: Store) -> Status:
    """Raises :class:`~pipeline.store.StoreError` where there is no sweep."""
    manifest = store.manifest()
    cells: list[dict[str, Any]] = manifest["cells"]
    possible = [cell for cell in cells if not cell["impossible"]]
    rows = newest_successful(store.attempts(COLUMNS))
    asked = {cell["cell_id"]: cell.get("asked", cell["expected"]) for cell in possible}
    rows = rows.filter(pa.array([index < asked.get(cell, 0) for cell, index in _pairs(rows)], pa.bool_()))
    good = pa.compute.equal(rows["status"], "ok")
    held = dict(_counts(rows.filter(good)))
    times = rows["finished_at"].to_pylist()
    with reached(store.folder, "read"):
        writer = holder(store.folder)
    return Status(
        cells=len(possible),
        cells_done=sum(held.get(cell["cell_id"], 0) >= cell["expected"] for cell in possible),
        cells_impossible=len(cells) - len(possible),
        rows=rows.num_rows,
        rows_asked=sum(asked.values()),
        failed=rows.num_rows - sum(held.values()),
        limit=manifest.get("limit"),
        newest=max(times, default=None),
        rate=_rate(times, time.time()),
        writer=named(writer) if writer else "",
        losses=tuple(store.losses()),
    )


def _rate(times: list[float], now: float) -> float:
    """Rows per second lately. The first second counts whole: one row, just in, tells no rate."""
    span = min(LATELY_S, max(now - min(times, default=now), 1.0))
    return sum(moment > now - LATELY_S for moment in times) / span


def _pairs(rows: pa.Table) -> Iterator[tuple[str, int]]:
    return zip(rows["cell_id"].to_pylist(), rows["sample_index"].to_pylist(), strict=True)


def _counts(rows: pa.Table) -> Iterator[tuple[str, int]]:
    """Rows per cell."""
    counts = rows["cell_id"].value_counts()
    return ((one["values"], one["counts"]) for one in counts.to_pylist())
