"""What holds for every registered method, whatever it keeps and in which form: on small random models, through the
engine. What a method computes is tested in its own file."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from dense_passes import Dense, dense_pass
from hypothesis import given, settings
from hypothesis import strategies as st
from kvquant_cases import of_tiny_llama
from models import prompt_ids, tiny_llama
from torch import Tensor

from kvcache.budget import Base, Budget
from kvcache.evict import PromptEvictor
from kvcache.fixed import FixedMethod
from kvcache.method import Method, method_class, method_names
from kvcache.pool import FamilyPool, PoolShape
from kvcache.prefill import Prefill
from kvcache.ragged import RaggedCompressed
from workers.engine import Engine
from workers.evaluate import fill_memory
from workers.fork import Fork, Generation, Prompt, PromptForks
from workers.job import EngineSpec
from workers.models import LoadedModel
from workers.row import Row

NEW = 10
SETTINGS: dict[str, tuple[dict[str, Any], ...]] = {
    "adakv": ({"window": 8}, {"window": 5, "alpha": 0.0}, {"window": 5, "safeguard": "force"}),
    "andpro": ({"window": 8}, {"window": 8, "chunk": 1, "anchor": "full"}),
    "critical_adakv": ({"window": 8, "safeguard": "force"}, {"window": 5}),
    "criticalkv": ({"window": 8},),
    "defensivekv": ({"window": 8},),
    "expected_attention": ({"future": 16},),
    "gvote": ({"samples": 2}, {"nucleus": 0.5}),
    "h2o": ({}, {"heavy_share": 0.0}),
    "key_norm": ({}, {"sinks": 2, "recent": 3}),
    "kivi": ({"group": 8, "residual": 16}, {"bits": 4, "group": 16, "residual": 32}),
    "kvquant": (of_tiny_llama(2), of_tiny_llama(3, 0.1)),
    "laq": ({"window": 8, "recent": 8, "lookahead": 3},),
    "laqpp": ({"window": 8, "recent": 3, "lookahead": 3},),
    "layer_defensivekv": ({"window": 8},),
    "lorekv": (
        {"window": 8, "particles": 2, "tokens": 3},
        {"window": 8, "particles": 2, "tokens": 3, "layer_budgets": "global", "head_exponent": 1.0},
        {"window": 8, "particles": 0},
    ),
    "obcache": ({"window": 8, "recent": 8}, {"window": 8, "recent": 5, "sinks": 2, "kernel": 3}),
    "pyramidkv": ({"window": 8, "beta": 4},),
    "qevict": ({"recent": 8}, {"recent": 8, "quantized_share": 0.0}),
    "quest": ({"tokens": 32, "page": 8, "dense_layers": 1},),
    "random": ({}, {"sinks": 2, "recent": 3}),
    "scissorhands": ({"history": 20, "recent": 5},),
    "snapkv": ({"window": 8},),
    "sparq": ({"channels": 4, "tokens": 16, "local": 4},),
    "zipcache": ({"interval": 6},),
}
"""Small ones, so that short prompts leave something to choose; a method that is not here runs with its defaults."""

LOSSLESS: dict[str, dict[str, Any]] = {
    "gvote": {"nucleus": 1.0},
    "kivi": {"residual": 512},
    "qevict": {"quantized_share": 0.0},
    "quest": {"tokens": 512},
    "sparq": {"channels": 16, "tokens": 512},
}
"""What leaves nothing out of an unlimited budget, where a budget alone does not decide. Methods with an operating point
that are not here always lose something."""

UNEVEN = {"adakv", "critical_adakv", "pyramidkv", "andpro", "defensivekv", "layer_defensivekv"}
"""A head may have more than its budget, and others less."""


def unused(method: Method, layers: int) -> int | None:
    """Most tokens of a model's budget that may stay unused; None: as many as the method likes."""
    if method.name == "gvote":
        return None
    return layers * (method.chunk - 1) if method.name == "andpro" else 0  # type: ignore[attr-defined]


METHODS = [method_class(name)(**own) for name in method_names() for own in SETTINGS.get(name, ({},))]
EVICTORS = [method for method in METHODS if isinstance(method, PromptEvictor)]
BUDGETED = [method for method in METHODS if not method.fixed and method.name != "full"]


def name_of(method: Method) -> str:
    own = {
        name: value
        for name, value in method.settings().items()
        if name != "calibration" and value != getattr(type(method), name, None)  # a file of this run alone
    }
    return " ".join([method.name, *(f"{name}={value}" for name, value in own.items())])


every_method = pytest.mark.parametrize("method", METHODS, ids=name_of)
every_evictor = pytest.mark.parametrize("method", EVICTORS, ids=name_of)
every_budget_of_a_method = pytest.mark.parametrize("method", BUDGETED, ids=name_of)


@cache
def model(dtype: torch.dtype = torch.float32) -> LoadedModel:
    return tiny_llama(dtype)


def fork(method: Method, budget: str = "60%", seed: str = "0") -> Fork:
    return Fork((method, seed), method, Budget.parse(budget if method in BUDGETED else "unlimited"), seed)


def run(loaded: LoadedModel, prompts: list[Prompt]) -> dict[tuple[Any, Method, str], Generation]:
    finished = Engine(loaded, EngineSpec(6, 64)).run(prompts)
    return {(one.prompt.key, one.fork.method, one.fork.seed): one for one in finished}


def prompts_of(forks: list[Fork]) -> list[Prompt]:
    return [prompt_of(70, forks, 19), prompt_of(150, forks)]


def prompt_of(tokens: int, forks: list[Fork], question: int = 0) -> Prompt:
    """Random tokens, and a question after them; nothing ends the answer early."""
    ids, appended = prompt_ids(tokens), prompt_ids(question, seed=7) if question else []
    return Prompt(tokens, ids, appended, NEW, forks, min_new_tokens=NEW)


@cache
def together() -> dict[tuple[Any, Method, str], Generation]:
    """All methods and prompts in one batch after another, in the dtype of a sweep."""
    return run(model(torch.bfloat16), prompts_of([fork(method) for method in METHODS]))


@cache
def prefilled(tokens: int) -> Prefill:
    forks = [fork(method) for method in METHODS]
    with torch.inference_mode():
        return PromptForks(model(), 64).prefill(prompt_of(tokens, forks))


def kept(method: PromptEvictor, tokens: int, budget: int) -> list[list[list[int]]]:
    """[layers][H_kv] of positions"""
    prefill = prefilled(tokens)
    resolved = Budget.parse(f"{budget} tokens").resolve(tokens, NEW, "prompt", prefill.layout)
    with torch.inference_mode():
        compressed = method.compress(prefill, resolved, method.examine([prefill], ["0"])[0])
    assert isinstance(compressed, RaggedCompressed)
    return [[head.tolist() for head in layer] for layer in compressed.kept]


# -- settings --------------------------------------------------------------------------------------------------------


def test_there_are_settings_for_no_other_methods() -> None:
    assert SETTINGS.keys() | LOSSLESS.keys() | UNEVEN <= set(method_names())


@every_method
def test_settings_survive_a_sweep_file(method: Method) -> None:
    again = method_class(method.name)(**json.loads(json.dumps(method.settings())))
    assert again == method
    assert json.dumps(again.identity) == json.dumps(method.identity)
    assert method.name in method_names()
    assert method.version >= 1


@pytest.mark.parametrize("name", method_names())
def test_settings_that_mean_nothing_are_refused(name: str) -> None:
    """No setting is of any use below zero, and none is a text that nobody knows."""
    settings_of = method_class(name)()
    for field in dataclasses.fields(settings_of):
        value = getattr(settings_of, field.name)
        if isinstance(value, bool):
            continue
        wrong = "nonsense" if isinstance(value, str) else -1
        with pytest.raises(ValueError, match=r"^[^\n]+$"):
            dataclasses.replace(settings_of, **{field.name: wrong})


# -- what is kept ----------------------------------------------------------------------------------------------------


@every_evictor
@settings(max_examples=12)
@given(tokens=st.integers(1, 70), budget=st.integers(1, 80))
def test_totals_are_exact_and_protected_tokens_stay(method: PromptEvictor, tokens: int, budget: int) -> None:
    prefill = prefilled(tokens)
    resolved = Budget.parse(f"{budget} tokens").resolve(tokens, NEW, "prompt", prefill.layout)
    protected = set(method.protected(prefill).nonzero().flatten().tolist())
    enough = budget >= min(max(sum(method.protected_ends), 1), tokens)
    assert (method.impossible(resolved, prefill.layout) is None) == enough
    if not enough:
        return
    found = kept(method, tokens, budget)
    heads = [head for layer in found for head in layer]
    most, spare = len(heads) * min(budget, tokens), unused(method, len(found))
    assert most - (most if spare is None else spare) <= sum(map(len, heads)) <= most
    for head in heads:
        assert head == sorted(set(head))
        assert protected <= set(head) <= set(range(tokens))
        assert len(head) <= budget or method.name in UNEVEN or "global" in method.settings().values()


@every_evictor
def test_an_evicted_cache_is_the_full_one_with_a_mask(method: PromptEvictor) -> None:
    """Gather, positions and storage at once: in a dense pass, new tokens that see only what each head kept follow."""
    prompt = prompt_of(70, [fork(method, "24 tokens")])
    (generation,) = run(model(), [prompt]).values()
    positions = kept(method, 70, 24)
    assert any(len(head) < 70 for layer in positions for head in layer)
    logits = dense_pass(model(), prompt.ids + generation.tokens[:-1], Dense(70, positions))[69:]
    silenced = logits.index_fill(1, torch.tensor(list(model().stop_ids)), -torch.inf)
    assert generation.tokens == silenced.argmax(-1).tolist()


# -- through the engine ----------------------------------------------------------------------------------------------


def lossless() -> Iterator[Method]:
    for method in METHODS:
        if method.name in LOSSLESS or not method.fixed:
            yield dataclasses.replace(method, **LOSSLESS.get(method.name, {}))


@cache
def unlimited() -> dict[tuple[Any, Method, str], Generation]:
    return run(model(), prompts_of([fork(method, "unlimited") for method in dict.fromkeys(lossless())]))


@pytest.mark.parametrize("method", dict.fromkeys(lossless()), ids=name_of)
def test_an_unlimited_budget_is_the_full_cache(method: Method) -> None:
    for tokens in (70, 150):
        found, full = (unlimited()[tokens, one, "0"] for one in (method, method_class("full")()))
        assert not found.error
        assert found.tokens == full.tokens


@every_method
def test_rows_do_not_depend_on_what_runs_beside(method: Method) -> None:
    for prompt in prompts_of([fork(method)]):
        (alone,) = run(model(torch.bfloat16), [prompt]).values()
        beside = together()[prompt.key, method, "0"]
        assert not alone.error
        assert (beside.tokens, beside.at_end, beside.peak_held) == (alone.tokens, alone.at_end, alone.peak_held)
        assert beside.method_facts == alone.method_facts


@every_method
def test_seeds_decide_where_a_method_says_so(method: Method) -> None:
    """The same seed is the same choice; another one is another in stochastic methods, and in no others."""
    found = run(model(), [prompt_of(70, [fork(method, seed=seed) for seed in ("0", "1")])])
    first, other = (found[70, method, seed] for seed in ("0", "1"))
    assert not first.error
    if method.stochastic:
        again = run(model(), [prompt_of(70, [fork(method, seed="1")])])
        assert again[70, method, "1"].tokens == other.tokens
    else:
        assert first.tokens == other.tokens
    if isinstance(method, PromptEvictor):
        scores = [method.utilities([prefilled(70)], [seed])[0] for seed in ("0", "0", "1")]
        same = [all(torch.equal(one, two) for one, two in zip(scores[0], other, strict=True)) for other in scores[1:]]
        assert same == [True, not method.stochastic]


@every_budget_of_a_method
def test_too_small_a_budget_is_impossible_in_one_sentence(method: Method) -> None:
    """Up to some number of tokens a sentence says why not; from there on the method runs."""
    layout = model().layout
    cases: tuple[tuple[Base, int], ...] = (("prompt", 70), ("prompt+max_new", 70), ("prompt", 150))
    for base, tokens in cases:
        asked = {budget: Budget.parse(f"{budget} tokens") for budget in range(1, 160)}
        reasons = {
            budget: method.impossible(one.resolve(tokens, NEW, base, layout), layout) for budget, one in asked.items()
        }
        least = next(budget for budget, reason in reasons.items() if reason is None)
        assert all((reason is None) == (budget >= least) for budget, reason in reasons.items())
        for budget in range(1, least):
            reason = reasons[budget]
            assert reason is not None
            assert method.name in reason
            assert str(asked[budget]) in reason
            assert "must" in reason
            assert "\n" not in reason
        forks = [fork(method, f"{budget} tokens", seed=str(budget)) for budget in (least - 1, least) if budget]
        found = run(model(), [dataclasses.replace(prompt_of(tokens, forks), base=base)])
        for (_, _, seed), generation in found.items():
            assert generation.error == ("" if int(seed) == least else f"ValueError: {reasons[least - 1]}")


def test_an_operating_point_beyond_the_budget_is_impossible_in_one_sentence() -> None:
    layout = model().layout
    for method in METHODS:
        reason = method.impossible(Budget.parse("10%").resolve(150, NEW, "prompt", layout), layout)
        if method.fixed:
            assert f"{method.name} has an operating point" in str(reason)
            assert method.impossible(Budget.parse("unlimited").resolve(150, NEW, "prompt", layout), layout) is None


# -- memory ----------------------------------------------------------------------------------------------------------


@every_method
def test_rows_say_what_their_tensors_hold(method: Method) -> None:
    """Eight rows of a pool: what they say they take is what is there when all tensors of the pool are walked."""
    layout, tokens, rows = model().layout, 70, 8
    one, prefill = fork(method), prefilled(tokens)
    budget = one.budget.resolve(tokens, NEW, "prompt", layout)
    with torch.inference_mode():
        pool = method.new_pool(PoolShape(layout, rows, model().device, model().dtype, model().rotary))
        empty = pool.allocated_bytes()
        compressed = method.compress(prefill, budget, method.examine([prefill], ["0"])[0])
        pool.admit(dict.fromkeys(range(rows), compressed))
        memories, walked = [pool.memory(row) for row in range(rows)], sum(each.nbytes for each in tensors(pool))
        taken = sum(memory.held + memory.slack + memory.workspace for memory in memories)
        assert max(taken, pool.allocated_bytes()) <= walked <= 1.05 * taken, "tables of pages take a little"
        for row in range(rows):
            pool.release(row)
        assert pool.allocated_bytes() == empty
    (generation,) = run(model(), [prompt_of(tokens, [one])]).values()
    assert generation.at_prefill == memories[0]


@every_method
def test_rows_tell_the_bytes_of_what_was_kept(method: Method) -> None:
    """And no more than the budget allows, and the plan expects."""
    layout, tokens = model().layout, 70
    (generation,) = run(model(), [prompt_of(tokens, [fork(method)])]).values()
    row, budget = Row("cell", "sample"), generation.budget
    assert budget is not None
    fill_memory(row, model(), generation)
    grown = generation.held_tokens - tokens
    assert grown == NEW - 1, "the last token is never fed"
    if isinstance(method, PromptEvictor):
        heads = [len(head) for layer in kept(method, tokens, budget.tokens) for head in layer]
        assert row.kv_bytes_prefill == sum(heads) * layout.full_bytes(1) // len(heads)
        assert row.kv_bytes_end == row.kv_bytes_prefill + layout.full_bytes(grown)
    if isinstance(method, FixedMethod):
        assert row.kv_bytes_prefill == method.held_bytes(tokens, 0, layout)
        assert row.kv_bytes_end == method.held_bytes(tokens, grown, layout)
    assert row.kv_bytes_end <= row.kv_bytes_peak <= method.peak_bytes(budget, layout)
    assert not row.over_budget
    assert row.kv_bytes_peak <= row.budget_bytes or not method.bounded


def tensors(owner: object, seen: set[int] | None = None) -> Iterator[Tensor]:
    """All tensors that an object of ours owns, each once."""
    seen = set() if seen is None else seen
    if id(owner) in seen:
        return
    seen.add(id(owner))
    if isinstance(owner, Tensor):
        yield owner
    elif isinstance(owner, dict | list | tuple):
        for part in owner.values() if isinstance(owner, dict) else owner:
            yield from tensors(part, seen)
    elif isinstance(owner, FamilyPool) or type(owner).__module__.split(".")[0] in ("kvcache", "qevict", "lorekv"):
        yield from tensors(vars(owner), seen)
