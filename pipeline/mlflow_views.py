"""Saved views of an experiment: what MLflow's Views menu offers, so that nobody has to pick columns first.

MLflow keeps a view as an experiment tag ``mlflow.sharedViewState.ID``: an envelope with a name, times, and the page's
state as JSON. The form is MLflow's own and not documented (written against 3.17): a view that a later version cannot
read is left out of its menu, and nothing else depends on it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from time import time
from typing import TYPE_CHECKING, Any

from pipeline.mlflow_runs import KIND

if TYPE_CHECKING:
    from mlflow import MlflowClient

TAG = "mlflow.sharedViewState."
LONGEST = 20_000
MOST_COLUMNS = 40
SECTION = "kvsweep-section"
METRIC_GROUPS = ("quality", "task", "memory", "cost", "samples", "by_seed")


def install_views(client: MlflowClient, experiment_id: str, macro_metrics: Mapping[str, float]) -> None:
    """Write the views as tags, over earlier ones of the same name. ``macro_metrics``: the parent's, for its chart."""
    for key, (name, state) in views(macro_metrics).items():
        moment = int(1000 * time())
        envelope = {"name": name, "createdAt": moment, "updatedAt": moment, "state": json.dumps(state)}
        text = json.dumps(envelope)
        if len(text) <= LONGEST:
            client.set_experiment_tag(experiment_id, TAG + key, text)


def links(server: str, experiment_id: str) -> dict[str, str]:
    """Full addresses of the views: MLflow's short ones open another page."""
    page = f"{server.rstrip('/')}/#/experiments/{experiment_id}/runs"
    modes = {"kvsweep-leaderboard": "TABLE", "kvsweep-budget": "CHART", "kvsweep-failures": "TABLE"}
    return {
        name: f"{page}?workflowType=machine_learning&viewStateShareKey={key}&compareRunsMode={modes[key]}"
        for key, (name, _) in views({}).items()
    }


def views(macro_metrics: Mapping[str, float]) -> dict[str, tuple[str, dict[str, Any]]]:
    """By id: the view's name and its state."""
    values = [name for name in macro_metrics if name.startswith("macro/")][:MOST_COLUMNS]
    sweeps = {
        "searchFilter": f'tags.`{KIND}` = "sweep"',
        "selectedColumns": [*(f"metrics.`{name}`" for name in values), "metrics.`rows_failed`"],
        **_charts(_bars("Macro score", values)),
    }
    children = f'tags.`{KIND}` = "configuration"'
    described = ("model", "method", "budget", "context")
    scored = ("quality/macro", "quality/delta_to_full", "memory/kv_share_peak")
    budget = {
        "searchFilter": children,
        "orderByKey": "metrics.`quality/macro`",
        "orderByAsc": False,
        "selectedColumns": [*(f"params.`{name}`" for name in described), *(f"metrics.`{name}`" for name in scored)],
        **_charts(
            _scatter("Macro score against KV held at peak", "memory/kv_share_peak", "quality/macro"),
            _scatter("Difference to the full cache", "memory/kv_share_peak", "quality/delta_to_full"),
            _parallel(["method", "budget"], ["memory/kv_share_peak", "cost/shared_decode_s", "quality/macro"]),
        ),
    }
    failures = {
        # sorted by a metric: sorted by date, MLflow adds the parents and folds the children under them
        "orderByKey": "metrics.`samples/failed`",
        "orderByAsc": False,
        "searchFilter": f'{children} and attributes.status = "FAILED"',
        "selectedColumns": [
            *(f"params.`{name}`" for name in described),
            *("tags.`error_type`", "metrics.`samples/failed`", "metrics.`samples/scored`"),
        ],
    }
    shown = {"orderByKey": "attributes.start_time", "orderByAsc": False, "runsHiddenMode": "SHOW_ALL"}
    return {
        "kvsweep-leaderboard": ("Leaderboard", {**shown, **sweeps}),
        "kvsweep-budget": ("Score against budget", {**shown, **budget}),
        "kvsweep-failures": ("Failures", {**shown, **failures}),
    }


def _charts(*cards: dict[str, Any]) -> dict[str, Any]:
    own = {"uuid": SECTION, "name": "kvsweep", "display": True}
    folded = [{"uuid": f"{SECTION}-{name}", "name": name, "display": False} for name in METRIC_GROUPS]
    sections = [{**section, "isReordered": False, "deleted": False, "isGenerated": False} for section in (own, *folded)]
    placed = [
        {"uuid": f"kvsweep-{index}", "metricSectionId": SECTION, "deleted": False, "isGenerated": False, **card}
        for index, card in enumerate(cards)
    ]
    return {"compareRunCharts": placed, "compareRunSections": sections, "isAccordionReordered": True}


def _bars(title: str, metrics: list[str]) -> dict[str, Any]:
    first = metrics[0] if metrics else "macro"
    chart = {"type": "BAR", "metricKey": first, "selectedMetricKeys": metrics, "displayName": title}
    return {**chart, "runsCountToCompare": 20}


def _scatter(title: str, across: str, up: str) -> dict[str, Any]:
    axes = {"xaxis": {"key": across, "type": "METRIC"}, "yaxis": {"key": up, "type": "METRIC"}}
    return {"type": "SCATTER", "displayName": title, "runsCountToCompare": 100, **axes}


def _parallel(params: list[str], metrics: list[str]) -> dict[str, Any]:
    chosen = {"selectedParams": params, "selectedMetrics": metrics, "showAllRuns": True}
    return {"type": "PARALLEL", "displayName": "Budget, memory, time, score", "runsCountToCompare": 100, **chosen}
