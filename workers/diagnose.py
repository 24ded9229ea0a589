"""Diagnostics of QEvict on a model: policies run teacher-forced beside a full-cache run of the same tokens (App. I).

    prefill P tokens ─┬─ one row per condition, decoded through its tiered pool: tiers and scores at every event
                      └─ the same T tokens over the full cache: attention, one layer at a time, measured and let go

Attention given to a state that was discarded cannot be seen in the compressed run, so the full-cache run is the
reference of every measure. Nothing is sampled: both runs read the trace's own tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvcache.budget import Base, Budget
from kvcache.pool import FamilyPool, PoolShape
from kvcache.prefill import Prefill
from qevict.capacity import Capacities
from qevict.method import QEvict
from qevict.pool import TieredPool
from qevict.view import is_event, tiers_of
from workers.attention import Step
from workers.engine import Engine, decode_step
from workers.fork import Fork, Prompt, PromptForks
from workers.job import EngineSpec
from workers.layer_measures import LayerTrace, Measure, measures_of
from workers.linear import LinearCache, LinearRows
from workers.models import LoadedModel
from workers.softmax import causal_attention
from workers.traces import Trace
from workers.untouched import UntouchedLayers


@dataclass(frozen=True)
class Condition:
    """One policy: R0 ... R4 of App. I, or any other setting of QEvict."""

    label: str
    method: QEvict
    budget: Budget
    base: Base = "prompt+max_new"


@dataclass(frozen=True)
class Held:
    """What a condition holds at most, as shares of the full cache's bytes for the whole trace: what the paper's rule
    charges right after an event, and what the tensors hold between events."""

    condition: str
    full_windows: int
    quantized_windows: int
    charged_share: float
    peak_share: float


@dataclass(frozen=True)
class Diagnosis:
    measures: list[Measure]
    held: list[Held]


@dataclass
class Decisions:
    """What a policy did: ``held`` [E], ``tiers`` and ``scores`` [E, L, W], scores fp32."""

    condition: Condition
    room: Capacities
    held: Tensor
    tiers: Tensor
    scores: Tensor
    charged: int
    peak: int


class ConditionError(ValueError):
    """A condition that cannot be run on this model and trace, and why."""


@torch.inference_mode()
def diagnose(
    model: LoadedModel, trace: Trace, conditions: Sequence[Condition], horizon: int, chunk: int = 2048
) -> Diagnosis:
    """All measures of all conditions on one trace."""
    prefill = prefill_of(model, trace, conditions, chunk)
    decided = run_policies(model, prefill, trace, conditions)
    measures: list[Measure] = []

    def observe(layer: int, attention: Tensor) -> None:
        sums = prefill.layers[layer].column_sums
        assert sums is not None
        for one in decided:
            method = one.condition.method
            seen = LayerTrace(
                sums,
                attention,
                one.held,
                one.tiers[:, layer],
                one.scores[:, layer],
                one.scores[0, layer],
                method.sinks,
                method.window,
                one.room.full,
                has_attention_scores=method.ranker == "cumulative",
            )
            measures.extend(measures_of(one.condition.label, layer, seen, horizon))

    read_in_full(model, prefill, trace, observe)
    whole = model.layout.full_bytes(len(trace.ids))
    held = [
        Held(one.condition.label, one.room.full, one.room.quantized, one.charged / whole, one.peak / whole)
        for one in decided
    ]
    return Diagnosis(measures, held)


@torch.inference_mode()
def continued(model: LoadedModel, trace: Trace) -> Trace:
    """The trace with its continuation replaced by what the full cache generates greedily; no stop token ends it."""
    from kvcache.baselines.full import Full

    new = len(trace.ids) - trace.prefill
    fork = Fork("full", Full(), Budget.parse("unlimited"), "0")
    prompt = Prompt(trace.name, list(trace.ids[: trace.prefill]), [], new, [fork], min_new_tokens=new)
    generation = next(Engine(model, EngineSpec(row_width=1)).run([prompt]))
    if generation.error:
        raise ConditionError(f"{trace.name}: {generation.error}")
    return Trace(trace.name, (*trace.ids[: trace.prefill], *generation.tokens), trace.prefill)


def prefill_of(model: LoadedModel, trace: Trace, conditions: Sequence[Condition], chunk: int) -> Prefill:
    """What the conditions ask for, and the prompt's attention, which the reference needs in any case."""
    reference = Condition("reference", QEvict(), Budget.parse("unlimited"))
    forks = [Fork(one.label, one.method, one.budget, "0") for one in (*conditions, reference)]
    prompt = Prompt(trace.name, list(trace.ids[: trace.prefill]), [], len(trace.ids) - trace.prefill, forks)
    return PromptForks(model, chunk).prefill(prompt)


# -- the policies ----------------------------------------------------------------------------------------------------


def run_policies(
    model: LoadedModel, prefill: Prefill, trace: Trace, conditions: Sequence[Condition]
) -> list[Decisions]:
    """One decode batch, a row per condition; every row reads the same tokens."""
    shape = PoolShape(model.layout, len(conditions), model.device, model.dtype, model.rotary)
    pools: dict[str, TieredPool] = {}
    rooms = [_admit(prefill, trace, one, row, pools, shape) for row, one in enumerate(conditions)]
    watches = [
        _Watch(one, room, pools[one.method.family], row, len(trace.ids))
        for row, (one, room) in enumerate(zip(conditions, rooms, strict=True))
    ]
    untouched = UntouchedLayers(model.layout, len(conditions), model.device, model.dtype)
    for row in range(len(conditions)):
        untouched.write(row, prefill)
    ids = torch.tensor(trace.ids)
    for held in range(trace.prefill, len(ids) + 1):
        for watch in watches:
            watch.look(held)
        if held == len(ids):
            break
        _step(model, list(pools.values()), untouched, ids[held].expand(len(conditions), 1), held)
    return [watch.decisions() for watch in watches]


class _Watch:
    """Looks at a row whenever its policy has routed."""

    def __init__(self, condition: Condition, room: Capacities, pool: TieredPool, row: int, total: int) -> None:
        self._condition, self._room, self._pool, self._row = condition, room, pool, row
        self._windows = -(-(total - condition.method.sinks) // condition.method.window)
        self._seen: list[tuple[int, Tensor, Tensor]] = []
        self._charged = 0

    def look(self, held: int) -> None:
        """At ``held`` tokens, if that is an event."""
        if not is_event(self._pool, self._row, held):
            return
        self._seen.append((held, *tiers_of(self._pool, self._row, held, self._windows)))
        self._charged = max(self._charged, self._pool.memory(self._row).charged)

    def decisions(self) -> Decisions:
        held, tiers, scores = zip(*self._seen, strict=True)
        at, stacked = torch.tensor(held, device=tiers[0].device), (torch.stack(tiers), torch.stack(scores))
        return Decisions(self._condition, self._room, at, *stacked, self._charged, self._pool.peak_held(self._row))


def _admit(
    prefill: Prefill, trace: Trace, one: Condition, row: int, pools: dict[str, TieredPool], shape: PoolShape
) -> Capacities:
    method, new = one.method, len(trace.ids) - trace.prefill
    budget = one.budget.resolve(trace.prefill, new, one.base, shape.layout)
    if reason := method.impossible(budget, shape.layout):
        raise ConditionError(f"condition {one.label}: {reason}")
    room = method.capacities(budget, shape.layout)
    assert room is not None, "an impossible budget is refused before"
    if method.family not in pools:
        pool = method.new_pool(shape)
        assert isinstance(pool, TieredPool)
        pools[method.family] = pool
    examined = method.examine([prefill], ["0"])[0]
    pools[method.family].admit({row: method.compress(prefill, budget, examined)})
    return room


def _step(
    model: LoadedModel, pools: Sequence[FamilyPool], untouched: UntouchedLayers, tokens: Tensor, position: int
) -> None:
    positions, counts = torch.full_like(tokens, position), torch.ones_like(tokens[:, 0])
    decode_step(model, pools, untouched, tokens, positions, counts)
    for pool in pools:
        pool.after_step(positions[pool.rows], counts[pool.rows])


# -- the reference ---------------------------------------------------------------------------------------------------


def read_in_full(model: LoadedModel, prefill: Prefill, trace: Trace, observe: Callable[[int, Tensor], None]) -> None:
    """Read the continuation over the prompt's full cache in one pass; ``observe`` gets each growing layer's attention
    [H_q, T, N] fp32, which is not kept."""
    ids = torch.tensor([trace.ids[trace.prefill :]], device=model.device)
    positions = torch.arange(trace.prefill, len(trace.ids), device=model.device)[None]
    states = LinearRows(model.layout, 1, model.device, model.dtype)
    states.write(0, prefill.linear)
    model.read(ids, positions, _FullStep(prefill, observe), LinearCache(states))


class _FullStep(Step):
    """Attention of the whole continuation over the prompt's cache and itself."""

    def __init__(self, prefill: Prefill, observe: Callable[[int, Tensor], None]) -> None:
        self._prefill, self._observe = prefill, observe
        self._growing = {index: place for place, index in enumerate(prefill.layout.growing)}

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        if layer in self._growing:
            before = self._prefill.layers[self._growing[layer]]
            past, window = (before.keys, before.values), None
        else:
            past, window = self._prefill.sliding[layer], self._prefill.layout.layers[layer].window
        keys, values = (torch.cat([old[None], new], 2) for old, new in zip(past, (keys, values), strict=True))
        if layer in self._growing:
            self._observe(self._growing[layer], causal_weights(queries[0], keys[0], scale))
        return causal_attention(queries, keys, values, scale, window)[0]


def causal_weights(queries: Tensor, keys: Tensor, scale: float) -> Tensor:
    """Attention probabilities of the last t of n tokens, fp32. queries [H_q, t, d], keys [H_kv, n, d] -> [H_q, t, n]"""
    new, visible = queries.shape[1], keys.shape[1]
    grouped = queries.float().unflatten(0, (len(keys), -1))
    scores = torch.einsum("hgtd,hnd->hgtn", grouped, keys.float()).flatten(0, 1) * scale
    position = torch.arange(visible, device=keys.device)
    return scores.masked_fill_(position > position[visible - new :, None], -torch.inf).softmax(-1)
