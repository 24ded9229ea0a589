"""What must hold of QEvict whatever its settings: reductions to simpler policies, conservation, order, rounding."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from models import prompt_ids, tiny_llama
from qevict_cases import (
    DIM,
    KV_HEADS,
    LAYERS,
    QUERY_HEADS,
    SCALE,
    SEED,
    admitted,
    compress,
    expected_state,
    feed,
    new_token,
    oracles,
    pool_of,
    prompt,
    rotary,
    state,
    tensor,
)
from torch import Tensor

from kvcache.budget import Budget
from kvcache.prefill import LayerPrefill, Prefill
from kvcache.quant import Quantized, dequantize
from kvcache.rotary import rotate, unrotate
from qevict.method import QEvict
from qevict.pool import TieredPool
from qevict.slots import FREE, SINK
from workers.engine import Engine
from workers.fork import Fork, Prompt
from workers.job import EngineSpec


def grouped(keys: Tensor) -> Tensor:
    return keys.float().repeat_interleave(QUERY_HEADS // KV_HEADS, 0)


def dense(query: Tensor, keys: Tensor, values: Tensor, alive: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """One query over everything, what is not ``alive`` masked out: output [H_q, d_v], attention [H_q, n]."""
    scores = (query[:, None].float() @ grouped(keys).transpose(1, 2))[:, 0] * SCALE
    if alive is not None:
        scores = scores.masked_fill(~alive, -torch.inf)
    attention = torch.softmax(scores, -1)
    return (attention[:, None] @ grouped(values))[:, 0], attention


def extend(layer: LayerPrefill, key: Tensor, value: Tensor) -> LayerPrefill:
    keys, values = torch.cat([layer.keys, key[:, None]], 1), torch.cat([layer.values, value[:, None]], 1)
    return replace(layer, keys=keys, values=values)


# -- reductions ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "budget"),
    [
        ({"quantized_share": 0.0}, "unlimited"),
        ({"fill_full_first": True}, "unlimited"),
        ({"fill_full_first": True, "accounting": "paper"}, "100%"),
        ({"quantized_share": 0.0, "accounting": "paper"}, "100%"),
    ],
    ids=str,
)
def test_at_full_budget_every_output_is_that_of_the_full_cache(changes: dict[str, Any], budget: str) -> None:
    pool, prefill, _ = admitted(QEvict(recent=8, **changes), 90, budget, 30, seed=1)
    layers = list(prefill.layers)
    for token in range(30):
        outputs = feed(pool, token, 90 + token, seed=1)
        for index in range(LAYERS):
            query, key, value = new_token(token, index, 1)
            layers[index] = extend(layers[index], key, value)
            expected, _ = dense(query, layers[index].keys, layers[index].values)
            torch.testing.assert_close(outputs[index], expected, rtol=1e-4, atol=1e-5)
    assert pool.facts(1)["evicted_windows"] == pool.memory(1).codes == 0


@pytest.mark.parametrize(("window", "sinks", "recent"), [(1, 5, 9), (4, 3, 8), (8, 5, 12)])
def test_without_a_low_bit_tier_it_is_window_eviction_by_cumulative_attention(
    window: int, sinks: int, recent: int
) -> None:
    """Dense attention with evicted positions masked, scores by position: no windows are stored, nothing is moved.

    With windows of one token this is token eviction by layer-mean cumulative attention.
    """
    tokens, new = 97, 40
    method = QEvict(window=window, sinks=sinks, recent=recent, quantized_share=0.0)
    pool, prefill, room = admitted(method, tokens, "45%", new, seed=6)
    layers = list(prefill.layers)
    sums = [layer.column_sums for layer in layers]
    scores = [torch.cat([x.mean(0), torch.zeros(new)]) for x in sums if x is not None]
    alive = [torch.arange(tokens + new) < tokens for _ in layers]
    for index in range(LAYERS):
        evict(alive[index], scores[index], tokens, room.full, window, sinks, recent)
    for token in range(new):
        outputs, now = feed(pool, token, tokens + token, seed=6), tokens + token + 1
        for index in range(LAYERS):
            query, key, value = new_token(token, index, 6)
            layers[index] = extend(layers[index], key, value)
            alive[index][now - 1] = True
            expected, attention = dense(query, layers[index].keys, layers[index].values, alive[index][:now])
            torch.testing.assert_close(outputs[index], expected, rtol=2e-4, atol=2e-5)
            scores[index][:now] += attention.mean(0)
            if (token + 1) % window == 0:
                evict(alive[index], scores[index], now, room.full, window, sinks, recent)
    assert not bool(alive[0][: tokens + new].all())


def evict(alive: Tensor, scores: Tensor, now: int, keep: int, window: int, sinks: int, recent: int) -> None:
    """Keep the best blocks of the history; ``alive`` in place."""
    blocks = max(0, (now - recent - sinks) // window)
    history = slice(sinks, sinks + blocks * window)
    by_block = scores[history].view(blocks, window).sum(1).masked_fill(~alive[history].view(blocks, window)[:, 0], -1)
    best = by_block.sort(descending=True, stable=True).indices[:keep]
    kept = torch.zeros(blocks, dtype=torch.bool)
    kept[best] = True
    alive[history] &= kept.repeat_interleave(window)


def gridded(seed: int, heads: int, tokens: int, first: int, window: int, sinks: int) -> tuple[Tensor, Tensor]:
    """Keys, not rotated, and values whose groups all have levels -1 0 1 2: two bits code them without loss."""
    generator = torch.Generator().manual_seed(seed)
    keys, values = (torch.randint(-1, 3, (heads, tokens, DIM), generator=generator).float() for _ in range(2))
    place = (torch.arange(first, first + tokens) - sinks) % window
    keys[:, place == 0], keys[:, place == 1] = -1, 2
    values[..., 0], values[..., 1] = -1, 2
    return keys, values


def test_with_a_lossless_quantiser_the_border_between_tiers_is_irrelevant() -> None:
    """Outputs depend on K_f + K_q alone, and are those of dense attention with evicted positions masked: stored
    positions, un-rotation, codes and rotation are undone by one another."""
    tokens, new, method = 120, 48, QEvict(recent=8)
    cos, sin = rotary(0, torch.arange(tokens + new))

    def rotated(keys: Tensor, first: int) -> Tensor:
        return rotate(keys, cos[first : first + keys.shape[1]], sin[first : first + keys.shape[1]])

    prefill = prompt(tokens, seed=3)
    for index, layer in enumerate(prefill.layers):
        keys, layer.values = gridded(index, KV_HEADS, tokens, 0, 8, 5)
        layer.keys = rotated(keys, 0)
    compressed = compress(method, prefill, "40%", new)
    total = 9
    borders = [
        replace(compressed, room=replace(compressed.room, full=full, quantized=total - full, strict=False))
        for full in (total, 6, 2, 0)
    ]
    pools = [pool_of(one) for one in borders]
    fed = [gridded(50 + index, KV_HEADS, new, tokens, 8, 5) for index in range(LAYERS)]
    layers = list(prefill.layers)
    for token in range(new):
        position = torch.tensor([[tokens + token]])
        for index in range(LAYERS):
            query = tensor(900 + 10 * token + index, QUERY_HEADS, DIM)
            key, value = rotated(fed[index][0][:, token : token + 1], tokens + token), fed[index][1][:, token]
            outputs = [
                pool.attend(
                    index, query[None, :, None], key[None], value[None, :, None], position, torch.tensor([1]), SCALE
                )
                for pool in pools
            ]
            layers[index] = extend(layers[index], key[:, 0], value)
            kept = torch.zeros(tokens + token + 1, dtype=torch.bool)
            kept[:5] = True
            for window in state(pools[0], index):
                kept[5 + window * 8 : 5 + window * 8 + 8] = True
            expected, _ = dense(query, layers[index].keys, layers[index].values, kept)
            for output in outputs:
                torch.testing.assert_close(output[0, :, 0], expected, rtol=1e-4, atol=1e-5)
        for pool in pools:
            pool.after_step(position, torch.tensor([1]))
        for index in range(LAYERS):
            assert all(set(state(pool, index)) == set(state(pools[0], index)) for pool in pools)
    assert pools[0].facts(1)["evicted_windows"] > 0
    assert pools[-1].memory(1).codes > 0


# -- scores ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("changes", [{}, {"promotion": "none"}, {"promotion": "exact"}], ids=str)
def test_windows_never_return_scores_never_fall_and_mass_is_conserved(
    changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sinks, recent and live windows, and what evicted ones had: together one for every query so far."""
    tokens, new = 100, 64
    method = QEvict(recent=8, **changes)
    pool, prefill, _ = admitted(method, tokens, "35%", new, seed=9)
    sinks = [float(layer.column_sums.mean(0)[:5].sum()) for layer in prefill.layers if layer.column_sums is not None]
    known = [dict(enumerate(scores)) for scores in method.examine([prefill], [SEED])[0].tolist()]
    live = [set(state(pool, layer)) for layer in range(LAYERS)]
    real = pool.after_step

    def look(positions: Tensor, counts: Tensor) -> None:
        """Before anything is routed, so that what goes is known as of its last step."""
        now = int(positions[0, 0]) + 1
        windows, scores = pool.full.table(pool._held[1].full_pages)
        for layer in range(LAYERS):
            held = state(pool, layer)
            assert set(held) == live[layer]
            for window, (_, score) in held.items():
                assert score >= known[layer].get(window, 0.0)
                known[layer][window] = score
            of_sinks = sinks[layer] + float(scores[layer][windows[layer] == SINK].sum())
            assert of_sinks + sum(known[layer].values()) == pytest.approx(now, rel=1e-4)
        real(positions, counts)
        for layer in range(LAYERS):
            held_now = set(state(pool, layer))
            assert held_now <= live[layer] | {(now - 5) // 8}, "a window came back"
            live[layer] = held_now

    monkeypatch.setattr(pool, "after_step", look)
    for token in range(new):
        feed(pool, token, tokens + token, seed=9)
    assert pool.facts(1)["evicted_windows"] > 0


def test_buffered_queries_give_the_scores_of_single_steps() -> None:
    """One causal pass of an interval's queries over the cache before the event: the cache changes only at events."""
    method, tokens, new = QEvict(recent=8), 110, 48
    _, prefill, room = admitted(method, tokens, "40%", new, seed=7)
    for layer, oracle in enumerate(oracles(method, prefill, room, tokens + new)):
        buffer: list[Tensor] = []
        checked = 0

        def check(oracle: Any = oracle, buffer: list[Tensor] = buffer) -> None:
            at, attention, _ = oracle.attention(torch.stack(buffer, 1), SCALE)
            received = dict(zip(at, attention.mean(0).sum(0).tolist(), strict=True))
            for number, tier in oracle.tier.items():
                if tier != "E":
                    once = sum(received[position] for position in oracle.positions(number))
                    assert once == pytest.approx(oracle.received[number], rel=1e-4, abs=1e-6)
            buffer.clear()

        for token in range(new):
            query, key, value = new_token(token, layer, 7)
            buffer.append(query)
            oracle.step(query, key, value, SCALE, check)
            checked += not buffer
        assert checked == new // 8


def test_prompt_scores_sum_to_its_queries() -> None:
    prefill = prompt(75, seed=8)
    scores = QEvict(sinks=0).examine([prefill], [SEED])[0]
    torch.testing.assert_close(scores.sum(-1), torch.full((LAYERS,), 75.0))


# -- storage ---------------------------------------------------------------------------------------------------------


def test_the_physical_order_of_windows_changes_nothing() -> None:
    """Slots shuffled in both tiers, between events: same outputs, same routing, to rounding."""
    method, tokens, new = QEvict(recent=8), 130, 48
    plain, _, _ = admitted(method, tokens, "40%", new, seed=12)
    mixed, _, _ = admitted(method, tokens, "40%", new, seed=12)
    for token in range(new):
        if token % 5 == 3:
            shuffle(mixed, seed=token)
        expected, outputs = feed(plain, token, tokens + token, 12), feed(mixed, token, tokens + token, 12)
        for one, other in zip(outputs, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
        for layer in range(LAYERS):
            found, wanted = state(mixed, layer), state(plain, layer)
            assert {window: name for window, (name, _) in found.items()} == {w: name for w, (name, _) in wanted.items()}
    assert mixed.memory(1) == plain.memory(1)
    assert mixed.facts(1) == plain.facts(1)


def shuffle(pool: TieredPool, seed: int) -> None:
    """Exchange whole slots of row 1, the same in every layer, and follow its newest window."""
    held = pool._held[1]
    generator = torch.Generator().manual_seed(seed)
    for tier, pages, slots in ((pool.full, held.full_pages, held.full_slots), (pool.ledger, held.code_pages, 0)):
        order = torch.randperm(slots or held.code_slots, generator=generator)
        if not len(order):
            continue
        old, new = pages[order // tier.per_page], pages[torch.arange(len(order)) // tier.per_page]
        from_place, to_place = order % tier.per_page, torch.arange(len(order)) % tier.per_page
        names = [name for name in tier.arena._tensors]
        for name in names:
            for layer in range(LAYERS):
                x = tier[name][layer]
                if x.ndim > 2:
                    x[new, :, to_place] = x[old, :, from_place].clone()
                else:
                    x[new, to_place] = x[old, from_place].clone()
        if tier is pool.ledger:  # and the working copy with it
            old, new = (
                held.working_pages[order // tier.per_page],
                held.working_pages[torch.arange(len(order)) // tier.per_page],
            )
            for layer in range(LAYERS):
                for name in ("keys", "values"):
                    x = pool.full[name][layer]
                    x[new, :, to_place] = x[old, :, from_place].clone()
                x = pool.full["fill"][layer]
                x[new, to_place] = x[old, from_place].clone()
        if tier is pool.full:
            moved = order.argsort()
            for layer in range(LAYERS):
                page = int(pool._tail_page[layer, 1])
                slot = int((pages == page).nonzero()) * tier.per_page + int(pool._tail_place[layer, 1])
                pool._point_tail(1, slice(layer, layer + 1), moved[slot : slot + 1])


def records(pool: TieredPool, layer: int) -> list[tuple[int, Quantized, Quantized]]:
    """Window, coded keys and coded values of every record of row 1."""
    held = pool._held[1]
    windows, _ = pool.ledger.table(held.code_pages)
    found = []
    for slot in (windows[layer] != FREE).nonzero().flatten().tolist():
        page, place = int(held.code_pages[slot // pool.ledger.per_page]), slot % pool.ledger.per_page
        parts = [
            Quantized(*(pool.ledger[f"{of}_{part}"][layer, page, :, place] for part in ("codes", "scale", "offset")))
            for of in ("key", "value")
        ]
        found.append((int(windows[layer, slot]), parts[0], parts[1]))
    return found


@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize("bias", [0.0, 200.0])
def test_the_error_of_codes_is_half_a_step_also_with_large_biases(bits: int, bias: float) -> None:
    """|x - x̂| <= s / 2, plus the fp16 rounding of scale and offset; keys before rotation, per channel; values per
    token. Projections with biases (Qwen) shift whole channels, which an offset per channel takes up."""
    prefill = prompt(140, seed=21)
    cos, sin = rotary(0, torch.arange(140))
    shift = bias * (torch.arange(DIM) == 3)
    for layer in prefill.layers:
        layer.keys = rotate(unrotate(layer.keys, cos, sin) + shift, cos, sin)
    pool = pool_of(compress(QEvict(recent=8, bits=bits), prefill, "40%", 30))
    for index, layer in enumerate(prefill.layers):
        for window, coded_keys, coded_values in records(pool, index):
            at = slice(5 + 8 * window, 13 + 8 * window)
            keys = unrotate(layer.keys[:, at], cos[at], sin[at]).transpose(1, 2)
            for x, coded in ((keys, coded_keys), (layer.values[:, at], coded_values)):
                error = (dequantize(coded, bits) - x).abs().amax(-1)
                rounding = (x.abs().amax(-1) + 2**bits * coded.scale.float()) * 2**-10
                assert bool((error <= coded.scale.float() / 2 + rounding).all())


def test_constant_and_huge_windows_give_finite_outputs_equal_to_the_papers_algorithm() -> None:
    """Constant groups have no range, biased channels a large offset; neither may give NaN or another tier."""
    method, tokens, new = QEvict(recent=8), 130, 24
    cos, sin = rotary(0, torch.arange(tokens + new))
    prefill = prompt(tokens, seed=22)
    shift = 30.0 * (torch.arange(DIM) == 1)
    for layer in prefill.layers:
        plain = unrotate(layer.keys, cos[:tokens], sin[:tokens]) + shift
        plain[:, 21:29] = plain[:, 21:22]
        layer.keys = rotate(plain, cos[:tokens], sin[:tokens])
        layer.values[:, 29:37] = 7.25
    compressed = compress(method, prefill, "40%", new)
    pool, paper = pool_of(compressed), oracles(method, prefill, compressed.room, tokens + new)
    for token in range(new):
        outputs = feed(pool, token, tokens + token, seed=22)
        for layer_index, oracle in enumerate(paper):
            expected = oracle.step(*new_token(token, layer_index, 22), SCALE)
            assert bool(outputs[layer_index].isfinite().all())
            torch.testing.assert_close(outputs[layer_index], expected, rtol=2e-3, atol=2e-4)
            held = {window: name for window, (name, _) in state(pool, layer_index).items()}
            wanted = {window: name for window, (name, _) in expected_state(oracle).items()}
            assert {window: held[window] for window in wanted} == wanted


def test_eviction_leaves_kept_keys_alone() -> None:
    """They keep their bits and, with them, the rotation of their true positions; nothing is moved closer together."""
    pool, prefill, _ = admitted(QEvict(recent=8), 150, "35%", 64, seed=23)
    fed = [[new_token(token, layer, 23)[1] for token in range(64)] for layer in range(LAYERS)]
    for token in range(64):
        feed(pool, token, 150 + token, seed=23)
    held = pool._held[1]
    windows, _ = pool.full.table(held.full_pages)
    seen = 0
    for index, layer in enumerate(prefill.layers):
        everything = torch.cat([layer.keys, torch.stack(fed[index], 1)], 1)
        for slot in (windows[index] >= 0).nonzero().flatten().tolist():
            page, place = int(held.full_pages[slot // pool.full.per_page]), slot % pool.full.per_page
            first, count = 5 + 8 * int(windows[index, slot]), int(pool.full["fill"][index, page, place])
            kept = pool.full["keys"][index, page, :, place, :count]
            assert torch.equal(kept, everything[:, first : first + count])
            seen += count
    assert seen > 0


def test_a_query_keeps_its_true_position_after_many_evictions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the engine: the position of each step is the count of tokens so far, not of those that are held."""
    seen: list[int] = []
    real = TieredPool.attend

    def attend(self: TieredPool, layer: int, *rest: Any) -> Tensor:
        if layer == 0:
            seen.append(int(rest[3][0, 0]))
        return real(self, layer, *rest)

    monkeypatch.setattr(TieredPool, "attend", attend)
    fork = Fork("", QEvict(recent=8), Budget.parse("25%"), "0")
    (generation,) = Engine(tiny_llama(), EngineSpec(4, 64)).run([Prompt("", prompt_ids(200), [], 60, [fork])])
    assert generation.method_facts["evicted_windows"] > 0
    assert len(generation.tokens) > 24, "too short for three events"
    assert seen == list(range(200, 199 + len(generation.tokens)))


def test_a_prefill_is_not_changed_by_compression() -> None:
    prefill: Prefill = prompt(100, seed=30)
    before = [(layer.keys.clone(), layer.values.clone()) for layer in prefill.layers]
    pool = pool_of(compress(QEvict(recent=8), prefill, "40%", 10))
    for token in range(10):
        feed(pool, token, 100 + token, seed=30)
    for layer, (keys, values) in zip(prefill.layers, before, strict=True):
        assert torch.equal(layer.keys, keys)
        assert torch.equal(layer.values, values)
