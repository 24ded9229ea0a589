"""The real worker, on a small model with real caches, that leaves a mark of what it is at; run as a script, the command
line with it in place.

A folder that ``MARKS`` names holds one file per process, with the samples of its job. Rows wait for ``PACE_S`` each,
unless the folder has a file ``hurry``. While it has a file ``full``, the disk of results is full.
"""

from __future__ import annotations

import errno
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from workers.actor import Worker
from workers.job import Job
from workers.row import Row

PACE_S = 0.05


def marks() -> Path:
    return Path(os.environ["MARKS"])


class MarkedWorker(Worker):
    def run(self, job: Job) -> Iterator[list[Row]]:
        mark = marks() / str(os.getpid())
        mark.with_suffix(".new").write_text(json.dumps([sample.index for sample in job.samples]))
        mark.with_suffix(".new").rename(mark)
        for rows in super().run(job):
            for row in rows:
                if not (marks() / "hurry").exists():
                    time.sleep(PACE_S)
                yield [row]
        mark.unlink()


def fill_the_disk_when_told() -> None:
    from pipeline.store import Folder

    write = Folder.write

    def full(self: Any, name: str, content: bytes) -> None:
        if (marks() / "full").exists():
            raise OSError(errno.ENOSPC, "No space left on device")
        write(self, name, content)

    Folder.write = full  # type: ignore[method-assign]


if __name__ == "__main__":
    import marked_worker  # the actors import this module by its name

    import pipeline.run
    from pipeline.cli import main

    fill_the_disk_when_told()
    pipeline.run.Worker = marked_worker.MarkedWorker  # type: ignore[misc]
    sys.exit(main())
