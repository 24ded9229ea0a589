"""Progress with counts and time left: a live bar on a terminal, plain lines in a log."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

LINE_EVERY_S = 10.0


class ProgressReport:
    """Counts rows. ``cost`` weighs them for the time left: long contexts come first, so rows are not alike."""

    def __init__(self, total: int, done: int, failed: int, cost: float, stream: TextIO | None = None) -> None:
        self.total, self.done, self.failed = total, done, failed
        self._cost, self._cost_done = cost, 0.0
        self._before = done
        self._stream = stream or sys.stderr
        self._started = time.monotonic()
        self._last_line = -LINE_EVERY_S
        self._actors = 0
        self._live: Progress | None = None

    def __enter__(self) -> ProgressReport:
        self._started = time.monotonic()
        if self._stream.isatty():
            columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[status]}"))
            self._live = Progress(*columns, console=Console(file=self._stream), transient=True)
            self._live.add_task("rows", total=self.total, completed=self.done, status=self._status())
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()
        print(self._status(), file=self._stream, flush=True)

    def row(self, failed: bool, cost: float) -> None:
        self.done += 1
        self.failed += failed
        self._cost_done += cost

    def actors(self, number: int) -> None:
        self._actors = number

    def say(self, text: str) -> None:
        """An event worth a line: an actor started, a model loaded, work lost."""
        if self._live is not None:
            self._live.console.print(text, markup=False, highlight=False)
        else:
            print(text, file=self._stream, flush=True)

    def tick(self) -> None:
        """Bring the bar up to date, or print a line if the last one is old enough."""
        if self._live is not None:
            self._live.update(self._live.task_ids[0], completed=self.done, status=self._status())
        elif time.monotonic() - self._last_line >= LINE_EVERY_S:
            self._last_line = time.monotonic()
            print(self._status(), file=self._stream, flush=True)

    def _status(self) -> str:
        """``340/1200 rows, 2 failed, 3.1 rows/s, 2 actors, 4 min 10 s left``"""
        elapsed = time.monotonic() - self._started
        fresh = self.done - self._before
        parts = [f"{self.done}/{self.total} rows"]
        if self.failed:
            parts.append(f"{self.failed} failed")
        if fresh and elapsed:
            parts.append(f"{fresh / elapsed:.3g} rows/s")
        if self._actors:
            parts.append(f"{self._actors} actor{'s' if self._actors != 1 else ''}")
        if self.done < self.total and self._cost_done > 0:
            parts.append(f"{duration(elapsed * (self._cost - self._cost_done) / self._cost_done)} left")
        elif self.done >= self.total:
            parts.append(f"{duration(elapsed)} in all")
        return ", ".join(parts)


def duration(seconds: float) -> str:
    """``45 s``, ``4 min 10 s``, ``2 h 05 min``"""
    whole = max(round(seconds), 0)
    if whole < 1:
        return "less than 1 s"
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
