"""What choosing costs: observing and compressing one prompt, every method against SnapKV, on the quickstart's model.

    python -m perf.observe [--context 4096] [--budget 20%] [--methods snapkv,adakv] [--rounds 3] [--json]

All methods take turns in one process. In every round one prefill records all observations; each kind is recorded once
more by itself, and only that recording is timed, since two whole prefills differ by more than most observations take.
Compression is choosing; admission to a pool, quantising included, stands beside it. Every method gets a prompt on which
nobody has scored before. A method may take up to three times SnapKV's observation and compression, unless it needs
attention from all queries, further forward passes or a calibration.

Nothing is reported, and the exit code is 1, where a budget is not filled exactly or the fast selection keeps other
tokens than sorting does. The exit code is also 1 where a method takes longer than it may.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from kvcache.baselines.kvquant import KVQuant
from kvcache.budget import Budget, ResolvedBudget
from kvcache.calibration import CalibrationFacts, save_calibration
from kvcache.evict import PromptEvictor
from kvcache.method import Method, NotCalibrated, Observations, method_class, method_names
from kvcache.moments import HiddenMoments
from kvcache.pool import Compressed, PoolShape
from kvcache.prefill import Prefill
from kvcache.ragged import RaggedCompressed
from kvcache.select import rank
from perf.calibration import calibration
from perf.grid import MODEL, prompts_of
from workers.attention import PrefillStep
from workers.calibrate import calibrate
from workers.fork import Fork, Prompt, PromptForks
from workers.job import EngineSpec
from workers.models import LoadedModel, load_model
from workers.traces import Trace

BASE, LIMIT = "snapkv", 3.0
CALIBRATION_TOKENS = 512


@dataclass(frozen=True)
class Costs:
    """Seconds of one method and prompt."""

    observe: float
    choose: float
    admit: float

    @property
    def without_admission(self) -> float:
        return self.observe + self.choose

    @property
    def total(self) -> float:
        return self.without_admission + self.admit


@dataclass(frozen=True)
class Outcome:
    """Medians over rounds. ``ratio``: observing and choosing, to SnapKV's in the same round; ``with_admission``: all
    three. ``exempt``: why it may take longer, if it may."""

    observe_s: float
    choose_s: float
    admit_s: float
    ratio: float
    with_admission: float
    exempt: str

    @property
    def over(self) -> bool:
        return not self.exempt and self.ratio > LIMIT


def main() -> int:
    options = _options()
    model, names = load_model(MODEL), options.methods or method_names()
    prompt = prompts_of(model, 1, options.context, 16)[0]
    with TemporaryDirectory() as folder:
        methods, reasons = usable(model, prompt, list(dict.fromkeys([BASE, *names])), Path(folder))
        prefill, _ = observed(model, prompt, methods)
        budget = Budget.parse(options.budget)
        wrong = [fault for method in methods for fault in faults(method, prefill, budget)]
        if wrong:
            print(*wrong, sep="\n", file=sys.stderr)
            return 1
        outcomes = compare(model, prompt, methods, reasons, budget, options.rounds)
    if options.json:
        asked = {"context": options.context, "tokens": len(prompt.ids), "budget": options.budget}
        found = {name: {**asdict(one), "over": one.over} for name, one in outcomes.items()}
        print(json.dumps({**asked, "methods": found, "calibration": calibration()}, indent=1))
    else:
        print("\n".join(_lines(outcomes)))
    return int(any(one.over for one in outcomes.values()))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m perf.observe", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--budget", default="20%", help="of methods that have one")
    parser.add_argument("--methods", type=lambda names: names.split(","), help="all that are registered by default")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


# -- methods -----------------------------------------------------------------------------------------------------------


def usable(
    model: LoadedModel, prompt: Prompt, names: Sequence[str], folder: Path
) -> tuple[list[Method], dict[str, str]]:
    """Methods by name; what must be calibrated is, on the prompt's first tokens. And why a method may take longer, of
    those whose settings say so."""
    methods, reasons = [], {}
    for name in names:
        method = method_class(name)()
        try:
            method = method.fitted(name, MODEL.source, folder)
        except NotCalibrated:
            reasons[name] = "calibration"
            method = _calibrated(model, prompt, method, folder)
        if method.observes().column_sums or method.observes().probes:
            reasons[name] = "column sums"
        methods.append(method)
    return methods, reasons


def _calibrated(model: LoadedModel, prompt: Prompt, method: Method, folder: Path) -> Method:
    if not isinstance(method, KVQuant):
        raise SystemExit(f"{method.name} asks for a calibration that this measurement cannot make")
    ids = tuple(prompt.ids[:CALIBRATION_TOKENS])
    tables = calibrate(model, [Trace("prompt", ids, len(ids))], method.grid, gradients=False)
    facts = CalibrationFacts(method.name, method.calibrated_settings, method.name, "prompt", 1, len(ids), False)
    save_calibration(folder / facts.file_name, facts, tables)
    return method.fitted(method.name, MODEL.source, folder)


# -- times -------------------------------------------------------------------------------------------------------------


class TimedStep(PrefillStep):
    """Prefill that records each kind of observation by itself, too, and adds up the seconds that this takes."""

    def __init__(self, model: LoadedModel, seconds: dict[Observations, float], *given: Any) -> None:
        super().__init__(*given)
        layout, tokens, _, rotary, _ = given
        self._model, self._seconds = model, seconds
        self._alone = {kind: PrefillStep(layout, tokens, kind, rotary) for kind in seconds}

    def _observe(self, layer: int, queries: Tensor, keys: Tensor, scale: float) -> None:
        super()._observe(layer, queries, keys, scale)
        for kind, alone in self._alone.items():
            alone._log_sums = self._log_sums  # attention's, which every prefill has
            began = time.perf_counter()
            alone._observe(layer, queries, keys, scale)
            self._seconds[kind] += self._model.elapsed(began)

    def advance(self, tokens: int) -> None:
        super().advance(tokens)
        for alone in self._alone.values():
            alone.advance(tokens)


@torch.inference_mode()
def observed(
    model: LoadedModel, prompt: Prompt, methods: Sequence[Method]
) -> tuple[Prefill, dict[Observations, float]]:
    """A prefill with what all methods ask for, and the seconds of each kind of observation."""
    seconds = {method.observes(): 0.0 for method in methods}
    forks = [Fork(method.name, method, Budget.parse("unlimited"), "0") for method in methods]
    of_hidden, add = 0.0, HiddenMoments.add

    def timed(moments: HiddenMoments, hidden: Tensor) -> None:
        nonlocal of_hidden
        began = time.perf_counter()
        add(moments, hidden)
        of_hidden += model.elapsed(began)

    with (
        patch("workers.fork.PrefillStep", partial(TimedStep, model, seconds)),
        patch.object(HiddenMoments, "add", timed),
    ):
        prefill = PromptForks(model, EngineSpec().prefill_chunk).prefill(replace(prompt, forks=forks))
    return prefill, {kind: alone + of_hidden * kind.hidden_moments for kind, alone in seconds.items()}


def compare(
    model: LoadedModel,
    prompt: Prompt,
    methods: Sequence[Method],
    reasons: dict[str, str],
    budget: Budget,
    rounds: int,
) -> dict[str, Outcome]:
    """All methods by turns; a first round warms up and is not counted."""
    runs: list[dict[str, Costs]] = []
    exempt = dict(reasons)
    for _ in range(rounds + 1):
        prefill, seconds = observed(model, prompt, methods)
        costs = {}
        for method in methods:
            watched = Watched(prefill)
            costs[method.name] = _costs(model, watched.prefill, method, budget, seconds[method.observes()])
            if watched.ran_model:
                exempt.setdefault(method.name, "extra forward passes")
        runs.append(costs)
    return {method.name: _outcome(method.name, runs[1:], exempt.get(method.name, "")) for method in methods}


def _outcome(name: str, runs: Sequence[dict[str, Costs]], exempt: str) -> Outcome:
    own, base = [run[name] for run in runs], [run[BASE] for run in runs]
    pairs = list(zip(own, base, strict=True))
    return Outcome(
        statistics.median(one.observe for one in own),
        statistics.median(one.choose for one in own),
        statistics.median(one.admit for one in own),
        statistics.median(one.without_admission / snap.without_admission for one, snap in pairs),
        statistics.median(one.total / snap.total for one, snap in pairs),
        exempt,
    )


class Watched:
    """A prompt as it comes from prefill, whatever others found out about it, and whether somebody ran its model."""

    def __init__(self, prefill: Prefill) -> None:
        self._given, self.ran_model = prefill, False
        self.prefill = replace(
            unscored(prefill), continue_prompts=self._continue_prompts, project_queries=self._project_queries
        )

    def _continue_prompts(self, prefills: Sequence[Prefill]) -> Any:
        self.ran_model = True
        return self._given.continue_prompts(prefills)

    def _project_queries(self, *given: Any) -> Tensor:
        self.ran_model = True
        assert self._given.project_queries is not None
        return self._given.project_queries(*given)


def unscored(prefill: Prefill) -> Prefill:
    """The same prompt, without what its layers remember of the methods that scored it."""
    return replace(prefill, layers=[replace(layer) for layer in prefill.layers])


@torch.inference_mode()
def _costs(model: LoadedModel, prefill: Prefill, method: Method, budget: Budget, observe: float) -> Costs:
    room = _room(method, prefill, budget)
    pool = method.new_pool(PoolShape(model.layout, 1, model.device, model.dtype, model.rotary))
    began = time.perf_counter()
    (examined,) = method.examine([prefill], ["0"])
    compressed = method.compress(prefill, room, examined)
    choose = model.elapsed(began)
    began = time.perf_counter()
    pool.admit({0: compressed})
    return Costs(observe, choose, model.elapsed(began))


def _room(method: Method, prefill: Prefill, budget: Budget) -> ResolvedBudget:
    own = Budget.parse("unlimited") if method.fixed or method.name == "full" else budget
    return own.resolve(prefill.tokens, 0, "prompt", prefill.layout)


# -- what is checked first ---------------------------------------------------------------------------------------------


@torch.inference_mode()
def faults(method: Method, prefill: Prefill, budget: Budget) -> list[str]:
    """What is wrong with the choice of a method that evicts, in words."""
    if not isinstance(method, PromptEvictor):
        return []
    room = _room(method, prefill, budget)
    (examined,) = method.examine([unscored(prefill)], ["0"])
    chosen = method.compress(prefill, room, examined)
    with selection_by_sorting():
        by_sorting = method.compress(prefill, room, examined)
    wrong = list(_misfits(method, chosen, room.prompt_budget))
    if [head.tolist() for head in _heads(chosen)] != [head.tolist() for head in _heads(by_sorting)]:
        wrong.append(f"{method.name}: the fast selection keeps other tokens than sorting does")
    return wrong


def _heads(compressed: Compressed) -> list[Tensor]:
    """The kept positions of every head of every layer."""
    assert isinstance(compressed, RaggedCompressed)
    return [head for heads in compressed.kept for head in heads]


def _misfits(method: PromptEvictor, chosen: Compressed, each: int) -> Iterator[str]:
    """Positions out of order; a budget of ``each`` tokens that is not filled: to the last one, or the last whole chunk
    of a layer. A method that says how much of a prompt was voted for need not fill it."""
    heads = _heads(chosen)
    if not all(bool((head.diff() > 0).all()) for head in heads):
        yield f"{method.name}: positions do not ascend"
    assert isinstance(chosen, RaggedCompressed)
    held, asked = sum(len(head) for head in heads), len(heads) * each
    spare = asked if "voted_share" in chosen.facts else len(chosen.kept) * (getattr(method, "chunk", 1) - 1)
    if not asked - spare <= held <= asked:
        yield f"{method.name}: {held} tokens are kept, and the budget is {asked}"


def best_by_sorting(scores: Tensor, counts: Tensor) -> Tensor:
    """The reference of :func:`kvcache.select.best_of_rows`."""
    places = torch.arange(scores.shape[-1], device=scores.device)
    return torch.zeros_like(scores, dtype=torch.bool).scatter(-1, rank(scores), places < counts[:, None])


@contextmanager
def selection_by_sorting() -> Iterator[None]:
    with patch("kvcache.select.best_of_rows", best_by_sorting), patch("kvcache.allocate.best_of_rows", best_by_sorting):
        yield


# -- the report --------------------------------------------------------------------------------------------------------


def _lines(outcomes: dict[str, Outcome]) -> Iterator[str]:
    yield f"{'method':22} observe  choose   admit    of {BASE}   admission included"
    for name, one in sorted(outcomes.items(), key=lambda pair: pair[1].ratio):
        times = " ".join(f"{seconds * 1e3:5.0f} ms" for seconds in (one.observe_s, one.choose_s, one.admit_s))
        note = f"exempt: {one.exempt}" if one.exempt else "above the limit" if one.over else ""
        yield f"{name:22}{times} {one.ratio:8.2f} x {one.with_admission:12.2f} x   {note}".rstrip()
    yield f"limit: {LIMIT:g} x, of observing and choosing; calibration: {calibration()}"


if __name__ == "__main__":
    sys.exit(main())
