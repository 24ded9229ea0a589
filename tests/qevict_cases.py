"""Random prompts in a tiered pool, beside the paper's algorithm."""

from __future__ import annotations

import pytest
import torch
from qevict_oracle import PaperCache
from torch import Tensor

from kvcache.budget import Budget
from kvcache.kernels.column_sums import add_column_sums
from kvcache.layout import CacheLayout, LayerLayout
from kvcache.pool import PoolShape
from kvcache.prefill import LayerPrefill, Prefill
from qevict.capacity import Capacities
from qevict.method import QEvict
from qevict.pool import TieredCompressed, TieredPool
from qevict.rankers import OWN

SEED = "0"
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
        projection = tensor(seed + 300 + layer, 5, QUERY_HEADS, DIM)
        layers.append(LayerPrefill(keys, values, queries[:, -32:], sums, projection, SCALE))
    return Prefill(layers, LAYOUT, tokens, torch.zeros(3), rotary, lambda _: pytest.fail("no lookahead here"))


def admitted(
    method: QEvict, tokens: int, budget: str, new: int, seed: int, row: int = 1
) -> tuple[TieredPool, Prefill, Capacities]:
    prefill = prompt(tokens, seed)
    compressed = compress(method, prefill, budget, new)
    return pool_of(compressed, row), prefill, compressed.room


def compress(method: QEvict, prefill: Prefill, budget: str, new: int) -> TieredCompressed:
    resolved = Budget.parse(budget).resolve(prefill.tokens, new, "prompt+max_new", prefill.layout)
    compressed = method.compress(prefill, resolved, method.examine([prefill], [SEED])[0])
    assert isinstance(compressed, TieredCompressed)
    return compressed


def pool_of(compressed: TieredCompressed, row: int = 1, dtype: torch.dtype = torch.float32) -> TieredPool:
    pool = compressed.method.new_pool(shape(dtype))
    assert isinstance(pool, TieredPool)
    pool.admit({row: compressed})
    return pool


def oracles(method: QEvict, prefill: Prefill, room: Capacities, total: int) -> list[PaperCache]:
    cos, sin = rotary(0, torch.arange(total))
    named = method.ranker not in OWN
    first = method.examine([prefill], [SEED])[0].tolist() if named else [None] * LAYERS
    return [
        PaperCache(
            layer.keys,
            layer.values,
            layer.column_sums if layer.column_sums is not None else torch.zeros(0),
            cos,
            sin,
            method.window,
            method.sinks,
            room.recent,
            method.bits,
            room.full,
            room.quantized,
            room.strict,
            method.ranker,
            method.decay,
            method.p,
            method.promotion,
            method.eviction_delay,
            scores,
        )
        for layer, scores in zip(prefill.layers, first, strict=True)
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
    """Every window held: where it lies ("full": F that was never coded, or recent) and its score."""
    held = pool._held[row]
    found: dict[int, tuple[str, float]] = {}
    for slots, pages, name in ((pool.full, held.full_pages, "full"), (pool.ledger, held.code_pages, "coded")):
        windows, ranks = slots.table(pages)
        if pool.ranking == "p_norm":  # of earlier events, and what came since
            ranks = ranks + slots["score"][:, pages].flatten(1)
        for window, score in zip(windows[layer].tolist(), ranks[layer].tolist(), strict=True):
            if window >= 0:
                assert window not in found, "a window is in two slots"
                found[window] = (name, score)
    return found


def expected_state(oracle: PaperCache) -> dict[int, tuple[str, float]]:
    def score(number: int) -> float:
        if oracle.ranker == "p_norm":
            return oracle.score[number] + oracle.received[number]
        return oracle.rank(number)

    kept = [number for number, tier in oracle.tier.items() if tier != "E"]
    return {number: ("coded" if number in oracle.ledger else "full", score(number)) for number in kept}


def assert_every_step_equals(method: QEvict, tokens: int, budget: str, new: int) -> tuple[TieredPool, list[PaperCache]]:
    """Outputs, tiers and scores of the pool and of the paper's algorithm."""
    pool, prefill, room = admitted(method, tokens, budget, new, seed=tokens)
    paper = oracles(method, prefill, room, tokens + new)
    for token in range(new):
        outputs = feed(pool, token, tokens + token, seed=tokens)
        for layer, oracle in enumerate(paper):
            expected = oracle.step(*new_token(token, layer, tokens), SCALE)
            torch.testing.assert_close(outputs[layer], expected, rtol=2e-4, atol=2e-5)
            held, wanted = state(pool, layer), expected_state(oracle)
            # A window is opened in its slot one step ahead of its first token.
            held = {window: entry for window, entry in held.items() if window in wanted or entry[1] != 0}
            assert {window: entry[0] for window, entry in held.items()} == {w: entry[0] for w, entry in wanted.items()}
            for window, (_, score) in wanted.items():
                assert held[window][1] == pytest.approx(score, rel=1e-4)
    facts = pool.facts(1)
    assert facts["evicted_windows"] == sum(oracle.evicted for oracle in paper)
    assert facts["promotions"] == sum(oracle.promotions for oracle in paper)
    return pool, paper


def assert_chunks_equal_single_tokens(method: QEvict, tokens: int, new: int) -> None:
    """What falls due inside a chunk of 16 happens at the same token, in every layer."""
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
        for layer in range(LAYERS):
            assert state(at_once, layer) == state(one_by_one, layer)
    assert at_once.memory(1) == one_by_one.memory(1)
    assert at_once.facts(1) == one_by_one.facts(1)
