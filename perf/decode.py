"""A decode step of a method against one of the full cache, on the device at hand: the same prompt, the same rows.

Both run interleaved in one process; a step counts with all that falls due in it, routing included, and what comes
before the first step (prefill, compression, admission) does not. On a CPU QEvict attends to a working copy of its
codes: no ratio is reported unless, in float32, it says the same tokens without one. (In bf16 the copy's keys are
rounded and those made of the codes at every step are not, which can turn a token.)

    python -m perf.decode [--method qevict] [--budget 20%] [--contexts 4096,8000] [--rows 1,4] [--new 17]
                          [--json]

Numbers of rows are interleaved too: what the most of them take is told in steps of the fewest. Thirty rows that keep
about 400 tokens each: ``--method snapkv --budget 20% --contexts 2048 --rows 1,30``.

The exit code is 1 where the method is the slower one.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch

from kvcache.budget import Budget
from kvcache.method import method_class
from kvcache.pool import Compressed
from perf.calibration import calibration
from perf.grid import MODEL, prompts_of
from workers.engine import Engine
from workers.fork import Fork, Generation, Prompt, PromptForks, Ready
from workers.job import EngineSpec
from workers.models import LoadedModel, load_model


class TimedEngine(Engine):
    """Decodes rows of one compressed prompt, and adds up the seconds of its steps."""

    def __init__(self, model: LoadedModel, spec: EngineSpec, compressed: Compressed) -> None:
        super().__init__(model, spec)
        self._compressed = compressed
        self.steps, self.seconds = 0, 0.0

    def _fork(self, prompts: list[Prompt], ready: deque[Ready]) -> Iterator[Generation]:
        ready.extend(Ready(Generation(one, fork), self._compressed) for one in prompts for fork in one.forks)
        yield from ()

    def _step(self) -> Iterator[Generation]:
        busy, began = any(self._rows), time.perf_counter()
        finished = list(super()._step())
        if busy:
            self.steps, self.seconds = self.steps + 1, self.seconds + self.model.elapsed(began)
        yield from finished


def main() -> int:
    options = _options()
    model, exact = load_model(MODEL), load_model(replace(MODEL, dtype="float32"))
    model.stop_ids = exact.stop_ids = frozenset()  # every row generates all its tokens
    method, full = method_class(options.method)(), method_class("full")()
    compared = (
        Fork("full", full, Budget.parse("100%"), "0"),
        Fork("method", method, Budget.parse(options.budget), "0"),
    )
    found: list[dict[str, Any]] = []
    growth = {}
    fewest, most = min(options.rows), max(options.rows)
    for context in options.contexts:
        prompt = prompts_of(model, 1, context, options.new)[0]
        if method.name == "qevict":
            refuse_other_tokens_without_copy(exact, _compressed(exact, prompt, compared[1]))
        compressed = [_compressed(model, prompt, fork) for fork in compared]
        for ready in compressed:
            refuse_other_tokens_in_company(model, ready, most)
            for rows in options.rows:
                _step_ms(model, ready, rows)  # warms up
        rounds = [
            {rows: [_step_ms(model, ready, rows) for ready in compressed] for rows in options.rows}
            for _ in range(options.rounds)
        ]
        growth[context] = statistics.median(one[most][1] / one[fewest][1] for one in rounds)
        for rows in options.rows:
            times = [one[rows] for one in rounds]
            found.append(
                {
                    "context": context,
                    "rows": rows,
                    "full_ms": statistics.median(of_full for of_full, _ in times),
                    "method_ms": statistics.median(of_method for _, of_method in times),
                    "ratio": statistics.median(of_method / of_full for of_full, of_method in times),
                }
            )
    slower = any(one["ratio"] > 1 for one in found)
    if options.json:
        asked = {name: getattr(options, name) for name in ("method", "budget", "new")}
        print(json.dumps({**asked, "steps": found, "growth": growth, "calibration": calibration()}, indent=1))
        return int(slower)
    for one in found:
        print(
            f"{one['context']:6} tokens, {one['rows']:2} rows: full cache {one['full_ms']:7.1f} ms,"
            f" {options.method} at {options.budget} {one['method_ms']:7.1f} ms, {one['ratio']:.2f} of it"
        )
    for context, longer in growth.items():
        if fewest < most:
            print(f"{context:6} tokens, {options.method}: a step of {most} rows takes {longer:.2f} x one of {fewest}")
    print(f"calibration: {calibration()}")
    return int(slower)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m perf.decode", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--method", default="qevict")
    parser.add_argument("--budget", default="20%")
    parser.add_argument("--contexts", type=_numbers, default=[4096, 8000])
    parser.add_argument("--rows", type=_numbers, default=[1, 4])
    parser.add_argument("--new", type=int, default=17, help="tokens generated by every row, two routing events")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


@torch.inference_mode()
def _compressed(model: LoadedModel, prompt: Prompt, fork: Fork) -> Ready:
    ready = next(PromptForks(model, EngineSpec().prefill_chunk).fork([replace(prompt, forks=[fork])]))
    if isinstance(ready, Generation):
        raise SystemExit(f"{fork.key}: {ready.error}")
    return ready


def refuse_other_tokens_without_copy(model: LoadedModel, ready: Ready) -> None:
    """What a step with the working copy saves is worth nothing where the copy says something else than the codes."""
    said = []
    for keeps in (True, False):
        with patch("qevict.pool.keeps_working_copy", lambda device, keeps=keeps: keeps):
            said.append(_run(model, ready, 1)[1][0].tokens)
    if said[0] != said[1]:
        place = next(place for place, pair in enumerate(zip(*said, strict=True), 1) if pair[0] != pair[1])
        prompt = len(ready.generation.prompt.ids)
        raise SystemExit(
            f"{prompt} tokens: QEvict says other tokens with a working copy of its codes than without, from the "
            f"{place}. on: no ratio is reported"
        )


def refuse_other_tokens_in_company(model: LoadedModel, ready: Ready, rows: int) -> None:
    """Rows of one batch are worth timing where each says what it says alone, at the same row width."""
    spec = EngineSpec(rows)
    alone, together = _run(model, ready, 1, spec)[1], _run(model, ready, rows, spec)[1]
    if any(one.tokens != alone[0].tokens for one in together):
        raise SystemExit(f"{ready.generation.fork.key}: one of {rows} rows says other tokens than alone")


def _step_ms(model: LoadedModel, ready: Ready, rows: int) -> float:
    """Mean milliseconds of a step of so many rows."""
    engine, _ = _run(model, ready, rows)
    return engine.seconds / engine.steps * 1e3


def _run(
    model: LoadedModel, ready: Ready, rows: int, spec: EngineSpec | None = None
) -> tuple[TimedEngine, list[Generation]]:
    prompt, fork = ready.generation.prompt, ready.generation.fork
    forks = [replace(fork, key=row) for row in range(rows)]
    engine = TimedEngine(model, spec or EngineSpec(rows), ready.compressed)
    finished = list(engine.run([replace(prompt, forks=forks)]))
    if failed := [row.error for row in finished if row.error]:
        raise SystemExit(f"a row failed: {failed[0]}")
    return engine, finished


if __name__ == "__main__":
    sys.exit(main())
