"""Where an output is. A relative one is under ``KVSWEEP_OUTPUT_ROOT``, a folder or a bucket, where that is set.

A job of Ray's runs in an unpacked copy of the code that it was submitted with, which Ray deletes when it needs the
room: a cluster sets the root once, and every sweep file keeps its ``output: results/NAME``.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

ROOT = "KVSWEEP_OUTPUT_ROOT"
PACKAGE = "_ray_pkg_"
"""How Ray names the folder that it unpacks a job's code into."""

log = logging.getLogger("kvsweep.location")


def output_location(output: str) -> str:
    """A URI or an absolute path stands for itself."""
    if "://" in output or Path(output).is_absolute():
        return output
    root = os.environ.get(ROOT)
    if root:
        return f"{root.rstrip('/')}/{output}"
    if PACKAGE in str(Path.cwd()):
        log.warning(
            "output: %s is in the job's own copy of the code, which Ray deletes in time: give --output, or start Ray "
            "with %s set",
            output,
            ROOT,
        )
    return output
