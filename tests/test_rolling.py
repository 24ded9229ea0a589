"""StreamingLLM as published: positions inside the cache, and a cache that rolls."""

from __future__ import annotations

import pytest
import torch
from attention_prompts import DIM, QUERY_HEADS, SCALE, prompt, tables
from hypothesis import given, settings
from hypothesis import strategies as st
from models import prompt_ids, tiny_gemma, tiny_llama
from torch import Tensor

from kvcache.baselines.full import Full
from kvcache.baselines.streaming_llm import RollingStreamingLLM
from kvcache.budget import Budget
from kvcache.pool import PoolShape
from kvcache.prefill import Rotary
from kvcache.rolling import RollingCompressed, RollingPool
from kvcache.rotary import rotate, unrotate
from workers.engine import Engine
from workers.fork import Fork, Generation, Prompt
from workers.job import EngineSpec
from workers.models import LoadedModel


def stretched(layer: int, positions: Tensor) -> tuple[Tensor, Tensor]:
    """As of scaled rotary variants."""
    cos, sin = tables(layer, positions)
    return 1.3 * cos, 1.3 * sin


class PublishedCache:
    """Keys before rotation; every step rotates all of them, and the query, by their places in the cache."""

    def __init__(self, keys: Tensor, values: Tensor, sinks: int, capacity: int) -> None:
        self.keys, self.values, self.sinks, self.capacity = keys.double(), values.double(), sinks, capacity
        self.roll()

    def roll(self) -> None:
        places = torch.arange(self.keys.shape[1])
        kept = torch.cat([places[: self.sinks], places[self.sinks :][-(self.capacity - self.sinks) :]])
        self.keys, self.values = self.keys[:, kept], self.values[:, kept]

    def step(self, query: Tensor, key: Tensor, value: Tensor, rotary: Rotary, layer: int) -> Tensor:
        """query [H_q, d], key [H_kv, d], un-rotated -> [H_q, d]"""
        self.keys = torch.cat([self.keys, key[:, None].double()], 1)
        self.values = torch.cat([self.values, value[:, None].double()], 1)
        self.roll()
        cos, sin = (table.double() for table in rotary(layer, torch.arange(self.keys.shape[1])))
        keys, query = rotate(self.keys, cos, sin), rotate(query.double(), cos[-1], sin[-1])
        group = len(query) // len(keys)
        keys, values = keys.repeat_interleave(group, 0), self.values.repeat_interleave(group, 0)
        weights = torch.softmax((keys @ query[:, :, None])[..., 0] * SCALE, -1)
        return (weights[:, None] @ values)[:, 0]


@settings(max_examples=12)
@given(st.data())
def test_attention_is_that_of_positions_inside_the_cache(data: st.DataObject) -> None:
    """Prompts shorter and longer than the cache, several pages, rows beside each other, several tokens at once."""
    sinks, rotary = data.draw(st.integers(1, 5)), data.draw(st.sampled_from((tables, stretched)))
    source = prompt(1)
    held = RollingPool(PoolShape(source.layout, 3, torch.device("cpu"), torch.float32, rotary), sinks)
    published, tokens = {}, {}
    for row in data.draw(st.sampled_from(((0,), (2, 0), (0, 1, 2)))):
        tokens[row], capacity = data.draw(st.integers(sinks + 1, 150)), data.draw(st.integers(sinks + 1, 150))
        source = prompt(tokens[row], seed=row)
        positions = torch.arange(tokens[row])
        plain = [layer.keys for layer in source.layers]
        for index, layer in enumerate(source.layers):
            layer.keys = rotate(layer.keys, *rotary(index, positions))
        held.admit({row: RollingCompressed(source, capacity)})
        for index, layer in enumerate(source.layers):
            published[row, index] = PublishedCache(plain[index], layer.values, sinks, capacity)
        assert held.memory(row).held == 3 * 2 * 2 * DIM * 4 * min(tokens[row], capacity)
    for _ in range(data.draw(st.integers(1, 30))):
        rows, width = held.rows.tolist(), data.draw(st.integers(1, 3))
        counts = torch.tensor([data.draw(st.integers(0, width)) for _ in rows])
        positions = torch.tensor([[tokens[row] + step for step in range(width)] for row in rows])
        for layer in range(3):
            shapes = (QUERY_HEADS, 2, 2)
            queries, keys, values = (torch.randn(len(rows), heads, width, DIM) for heads in shapes)
            cos, sin = (table.view(len(rows), 1, width, DIM) for table in rotary(layer, positions.flatten()))
            rotated = rotate(queries, cos, sin), rotate(keys, cos, sin), values
            found = held.attend(layer, *rotated, positions, counts, SCALE)
            for place, row in enumerate(rows):
                for step in range(int(counts[place])):
                    new = queries[place, :, step], keys[place, :, step], values[place, :, step]
                    expected = published[row, layer].step(*new, rotary, layer)
                    torch.testing.assert_close(found[place, :, step].double(), expected, rtol=1e-3, atol=1e-4)
        for place, row in enumerate(rows):
            tokens[row] += int(counts[place])
            count = published[row, 0].keys.shape[1]
            assert held.memory(row).held == 3 * 2 * 2 * DIM * 4 * count
    for row in held.rows.tolist():
        held.release(row)
    assert held.allocated_bytes() == 3 * 3 * 2 * 2 * DIM * 4 * sinks, "room for sinks is all that stays"


def test_the_oracle_undoes_rotation() -> None:
    keys, positions = torch.randn(2, 9, DIM), torch.arange(9)
    torch.testing.assert_close(unrotate(rotate(keys, *stretched(0, positions)), *stretched(0, positions)), keys)


def generated(model: LoadedModel, prompts: list[Prompt]) -> dict[object, Generation]:
    found = list(Engine(model, EngineSpec(6, 64)).run(prompts))
    return {(one.prompt.key, one.fork.key): one for one in found}


def forks(*asked: str) -> list[Fork]:
    return [Fork(budget, RollingStreamingLLM(), Budget.parse(budget), "0") for budget in asked]


@pytest.mark.parametrize("build", [tiny_llama, tiny_gemma], ids=["llama", "gemma"])
def test_nothing_evicted_is_the_full_cache(build: type) -> None:
    model: LoadedModel = build()
    full = Fork("full", Full(), Budget.parse("unlimited"), "0")
    found = generated(model, [Prompt("", prompt_ids(90), prompt_ids(20, 7), 12, [full, *forks("unlimited")])])
    assert found["", "unlimited"].tokens == found["", "full"].tokens
    assert not found["", "unlimited"].error


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_rows_are_alone_and_never_exceed_the_budget(dtype: torch.dtype) -> None:
    model = tiny_llama(dtype)
    prompts = [
        Prompt(length, prompt_ids(length), prompt_ids(25, 7), 20, forks("20%", "70 tokens")) for length in (60, 150)
    ]
    together = generated(model, prompts)
    for prompt_ in prompts:
        for fork in prompt_.forks:
            alone = Prompt(prompt_.key, prompt_.ids, prompt_.appended, 20, [fork])
            one = generated(model, [alone])[prompt_.key, fork.key]
            assert one.tokens == together[prompt_.key, fork.key].tokens
            assert not one.error
            assert one.budget is not None
            assert max(one.peak_held, one.at_end.held, one.at_prefill.held) <= one.budget.total_bytes


def test_what_cannot_be_kept_is_impossible() -> None:
    layout, method = prompt(1).layout, RollingStreamingLLM()
    for text, tokens, reason in (("4 tokens", 90, "must keep 5 tokens"), ("50 tokens", 4, "longer than its 4 sinks")):
        resolved = Budget.parse(text).resolve(tokens, 8, "prompt", layout)
        assert reason in (method.impossible(resolved, layout) or "")
    assert method.impossible(Budget.parse("5 tokens").resolve(5, 8, "prompt", layout), layout) is None
    with pytest.raises(ValueError, match="sinks must be at least 1"):
        RollingStreamingLLM(sinks=0)
