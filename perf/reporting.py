"""What believing costs: intervals and comparisons of a large sweep, and its MLflow runs over HTTP.

``statistics``: a thousand cells of 500 samples, from rows to boards with intervals, paired differences and Holm's
correction; then every figure of the page. ``mlflow``: the same sweep's runs, one per configuration, written by the
driver's background thread to a server that is started for it. The thread's own seconds, and what the driver itself
waits, are set against five per cent of the sweep.

    python -m perf.reporting [statistics] [mlflow] [--cells 1000] [--samples 500] [--children 1000] [--json]
"""

from __future__ import annotations

import argparse
import json
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from pipeline.report import build_report
from pipeline.summary import planned_rows, summarize
from pipeline.tracking import Tracker
from workers.row import Row

TASKS = 10
SHARE = 0.05
PROTOCOL = {"question": "compressed", "budget_base": "prompt", "growth": "grow"}
SWEEP: dict[str, Any] = {"name": "perf-reporting", "protocol": PROTOCOL, "config_text": "name: perf-reporting\n"}


def main() -> int:
    options = _options()
    found: dict[str, dict[str, float]] = {}
    if "statistics" in options.what:
        found["statistics"] = statistics(options.cells, options.samples)
    if "mlflow" in options.what:
        found["mlflow"] = tracking(options.children)
    if options.json:
        print(json.dumps(found, indent=1))
    for title, figures in found.items() if not options.json else ():
        print(title, *(f"  {name}: {value:,.2f}" for name, value in figures.items()), sep="\n")
    return 0


def statistics(cells: int, samples: int) -> dict[str, float]:
    """Seconds from rows to results, and to the page."""
    rows, plan = sweep(-(-cells // TASKS), TASKS, samples)
    started = time.perf_counter()
    summarize(rows, plan, PROTOCOL)
    summed = time.perf_counter()
    build_report(rows, plan, {**SWEEP, "output": "results/perf"}).html()
    return {
        "cells": len(plan),
        "rows": len(rows),
        "seconds to intervals and comparisons": summed - started,
        "seconds to the whole page": time.perf_counter() - summed,
    }


def tracking(children: int) -> dict[str, float]:
    """Seconds that the driver's own thread is held, that MLflow's thread takes, and the sweep of which they are 5 %."""
    rows, plan = sweep(children, 2, 4)
    with tempfile.TemporaryDirectory() as folder, server(Path(folder)) as address:
        facts = {**SWEEP, "output": f"{folder}/sweep"}
        report = build_report(planned_rows(rows, plan), plan, facts)
        started = time.perf_counter()
        tracker = Tracker.start(address, facts, plan)
        tracker.progress(1, 0, len(rows))
        tracker.finish(report, [], "FINISHED")
        held, before = time.perf_counter() - started, time.process_time()
        at_end = time.perf_counter()
        tracker.close(3600)
        written, busy = time.perf_counter() - at_end, time.process_time() - before
    return {
        "children": children,
        "seconds the driver's thread is held while it runs": held,
        "seconds until all is written, waited for at the end": written,
        "seconds of them that this process computes": busy,
        "minutes of a sweep of which the wait is 5 %": written / SHARE / 60,
        "per cent of a sweep of one hour": 100 * (held + written) / 3600,
    }


def sweep(configurations: int, tasks: int, samples: int) -> tuple[pd.DataFrame, list[dict[str, Any]]]:
    """Right or wrong answers, the full cache first; methods of ten budgets each."""
    generator = np.random.default_rng(0)
    named = [("full", "100%"), *((f"method {i // 10}", f"{i % 10 + 1}%") for i in range(configurations - 1))]
    plan, parts = [], []
    template = asdict(Row(cell_id="", sample_id=""))
    for (method, budget), task in product(named, range(tasks)):
        cell = {"model": "model", "method": method, "budget": budget, "context": 4096, "task": f"task {task}"}
        cell |= {"data_seed": 0, "method_seed": 0, "cell_id": f"{method}/{budget}/{task}"}
        plan.append({**cell, "settings": {}, "expected": samples, "asked": samples, "impossible": ""})
        made = pd.DataFrame({**template, **cell, "references": None, **_facts()}, index=range(samples))
        right = (generator.random(samples) < 0.7).astype(float)
        parts.append(made.assign(sample_id=[f"s{i}" for i in range(samples)], sample_index=range(samples), score=right))
    return pd.concat(parts, ignore_index=True), plan


def _facts() -> dict[str, Any]:
    share = {"kv_bytes_prefill": 10, "kv_bytes_end": 11, "kv_bytes_peak": 11, "budget_bytes": 10, "charged_bytes": 10}
    full = {"kv_bytes_full_prefill": 100, "kv_bytes_full": 101, "prompt_tokens": 4000, "output_tokens": 16}
    return {**share, **full, "versions": "{}", "numerics": "one", "finished_at": time.time(), "metric": "recall"}


@contextmanager
def server(folder: Path) -> Iterator[str]:
    """``mlflow server`` on a free port, with a database in ``folder``."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
    words = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "2"]
    words += ["--backend-store-uri", f"sqlite:///{folder}/mlflow.db", "--artifacts-destination", str(folder / "files")]
    with open(folder / "server.log", "wb") as log:
        running = subprocess.Popen(words, stdout=log, stderr=log)
        try:
            _wait(f"http://127.0.0.1:{port}/health", running)
            yield f"http://127.0.0.1:{port}"
        finally:
            running.terminate()
            running.wait(30)


def _wait(address: str, running: subprocess.Popen[bytes]) -> None:
    for _ in range(240):
        try:
            with urllib.request.urlopen(address, timeout=2):
                return
        except (urllib.error.URLError, OSError):
            if running.poll() is not None:
                break
            time.sleep(0.5)
    raise SystemExit(f"mlflow server does not answer at {address}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="The cost of statistics, report and tracking.")
    parser.add_argument("what", nargs="*", default=["statistics", "mlflow"], help="statistics, mlflow, or both")
    parser.add_argument("--cells", type=int, default=1000)
    parser.add_argument("--samples", type=int, default=500)
    parser.add_argument("--children", type=int, default=1000)
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
