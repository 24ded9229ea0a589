"""What LORE-KV's lookahead costs: its scoring against SnapKV's, its stages on a real model, and a model of an H200.

    python -m perf.lookahead [--model] [--context 4096] [--rounds 5] [--json]

Scoring is that of a prompt with the quickstart model's shape and random content: SnapKV's window alone, LORE-KV's
window and all its futures, by turns in one process. LORE-KV's scores are compared with its reference first; when they
differ nothing is reported and the exit code is 1. The ratio is per query: LORE-KV has w + M T of them and SnapKV w.
``--model`` times the stages on the quickstart's model, beside SnapKV's and AnDPro's.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kvcache.baselines.snapkv import SnapKV
from kvcache.budget import Budget
from kvcache.evict import PromptEvictor
from kvcache.layout import CacheLayout, LayerLayout
from kvcache.method import method_class
from kvcache.prefill import LayerPrefill, Prefill
from lorekv.deletion import projection_grams
from lorekv.lookahead import Futures, sample_futures
from lorekv.method import LoreKV
from lorekv.reliability import particle_weights
from lorekv.scoring import future_cost, score_prompt, window_cost
from perf.calibration import calibration
from perf.grid import MODEL, prompts_of
from perf.observe import unscored
from perf.roofline import BANDWIDTH, H200, ISSUE, Device
from workers.fork import Fork, Prompt, PromptForks
from workers.job import EngineSpec
from workers.models import LoadedModel, load_model

LAYERS, QUERY_HEADS, KV_HEADS, DIM, HIDDEN = 30, 9, 3, 64, 576
"""The quickstart model's."""
LORE, SNAP = LoreKV(), SnapKV()
GOAL, GOAL_ALL = 1.5, 1.6
COMPARED, BUDGET = ("snapkv", "andpro"), "10%"
CHECKED_LAYERS, ERROR = 2, 1e-5


def main() -> int:
    options = _options()
    prefill, futures = random_prompt(options.context)
    if wrong := differences(prefill, futures):
        print(*wrong, sep="\n", file=sys.stderr)
        return 1
    found: dict[str, Any] = {
        "context": options.context,
        "scoring": scoring_times(prefill, futures, options.rounds),
        "modelled_h200": {tokens: modelled(tokens) for tokens in (16 * 1024, 32 * 1024)},
    }
    if options.model:
        found["stages"], found["of_andpro"] = stage_times(options.context, options.rounds)
    found["calibration"] = calibration()
    print(json.dumps(found, indent=1) if options.json else "\n".join(_lines(found)))
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m perf.lookahead", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", action="store_true", help="time the stages on the quickstart's model too")
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


# -- scoring -----------------------------------------------------------------------------------------------------------


def random_prompt(tokens: int, layers: int = LAYERS) -> tuple[Prefill, Futures]:
    """A prompt in bf16 after prefill, and its futures."""
    generator = torch.Generator().manual_seed(0)
    particles, steps = LORE.particles, LORE.tokens

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).bfloat16()

    def layer() -> LayerPrefill:
        keys, values = random(KV_HEADS, tokens, DIM), random(KV_HEADS, tokens, DIM)
        projection = random(HIDDEN, QUERY_HEADS, DIM) / HIDDEN**0.5
        return LayerPrefill(keys, values, random(QUERY_HEADS, LORE.window, DIM), None, projection, DIM**-0.5)

    layout = CacheLayout((LayerLayout("growing", QUERY_HEADS, KV_HEADS, DIM, DIM),) * layers, 2)
    prefill = Prefill([layer() for _ in range(layers)], layout, tokens, torch.zeros(1), _unused, _unused)
    surprise, entropy, varentropy = torch.rand(3, particles, steps, generator=generator)
    queries, keys, values = (
        [random(particles, heads, steps, DIM) for _ in range(layers)] for heads in (QUERY_HEADS, KV_HEADS, KV_HEADS)
    )
    fed = torch.zeros(particles, steps, dtype=torch.int64)
    lengths = torch.full((particles,), steps)
    return prefill, Futures(fed, lengths, -surprise, entropy, varentropy, queries, keys, values, [])


def _unused(*arguments: Any) -> Any:
    raise NotImplementedError("scoring does not run the model")


@torch.inference_mode()
def differences(prefill: Prefill, futures: Futures) -> list[str]:
    """Where scores differ from those of the reference, which holds every query's costs, in the first layers."""
    found = score_prompt(LORE, prefill, futures).scores
    weights = particle_weights(futures, LORE.atypicality, LORE.entropy)
    wrong = []
    for index, layer in enumerate(prefill.layers[:CHECKED_LAYERS]):
        grams = projection_grams(layer.output_projection, len(layer.keys))
        of_futures = future_cost(LORE, index, layer, grams, futures, weights)
        expected = (1 - LORE.mix) * window_cost(LORE, layer, grams) + LORE.mix * of_futures
        error = float((found[index] - expected).norm() / expected.norm())
        top = prefill.tokens // 10
        same = torch.equal(*(one.topk(top).indices.sort().values for one in (found[index], expected)))
        if error > ERROR or not same:
            best = "the same" if same else "another"
            wrong.append(f"layer {index}: scores differ by {error:.1e} of their norm, and the best tenth is {best}")
    return wrong


def scoring_times(prefill: Prefill, futures: Futures, rounds: int) -> dict[str, float]:
    """Median seconds of both, and the median over rounds of their ratio, per query."""
    runs = (lambda: SNAP.scores(unscored(prefill), "0"), lambda: score_prompt(LORE, prefill, futures))
    for run in runs:
        _seconds(run)
    pairs = [[_seconds(run) for run in runs] for _ in range(rounds)]
    more_queries = (LORE.window + LORE.particles * LORE.tokens) / SNAP.window
    return {
        "snapkv_s": statistics.median(snap for snap, _ in pairs),
        "lorekv_s": statistics.median(lore for _, lore in pairs),
        "ratio_per_query": statistics.median(lore / snap for snap, lore in pairs) / more_queries,
    }


@torch.inference_mode()
def _seconds(run: Callable[[], Any]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


# -- a real model ------------------------------------------------------------------------------------------------------


def stage_times(context: int, rounds: int) -> tuple[dict[str, dict[str, float]], float]:
    """Median seconds of each stage: LORE-KV's, and those of the methods it is compared with, by turns; and the median
    over rounds of all of LORE-KV's in units of AnDPro's."""
    model = load_model(MODEL)
    prompt = prompts_of(model, 1, context, 16)[0]
    methods = {"lorekv": LORE, **{name: method_class(name)() for name in COMPARED}}
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in methods}
    for _ in range(rounds + 1):
        for name, method in methods.items():
            assert isinstance(method, PromptEvictor)
            runs[name].append(_stages(model, prompt, method))
    medians = {
        name: {stage: statistics.median(run[stage] for run in times[1:]) for stage in times[0]}
        for name, times in runs.items()
    }
    pairs = zip(runs["lorekv"][1:], runs["andpro"][1:], strict=True)
    return medians, statistics.median(sum(ours.values()) / sum(theirs.values()) for ours, theirs in pairs)


@torch.inference_mode()
def _stages(model: LoadedModel, prompt: Prompt, method: PromptEvictor) -> dict[str, float]:
    """Seconds of prefill with what the method observes, its lookahead if it has one, scoring and selection."""
    seconds = {}

    def timed(stage: str, run: Callable[[], Any]) -> Any:
        began = time.perf_counter()
        result = run()
        seconds[stage] = model.elapsed(began)
        return result

    budget = Budget.parse(BUDGET)
    forked = replace(prompt, forks=[Fork("", method, budget, "0")])
    prefill: Prefill = timed("prefill", lambda: PromptForks(model, EngineSpec().prefill_chunk).prefill(forked))
    if isinstance(method, LoreKV):
        sampling = method.particles, method.tokens, method.temperature, ["0"]
        futures = timed("lookahead", lambda: sample_futures([prefill], *sampling)[0])
        examined = timed("scoring", lambda: score_prompt(method, prefill, futures))
    else:
        examined = timed("scoring", lambda: method.examine([prefill], ["0"])[0])
    room = budget.resolve(prefill.tokens, prompt.max_new_tokens, "prompt", model.layout)
    timed("selection", lambda: method.compress(prefill, room, examined))
    return seconds


# -- a GPU, modelled ---------------------------------------------------------------------------------------------------

INSTRUCTIONS = 107.2, 61.1
"""Per query and token in the loops of ``attend_prompt`` and ``deletion_costs``, from ``perf.kernels``, sm_90."""
PRODUCTS, ATTENTION = 650e12, 400e12
"""FLOP/s that a prefill's dense products, and attention with our kernels, are taken to reach on an H200."""


def modelled(tokens: int, device: Device = H200) -> dict[str, Any]:
    """Seconds of a prompt of a model with the shape of Llama-3.1-8B; an efficiency is assumed wherever one is needed.

    The lookahead is taken to read all weights and the prompt's cache once a step; prefill is dense products and
    causal attention.
    """
    layers, heads, kv_heads, dim = 32, 32, 8, 128
    weights, dense = 16.1e9, 13.96e9  # bytes; FLOP per token
    queries = LORE.window + LORE.particles * LORE.tokens
    pairs, half_cache = heads * queries * tokens, kv_heads * tokens * dim * 2
    of_layer = {
        "memory": (5 * half_cache + 3 * heads * tokens * 4) / (BANDWIDTH * device.bandwidth),
        # Three products of the queries in each pass, since fp32 goes in two halves, and two of the values with G.
        "products": (6 * 2 * pairs * dim + 2 * 2 * heads * tokens * dim**2) / ATTENTION,
        "issue": pairs * sum(INSTRUCTIONS) / 32 / (ISSUE * 4 * device.processors * device.clock),
    }
    limit = max(of_layer, key=lambda name: of_layer[name])
    prefill = dense * tokens / PRODUCTS + layers * 2 * tokens**2 * heads * dim / ATTENTION
    step = (weights + 2 * layers * half_cache) / (BANDWIDTH * device.bandwidth)
    return {
        "prefill_s": prefill,
        "lookahead_s": LORE.tokens * step,
        "scoring_s": layers * of_layer[limit],
        "scoring_limit": limit,
    }


# -- the report --------------------------------------------------------------------------------------------------------


def _lines(found: dict[str, Any]) -> Iterator[str]:
    scoring = found["scoring"]
    yield (
        f"scoring {found['context']} tokens: SnapKV {scoring['snapkv_s'] * 1e3:.0f} ms, LORE-KV"
        f" {scoring['lorekv_s'] * 1e3:.0f} ms; per query {scoring['ratio_per_query']:.2f} of it (goal {GOAL})"
    )
    for name, stages in found.get("stages", {}).items():
        times = ", ".join(f"{stage} {seconds * 1e3:.0f} ms" for stage, seconds in stages.items())
        yield f"{name:8} {times}; all {sum(stages.values()) / stages['prefill']:.2f} x its prefill"
    if "of_andpro" in found:
        yield f"LORE-KV's {found['of_andpro']:.2f} x AnDPro's, round by round (goal {GOAL_ALL})"
    for tokens, times in found["modelled_h200"].items():
        lookahead, score = times["lookahead_s"], times["scoring_s"]
        yield (
            f"modelled, {H200.name}, 8B model, {tokens // 1024}K: prefill {times['prefill_s']:.2f} s, lookahead"
            f" {lookahead * 1e3:.0f} ms, scoring {score * 1e3:.0f} ms (limited by {times['scoring_limit']});"
            f" scoring {score / times['prefill_s']:.1%} of prefill"
        )
    yield f"calibration: {found['calibration']}"


if __name__ == "__main__":
    sys.exit(main())
