"""QEvict's rankers, promotion modes and first evictions: each against the paper's algorithm, step by step."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from models import prompt_ids, tiny_gemma, tiny_llama
from qevict_cases import (
    LAYERS,
    LAYOUT,
    SEED,
    admitted,
    assert_chunks_equal_single_tokens,
    assert_every_step_equals,
    compress,
    feed,
    pool_of,
    prompt,
    state,
)
from torch import Tensor

from kvcache.baselines.snapkv import SnapKV
from kvcache.budget import Budget
from kvcache.method import Observations
from lorekv.method import LoreKV
from pipeline.spec import SpecError, load_sweep
from qevict.capacity import window_bytes
from qevict.method import QEvict
from qevict.pool import TieredPool
from qevict.rankers import OWN, ranking_method
from qevict.slots import FREE
from qevict.window_scores import p_norm, utility_scores
from workers.engine import Engine
from workers.fork import Fork, Generation, Prompt
from workers.job import EngineSpec
from workers.models import LoadedModel

TOKEN = LAYOUT.layers[0].token_bytes(LAYOUT.element_bytes)

SETTINGS: list[dict[str, Any]] = [
    {"ranker": "decay"},
    {"ranker": "decay", "decay": 0.3, "first_eviction": "first_step"},
    {"ranker": "p_norm"},
    {"ranker": "p_norm", "p": 1.5, "first_eviction": "after_window", "quantized_share": 0.4},
    {"ranker": "p_norm", "promotion": "exact", "accounting": "paper"},
    {"ranker": "key_norm"},
    {"ranker": "key_norm", "first_eviction": "first_step", "window": 4},
    {"ranker": "key_norm", "promotion": "none", "sinks": 0},
    {"ranker": "snapkv"},
    {"ranker": "streaming_llm", "promotion": "exact", "first_eviction": "after_window"},
    {"promotion": "none"},
    {"promotion": "none", "accounting": "paper", "bits": 4},
    {"promotion": "none", "first_eviction": "first_step", "window": 4},
    {"promotion": "exact"},
    {"promotion": "exact", "accounting": "paper", "window": 4, "sinks": 3},
    {"promotion": "exact", "first_eviction": "first_step"},
    {"first_eviction": "first_step"},
    {"first_eviction": "after_window"},
    {"first_eviction": "after_window", "window": 16, "sinks": 17, "accounting": "paper"},
    {"first_eviction": "first_step", "window": 1, "quantized_share": 0.0},
    {"recent": "25%"},
    {"recent": "10%", "window": 4, "accounting": "paper"},
    {"fill_full_first": True},
]


@pytest.mark.parametrize("changes", SETTINGS, ids=str)
@pytest.mark.parametrize(("tokens", "budget"), [(150, "40%"), (101, "75%")])
def test_every_step_equals_the_papers_algorithm(changes: dict[str, Any], tokens: int, budget: str) -> None:
    assert_every_step_equals(QEvict(**{"recent": 8} | changes), tokens, budget, new=44)


# -- promotion -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("promotion", ["residency", "none", "exact"])
def test_windows_come_back_as_the_promotion_mode_says(promotion: Any) -> None:
    method = QEvict(recent=8, quantized_share=0.6, promotion=promotion)
    pool, paper = assert_every_step_equals(method, 200, "40%", new=100)
    promotions = pool.facts(1)["promotions"]
    assert (promotions > 0) == (promotion != "none")
    assert all(oracle.promotions == 0 for oracle in paper) == (promotion == "none")


def test_exact_promotion_restores_every_bit_and_codes_it_alike_again() -> None:
    """Full windows are always the originals; a window that is quantised a second time gets its first codes."""
    method = QEvict(recent=8, quantized_share=0.6, promotion="exact")
    pool, prefill, _ = admitted(method, 200, "40%", 160, seed=5)
    held = pool._held[1]
    codes: dict[tuple[int, int], Tensor] = {}
    again = 0
    gone: set[tuple[int, int]] = set()
    for token in range(160):
        feed(pool, token, 200 + token, seed=5)
        for layer, slot in (pool.full.table(held.full_pages)[0] >= 0).nonzero().tolist():
            window = int(pool.full.table(held.full_pages)[0][layer, slot])
            first = method.sinks + window * method.window
            if first + method.window <= 200 and (layer, window) in codes:
                page, place = int(held.full_pages[slot // pool.full.per_page]), slot % pool.full.per_page
                kept = pool.full["keys"][layer, page, :, place]
                assert torch.equal(kept, prefill.layers[layer].keys[:, first : first + method.window])
                gone.add((layer, window))
        for layer, slot in (pool.ledger.table(held.code_pages)[0] != FREE).nonzero().tolist():
            key = layer, int(pool.ledger.table(held.code_pages)[0][layer, slot])
            page, place = int(held.code_pages[slot // pool.ledger.per_page]), slot % pool.ledger.per_page
            found = pool.ledger["key_codes"][layer, page, :, place].clone()
            assert torch.equal(found, codes.setdefault(key, found))
            again += key in gone
    assert gone, "nothing was promoted: the test shows nothing"
    assert again, "nothing was quantised a second time: the test shows nothing"


def test_host_bytes_are_those_of_the_originals_and_free_with_the_row() -> None:
    pool, _, room = admitted(QEvict(recent=8, promotion="exact"), 150, "30%", 20, seed=1)
    records = sum(name == "coded" for layer in range(LAYERS) for name, _ in state(pool, layer).values())
    memory = pool.memory(1)
    assert records == LAYERS * room.quantized
    assert memory.host == records * window_bytes(8, 2, LAYOUT.layers[0], 4).full
    assert memory.held == memory.full_precision + memory.codes + memory.quantization + 9 * (memory.positions // 4)
    assert admitted(QEvict(recent=8), 150, "30%", 20, seed=1)[0].memory(1).host == 0
    originals = pool.tiers.originals
    assert originals is not None
    pool.release(1)
    assert originals.nbytes == pool.allocated_bytes() == 0


# -- first eviction --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("first_eviction", "steps"), [("prefill", 0), ("first_step", 1), ("after_window", 8)])
def test_the_whole_prompt_is_held_and_attended_until_the_first_eviction(first_eviction: Any, steps: int) -> None:
    tokens, new = 150, 30
    method = QEvict(recent=8, first_eviction=first_eviction)
    pool, _, room = admitted(method, tokens, "30%", new, seed=2)
    whole, _, _ = admitted(QEvict(recent=8, quantized_share=0.0), tokens, "unlimited", new, seed=2)
    budget = Budget.parse("30%").resolve(tokens, new, "prompt+max_new", LAYOUT).total_bytes
    pages = len(pool._held[1].full_pages)
    for token in range(new):
        full = token < steps
        held = pool.memory(1)
        assert (held.full_precision == (tokens + token) * TOKEN * LAYERS) == full
        assert (held.held > budget) == full
        assert (pool.facts(1)["evicted_windows"] == 0) == full
        outputs, expected = feed(pool, token, tokens + token, seed=2), feed(whole, token, tokens + token, seed=2)
        same = all(torch.allclose(a, b, atol=1e-5) for a, b in zip(outputs, expected, strict=True))
        assert same == full
    assert pool.peak_held(1) > budget if steps else pool.peak_held(1) <= budget
    assert pool._held[1].full_slots == room.full + room.protected_slots
    assert (len(pool._held[1].full_pages) < pages) == bool(steps), "what was evicted is freed"


@pytest.mark.parametrize("first_eviction", ["first_step", "after_window"])
@pytest.mark.parametrize("promotion", ["residency", "exact"])
def test_a_late_eviction_inside_a_chunk_equals_one_by_one(first_eviction: Any, promotion: Any) -> None:
    method, tokens, new = QEvict(recent=8, first_eviction=first_eviction, promotion=promotion), 121, 48
    assert_chunks_equal_single_tokens(method, tokens, new)


@settings(max_examples=40)
@given(
    tokens=st.integers(30, 160),
    new=st.integers(1, 50),
    share=st.integers(8, 100),
    window=st.sampled_from([4, 8, 16]),
    sinks=st.integers(0, 9),
    recent=st.sampled_from([1, 13, 40, "25%", "60%"]),
    quantized=st.sampled_from([0.0, 0.3, 0.7, 1.0]),
    promotion=st.sampled_from(["residency", "none", "exact"]),
    first=st.sampled_from(["prefill", "first_step", "after_window"]),
    ranker=st.sampled_from([*OWN, "snapkv"]),
    fill=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_bytes_stay_in_budget_from_the_first_eviction_on(
    tokens: int,
    new: int,
    share: int,
    window: int,
    sinks: int,
    recent: Any,
    quantized: float,
    promotion: Any,
    first: Any,
    ranker: str,
    fill: bool,
    seed: int,
) -> None:
    method = QEvict(
        window=window,
        sinks=sinks,
        recent=recent,
        quantized_share=quantized,
        promotion=promotion,
        first_eviction=first,
        ranker=ranker,
        fill_full_first=fill,
    )
    budget = Budget.parse(f"{share}%").resolve(tokens, new, "prompt+max_new", LAYOUT)
    if method.impossible(budget, LAYOUT):
        return
    pool, _, room = admitted(method, tokens, f"{share}%", new, seed)
    for token in range(new + 1):
        memory = pool.memory(1)
        if token >= method.eviction_delay:
            assert memory.held <= memory.charged <= budget.total_bytes
        used = sum(
            slots.arena.page_bytes * len(pages)
            for slots, pages in ((pool.full, pool._held[1].full_pages), (pool.ledger, pool._held[1].code_pages))
        )
        assert memory.held + memory.slack == used
        boundary = pool._boundary(1, tokens + token)
        for layer in range(LAYERS):
            windows = set(state(pool, layer))
            everything = range(-(-(tokens + token - sinks) // window))
            assert {number for number in everything if number >= boundary} <= windows, "a recent window is gone"
            if token >= method.eviction_delay:
                assert len([w for w in windows if w < boundary]) <= room.full + room.quantized + 1
        if token < new:
            feed(pool, token, tokens + token, seed)


# -- the recent region as a share --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("budget", "recent", "full", "quantized"),
    [("80%", 136, 14, 133), ("60%", 104, 10, 99), ("40%", 72, 7, 64), ("20%", 40, 3, 29), ("10%", 24, 1, 12)],
)
def test_a_quarter_of_the_budget_as_on_gsm8k(budget: str, recent: int, full: int, quantized: int) -> None:
    """157 prompt and 512 new tokens on an 8B Llama's heads: ceil(share * total), in whole windows."""
    from test_qevict_capacity import layout, resolve

    room = resolve(budget, 157, 512, layout(8, 128), recent="25%", accounting="paper")
    assert room is not None
    assert (room.recent, room.full) == (recent, full)
    assert room.quantized == min(quantized, -(-(157 + 512) // 8))


def test_rows_with_other_recent_regions_share_a_pool() -> None:
    assert QEvict(recent="25%").family == QEvict(recent=64).family == QEvict(ranker="lorekv").family
    families = {QEvict(ranker=ranker).family for ranker in ("cumulative", "decay", "p_norm", "key_norm")}
    assert len(families) == 3


# -- filling the full tier first ---------------------------------------------------------------------------------------


def test_fill_full_first_quantises_only_what_does_not_fit() -> None:
    def room(budget: str, **changes: Any) -> tuple[int, int]:
        from test_qevict_capacity import layout, resolve

        found = resolve(budget, 400, 112, layout(8, 128), **changes)
        assert found is not None
        return found.full, found.quantized

    assert room("100%", fill_full_first=True, accounting="paper") == ((512 - 5 - 32) // 8, 0)
    assert room("unlimited", fill_full_first=True) == (64, 0)
    plain, filled = room("60%"), room("60%", fill_full_first=True)
    assert filled[0] > plain[0]
    assert sum(filled) == (512 - 5 - 32) // 8 <= sum(plain)
    assert room("20%", fill_full_first=True) == room("20%"), "where windows are evicted the paper's split stands"


# -- rankers -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("lorekv2", "ranker 'lorekv2' is unknown; did you mean lorekv?"),
        ("key-norm", "ranker 'key-norm' is unknown; did you mean key_norm?"),
        ("full", "is a method that does not score prompt tokens; known: cumulative, decay, p_norm, key_norm, "),
        ("qevict", "is a method that does not score prompt tokens"),
    ],
)
def test_a_name_that_ranks_nothing_is_told_in_the_sweep_file(name: str, said: str, tmp_path: Path) -> None:
    sweep = {
        "name": "s",
        "models": [{"label": "m", "source": "a/b"}],
        "contexts": [512],
        "tasks": ["niah"],
        "methods": [{"name": "qevict", "ranker": name}],
        "budgets": ["10%"],
        "output": "out",
    }
    file = tmp_path / "sweep.yaml"
    file.write_text(yaml.safe_dump(sweep), encoding="utf-8")
    with pytest.raises(SpecError) as caught:
        load_sweep(file)
    assert any(said in line for line in str(caught.value).splitlines())
    assert "methods[0]" in str(caught.value)


def test_rankers_are_resolved_without_torch() -> None:
    code = (
        "import sys\nfrom qevict.method import QEvict\nmethod = QEvict(ranker='lorekv', recent='25%')\n"
        "assert method.stochastic and method.observes().queries and method.identity\nsys.exit('torch' in sys.modules)"
    )
    root = Path(__file__).resolve().parents[1]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_named_ranker_brings_its_own_needs() -> None:
    """Its observations and seeds; its version and settings are part of the cell."""
    lore, plain = QEvict(ranker="lorekv"), QEvict()
    assert lore.observes() == LoreKV().observes()
    assert lore.stochastic
    assert not plain.stochastic
    assert plain.observes() == Observations(column_sums=True)
    assert QEvict(ranker="key_norm").observes() == Observations()
    assert plain.identity == ["qevict", QEvict.version, plain.settings()]
    assert lore.identity == ["qevict", QEvict.version, lore.settings(), LoreKV().identity]
    assert isinstance(ranking_method("snapkv"), SnapKV)


def test_utilities_become_scores_on_the_scale_of_attention() -> None:
    """Mean over heads, sum over windows, n in all; the ranker's protected tokens rank with its best window."""
    prefill = prompt(45, seed=0)
    of_tokens = [torch.rand(2, 45, generator=torch.Generator().manual_seed(layer)) for layer in range(LAYERS)]
    scores = utility_scores(prefill, of_tokens, (0, 0), sinks=5, window=8)
    assert scores.shape == (LAYERS, 5)
    torch.testing.assert_close(scores.sum(-1), torch.full((LAYERS,), 45.0))
    plain = torch.stack([x.mean(0)[5:].view(5, 8).sum(-1) for x in of_tokens])
    torch.testing.assert_close(scores, plain * (45 / plain.sum(-1, keepdim=True)))
    kept = utility_scores(prefill, of_tokens, (1, 10), sinks=5, window=8)
    assert torch.equal(kept[:, 3:], kept.amax(-1, keepdim=True).expand(-1, 2))
    shifted = utility_scores(prefill, [x - 100 for x in of_tokens], (0, 0), sinks=5, window=8)
    assert bool((shifted >= 0).all())
    assert torch.equal(shifted.argsort(-1), scores.argsort(-1))
    nothing = utility_scores(prefill, [torch.zeros(2, 45)] * LAYERS, (0, 0), sinks=5, window=8)
    assert torch.equal(nothing, torch.zeros(LAYERS, 5))
    with pytest.raises(ValueError, match="not all finite"):
        utility_scores(prefill, [torch.full((2, 45), torch.inf)] * LAYERS, (0, 0), sinks=5, window=8)


def test_decode_attention_adds_to_a_named_rankers_scores() -> None:
    method = QEvict(recent=8, ranker="snapkv")
    pool, prefill, _ = admitted(method, 100, "60%", 20, seed=4)
    first = method.examine([prefill], [SEED])[0]
    feed(pool, 0, 100, seed=4)
    for layer in range(LAYERS):
        began = dict(enumerate(first[layer].tolist()))
        grown = sum(score - began.get(window, 0.0) for window, (_, score) in state(pool, layer).items())
        assert 0 < grown <= 1 + 1e-4


@given(st.floats(0, 1e6), st.floats(0, 1e6), st.sampled_from([1.0, 3.0, 8.0]))
def test_p_norm_is_that_of_both_whatever_their_size(first: float, second: float, p: float) -> None:
    found = float(p_norm(torch.tensor(first), torch.tensor(second), p))
    assert found == pytest.approx((first**p + second**p) ** (1 / p), rel=1e-4, abs=1e-30)


@pytest.mark.parametrize(
    "wrong",
    [
        {"recent": "25"},
        {"recent": "0%"},
        {"recent": "a%"},
        {"decay": 0.0},
        {"p": 0.5},
        {"promotion": "maybe"},
        {"first_eviction": "never"},
    ],
    ids=str,
)
def test_settings_that_mean_nothing_are_refused(wrong: dict[str, Any]) -> None:
    (name,) = wrong
    with pytest.raises(ValueError, match=name):
        QEvict(**wrong)


# -- through the engine ----------------------------------------------------------------------------------------------

METHODS = [
    QEvict(recent=8, ranker="lorekv"),
    QEvict(recent="10%", ranker="p_norm", first_eviction="after_window"),
    QEvict(recent=8, ranker="key_norm", promotion="none"),
    QEvict(recent=8, promotion="exact", first_eviction="first_step"),
    QEvict(recent=8, ranker="decay"),
]


def generations(model: LoadedModel, forks: list[Fork], lengths: tuple[int, ...]) -> dict[tuple[Any, Any], Generation]:
    prompts = [Prompt(n, prompt_ids(n), prompt_ids(21, seed=7) if n % 2 else [], 20, forks) for n in lengths]
    return {(one.prompt.key, one.fork.key): one for one in Engine(model, EngineSpec(8, 64)).run(prompts)}


@pytest.mark.parametrize("build", [tiny_llama, tiny_gemma], ids=["llama", "gemma"])
def test_every_setting_runs_alone_as_beside_others(build: Any) -> None:
    """In bf16: same tokens, same bytes, same facts."""
    model = build(torch.bfloat16)
    forks = [Fork(str(method), method, Budget.parse("40%"), "0") for method in METHODS]
    together = generations(model, forks, (90, 131, 200))
    for one in forks:
        for length in (90, 131, 200):
            beside, alone = together[length, one.key], generations(model, [one], (length,))[length, one.key]
            assert not beside.error
            assert beside.tokens == alone.tokens
            assert (beside.at_end, beside.peak_held) == (alone.at_end, alone.peak_held)
            assert beside.method_facts == alone.method_facts
            assert beside.budget is not None
            late = one.method.eviction_delay  # type: ignore[attr-defined]
            assert (beside.at_prefill.held > beside.budget.total_bytes) == (late > 0)
            assert beside.at_end.held <= beside.budget.total_bytes
            assert beside.method_facts["evicted_windows"] > 0


def test_seeds_move_a_stochastic_ranker_and_neighbours_do_not() -> None:
    model = tiny_llama()
    method = QEvict(recent=8, ranker="lorekv")
    forks = [Fork(seed, method, Budget.parse("40%"), seed) for seed in "abcd"]
    found = generations(model, forks, (90, 200))
    assert len({tuple(found[200, seed].tokens) for seed in "abcd"} | {tuple(found[90, s].tokens) for s in "abcd"}) > 2
    (alone,) = generations(model, forks[2:3], (200,)).values()
    assert alone.tokens == found[200, "c"].tokens


def test_a_prompts_ranks_do_not_depend_on_its_row_number() -> None:
    """The exact originals lie page for page beside the ledger, whatever came and went before."""
    method = QEvict(recent=8, promotion="exact")
    fresh = pool_of(compress(method, prompt(140, 1), "40%", 60), row=2)
    used = pool_of(compress(method, prompt(90, 2), "90%", 60), row=0)
    assert isinstance(used, TieredPool)
    used.admit({2: compress(method, prompt(140, 1), "40%", 60)})
    used.release(0)
    for token in range(60):
        for one, other in zip(feed(fresh, token, 140 + token, 1, 2), feed(used, token, 140 + token, 1, 2), strict=True):
            assert torch.equal(one, other)
    assert fresh.facts(2) == used.facts(2)
