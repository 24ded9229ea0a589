"""Signals as facts to look at: a sweep that is told to stop writes what is finished first.

Ray takes SIGTERM for itself as it connects, and would end a sweep that plans or reports with a code of its own.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

TERMINATED = 128 + signal.SIGTERM

_dropped: list[int] = []
"""SIGTERM, where the exit that it raised may not have been heard: Python drops one raised in a callback of its own, as
while it imports a module."""


@contextmanager
def stop_signals() -> Iterator[list[int]]:
    """SIGTERM and SIGINT received meanwhile. To be entered after ``ray.init``, which replaces handlers set before."""
    received = list(_dropped)

    def note(signum: int, frame: object) -> None:
        received.append(signum)

    before = {signum: signal.signal(signum, note) for signum in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield received
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


@contextmanager
def exit_on_sigterm() -> Iterator[None]:
    """SIGTERM raises ``SystemExit``, so that leases are given back and the exit code tells."""

    def leave(signum: int, frame: object) -> None:
        _dropped.append(signum)
        sys.exit(TERMINATED)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
        if _dropped:
            sys.exit(TERMINATED)
    finally:
        _dropped.clear()
        signal.signal(signal.SIGTERM, before)


@contextmanager
def sigterm_kept() -> Iterator[None]:
    """Whatever handler another library installs meanwhile, the present one is there afterwards."""
    ours = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if ours:
            signal.signal(signal.SIGTERM, before)
