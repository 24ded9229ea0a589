"""What MLflow is told of a result: parameters, metrics and their names. Scores are times 100, as in the report."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from math import isnan
from typing import TYPE_CHECKING

from kvcache.budget import Budget
from pipeline.partition import partition
from pipeline.results import Result, Summary
from pipeline.stats import Macro

if TYPE_CHECKING:
    from pipeline.report import Report

MOST_SETTINGS = 60
LONGEST_NAME = 250
LONGEST_DIGEST = 36
CHILD_METRICS = ("task/", "quality/", "memory/", "cost/", "samples/")


def child_key(result: Result) -> str:
    configuration = result.configuration
    parts = [*(str(getattr(configuration.condition, key)) for key in ("model", "context"))]
    parts += [*configuration.condition.protocol.values()]
    parts += [configuration.method, configuration.settings, configuration.budget]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def describe(result: Result) -> dict[str, str]:
    """What a child is, for filters: parameters and tags alike."""
    configuration = result.configuration
    budget = Budget.parse(configuration.budget)
    number = {"share": f"{100 * budget.value:f}".rstrip("0").rstrip("."), "tokens": str(budget.value), "unlimited": ""}
    described = {
        "model": configuration.condition.model,
        "context": str(configuration.condition.context),
        "method": result.label,
        "budget": configuration.budget,
        "budget_number": number[budget.unit],
        "budget_unit": {"share": "percent"}.get(budget.unit, budget.unit),
        **configuration.condition.protocol,
        "settings": configuration.settings,
    }
    settings = list(json.loads(configuration.settings).items())[:MOST_SETTINGS]
    described |= {metric_name(f"settings.{key}"): str(value) for key, value in settings}
    return {key: value for key, value in described.items() if value}


def macro_metrics(summary: Summary) -> dict[str, float]:
    """``macro/METHOD/BUDGET`` with ``macro_low`` and ``macro_high``; model, context, protocol in it if they differ."""
    conditions = [board.condition for board in summary.boards]
    fields = ("model", "context", "question", "budget_base", "growth", "chat_template", "answer_prefix")
    telling = [name for name in fields if len({getattr(condition, name) for condition in conditions}) > 1]
    metrics: dict[str, float] = {}
    for result in summary.results:
        where = [str(getattr(result.configuration.condition, name)) for name in telling]
        where += [result.label, result.configuration.budget]
        for prefix, value in _macro("macro", result.macro).items():
            metrics[metric_name(prefix, *where)] = value
    return metrics


def child_metrics(result: Result) -> dict[str, float]:
    """The configuration's figures. A task's metric is its score over all seeds, the report's own number."""
    metrics = {
        metric_name("task", task.task): 100 * task.estimate.value for task in result.tasks.values() if task.estimate
    }
    metrics |= _macro("quality/macro", result.macro)
    against = result.against_full
    if against:
        metrics |= _macro("quality/delta_to_full", against.macro)
        metrics |= {"quality/p_holm": against.p_holm} if against.p_holm is not None else {}
    memory = result.memory
    if memory:
        metrics |= {
            "memory/kv_share_prefill": memory.share_prefill,
            "memory/kv_share_end": memory.share_end,
            "memory/kv_share_peak": memory.share_peak,
            "memory/kv_bytes_prefill": memory.bytes_prefill,
            "memory/kv_bytes_end": memory.bytes_end,
            "memory/kv_bytes_peak": memory.bytes_peak,
            "memory/workspace_bytes": memory.workspace_bytes,
            "memory/over_budget_samples": memory.over_budget,
        }
    for cost in result.costs:
        timed = {name: getattr(cost, f"{name}_s") for name in ("prefill", "compress", "decode", "ttft", "tpot")}
        metrics |= {f"cost/{cost.timing}_{name}_s": value for name, value in timed.items() if value is not None}
    metrics |= {"samples/scored": result.scored, "samples/failed": result.failed}
    return {key: value for key, value in metrics.items() if not isnan(value)}


def seed_metrics(result: Result) -> Iterator[dict[str, float]]:
    """Per seed, in order, each task's mean; nothing where there is one seed."""
    means = {name: partition(scores).seed_means() for name, scores in result.scores.items() if scores is not None}
    seeds = sorted({seed for task in means.values() for seed in task})
    if len(seeds) > 1:
        for seed in seeds:
            yield {metric_name("by_seed", name): 100 * task[seed] for name, task in means.items() if seed in task}


def dataset_facts(report: Report) -> list[dict[str, str]]:
    """MLflow's datasets: the samples of each task and length, by a digest of their contents, and the files that tasks
    were read from, by their checksums."""
    found = []
    for task in report.provenance.tasks:
        about = {"task": task.task, "context": task.context, "facts": task.facts}
        profile = {"samples": task.samples, "prompt_tokens": task.prompt_tokens, "benchmark_size": task.benchmark_size}
        called = f"{task.task}, {task.context:,} tokens" if task.context else task.task
        found.append({"name": called, "digest": task.digest, "source_type": "kvsweep", **_texts(about, profile)})
    for path, one in report.sweep.get("data", {}).get("files", {}).items():
        about = {"path": str(one["path"]), "from": str(one["from"])}
        checksum = str(one["sha256"])
        facts = {"name": path, "digest": checksum[:LONGEST_DIGEST], "source_type": "file"}
        found.append({**facts, **_texts(about, {"sha256": checksum})})
    return found


def _texts(source: Mapping[str, object], profile: Mapping[str, object]) -> dict[str, str]:
    return {"source": json.dumps(source), "profile": json.dumps(profile)}


def metric_name(*parts: str) -> str:
    """Parts joined by slashes, in the characters that MLflow takes: ``10%`` becomes ``10pct``."""
    cleaned = (re.sub(r"[^\w\-. ]+", "_", part.replace("%", "pct"), flags=re.ASCII).strip(" _.") for part in parts)
    name = "/".join(part or "_" for part in cleaned)
    if len(name) <= LONGEST_NAME:
        return name
    return f"{name[: LONGEST_NAME - 9]}_{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def _macro(name: str, macro: Macro) -> dict[str, float]:
    metrics = {} if macro.value is None else {name: 100 * macro.value}
    if macro.interval:
        metrics |= {f"{name}_low": 100 * macro.interval.low, f"{name}_high": 100 * macro.interval.high}
    return metrics
