"""A sweep as MLflow runs: one parent for the sweep, one child per configuration. Every call may be repeated.

Runs are found again by the tags ``kvsweep.sweep_id`` and ``kvsweep.child``, and only what changed is logged: a metric
is stamped with the time of its last row, or with the present where it replaces another. What filters need is repeated
on each child, as parameter and as tag: MLflow's filters do not look at parents.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from functools import partial
from math import isnan, nan
from pathlib import Path
from threading import Event
from time import time
from typing import TYPE_CHECKING, Any

from pipeline.figures import full_name
from pipeline.mlflow_calls import failures, in_parallel, is_refusal, mlflow_client, writers
from pipeline.mlflow_metrics import (
    CHILD_METRICS,
    child_key,
    child_metrics,
    dataset_facts,
    describe,
    macro_metrics,
    seed_metrics,
)
from pipeline.results import Result

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Metric, Run

    from pipeline.report import Report

SWEEP_ID, KIND, CHILD = "kvsweep.sweep_id", "kvsweep.kind", "kvsweep.child"
METRICS_PER_CALL = 1000
DATASETS_PER_CALL = 1000
LONGEST_PARAM, LONGEST_TAG = 6000, 5000


class SweepRuns:
    """The runs of one sweep. The parent is found, or created, at once; ``stop`` ends the writing of children."""

    def __init__(self, uri: str, sweep: Mapping[str, Any], stop: Event | None = None) -> None:
        self._client = mlflow_client(uri)
        self._writers, self._stop = writers(uri), stop or Event()
        self._sweep = sweep
        self._sweep_id = sweep_id(sweep)
        self.experiment_id = self._experiment(uri)
        self._parent = self._found() or self._create(str(sweep["name"]), self._parent_tags(), now())

    @property
    def client(self) -> MlflowClient:
        return self._client

    @property
    def parent_id(self) -> str:
        return str(self._parent.info.run_id)

    def begin(self, cells: Sequence[Mapping[str, Any]]) -> None:
        """Mark the parent as running, with what is to be done."""
        self._client.update_run(self.parent_id, status="RUNNING")
        columns = ("model", "method", "budget", "context", "task", "data_seed")
        counts = {f"{column}s": len({str(cell[column]) for cell in cells}) for column in columns}
        counts |= {"cells": len(cells), "samples": sum(int(cell["expected"]) for cell in cells)}
        counts |= {"cells_impossible": sum(1 for cell in cells if cell["impossible"])}
        self._batch(self._parent, [], {key: str(value) for key, value in counts.items()})
        self._client.log_text(self.parent_id, str(self._sweep.get("config_text", "")), "sweep.yaml")

    def progress(self, counted: Sequence[tuple[int, Mapping[str, float]]]) -> None:
        """Live counts, each with its moment; the rows done are the step."""
        lines = [_points(figures, int(figures["rows_done"]), moment) for moment, figures in counted]
        self._batch(self._parent, [line for of_moment in lines for line in of_moment])

    def results(self, report: Report) -> None:
        """Scores and intervals on the parent, everything of a configuration on its child. What of one is refused is
        raised once the others are written."""
        summary = report.summary
        moment = int(1000 * report.provenance.last) or now()
        done = {"cells_done": summary.cells_done, "rows_done": summary.rows, "rows_failed": summary.rows_failed}
        macros = _changed(self._parent, macro_metrics(summary), moment, prefixes=("macro",))
        self._batch(self._parent, _points(done, summary.rows, moment) + macros, tags={"partial": _yes(summary.partial)})
        self._datasets(report)
        children = self._children()
        begun = [result for result in summary.results if result.scored + result.failed]
        refused: list[Exception] = []

        def write(result: Result) -> None:
            try:
                self._child(result, children.get(child_key(result)))
            except failures() as error:
                if not is_refusal(error):
                    raise
                refused.append(error)

        in_parallel([partial(write, result) for result in begun], self._writers, self._stop)
        if refused:
            raise refused[0]

    def _found(self) -> Run | None:
        """The sweep's own run. Where an answer was lost on its way and the client asked again, MLflow has made a run
        twice: the one that was begun stays."""
        found = self._find(f"tags.`{KIND}` = 'sweep'")
        found.sort(key=lambda run: "cells" not in run.data.tags)
        for twin in found[1:]:
            self._client.delete_run(twin.info.run_id)
        return found[0] if found else None

    def _children(self) -> dict[str, Run]:
        """By what they are of; one of those that were made twice."""
        children: dict[str, Run] = {}
        for run in self._find(f"tags.`{KIND}` = 'configuration'"):
            if children.setdefault(run.data.tags[CHILD], run) is not run:
                self._client.delete_run(run.info.run_id)
        return children

    def files(self, files: Sequence[Path]) -> None:
        """Pages at the top of the parent's artifacts, tables in a folder of their own."""
        for file in files:
            self._client.log_artifact(self.parent_id, str(file), None if file.suffix == ".html" else "tables")

    def end(self, status: str) -> None:
        """``FINISHED``, ``FAILED`` or ``KILLED``."""
        self._client.set_terminated(self.parent_id, status)

    def _experiment(self, uri: str) -> str:
        name = str(self._sweep["name"])
        known = self._client.get_experiment_by_name(name)
        if known is not None:
            return str(known.experiment_id)
        output = local_folder(str(self._sweep["output"]))
        beside = (output / "mlartifacts").as_uri() if output and uri.startswith("sqlite:") else None
        return str(self._client.create_experiment(name, beside))

    def _find(self, condition: str) -> list[Run]:
        query = f"tags.`{SWEEP_ID}` = '{self._sweep_id}' and {condition}"
        found: list[Run] = []
        token: str | None = ""
        while token is not None:
            page = self._client.search_runs([self.experiment_id], query, max_results=1000, page_token=token or None)
            found.extend(page)
            token = page.token or None
        return found

    def _create(self, name: str, tags: Mapping[str, str], moment: int) -> Run:
        ours = {SWEEP_ID: self._sweep_id, "mlflow.source.name": "kvsweep", **tags}
        return self._client.create_run(self.experiment_id, moment, {key: ours[key][:LONGEST_TAG] for key in ours}, name)

    def _parent_tags(self) -> dict[str, str]:
        versions = {f"version.{key}": str(value) for key, value in self._sweep.get("versions", {}).items()}
        protocol = {f"protocol.{key}": str(value) for key, value in self._sweep.get("protocol", {}).items()}
        known = {"mlflow.source.git.commit": git_commit(), "ray.submission_id": submission_id()}
        output = {"kvsweep.output": str(self._sweep["output"])}
        return {KIND: "sweep", **output, **versions, **protocol, **{key: text for key, text in known.items() if text}}

    def _datasets(self, report: Report) -> None:
        """On the parent, whose samples all children share; what is there already is not written twice."""
        from mlflow.entities import Dataset, DatasetInput

        inputs = [DatasetInput(Dataset(**facts)) for facts in dataset_facts(report)]
        for start in range(0, len(inputs), DATASETS_PER_CALL):
            self._client.log_inputs(self.parent_id, inputs[start : start + DATASETS_PER_CALL])

    def _child(self, result: Result, run: Run | None) -> None:
        moment = int(1000 * result.finished_at)
        described = describe(result)
        error = next(iter(result.errors), "")
        tags = {"complete": result.macro.coverage, "partial": _yes(result.partial)}
        tags |= {"error_type": error} if error else {}
        if run is None:
            ours = {KIND: "configuration", CHILD: child_key(result), "mlflow.parentRunId": self.parent_id}
            run = self._create(full_name(result), {**described, **tags, **ours}, moment)
        if not error and "error_type" in run.data.tags:
            self._client.delete_tag(run.info.run_id, "error_type")
        lines = _changed(run, child_metrics(result), moment, prefixes=CHILD_METRICS)
        for step, figures in enumerate(seed_metrics(result)):
            lines += _points(figures, step, moment)
        self._batch(run, lines, described, tags)
        status = "FAILED" if result.failed else "FINISHED"
        if (run.info.status, run.info.end_time) != (status, moment):
            self._client.set_terminated(run.info.run_id, status, moment)

    def _batch(
        self,
        run: Run,
        metrics: Sequence[Metric],
        params: Mapping[str, str] | None = None,
        tags: Mapping[str, str] | None = None,
    ) -> None:
        """One call, more where MLflow's limit asks for it. ``params`` become tags too, since a tag may change later.

        A parameter keeps its first value: MLflow lets none change.
        """
        from mlflow.entities import Param, RunTag

        params = params or {}
        texts = {key: value[:LONGEST_TAG] for key, value in {**params, **(tags or {})}.items()}
        new_params = [Param(key, value[:LONGEST_PARAM]) for key, value in params.items() if key not in run.data.params]
        new_tags = [RunTag(key, value) for key, value in texts.items() if run.data.tags.get(key) != value]
        if metrics or new_params or new_tags:
            self._client.log_batch(run.info.run_id, metrics[:METRICS_PER_CALL], new_params, new_tags)
        for start in range(METRICS_PER_CALL, len(metrics), METRICS_PER_CALL):
            self._client.log_batch(run.info.run_id, metrics[start : start + METRICS_PER_CALL])


def sweep_id(sweep: Mapping[str, Any]) -> str:
    """The same name into the same output is the same sweep."""
    output = local_folder(str(sweep["output"])) or sweep["output"]
    return hashlib.sha256(f"{sweep['name']}\n{output}".encode()).hexdigest()[:16]


def local_folder(output: str) -> Path | None:
    """The absolute folder behind an output; None for an object store."""
    if "://" not in output:
        return Path(output).resolve()
    scheme, _, path = output.partition("://")
    return Path(path) if scheme == "file" else None


def git_commit() -> str:
    """The commit of the checkout that this file lies in; empty where it lies in none."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return found.stdout.strip() if found.returncode == 0 else ""


def submission_id() -> str:
    """The id of the Ray job that this process drives, if it is one."""
    try:
        config = json.loads(os.environ.get("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}"))
    except json.JSONDecodeError:
        return ""
    return str(config.get("metadata", {}).get("job_submission_id", ""))


def _yes(answer: bool) -> str:
    return "yes" if answer else "no"


def _points(metrics: Mapping[str, float], step: int, moment: int) -> list[Metric]:
    from mlflow.entities import Metric

    return [Metric(key, float(value), moment, step) for key, value in metrics.items()]


def _changed(run: Run, metrics: Mapping[str, float], moment: int, prefixes: tuple[str, ...]) -> list[Metric]:
    """The figures that the run does not show yet. One under ``prefixes`` that holds no longer becomes NaN."""
    known = run.data.metrics
    new = {key: value for key, value in metrics.items() if key not in known}
    other = {key: value for key, value in metrics.items() if key in known and known[key] != value}
    gone = {key: nan for key in known if key.startswith(prefixes) and key not in metrics and not isnan(known[key])}
    return _points(new, 0, moment) + _points({**other, **gone}, 0, max(moment, now()))


def now() -> int:
    return int(1000 * time())
