"""Samples are made once, by one process, while the others wait for it."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from pathlib import Path
from typing import Any

from word_tokenizer import WordTokenizer

from tasks.cache import prepare
from tasks.registry import get_task
from tasks.sample import Sample
from tasks.sources import DataSources

FORK = multiprocessing.get_context("fork")
SLOW_S = 0.5


def prepared(folder: Path, counter: Path, seconds: float = SLOW_S) -> list[Sample]:
    """``counter`` gets a line every time samples are really made, which takes some time."""
    task = get_task("niah_single_1")

    class Slow(type(task)):  # type: ignore[misc]
        def samples(self, *arguments: Any) -> list[Sample]:
            with counter.open("a") as file:
                file.write(f"{os.getpid()}\n")
            time.sleep(seconds)
            made: list[Sample] = super().samples(*arguments)
            return made

    return prepare(Slow(), WordTokenizer(), "t", DataSources(), 600, 0, 3, 10, folder)


def started(counter: Path) -> list[str]:
    deadline = time.monotonic() + 20
    while not counter.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    return counter.read_text().split()


def test_of_several_processes_one_makes_the_samples_and_all_read_them(tmp_path: Path) -> None:
    folder, counter = tmp_path / "samples", tmp_path / "made"
    with FORK.Pool(3) as pool:
        results = pool.starmap(prepared, [(folder, counter)] * 3, chunksize=1)
        pool.close()
        pool.join()  # else they are ended by SIGTERM, whose handler a process that was forked has from this one
    assert results[0] == results[1] == results[2]
    assert len(counter.read_text().split()) == 1


def test_the_lock_of_a_process_that_was_killed_is_free(tmp_path: Path) -> None:
    folder, counter = tmp_path / "samples", tmp_path / "made"
    holder = FORK.Process(target=prepared, args=(folder, counter, 60.0))
    holder.start()
    [pid] = started(counter)
    os.kill(int(pid), signal.SIGKILL)
    holder.join()
    began = time.monotonic()
    assert len(prepared(folder, counter, 0.0)) == 3
    assert time.monotonic() - began < 20
    assert len(list(folder.glob("*.jsonl"))) == 1
