"""From rows to results: what every table, plot and tracked run shows, computed once.

A board is what may stand in one table: one model, one context, one protocol. Its results are the configurations
(method with its settings, at a budget), each with one score per task, a macro-average, memory, cost, and the paired
difference to the full cache of the same board.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Hashable, Iterable, Mapping, Sequence
from math import isnan
from typing import TYPE_CHECKING, Any

from pipeline import stats
from pipeline.partition import Scores
from pipeline.results import PROTOCOL, Board, Condition, Configuration, Cost, Memory, Result, State, Summary, TaskResult
from pipeline.stats import Comparison, Macro

if TYPE_CHECKING:
    import pandas as pd

MEMORY_MEANS = [
    *("share_prefill", "share_end", "share_peak", "kv_bytes_prefill", "kv_bytes_end", "kv_bytes_peak"),
    *("budget_bytes", "charged_bytes", "workspace_bytes", "host_bytes"),
]
COST_MEDIANS = ["prefill_s", "compress_s", "decode_s", "output_tokens", "batch_rows", "ttft_s", "tpot_s"]
USED = [
    *("cell_id", "sample_id", "sample_index", "sample_meta", "task", "data_seed", "method_seed", *PROTOCOL),
    *("status", "error", "score", "scored", "numerics", "finished_at", "over_budget", "peak_device_bytes", "timing"),
    *(*MEMORY_MEANS, *COST_MEDIANS),
]
PROTOCOL_DEFAULTS = {
    "question": "compressed",
    "budget_base": "prompt",
    "growth": "grow",
    "chat_template": "auto",
    "answer_prefix": "stripped",
}


def summarize(rows: pd.DataFrame, cells: Sequence[Mapping[str, Any]], protocol: Mapping[str, str]) -> Summary:
    """``rows`` of the store and ``cells`` of the plan to results. ``protocol`` serves cells that have no rows yet."""
    planned = planned_rows(rows, cells)
    by_cell = {str(cell_id): part for cell_id, part in planned[USED].groupby("cell_id", sort=False)}
    grouped: dict[Configuration, list[Mapping[str, Any]]] = {}
    for cell in cells:
        grouped.setdefault(_configuration(cell, by_cell.get(cell["cell_id"]), protocol), []).append(cell)
    labels = _labels(grouped)
    conditions = list(dict.fromkeys(configuration.condition for configuration in grouped))
    models = list(dict.fromkeys(condition.model for condition in conditions))
    boards = tuple(
        _board(condition, {key: grouped[key] for key in grouped if key.condition == condition}, by_cell, labels)
        for condition in sorted(conditions, key=lambda one: (models.index(one.model), one))
    )
    possible = [cell for cell in cells if not cell["impossible"]]
    done = sum(1 for cell in possible if _scored_rows(by_cell.get(cell["cell_id"])) >= cell["expected"])
    return Summary(
        boards=boards,
        cells=len(cells),
        cells_done=done,
        cells_impossible=len(cells) - len(possible),
        rows=len(planned),
        rows_failed=int((~planned["scored"]).sum()),
        rows_expected=sum(int(cell["expected"]) for cell in possible),
        rows_outside=len(rows) - len(planned),
        configurations={str(cell["cell_id"]): key for key, cells_of_it in grouped.items() for cell in cells_of_it},
    )


def planned_rows(rows: pd.DataFrame, cells: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """The rows that the plan asks for, measured, in its order: the first ``expected`` samples of each of its cells."""
    expected = rows["cell_id"].map({cell["cell_id"]: cell["expected"] for cell in cells}).astype("float64")
    places = {cell["cell_id"]: place for place, cell in enumerate(cells)}
    kept = rows[rows["sample_index"] < expected]
    ordered = kept.assign(place=kept["cell_id"].map(places)).sort_values(["place", "sample_index", "sample_id"])
    return measured(ordered.drop(columns="place"))


def measured(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows with ``scored`` and the shares of the full cache held at the end of prefill, at the end, and at peak."""
    full_prefill, full = (rows[name].where(rows[name] > 0) for name in ("kv_bytes_full_prefill", "kv_bytes_full"))
    return rows.assign(
        score=rows["score"].astype("float64"),
        scored=(rows["status"] == "ok") & rows["score"].notna(),
        share_prefill=rows["kv_bytes_prefill"] / full_prefill,
        share_end=rows["kv_bytes_end"] / full,
        share_peak=rows["kv_bytes_peak"] / full,
    )


def cells_of(rows: pd.DataFrame) -> list[dict[str, Any]]:
    """A plan read back from rows, for outputs whose plan is not at hand: complete means as many samples as the cell of
    the same model, context, task and data seed that has most."""
    coordinates = ["model", "method", "settings", "budget", "context", "task", "data_seed", "method_seed"]
    cells = rows.groupby(["cell_id", *coordinates], sort=False).size().reset_index(name="found")
    cells["expected"] = cells.groupby(["model", "context", "task", "data_seed"])["found"].transform("max")
    return [
        {**{str(key): value for key, value in cell.items()}, "settings": json.loads(cell["settings"]), "impossible": ""}
        for cell in cells.to_dict("records")
    ]


def _configuration(cell: Mapping[str, Any], rows: pd.DataFrame | None, protocol: Mapping[str, str]) -> Configuration:
    held = {} if rows is None else {name: str(rows[name].iloc[0]) for name in PROTOCOL}
    condition = Condition(
        model=str(cell["model"]),
        context=int(cell["context"]),
        **{**PROTOCOL_DEFAULTS, **{name: str(protocol[name]) for name in PROTOCOL if name in protocol}, **held},
    )
    settings = json.dumps(cell["settings"], sort_keys=True, default=str)
    return Configuration(condition, str(cell["method"]), settings, str(cell["budget"]))


def _labels(grouped: Mapping[Configuration, Sequence[Mapping[str, Any]]]) -> dict[tuple[str, str], str]:
    """(method, settings) to what tables call it: the plan's own label, else the settings that differ."""
    given = {(key.method, key.settings): str(cells[0].get("label") or "") for key, cells in grouped.items()}
    labels = {}
    for method, settings in given:
        sisters = [json.loads(other) for name, other in given if name == method]
        own = json.loads(settings)
        keys = [name for name in own if any(other.get(name) != own[name] for other in sisters)]
        differing = ", ".join(f"{name}={own[name]}" for name in keys)
        named = f"{method} ({differing})" if differing else method
        labels[method, settings] = given[method, settings] or named
    return labels


def _board(
    condition: Condition,
    grouped: Mapping[Configuration, Sequence[Mapping[str, Any]]],
    by_cell: Mapping[str, pd.DataFrame],
    labels: Mapping[tuple[str, str], str],
) -> Board:
    tasks = tuple(dict.fromkeys(str(cell["task"]) for cells in grouped.values() for cell in cells))
    results = [
        _result(configuration, labels[configuration.method, configuration.settings], tasks, cells, by_cell)
        for configuration, cells in grouped.items()
    ]
    budgets = tuple(dict.fromkeys(key.budget for key in sorted(grouped, key=lambda key: not key.is_baseline)))
    return Board(condition, tasks, budgets, tuple(_against_full(results)))


def _result(
    configuration: Configuration,
    label: str,
    tasks: Iterable[str],
    cells: Sequence[Mapping[str, Any]],
    by_cell: Mapping[str, pd.DataFrame],
) -> Result:
    import pandas as pd

    held = {task: [cell for cell in cells if cell["task"] == task] for task in tasks}
    results = {task: _task_result(task, mine, by_cell) for task, mine in held.items()}
    parts = [by_cell[cell["cell_id"]] for cell in cells if cell["cell_id"] in by_cell]
    rows = pd.concat(parts) if parts else None
    scored = rows[rows["scored"]] if rows is not None else None
    numerics = tuple(sorted({name for task in results.values() for name in task.numerics}))
    estimates, macro = stats.macro_of({task: result.scores for task, result in results.items()})
    if len(numerics) > 1:
        macro = Macro(None, None, None, macro.complete, macro.tasks)
    return Result(
        configuration=configuration,
        label=label,
        tasks={task: dataclasses.replace(results[task], estimate=estimates[task]) for task in results},
        macro=macro,
        memory=_memory(scored) if scored is not None and len(scored) else None,
        costs=_costs(scored) if scored is not None and len(scored) else (),
        numerics=numerics,
        finished_at=float(rows["finished_at"].max()) if rows is not None else 0.0,
        errors=error_kinds(rows) if rows is not None else {},
    )


def _task_result(task: str, cells: Sequence[Mapping[str, Any]], by_cell: Mapping[str, pd.DataFrame]) -> TaskResult:
    import pandas as pd

    reasons = sorted({str(cell["impossible"]) for cell in cells if cell["impossible"]})
    expected = sum(int(cell["expected"]) for cell in cells if not cell["impossible"])
    parts = [by_cell[cell["cell_id"]] for cell in cells if cell["cell_id"] in by_cell]
    if not parts:
        state: State = "impossible" if reasons else "incomplete" if cells else "not planned"
        return TaskResult(task, state, expected, 0, 0, reason="; ".join(reasons))
    rows = pd.concat(parts)
    scored = rows[rows["scored"]]
    have = {cell["cell_id"]: _scored_rows(by_cell.get(cell["cell_id"])) for cell in cells}
    lacking = [cell for cell in cells if have[cell["cell_id"]] < cell["expected"]]
    as_asked = all(have[cell["cell_id"]] >= cell.get("asked", cell["expected"]) for cell in lacking)
    numerics = tuple(sorted(set(scored["numerics"].astype(str))))
    state = "impossible" if reasons else "mixed numerics" if len(numerics) > 1 else "complete"
    if state == "complete" and lacking:
        state = "partial" if as_asked else "incomplete"
    even = len(lacking) in (0, len(cells))
    return TaskResult(
        task=task,
        state=state,
        expected=expected,
        scored=len(scored),
        failed=len(rows) - len(scored),
        scores=_scores(scored) if state == "complete" else None,
        partial=float(scored["score"].mean()) if len(scored) and len(numerics) < 2 and even else None,
        numerics=numerics,
        reason="; ".join(reasons),
    )


def _scores(scored: pd.DataFrame) -> Scores:
    """Samples that name a ``document`` which they share are one unit of it."""
    named = [_document(meta, sample) for meta, sample in zip(scored["sample_meta"], scored["sample_id"], strict=True)]
    return Scores.of(scored["score"], scored["sample_id"], scored["data_seed"], scored["method_seed"], named)


def _document(meta: str, sample: str) -> str:
    return str(json.loads(meta).get("document", sample)) if '"document"' in meta else sample


def _scored_rows(rows: pd.DataFrame | None) -> int:
    return 0 if rows is None else int(rows["scored"].sum())


def _memory(scored: pd.DataFrame) -> Memory:
    means = scored.groupby("task")[MEMORY_MEANS].mean().mean()
    return Memory(
        share_prefill=float(means["share_prefill"]),
        share_end=float(means["share_end"]),
        share_peak=float(means["share_peak"]),
        bytes_prefill=float(means["kv_bytes_prefill"]),
        bytes_end=float(means["kv_bytes_end"]),
        bytes_peak=float(means["kv_bytes_peak"]),
        largest_peak=int(scored["kv_bytes_peak"].max()),
        budget_bytes=float(means["budget_bytes"]),
        charged_bytes=float(means["charged_bytes"]),
        workspace_bytes=float(means["workspace_bytes"]),
        host_bytes=float(means["host_bytes"]),
        over_budget=int(scored["over_budget"].sum()),
        rows=len(scored),
    )


def _costs(scored: pd.DataFrame) -> tuple[Cost, ...]:
    return tuple(_cost(timing, scored[scored["timing"] == timing]) for timing in sorted(set(scored["timing"]))[::-1])


def _cost(timing: str, rows: pd.DataFrame) -> Cost:
    medians = rows[COST_MEDIANS].astype("float64").median()
    return Cost(
        timing=timing,
        rows=len(rows),
        prefill_s=float(medians["prefill_s"]),
        compress_s=float(medians["compress_s"]),
        decode_s=float(medians["decode_s"]),
        output_tokens=float(medians["output_tokens"]),
        batch_rows=float(medians["batch_rows"]),
        ttft_s=_known(medians["ttft_s"]),
        tpot_s=_known(medians["tpot_s"]),
        peak_device_bytes=int(rows["peak_device_bytes"].max()),
    )


def _known(value: float) -> float | None:
    return None if isnan(value) else float(value)


def error_kinds(rows: pd.DataFrame) -> dict[str, int]:
    """Failed rows by the exception's name, most frequent first."""
    counts: dict[Hashable, int] = rows.loc[~rows["scored"], "error"].map(error_kind).value_counts().to_dict()
    return {str(kind): int(count) for kind, count in counts.items()}


def error_kind(error: str) -> str:
    """``torch.OutOfMemoryError: CUDA ...`` to ``OutOfMemoryError``, behind the driver's own words too."""
    if not error.strip():
        return "unscored"
    heads = [part.strip() for part in error.strip().partition("\n")[0].split(":")[:2]]
    named = next((head for head in heads if head and " " not in head), "")
    return named.rpartition(".")[2] or "error"


def _against_full(results: Sequence[Result]) -> list[Result]:
    """Each result with its paired difference to the full cache, p-values corrected over this board."""
    full = next((result for result in results if result.configuration.is_baseline), None)
    if full is None:
        return list(results)
    compared = [None if result is full else compare_results(result, full) for result in results]
    corrected = stats.holm([one.p if one else None for one in compared])
    return [
        dataclasses.replace(result, against_full=dataclasses.replace(one, p_holm=p) if one else None)
        for result, one, p in zip(results, compared, corrected, strict=True)
    ]


def compare_results(first: Result, second: Result) -> Comparison:
    """First minus second; refused where their rows come from different numerics."""
    numerics = sorted({*first.numerics, *second.numerics})
    if len(numerics) > 1:
        tasks = len({*first.tasks, *second.tasks})
        reason = f"rows of different numerics: {'; '.join(numerics)}"
        return Comparison(Macro(None, None, None, 0, tasks), {}, None, refused=reason)
    return stats.compare(first.scores, second.scores)
