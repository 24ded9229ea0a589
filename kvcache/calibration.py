"""Calibrations: what a method needs to know of a model besides its weights, found once from a text, kept in a file.

A file is safetensors; which model, text and settings it comes from is in its header. No other file is ever read below
this room. Torch-free but for the tables themselves.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvcache.method import NotCalibrated

if TYPE_CHECKING:
    from torch import Tensor

SUFFIX = ".safetensors"
HEADER = "calibration"


@dataclass(frozen=True)
class CalibrationFacts:
    """``model`` is a fingerprint, ``text`` the sha256 of what was read: ``sequences`` of ``tokens`` each. ``settings``
    are those of the method that the tables hold for; ``weighted`` tells whether by squared gradients."""

    method: str
    settings: dict[str, Any]
    model: str
    text: str
    sequences: int
    tokens: int
    weighted: bool

    @property
    def file_name(self) -> str:
        """The same for the same model, text and settings."""
        key = hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()
        return f"{self.method}-{key[:16]}{SUFFIX}"


def save_calibration(path: Path, facts: CalibrationFacts, tables: Mapping[str, Tensor]) -> None:
    """Under another name first: a file that is there is whole."""
    from safetensors.torch import save_file

    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(f".{os.getpid()}")
    tensors = {name: table.contiguous() for name, table in tables.items()}
    save_file(tensors, unfinished, metadata={HEADER: json.dumps(asdict(facts), sort_keys=True)})
    unfinished.replace(path)


def read_facts(path: Path) -> CalibrationFacts:
    """Raises :class:`NotCalibrated` for a file that is not there or is no calibration."""
    return _facts(*_version(path))


def content_digest(path: Path) -> str:
    """Of the file's bytes: what a cell's hash takes of it. Raises :class:`NotCalibrated`."""
    return _digest(*_version(path))


def read_tables(path: Path) -> dict[str, Tensor]:
    """All tensors of a file, on the CPU, read once. Raises :class:`NotCalibrated`."""
    return _tables(*_version(path))


def _version(path: Path) -> tuple[Path, int, int]:
    """A file that changes is read again."""
    try:
        status = path.stat()
    except OSError as error:
        raise NotCalibrated(f"the calibration {path} cannot be read: {error.strerror}") from None
    return path, status.st_size, status.st_mtime_ns


@lru_cache(maxsize=256)
def _facts(path: Path, size: int, modified: int) -> CalibrationFacts:
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length)) if length < size else {}
        return CalibrationFacts(**json.loads(header["__metadata__"][HEADER]))
    except (ValueError, LookupError, TypeError):
        raise NotCalibrated(f"{path} is not a calibration: `kvsweep calibrate` writes them") from None


@lru_cache(maxsize=256)
def _digest(path: Path, size: int, modified: int) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]


@lru_cache(maxsize=4)
def _tables(path: Path, size: int, modified: int) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return load_file(path)
