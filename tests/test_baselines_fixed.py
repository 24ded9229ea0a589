"""Methods with an operating point of their own, through the engine: tokens, bytes, and what a sweep makes of them."""

from __future__ import annotations

import json
import random

import pytest
import torch
from models import prompt_ids, tiny_gemma, tiny_llama
from test_engine import NEW, fork, prompts_of, run

from kvcache.baselines.full import Full
from kvcache.baselines.kivi import KIVI
from kvcache.baselines.quest import Quest
from kvcache.baselines.snapkv import SnapKV
from kvcache.baselines.sparq import SparQ
from kvcache.baselines.zipcache import ZipCache
from kvcache.fixed import FixedMethod
from kvcache.probes import probe_positions
from workers.evaluate import fill_memory
from workers.fork import Prompt, PromptForks
from workers.models import LoadedModel
from workers.row import Row

METHODS: list[FixedMethod] = [
    KIVI(group=8, residual=16),
    KIVI(bits=4, group=16, residual=32),
    ZipCache(interval=10),
    Quest(tokens=32, page=8, dense_layers=1),
    SparQ(channels=4, tokens=16, local=4),
]
LOSSLESS: list[FixedMethod] = [
    KIVI(group=8, residual=512),
    Quest(tokens=512, page=16),
    SparQ(channels=16, tokens=512),
]
"""With what leaves nothing out: all tokens in the residual, all pages, all channels and tokens."""


@pytest.mark.parametrize("build", [tiny_llama, tiny_gemma], ids=["llama", "gemma"])
@pytest.mark.parametrize("question", [0, 19])
def test_with_nothing_left_out_the_tokens_are_those_of_the_full_cache(build: type, question: int) -> None:
    forks = [fork(Full()), *(fork(method) for method in LOSSLESS)]
    found = run(build(), prompts_of((20, 77, 160), forks, question))
    for length in (20, 77, 160):
        for one in forks[1:]:
            assert not found[length, one.key].error
            assert found[length, one.key].tokens == found[length, forks[0].key].tokens, one.method


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [(torch.bfloat16, {}), (torch.float32, {"num_attention_heads": 4, "num_key_value_heads": 1})],
    ids=["bf16, 2 heads", "fp32, 1 head"],
)
def test_tokens_do_not_depend_on_what_runs_beside(dtype: torch.dtype, shape: dict[str, int]) -> None:
    """Alone, beside other cells and prompts, in another order; over several chunks of prompt and question."""
    model: LoadedModel = tiny_llama(dtype, **shape)
    forks = [fork(method) for method in METHODS] + [fork(SnapKV(window=8), "50%")]
    lengths = {11: 0, 90: 5, 140: 40, 333: 20}
    prompts = [
        Prompt(length, prompt_ids(length), prompt_ids(question, seed=7) if question else [], NEW, forks)
        for length, question in lengths.items()
    ]
    together = run(model, prompts)
    shuffled = [
        Prompt(one.key, one.ids, one.appended, NEW, random.Random(1).sample(forks, len(forks)))
        for one in reversed(prompts)
    ]
    again = run(model, shuffled)
    for prompt in prompts:
        for one in forks:
            alone = run(model, [Prompt(prompt.key, prompt.ids, prompt.appended, NEW, [one])])[prompt.key, one.key]
            for other in (together, again):
                found = other[prompt.key, one.key]
                assert (found.error, found.tokens, found.at_end) == (alone.error, alone.tokens, alone.at_end)
                assert found.method_facts == alone.method_facts


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_rows_hold_the_bytes_of_their_formulas(dtype: torch.dtype) -> None:
    model = tiny_llama(dtype)
    forks = [fork(method) for method in METHODS]
    found = run(model, prompts_of((9, 64, 150), forks, appended=21))
    for (length, _), generation in found.items():
        method = generation.fork.method
        assert isinstance(method, FixedMethod)
        assert not generation.error
        assert generation.budget is not None
        new = generation.held_tokens - length
        assert generation.at_prefill.held == method.held_bytes(length, 0, model.layout)
        assert generation.at_end.held == method.held_bytes(length, new, model.layout)
        assert generation.peak_held <= method.peak_bytes(generation.budget, model.layout)
    small, large = (found[150, fork(method).key].at_end.held for method in METHODS[:2])
    assert small < large < model.layout.full_bytes(150)


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_prefill_records_the_probes_whatever_its_chunks(chunk: int) -> None:
    prompt = Prompt("", prompt_ids(61), [], 1, [fork(ZipCache()), fork(ZipCache(probes=1.0))])
    for layer in PromptForks(tiny_llama(), chunk).prefill(prompt).layers:
        every = layer.probes[1.0]
        assert every.shape == (6, 61, 16)
        assert torch.equal(layer.probes[0.1], every[:, probe_positions(61, 0.1)])


def test_a_row_says_what_is_held_and_read_and_is_over_no_budget() -> None:
    model, forks = tiny_llama(), [fork(method) for method in METHODS]
    rows = {}
    for (_, key), generation in run(model, prompts_of((150,), forks)).items():
        rows[key] = row = Row("cell", "sample")
        fill_memory(row, model, generation)
        assert not row.over_budget
    quantized, quest, sparq = (rows[fork(METHODS[place]).key] for place in (0, 3, 4))
    assert quantized.kv_share < 0.5
    assert quest.kv_share > sparq.kv_share > 1, "the whole cache, and what chooses"
    for row in (quest, sparq):
        facts = json.loads(row.method_facts)
        assert 0 < facts["tokens_read"] < facts["tokens_held"]
        assert 0 < facts["elements_read_share"] < 1


def test_an_operating_point_beyond_the_budget_fails_and_says_so() -> None:
    one = fork(KIVI(group=8, residual=16), "10%")
    found = run(tiny_llama(), prompts_of((150,), [one, fork(Full())]))
    assert "operating point" in found[150, one.key].error
    assert not found[150, fork(Full()).key].error
