"""Files on this machine that appear whole or not at all: a reader, or a write that is cut short, sees the old ones."""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path


def put(path: Path, content: bytes) -> None:
    """Write under another name in the same folder, which is made where there is none, and rename."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:  # after a signal too: on a full disk it would hold what little room there is
        temporary.unlink(missing_ok=True)
    with suppress(OSError):  # not all file systems can, and the file is there
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)  # or the new name may be gone after a power cut
        finally:
            os.close(folder)


def put_texts(folder: Path, texts: Mapping[str, str]) -> list[Path]:
    """Files by name; returns where they are."""
    for name, text in texts.items():
        put(folder / name, text.encode())
    return [folder / name for name in texts]
