"""Results in an S3 bucket: a driver that is killed is continued, and the table is that of a local folder."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import stub_worker
from servers import KEYS, keys_in, s3
from test_driver import ENVIRONMENT, TESTS, assert_nothing_was_run_twice, results, write

from pipeline.run import Opened, RunOptions, open_sweep

pytestmark = pytest.mark.slow

BUCKET = "sweeps"


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The endpoint, named as a cluster's secret names it."""
    stub_worker.install(monkeypatch)
    with s3(BUCKET) as address:
        for name, value in {**KEYS, "AWS_ENDPOINT_URL": address, "KVSWEEP_OUTPUT_ROOT": f"s3://{BUCKET}"}.items():
            monkeypatch.setenv(name, value)
        yield address


def start(file: Path) -> subprocess.Popen[str]:
    command = [sys.executable, str(TESTS / "stub_worker.py"), "run", str(file)]
    environment = {**ENVIRONMENT, **os.environ, "PYTHONPATH": ENVIRONMENT["PYTHONPATH"], "STUB_DELAY_S": "0.05"}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def opened(file: Path) -> Opened:
    return open_sweep(file, RunOptions())


def test_a_sweep_in_a_bucket_is_killed_and_continued_to_the_same_table(tmp_path: Path, bucket: str) -> None:
    (tmp_path / "local").mkdir()
    local = write(tmp_path / "local", samples=60)
    there = start(local)

    file = write(tmp_path, samples=60, output="results/quick")
    driver = start(file)
    deadline = time.monotonic() + 120
    while not [key for key in keys_in(bucket, BUCKET) if key.endswith(".parquet")]:
        assert driver.poll() is None, driver.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.1)
    driver.kill()
    driver.communicate()
    kept = opened(file).store.attempts(("cell_id",)).num_rows
    assert 0 < kept < 180

    said, _ = (again := start(file)).communicate(timeout=120)
    assert again.returncode == 0, said
    assert "Traceback" not in said
    assert f"{kept}/180 rows" in said
    assert_nothing_was_run_twice(opened(file))
    said, _ = there.communicate(timeout=120)
    assert there.returncode == 0, said
    assert results(opened(file)) == results(opened(local))
    assert {f"results/quick/{name}" for name in ("report.html", "table.md", "plan.json", "sweep.yaml")} <= {
        *keys_in(bucket, BUCKET)
    }
    assert "results/quick/lease.json" not in keys_in(bucket, BUCKET)
