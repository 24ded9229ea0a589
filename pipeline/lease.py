"""The lease that keeps two drivers out of one output.

A small JSON file names the driver that holds the output; the driver renews it every few seconds. A lease counts as
left behind when its process is gone (same machine) or when it was not renewed for a minute, and is then taken over.
"""

from __future__ import annotations

import getpass
import json
import os
import socket
import threading
import time
import uuid
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from pipeline.errors import SweepProblem
from pipeline.store import reached

if TYPE_CHECKING:
    from pipeline.store import Folder

RENEW_S = 10.0
STALE_S = 60.0
FILE = "lease.json"


class LeaseHeld(SweepProblem):
    """Another driver is writing to this output."""


class Lease:
    """Hold the output while in this context; ``lost`` turns true if another driver took it."""

    def __init__(self, folder: Folder) -> None:
        self.lost = False
        self._folder = folder
        self._token = uuid.uuid4().hex
        self._started = time.time()
        self._done = threading.Event()
        self._renewal = threading.Thread(target=self._renew, name="lease", daemon=True)

    def __enter__(self) -> Lease:
        with reached(self._folder, "write"):
            if (other := holder(self._folder)) is not None:
                raise LeaseHeld(_who(self._folder.uri, other))
            self._write()
            last = _read(self._folder)
        # Of two drivers that start in the same instant, the one that wrote last goes on.
        if last is None or last["token"] != self._token:
            raise LeaseHeld(_who(self._folder.uri, last or {}))
        self._renewal.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done.set()
        self._renewal.join()
        if not self.lost:
            with suppress(OSError):  # storage is away: the lease is left behind, and what went wrong is told as it is
                self._folder.delete(FILE)

    def _renew(self) -> None:
        while not self._done.wait(RENEW_S):
            try:
                last = _read(self._folder)
                if last is not None and last["token"] != self._token:
                    self.lost = True
                    return
                self._write()
            except OSError:
                continue  # a storage hiccup: the lease holds for STALE_S

    def _write(self) -> None:
        ours = {
            "token": self._token,
            "machine": _machine(),
            "pid": os.getpid(),
            "user": _user(),
            "started": self._started,
            "renewed": time.time(),
        }
        self._folder.write(FILE, json.dumps(ours).encode())


def holder(folder: Folder) -> dict[str, Any] | None:
    """What the driver that writes here now says of itself."""
    last = _read(folder)
    return None if last is None or _left_behind(last) else last


def named(holder: dict[str, Any]) -> str:
    """``process 7 of ada on machine, last seen 3 s ago``"""
    age = int(time.time() - holder["renewed"])
    machine = holder["machine"].split()[0]
    return f"process {holder['pid']} of {holder['user']} on {machine}, last seen {age} s ago"


def _read(folder: Folder) -> dict[str, Any] | None:
    content = folder.read(FILE)
    if content is None:
        return None
    try:
        return dict(json.loads(content))
    except ValueError:
        return None  # cut off in mid-write: nobody holds it


def _left_behind(holder: dict[str, Any]) -> bool:
    if holder["machine"] == _machine() and (holder["pid"] == os.getpid() or not _alive(holder["pid"])):
        return True
    return time.time() - holder["renewed"] > STALE_S


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _machine() -> str:
    """The host, and the process namespace in it: a process id means something only there."""
    namespace = Path("/proc/self/ns/pid")
    return f"{socket.gethostname()} {namespace.readlink() if namespace.is_symlink() else ''}".strip()


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())


def _who(uri: str, holder: dict[str, Any]) -> str:
    if not holder:
        return f"{uri} was just taken by another driver: run one driver per output"
    return (
        f"{uri} is being written by another driver: {named(holder)}; wait for it, stop it, or give another --output "
        f"(a driver not seen for {STALE_S:.0f} s counts as gone)"
    )
