"""Servers that tests start on free ports of this machine: PostgreSQL, an S3 endpoint, MLflow."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from base64 import b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from ray_head import free_ports

KEYS = {"AWS_ACCESS_KEY_ID": "tests", "AWS_SECRET_ACCESS_KEY": "tests", "AWS_REGION": "us-east-1"}


@contextmanager
def postgres() -> Iterator[str]:
    """A PostgreSQL of its own, with a database; yields its URI. Skips where Debian's package is not installed."""
    binaries = _postgres_binaries()
    (port,) = free_ports(1)
    with tempfile.TemporaryDirectory(prefix="pg") as scratch:
        data = Path(scratch) / "data"
        if os.getuid() == 0:
            shutil.chown(scratch, "postgres")
        _as_postgres(binaries / "initdb", "--auth=trust", "--username=mlflow", "--no-sync", "-D", data)
        options = f"-p {port} -c listen_addresses=127.0.0.1 -c unix_socket_directories={scratch} -c fsync=off"
        log = Path(scratch) / "log"
        _as_postgres(binaries / "pg_ctl", "start", "--wait", "-D", data, "-l", log, "-o", options)
        try:
            yield f"postgresql://mlflow@127.0.0.1:{port}/postgres"
        finally:
            _as_postgres(binaries / "pg_ctl", "stop", "-D", data, "-m", "immediate")


def _postgres_binaries() -> Path:
    candidates = sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    found = [folder for folder in candidates if (folder / "initdb").exists()]
    if not found and not shutil.which("initdb"):
        pytest.skip("PostgreSQL's server is not installed: apt-get install postgresql")
    return found[0] if found else Path(str(shutil.which("initdb"))).resolve().parent


def _as_postgres(*words: object) -> None:
    """PostgreSQL refuses to run as root."""
    user = ["runuser", "-u", "postgres", "--"] if os.getuid() == 0 else []
    done = subprocess.run([*user, *map(str, words)], cwd="/", capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@contextmanager
def s3(bucket: str) -> Iterator[str]:
    """An S3 endpoint in this process, with an empty bucket; yields its address."""
    server = pytest.importorskip("moto.server", reason="pip install 'moto[s3]'")
    boto3 = pytest.importorskip("boto3")
    (port,) = free_ports(1)
    endpoint = server.ThreadedMotoServer("127.0.0.1", port)
    endpoint.start()
    address = f"http://127.0.0.1:{port}"
    try:
        boto3.client("s3", endpoint_url=address, region_name="us-east-1", **_boto_keys()).create_bucket(Bucket=bucket)
        yield address
    finally:
        endpoint.stop()


def _boto_keys() -> dict[str, str]:
    return {"aws_access_key_id": "tests", "aws_secret_access_key": "tests"}


def keys_in(address: str, bucket: str) -> list[str]:
    """The names of all objects."""
    import boto3

    client = boto3.client("s3", endpoint_url=address, region_name="us-east-1", **_boto_keys())
    return [entry["Key"] for entry in client.list_objects_v2(Bucket=bucket).get("Contents", [])]


@contextmanager
def mlflow_server(words: list[str], environment: dict[str, str], folder: Path) -> Iterator[str]:
    """``mlflow server ...`` on a free port, from when it answers; yields its address."""
    (port,) = free_ports(1)
    command = [sys.executable, "-m", *words, "--port", str(port)]
    with open(folder / "mlflow.log", "wb") as log:
        process = subprocess.Popen(
            command, cwd=folder, env={**os.environ, **environment}, stdout=log, stderr=subprocess.STDOUT
        )
        try:
            deadline = time.monotonic() + 180
            while not answers(f"http://127.0.0.1:{port}/health"):
                assert process.poll() is None, (folder / "mlflow.log").read_text(errors="replace")
                assert time.monotonic() < deadline, (folder / "mlflow.log").read_text(errors="replace")
                time.sleep(0.5)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait(30)


def answers(address: str) -> bool:
    try:
        with urllib.request.urlopen(address, timeout=5):
            return True
    except (urllib.error.URLError, OSError):
        return False


@contextmanager
def signed_in(address: str, login: str) -> Iterator[str]:
    """A door to a server that adds the login to every request, which a headless browser cannot type."""
    header = "Basic " + b64encode(login.encode()).decode()

    class Door(BaseHTTPRequestHandler):
        def forward(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            kept = {name: value for name, value in self.headers.items() if name.lower() in ("content-type", "accept")}
            asked = urllib.request.Request(address + self.path, body or None, {**kept, "Authorization": header})
            asked.method = self.command
            try:
                answer = urllib.request.urlopen(asked, timeout=60)
            except urllib.error.HTTPError as error:
                answer = error
            with answer:
                content = answer.read()
                self.send_response(answer.status or 500)
                self.send_header("Content-Type", answer.headers.get("Content-Type", "text/plain"))
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

        do_GET = do_POST = forward

        def log_message(self, format: str, *arguments: object) -> None:
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Door) as door:
        thread = threading.Thread(target=door.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{door.server_port}"
        door.shutdown()
