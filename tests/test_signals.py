"""A signal is heard wherever it comes."""

from __future__ import annotations

import os
import signal
from contextlib import suppress

import pytest

from pipeline.signals import TERMINATED, exit_on_sigterm, stop_signals


def drop_an_exit() -> None:
    """As Python does with what is raised in a destructor or while a module is imported."""
    with suppress(SystemExit):
        os.kill(os.getpid(), signal.SIGTERM)


def test_an_exit_that_was_dropped_stops_a_sweep_before_it_begins() -> None:
    def sweep() -> None:
        drop_an_exit()
        with stop_signals() as received:
            assert received == [signal.SIGTERM]

    with pytest.raises(SystemExit) as ended, exit_on_sigterm():
        sweep()
    assert ended.value.code == TERMINATED


def test_a_dropped_exit_is_made_at_the_end_and_is_then_forgotten() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as ended, exit_on_sigterm():
        drop_an_exit()
    assert ended.value.code == TERMINATED
    assert signal.getsignal(signal.SIGTERM) == before
    with stop_signals() as received, exit_on_sigterm():
        assert received == []
