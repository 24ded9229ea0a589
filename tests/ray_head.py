"""A Ray of its own on this machine, started as a user starts one, with ports and a folder that nothing else uses."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

TOKEN = "a token of at least thirty-two characters"


@dataclass(frozen=True)
class RayHead:
    address: str
    """Of the job API."""
    environment: dict[str, str]
    """What a client needs: the address and the token."""


def free_ports(count: int) -> list[int]:
    with ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


@contextmanager
def ray_head(folder: Path, **variables: str) -> Iterator[RayHead]:
    """``ray start --head`` in ``folder``, until the context ends; its sockets need a short path of their own."""
    port, dashboard, listen, grpc, runtime, metrics = free_ports(6)
    binaries = str(Path(sys.executable).parent)
    client = {
        **{name: value for name, value in os.environ.items() if not name.startswith("RAY_")},
        **{"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN, "RAY_ADDRESS": f"http://127.0.0.1:{dashboard}"},
        "PATH": f"{binaries}{os.pathsep}{os.environ['PATH']}",
    }
    with tempfile.TemporaryDirectory(prefix="ray") as scratch, open(Path(scratch) / "start.log", "wb") as log:
        server = {name: value for name, value in client.items() if name != "RAY_ADDRESS"}
        command = ["-m", "ray.scripts.scripts", "start", "--head", "--block", "--disable-usage-stats"]
        command += [f"--port={port}", f"--dashboard-port={dashboard}", f"--dashboard-agent-listen-port={listen}"]
        command += [f"--dashboard-agent-grpc-port={grpc}", f"--runtime-env-agent-port={runtime}"]
        command += [f"--metrics-export-port={metrics}", "--min-worker-port=0", "--max-worker-port=0"]
        command += ["--num-cpus=2", "--num-gpus=0", "--object-store-memory=100000000", f"--temp-dir={scratch}"]
        process = subprocess.Popen(
            [sys.executable, *command],
            cwd=folder,
            env={**server, "RAY_TMPDIR": scratch, **variables},
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            _wait_until_it_answers(client["RAY_ADDRESS"], process, Path(scratch) / "start.log")
            yield RayHead(client["RAY_ADDRESS"], client)
        finally:
            process.send_signal(signal.SIGTERM)  # it takes its own processes along
            try:
                process.wait(30)
            finally:
                _kill_group(process.pid)


def _wait_until_it_answers(address: str, process: subprocess.Popen[bytes], log: Path) -> None:
    asked = urllib.request.Request(f"{address}/api/version", headers={"Authorization": f"Bearer {TOKEN}"})
    deadline = time.monotonic() + 120
    while True:
        assert process.poll() is None, log.read_text(errors="replace")
        assert time.monotonic() < deadline, log.read_text(errors="replace")
        try:
            with urllib.request.urlopen(asked, timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)


def _kill_group(group: int) -> None:
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        return
