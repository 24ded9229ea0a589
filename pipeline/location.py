"""Where an output is. A relative one is under ``KVSWEEP_OUTPUT_ROOT``, a folder or a bucket, where that is set.

A job of Ray's runs in an unpacked copy of the code that it was submitted with, which Ray deletes when it needs the
room: a cluster sets the root once, and every sweep file keeps its ``output: results/NAME``.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

from pipeline.errors import SweepProblem

ROOT = "KVSWEEP_OUTPUT_ROOT"
PACKAGE = "_ray_pkg_"
"""How Ray names the folder that it unpacks a job's code into."""

log = logging.getLogger("kvsweep.location")


def output_location(output: str) -> str:
    """A URI or an absolute path stands for itself. Raises :class:`SweepProblem` for a root that is no place."""
    if "://" in output or Path(output).is_absolute():
        return output
    root = os.environ.get(ROOT)
    if root:
        return _under(root, output)
    if PACKAGE in str(Path.cwd()):
        log.warning(
            "output: %s is in the job's own copy of the code, which Ray deletes in time: give --output, or start Ray "
            "with %s set",
            output,
            ROOT,
        )
    return output


def local_folder(output: str) -> Path:
    """Where it is, for what is written into folders alone. Raises :class:`SweepProblem` for a bucket."""
    location = output_location(output)
    if "://" in location:
        raise SweepProblem(f"output: diagnostics are written into a local folder, not {location}: give --output FOLDER")
    return Path(location)


def _under(root: str, output: str) -> str:
    if "://" not in root:
        return str(Path(root).expanduser() / output)
    scheme, host, path, query, rest = urlsplit(root)
    if not host and not path.strip("/"):
        raise SweepProblem(f"{ROOT}: {root} names no bucket or folder")
    return urlunsplit((scheme, host, f"{path.rstrip('/')}/{output}", query, rest))
