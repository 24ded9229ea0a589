"""The tiered pool against the paper's algorithm, token by token."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from qevict_oracle import PaperCache
from torch import Tensor

from kvcache.budget import Budget
from kvcache.kernels.column_sums import add_column_sums
from kvcache.layout import CacheLayout, LayerLayout
from kvcache.pool import PoolShape
from kvcache.prefill import LayerPrefill, Prefill
from qevict.capacity import Capacities
from qevict.method import QEvict
from qevict.pool import TieredPool
from qevict.slots import FREE

QUERY_HEADS, KV_HEADS, DIM, LAYERS, ROWS = 4, 2, 8, 3, 4
SCALE = DIM**-0.5
LAYOUT = CacheLayout((LayerLayout("growing", QUERY_HEADS, KV_HEADS, DIM, DIM),) * LAYERS, 4)


def rotary(layer: int, positions: Tensor) -> tuple[Tensor, Tensor]:
    angles = positions[:, None] / 100 ** (torch.arange(0, DIM, 2) / DIM)
    return torch.cat([angles.cos()] * 2, -1), torch.cat([angles.sin()] * 2, -1)


def shape(dtype: torch.dtype = torch.float32) -> PoolShape:
    return PoolShape(LAYOUT, ROWS, torch.device("cpu"), dtype, rotary)


def tensor(seed: int, *dims: int) -> Tensor:
    return torch.randn(*dims, generator=torch.Generator().manual_seed(seed))


def prompt(tokens: int, seed: int) -> Prefill:
    """Random keys whose attention is uneven, with their true column sums."""
    layers = []
    for layer in range(LAYERS):
        keys = tensor(seed + layer, KV_HEADS, tokens, DIM) * 2
        queries = tensor(seed + 100 + layer, QUERY_HEADS, tokens, DIM) * 2
        sums = torch.zeros(QUERY_HEADS, tokens)
        add_column_sums(sums, queries, keys, 0, SCALE)
        values = tensor(seed + 200 + layer, KV_HEADS, tokens, DIM)
        layers.append(LayerPrefill(keys, values, None, sums, torch.zeros(1, QUERY_HEADS, DIM), SCALE))
    return Prefill(layers, LAYOUT, tokens, torch.zeros(3), rotary, lambda _: pytest.fail("no lookahead here"))


def admitted(
    method: QEvict, tokens: int, budget: str, new: int, seed: int, row: int = 1
) -> tuple[TieredPool, Prefill, Capacities]:
    prefill = prompt(tokens, seed)
    resolved = Budget.parse(budget).resolve(tokens, new, "prompt+max_new", LAYOUT)
    room = method.capacities(resolved, LAYOUT)
    assert room is not None
    pool = method.new_pool(shape())
    assert isinstance(pool, TieredPool)
    pool.admit(row, method.compress(prefill, resolved, method.prompt_scores(prefill)))
    return pool, prefill, room


def oracles(method: QEvict, prefill: Prefill, room: Capacities, total: int) -> list[PaperCache]:
    cos, sin = rotary(0, torch.arange(total))
    return [
        PaperCache(
            layer.keys,
            layer.values,
            layer.column_sums if layer.column_sums is not None else torch.zeros(0),
            cos,
            sin,
            method.window,
            method.sinks,
            method.recent,
            method.bits,
            room.full,
            room.quantized,
            room.strict,
        )
        for layer in prefill.layers
    ]


def feed(pool: TieredPool, token: int, position: int, seed: int, row: int = 1) -> list[Tensor]:
    """One step of one row: its output in every layer, [H_q, d] each."""
    outputs = []
    positions, counts = torch.tensor([[position]]), torch.tensor([1])
    for layer in range(LAYERS):
        query, key, value = new_token(token, layer, seed)
        output = pool.attend(
            layer, query[None, :, None], key[None, :, None], value[None, :, None], positions, counts, SCALE
        )
        outputs.append(output[0, :, 0])
    pool.after_step(positions, counts)
    return outputs


def new_token(token: int, layer: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    base = seed + 1000 * (token + 1) + layer
    return tensor(base, QUERY_HEADS, DIM) * 2, tensor(base + 50, KV_HEADS, DIM) * 2, tensor(base + 90, KV_HEADS, DIM)


def state(pool: TieredPool, layer: int, row: int = 1) -> dict[int, tuple[str, float]]:
    """Every window held: its tier ("F" and "recent" are both full precision) and its score."""
    held = pool._held[row]
    found: dict[int, tuple[str, float]] = {}
    for slots, pages, name in ((pool.full, held.full_pages, "full"), (pool.ledger, held.code_pages, "coded")):
        windows, scores = slots.table(pages)
        for window, score in zip(windows[layer].tolist(), scores[layer].tolist(), strict=True):
            if window >= 0:
                assert window not in found, "a window is in two slots"
                found[window] = (name, score)
    return found


def expected_state(oracle: PaperCache) -> dict[int, tuple[str, float]]:
    kept = {number: tier for number, tier in oracle.tier.items() if tier != "E"}
    return {number: ("coded" if number in oracle.ledger else "full", oracle.score[number]) for number in kept}


SETTINGS: list[dict[str, Any]] = [
    {"recent": 8},
    {"recent": 12, "quantized_share": 0.3},
    {"recent": 8, "quantized_share": 0.0},
    {"recent": 8, "quantized_share": 1.0},
    {"recent": 16, "bits": 4, "sinks": 3},
    {"recent": 9, "sinks": 0, "window": 4},
    {"recent": 6, "window": 16, "sinks": 17},
    {"recent": 8, "window": 1, "quantized_share": 0.0},
    {"recent": 8, "accounting": "paper"},
    {"recent": 8, "window": 4, "accounting": "paper", "quantized_share": 0.5},
]


@pytest.mark.parametrize("changes", SETTINGS, ids=str)
@pytest.mark.parametrize(("tokens", "budget"), [(150, "40%"), (97, "75%"), (61, "unlimited")])
def test_every_step_equals_the_papers_algorithm(changes: dict[str, Any], tokens: int, budget: str) -> None:
    """Outputs, tiers and scores (Eq. 1 at every step), over several routing events."""
    method, new = QEvict(**changes), 50
    pool, prefill, room = admitted(method, tokens, budget, new, seed=tokens)
    paper = oracles(method, prefill, room, tokens + new)
    for token in range(new):
        outputs = feed(pool, token, tokens + token, seed=tokens)
        for layer, oracle in enumerate(paper):
            expected = oracle.step(*new_token(token, layer, tokens), SCALE)
            torch.testing.assert_close(outputs[layer], expected, rtol=2e-4, atol=2e-5)
            held, wanted = state(pool, layer), expected_state(oracle)
            # A window is opened in its slot one step ahead of its first token.
            held = {window: entry for window, entry in held.items() if window in wanted or entry[1] > 0}
            assert {window: entry[0] for window, entry in held.items()} == {w: entry[0] for w, entry in wanted.items()}
            for window, (_, score) in wanted.items():
                assert held[window][1] == pytest.approx(score, rel=1e-4)


def test_codes_survive_demotion_promotion_and_demotion() -> None:
    """Written once: bit-identical through every migration, and really promoted and demoted in between."""
    method = QEvict(recent=8, quantized_share=0.6)
    pool, _, _ = admitted(method, 200, "40%", 200, seed=5)
    first: dict[tuple[int, int], dict[str, Tensor]] = {}
    flags: dict[tuple[int, int], list[bool]] = {}
    held = pool._held[1]
    names = [name for name in ("key_codes", "key_scale", "key_offset", "value_codes", "value_scale", "value_offset")]
    for token in range(200):
        feed(pool, token, 200 + token, seed=5)
        windows, _ = pool.ledger.table(held.code_pages)
        for layer, slot in (windows != FREE).nonzero().tolist():
            page, place = int(held.code_pages[slot // pool.ledger.per_page]), slot % pool.ledger.per_page
            by_slot = {name: pool.ledger[name][layer, page] for name in names}
            codes = {name: (x[:, :, place] if name.startswith("key") else x[:, place]) for name, x in by_slot.items()}
            key = layer, int(windows[layer, slot])
            known = first.setdefault(key, {name: code.clone() for name, code in codes.items()})
            assert all(torch.equal(code, known[name]) for name, code in codes.items())
            flags.setdefault(key, []).append(bool(pool.ledger["promoted"][layer, page, place]))
    there_and_back = [history for history in flags.values() if "1,0" in ",".join(str(int(f)) for f in history)]
    assert there_and_back, "no window was promoted and demoted again: the test shows nothing"


@settings(max_examples=25, deadline=None)
@given(
    tokens=st.integers(30, 160),
    new=st.integers(1, 60),
    share=st.integers(8, 100),
    window=st.sampled_from([1, 4, 8, 16]),
    sinks=st.integers(0, 9),
    recent=st.integers(1, 40),
    quantized=st.sampled_from([0.0, 0.3, 0.7, 1.0]),
    seed=st.integers(0, 1000),
)
def test_bytes_stay_in_budget_and_no_token_is_lost_or_doubled(
    tokens: int, new: int, share: int, window: int, sinks: int, recent: int, quantized: float, seed: int
) -> None:
    if window == 1:
        quantized = 0.0
    method = QEvict(window=window, sinks=sinks, recent=recent, quantized_share=quantized)
    budget = Budget.parse(f"{share}%").resolve(tokens, new, "prompt+max_new", LAYOUT)
    if method.impossible(budget, LAYOUT):
        return
    pool, _, room = admitted(method, tokens, f"{share}%", new, seed)
    for token in range(new):
        assert pool.memory(1).held <= budget.total_bytes
        assert pool.memory(1).held <= pool.memory(1).charged <= budget.total_bytes
        feed(pool, token, tokens + token, seed)
        boundary = pool._boundary(tokens + token + 1)
        for layer in range(LAYERS):
            windows = set(state(pool, layer))
            everything = range(-(-(tokens + token + 1 - sinks) // window))
            assert {number for number in everything if number >= boundary} <= windows, "a recent window is gone"
            assert len([w for w in windows if w < boundary]) <= room.full + room.quantized + 1
    assert pool.peak_held(1) <= budget.total_bytes
    used = pool.memory(1)
    assert used.held + used.slack == sum(
        slots.arena.page_bytes * len(pages)
        for slots, pages in ((pool.full, pool._held[1].full_pages), (pool.ledger, pool._held[1].code_pages))
    )


def test_several_tokens_at_once_equal_one_by_one() -> None:
    """Routing falls due inside the chunk, at the same token in every layer."""
    method, tokens, new = QEvict(recent=8), 120, 48
    one_by_one, _, _ = admitted(method, tokens, "50%", new, seed=3)
    at_once, _, _ = admitted(method, tokens, "50%", new, seed=3)
    for start in range(0, new, 16):
        single = [feed(one_by_one, start + token, tokens + start + token, seed=3) for token in range(16)]
        positions, counts = torch.arange(tokens + start, tokens + start + 16)[None], torch.tensor([16])
        for layer in range(LAYERS):
            parts = zip(*(new_token(start + token, layer, 3) for token in range(16)), strict=True)
            queries, keys, values = (torch.stack(part, 1)[None] for part in parts)
            output = at_once.attend(layer, queries, keys, values, positions, counts, SCALE)
            for token in range(16):
                assert torch.equal(output[0, :, token], single[token][layer])
        at_once.after_step(positions, counts)
        assert all(state(at_once, layer) == state(one_by_one, layer) for layer in range(LAYERS))
    assert at_once.memory(1) == one_by_one.memory(1)


def test_attention_mass_is_conserved() -> None:
    """Scores of live windows grow by one per query, less what sinks receive."""
    method, tokens = QEvict(recent=8, sinks=0), 100
    pool, _, _ = admitted(method, tokens, "60%", 40, seed=9)
    for token in range(40):
        before = [sum(score for _, score in state(pool, layer).values()) for layer in range(LAYERS)]
        routed = (token + 1) % method.window == 0
        feed(pool, token, tokens + token, seed=9)
        if not routed:
            for layer in range(LAYERS):
                after = sum(score for _, score in state(pool, layer).values())
                assert after - before[layer] == pytest.approx(1.0, abs=1e-4)


def test_a_rows_neighbours_change_nothing() -> None:
    method, tokens = QEvict(recent=8), 100
    alone, _, _ = admitted(method, tokens, "50%", 30, seed=11, row=2)
    crowded, _, _ = admitted(method, tokens, "50%", 30, seed=11, row=2)
    other = prompt(140, 77)
    resolved = Budget.parse("80%").resolve(140, 30, "prompt+max_new", LAYOUT)
    for row in (0, 3):
        crowded.admit(row, method.compress(other, resolved, method.prompt_scores(other)))
    for token in range(30):
        expected = feed(alone, token, tokens + token, seed=11)
        rows = crowded.rows.tolist()
        positions = torch.tensor([[tokens + token if row == 2 else 140 + token] for row in rows])
        counts = torch.ones(len(rows), dtype=torch.int64)
        for layer in range(LAYERS):
            seeds = [11 if row == 2 else 77 for row in rows]
            parts = zip(*(new_token(token, layer, seed) for seed in seeds), strict=True)
            query, key, value = (torch.stack(part)[:, :, None] for part in parts)
            output = crowded.attend(layer, query, key, value, positions, counts, SCALE)
            assert torch.equal(output[rows.index(2), :, 0], expected[layer])
        crowded.after_step(positions, counts)
        if token == 15:
            crowded.release(0)
