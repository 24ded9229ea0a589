"""Progress: counts, rate and time left; plain lines in a log, a bar on a terminal."""

from __future__ import annotations

import io

import pytest

import pipeline.progress
from pipeline.progress import ProgressReport, duration


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(pipeline.progress.time, "monotonic", lambda: now[0])
    return now


def test_a_log_gets_plain_lines_now_and_then(clock: list[float]) -> None:
    log = io.StringIO()
    with ProgressReport(total=10, done=4, failed=1, cost=6.0, stream=log) as progress:
        progress.tick()
        for _ in range(3):
            clock[0] += 4
            progress.row(failed=False, cost=1.0)
            progress.tick()
        progress.say("an event")
    assert log.getvalue().splitlines() == [
        "4/10 rows, 1 failed",
        "7/10 rows, 1 failed, 0.25 rows/s, 12 s left",
        "an event",
        "7/10 rows, 1 failed, 0.25 rows/s, 12 s left",
    ]
    assert "\r" not in log.getvalue()
    assert "\x1b" not in log.getvalue()


def test_the_time_left_weighs_rows_by_their_cost(clock: list[float]) -> None:
    log = io.StringIO()
    with ProgressReport(total=2, done=0, failed=0, cost=11.0, stream=log) as progress:
        clock[0] += 10
        progress.row(failed=False, cost=10.0)
    assert log.getvalue() == "1/2 rows, 0.1 rows/s, 1 s left\n"


def test_a_failed_row_is_counted_and_the_end_says_how_long_it_took(clock: list[float]) -> None:
    log = io.StringIO()
    with ProgressReport(total=1, done=0, failed=0, cost=1.0, stream=log) as progress:
        clock[0] += 65
        progress.row(failed=True, cost=1.0)
    assert log.getvalue() == "1/1 rows, 1 failed, 0.0154 rows/s, 1 min 05 s in all\n"


def test_a_terminal_gets_a_live_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    screen = Terminal()
    with ProgressReport(total=4, done=1, failed=0, cost=3.0, stream=screen) as progress:
        progress.row(failed=False, cost=1.0)
        progress.tick()
        progress.say("an event [not markup]")
    drawn = screen.getvalue()
    assert "\x1b[" in drawn
    assert "━" in drawn
    assert "an event [not markup]" in drawn
    assert "2/4 rows" in drawn.splitlines()[-1]


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.2, "less than 1 s"), (59.4, "59 s"), (61, "1 min 01 s"), (7500, "2 h 05 min")],
)
def test_durations_are_in_words(seconds: float, words: str) -> None:
    assert duration(seconds) == words
