"""The ragged pool: masked attention over what is kept, and memory that is really given back."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvcache.layout import CacheLayout, LayerLayout
from kvcache.pool import PoolShape
from kvcache.prefill import LayerPrefill, Prefill
from kvcache.ragged import RaggedCompressed, RaggedPool

QUERY_HEADS, KV_HEADS, DIM, SCALE = 4, 2, 8, 0.3
LAYOUT = CacheLayout((LayerLayout("growing", QUERY_HEADS, KV_HEADS, DIM, DIM),) * 2, 4)


def pool(rows: int = 4) -> RaggedPool:
    return RaggedPool(PoolShape(LAYOUT, rows, torch.device("cpu"), torch.float32, lambda *_: (Tensor(), Tensor())))


def prompt(tokens: int) -> Prefill:
    layers = [
        LayerPrefill(
            torch.randn(KV_HEADS, tokens, DIM), torch.randn(KV_HEADS, tokens, DIM), None, None, Tensor(), SCALE
        )
        for _ in LAYOUT.layers
    ]
    return Prefill(layers, LAYOUT, tokens, torch.zeros(3), lambda *_: (Tensor(), Tensor()), lambda _: None)  # type: ignore[arg-type,return-value]


def masked_attention(query: Tensor, keys: Tensor, values: Tensor, kept: list[list[int]]) -> Tensor:
    """Dense attention with everything that is not kept masked out. query [H_q, d]"""
    outputs = []
    group = QUERY_HEADS // KV_HEADS
    for head in range(QUERY_HEADS):
        mask = torch.full((keys.shape[1],), -torch.inf)
        mask[kept[head // group]] = 0
        weights = torch.softmax(query[head] @ keys[head // group].T * SCALE + mask, -1)
        outputs.append(weights @ values[head // group])
    return torch.stack(outputs)


@settings(max_examples=25)
@given(st.data())
def test_attention_over_the_kept_set_is_masked_attention(data: st.DataObject) -> None:
    """Any kept set per row, layer and head, empty heads excepted; rows come, grow by different steps, and go."""
    held = pool()
    sources: dict[int, tuple[Prefill, list[list[list[int]]]]] = {}
    for row in data.draw(st.permutations(range(4)))[: data.draw(st.integers(1, 4))]:
        tokens = data.draw(st.integers(1, 200))
        source = prompt(tokens)
        kept = [
            [sorted(data.draw(st.sets(st.integers(0, tokens - 1), min_size=1))) for _ in range(KV_HEADS)]
            for _ in LAYOUT.layers
        ]
        held.admit({row: RaggedCompressed(source, [[torch.tensor(head) for head in layer] for layer in kept])})
        sources[row] = source, kept
    for step in range(data.draw(st.integers(1, 70))):
        rows = held.rows.tolist()
        counts = torch.tensor([data.draw(st.integers(0, 1)) if step < 3 else 1 for _ in rows])
        positions = torch.zeros(len(rows), 1, dtype=torch.int64)
        for layer in range(len(LAYOUT.layers)):
            queries, keys, values = (
                torch.randn(len(rows), heads, 1, DIM) for heads in (QUERY_HEADS, KV_HEADS, KV_HEADS)
            )
            found = held.attend(layer, queries, keys, values, positions, counts, SCALE)
            for place, row in enumerate(rows):
                if not counts[place]:
                    continue
                source, kept = sources[row]
                content = source.layers[layer]
                content.keys = torch.cat([content.keys, keys[place]], 1)
                content.values = torch.cat([content.values, values[place]], 1)
                for head in kept[layer]:
                    head.append(content.keys.shape[1] - 1)
                expected = masked_attention(queries[place, :, 0], content.keys, content.values, kept[layer])
                torch.testing.assert_close(found[place, :, 0], expected, rtol=1e-4, atol=1e-5)
    check_memory(held, {row: kept for row, (_, kept) in sources.items()})
    for row in list(sources):
        held.release(row)
        del sources[row]
        check_memory(held, {row: kept for row, (_, kept) in sources.items()})
    assert held.allocated_bytes() == 0


def test_what_a_row_leaves_behind_reaches_no_other() -> None:
    """Masked slots take part in products, and 0 times NaN is NaN."""
    held, source, broken = pool(), prompt(64), prompt(200)
    for layer in broken.layers:
        layer.keys.fill_(torch.nan)
        layer.values.fill_(torch.inf)
    held.admit({2: RaggedCompressed(broken, [[torch.arange(200)] * KV_HEADS] * 2)})
    held.release(2)
    held.admit({1: RaggedCompressed(source, [[torch.arange(64)] * KV_HEADS] * 2)})
    query, key, value = (torch.randn(1, heads, 1, DIM) for heads in (QUERY_HEADS, KV_HEADS, KV_HEADS))
    found = held.attend(0, query, key, value, torch.tensor([[64]]), torch.tensor([1]), SCALE)
    assert found.isfinite().all()


def check_memory(held: RaggedPool, rows: dict[int, list[list[list[int]]]]) -> None:
    """A row's bytes are its tokens' bytes; with the slack they are never more than the pool's."""
    token = 2 * DIM * 4
    for row, kept in rows.items():
        assert held.memory(row).held == token * sum(len(head) for layer in kept for head in layer)
    assert sum(held.memory(row).held + held.memory(row).slack for row in rows) <= held.allocated_bytes()


def test_several_tokens_at_once_equal_one_by_one() -> None:
    source = prompt(100)
    everything = [[torch.arange(100)] * KV_HEADS] * 2
    one_by_one, at_once = pool(), pool()
    for held in (one_by_one, at_once):
        held.admit({1: RaggedCompressed(source, everything)})
    queries, keys, values = (torch.randn(1, heads, 40, DIM) for heads in (QUERY_HEADS, KV_HEADS, KV_HEADS))
    positions = torch.arange(100, 140)[None]
    together = at_once.attend(0, queries, keys, values, positions, torch.tensor([37]), SCALE)
    for token in range(37):
        one = slice(token, token + 1)
        single = one_by_one.attend(
            0, queries[:, :, one], keys[:, :, one], values[:, :, one], positions[:, one], torch.tensor([1]), SCALE
        )
        assert torch.equal(single, together[:, :, one])
    assert one_by_one.memory(1) == at_once.memory(1)


def test_a_step_on_the_kernels_waits_for_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing can be read from a tensor on the meta device, as nothing should be from a GPU while it works: admission,
    release, and steps, some of which take pages and some of which not every row feeds, know all they need."""
    asked: list[tuple[int, ...]] = []

    def attend_owned(queries: Tensor, *_: Tensor | float, longest: int, split: int) -> Tensor:
        asked.append((len(queries), longest))
        return queries.new_empty(*queries.shape[:2], DIM)

    monkeypatch.setattr("kvcache.ragged.attend_owned", attend_owned)
    monkeypatch.setattr("kvcache.ragged.fuses", lambda *_: True)
    device = torch.device("meta")
    held = RaggedPool(replace(pool().shape, device=device, dtype=torch.bfloat16))
    source = prompt(70)
    for layer in source.layers:
        layer.keys, layer.values = (part.to(device, torch.bfloat16) for part in (layer.keys, layer.values))
    kept = [[torch.arange(63, device=device), torch.arange(5, device=device)][:KV_HEADS]] * len(LAYOUT.layers)
    held.admit({3: RaggedCompressed(source, kept), 1: RaggedCompressed(source, kept)})
    for step in range(3):
        counts = torch.tensor([1, int(step != 1)])
        queries = torch.empty(2, QUERY_HEADS, 1, DIM, device=device, dtype=torch.bfloat16)
        keys = torch.empty(2, KV_HEADS, 1, DIM, device=device, dtype=torch.bfloat16)
        for layer in range(len(LAYOUT.layers)):
            found = held.attend(layer, queries, keys, keys, torch.full((2, 1), 70 + step), counts, SCALE)
            assert found.shape == (2, QUERY_HEADS, 1, DIM)
    assert [held.stores[0].lengths[[2, 3, 6, 7]].tolist()] == [[66, 8, 65, 7]]
    assert asked[:: len(LAYOUT.layers)] == [(4, 1), (2, 2), (4, 2)]
    held.release(1)
    assert held.stores[0].lengths.sum() == 65 + 7
