"""Synthetic rows and plans: a sweep's output without a sweep."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from workers.row import Row

TOKEN_BYTES = 4096
MODEL = "small-model"


class Output(NamedTuple):
    rows: pd.DataFrame
    cells: list[dict[str, Any]]
    sweep: dict[str, Any]


def make_cell(method: str, budget: str, task: str, expected: int, **other: Any) -> dict[str, Any]:
    cell = {
        "model": MODEL,
        "method": method,
        "settings": {},
        "budget": budget,
        "context": 4096,
        "task": task,
        "data_seed": 0,
        "method_seed": 0,
        "expected": expected,
        "impossible": "",
        **other,
    }
    content = {key: value for key, value in cell.items() if key not in ("expected", "impossible", "label")}
    return {"cell_id": hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16], **cell}


def make_rows(cell: dict[str, Any], scores: Sequence[float | None], **fields: Any) -> pd.DataFrame:
    """One row per score, None for a failed one. ``fields`` replace a Row's fields; a list gives one value per row."""
    share = 1.0 if cell["method"] == "full" else budget_share(cell["budget"])
    rows = []
    for index, score in enumerate(scores):
        prompt, generated = 4000 + index, 20
        full_prefill, full = prompt * TOKEN_BYTES, (prompt + generated - 1) * TOKEN_BYTES
        held = int(share * full_prefill)
        given = {key: value[index] if isinstance(value, list) else value for key, value in fields.items()}
        base = {
            **{key: cell[key] for key in ("cell_id", "model", "method", "budget", "context", "task")},
            **{key: cell[key] for key in ("data_seed", "method_seed")},
            "settings": json.dumps(cell["settings"], sort_keys=True),
            "sample_id": f"{cell['task']}-{cell['data_seed']}-{index}",
            "sample_index": index,
            "status": "failed" if score is None else "ok",
            "error": "torch.OutOfMemoryError: CUDA out of memory" if score is None else "",
            "score": score,
            "metric": "string_match_all",
            "prediction": f"answer {index} {score}",
            "references": [f"answer {index}"],
            "prompt_tokens": prompt,
            "output_tokens": generated,
            "finish_reason": "stop",
            "sample_meta": json.dumps({"wording": "own", "haystack": "noise", "depths": [index]}),
            "budget_bytes": int(share * full_prefill),
            "charged_bytes": held,
            "kv_bytes_prefill": held,
            "kv_bytes_end": held + (generated - 1) * TOKEN_BYTES,
            "kv_bytes_peak": held + (generated - 1) * TOKEN_BYTES,
            "kv_bytes_full_prefill": full_prefill,
            "kv_bytes_full": full,
            "prefill_s": 1.5,
            "compress_s": 0.02,
            "decode_s": 0.8,
            "batch_rows": 12,
            "device": "cpu",
            "node": "node-1",
            "dtype": "bfloat16",
            "attention": "sdpa",
            "row_width": 32,
            "numerics": "torch 2.13 cpu",
            "versions": json.dumps({"torch": "2.13.0", "kvsweep": "0.1.0"}),
            "finished_at": 1_780_000_000.0 + index,
        }
        rows.append(dataclasses.asdict(Row(**{**base, **given})))
    return pd.DataFrame(rows, columns=[field.name for field in dataclasses.fields(Row)])


def make_output(
    methods: Sequence[str] = ("snapkv", "qevict"),
    budgets: Sequence[str] = ("10%", "20%"),
    tasks: Sequence[str] = ("niah_single", "vt"),
    samples: int = 20,
    data_seeds: Sequence[int] = (0,),
    contexts: Sequence[int] = (4096,),
    models: Sequence[str] = (MODEL,),
    graded: Sequence[str] = (),
) -> Output:
    """A complete sweep with the full cache: right or wrong answers (a share of right ones for the tasks ``graded``)."""
    cells, parts = [], []
    configurations = [("full", "100%"), *product(methods, budgets)]
    for model, context, task, seed in product(models, contexts, tasks, data_seeds):
        draws = np.random.default_rng([len(task), seed, context, *task.encode()])
        ease = draws.normal(1.2, 1.3, size=samples)
        for method, budget in configurations:
            cell = make_cell(method, budget, task, samples, data_seed=seed, context=context, model=model)
            loss = 0.0 if method == "full" else (1.2 - budget_share(budget)) * (0.3 + sum(method.encode()) % 7 / 4)
            chance = 1 / (1 + np.exp(-(ease - loss)))
            right = draws.random((4 if task in graded else 1, samples)) < chance
            parts.append(make_rows(cell, right.mean(axis=0).tolist()))
            cells.append(cell)
    return Output(pd.concat(parts, ignore_index=True), cells, make_sweep())


def make_sweep(**fields: Any) -> dict[str, Any]:
    return {
        "name": "unit",
        "output": "results/unit",
        "started": "2026-07-11T09:30:00+00:00",
        "config_text": "name: unit\nmethods: [full]\n",
        "versions": {"kvsweep": "0.1.0", "torch": "2.13.0"},
        "protocol": {
            "question": "compressed",
            "budget_base": "prompt",
            "growth": "grow",
            "chat_template": "auto",
            "answer_prefix": "stripped",
        },
        **fields,
    }


def budget_share(budget: str) -> float:
    if budget.endswith("%"):
        return float(budget[:-1]) / 100
    return int(budget.split()[0]) / 4000 if budget.endswith("tokens") else 1.0
