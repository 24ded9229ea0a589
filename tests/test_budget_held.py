"""Bytes really held never exceed the budget: random models, lengths, questions and budgets, through the engine."""

from __future__ import annotations

from functools import lru_cache

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models import prompt_ids, tiny_llama

from kvcache.baselines.adakv import AdaKV
from kvcache.baselines.andpro import AnDPro
from kvcache.baselines.criticalkv import CriticalAdaKV, CriticalKV
from kvcache.baselines.defensivekv import DefensiveKV, LayerDefensiveKV
from kvcache.baselines.expected_attention import ExpectedAttention
from kvcache.baselines.gvote import GVote
from kvcache.baselines.h2o import H2O
from kvcache.baselines.key_norm import KeyNorm
from kvcache.baselines.laq import LAQ, LAQPlusPlus
from kvcache.baselines.obcache import OBCache
from kvcache.baselines.pyramidkv import PyramidKV
from kvcache.baselines.random_tokens import RandomTokens
from kvcache.baselines.scissorhands import Scissorhands
from kvcache.baselines.snapkv import SnapKV
from kvcache.baselines.streaming_llm import RollingStreamingLLM, StreamingLLM
from kvcache.budget import Base, Budget
from kvcache.layout import CacheLayout
from lorekv.method import LoreKV
from qevict.method import QEvict
from workers.engine import Engine
from workers.fork import Fork, Generation, Prompt
from workers.job import EngineSpec
from workers.models import LoadedModel

NEW = 12
METHODS = (
    StreamingLLM(),
    RollingStreamingLLM(),
    SnapKV(window=8),
    RandomTokens(),
    KeyNorm(),
    H2O(),
    Scissorhands(history=30, recent=8),
    PyramidKV(window=8, beta=4),
    AdaKV(window=8),
    CriticalKV(window=8),
    CriticalAdaKV(window=8, safeguard="force"),
    ExpectedAttention(future=16),
    AnDPro(window=8),
    OBCache(window=8, recent=8),
    DefensiveKV(window=8),
    LayerDefensiveKV(window=8),
    LAQ(window=8, recent=8, lookahead=2),
    LAQPlusPlus(window=8, lookahead=2),
    GVote(samples=2),
    LoreKV(window=8, particles=2, tokens=3),
    LoreKV(window=8, particles=2, tokens=3, layer_budgets="global", head_exponent=1.0, key_diversity=0.5),
    QEvict(recent=8),
    QEvict(recent=8, quantized_share=0.0, sinks=0),
    QEvict(recent=11, window=4, bits=4, quantized_share=1.0),
    QEvict(recent="20%", promotion="exact", ranker="p_norm"),
    QEvict(recent=8, promotion="none", ranker="lorekv"),
)
SHAPES = ((4, 4, 8), (6, 2, 16), (8, 1, 32), (6, 3, 64))


OVER = (
    QEvict(recent=8, first_eviction="first_step"),
    QEvict(recent=8, first_eviction="after_window"),
    QEvict(recent=8, accounting="paper"),
    QEvict(recent=32, window=32, accounting="paper", quantized_share=0.5),
)
"""They may hold more than the budget, and no more than the plan says: the whole prompt until a late first eviction, and
what paper accounting does not charge."""


@lru_cache(maxsize=2)
def model(heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> LoadedModel:
    return tiny_llama(dtype, num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=head_dim)


@settings(max_examples=12)
@given(
    st.sampled_from(SHAPES),
    st.sampled_from((torch.float32, torch.bfloat16)),
    st.lists(st.integers(30, 200), min_size=1, max_size=2, unique=True),
    st.sampled_from((0, 1, 25)),
    st.sampled_from(("prompt", "prompt+max_new")),
    st.one_of(st.integers(15, 100).map("{}%".format), st.integers(60, 300).map("{} tokens".format)),
)
def test_bytes_held_never_exceed_the_budget(
    shape: tuple[int, int, int], dtype: torch.dtype, lengths: list[int], question: int, base: Base, budget: str
) -> None:
    forks = [Fork(method, method, Budget.parse(budget), "0") for method in (*METHODS, *OVER)]
    prompts = [
        Prompt(length, prompt_ids(length), prompt_ids(question) if question else [], NEW, forks, base=base)
        for length in lengths
    ]
    finished = list(Engine(model(*shape, dtype), EngineSpec(6, 64)).run(prompts))
    assert len(finished) == len(prompts) * (len(METHODS) + len(OVER))
    for generation in finished:
        most = _most(generation, model(*shape, dtype).layout)
        assert generation.error or max(generation.peak_held, generation.at_end.held) <= most
        if generation.error:
            assert "must" in generation.error, "only a budget below what must be kept may fail"
            continue
        if generation.fork.method in OVER:
            continue
        assert generation.budget is not None
        bounded = base == "prompt+max_new" or generation.fork.method.bounded
        held = max(generation.peak_held, generation.at_end.held) if bounded else generation.at_prefill.held
        assert held <= generation.budget.total_bytes


def _most(generation: Generation, layout: CacheLayout) -> int:
    return generation.fork.method.peak_bytes(generation.budget, layout) if generation.budget is not None else 0
