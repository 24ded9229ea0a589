"""Signals as facts to look at: a sweep that is told to stop writes what is finished first."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def stop_signals() -> Iterator[list[int]]:
    """SIGTERM and SIGINT received meanwhile. To be entered after ``ray.init``, which replaces handlers set before."""
    received: list[int] = []

    def note(signum: int, frame: object) -> None:
        received.append(signum)

    before = {signum: signal.signal(signum, note) for signum in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield received
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
