"""What kvpress keeps on a small random model, written to a safetensors file for ``test_parity.py``.

It runs in an environment of its own, since kvpress pins an older transformers: ``make parity`` makes both.

    PYTHON tests/parity_export.py FILE

Per prompt and way of attending (sdpa, eager): ``queries`` [L, H_q, n, d] and ``keys`` [L, H_kv, n, d], both rotated,
and ``values`` [L, H_kv, n, d]. Per prompt and press: ``kept`` [L, H_kv, n] bool, read off what is left in the cache.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any
from unittest.mock import patch

import torch
from kvpress import (
    AdaKVPress,
    CriticalAdaKVPress,
    CriticalKVPress,
    ExpectedAttentionPress,
    KnormPress,
    ObservedAttentionPress,
    PyramidKVPress,
    SnapKVPress,
    StreamingLLMPress,
)
from safetensors.torch import save_file
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM
from transformers.models.llama import modeling_llama

PROMPTS, TOKENS, FUTURE = 6, 384, 512
SHAPE = {
    "vocab_size": 128,
    "hidden_size": 96,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "max_position_embeddings": 1024,
}


def removed(kept: int) -> float:
    """The compression ratio that leaves so many tokens: exact, since 384 is 3 times a power of two."""
    ratio = 1 - kept / TOKENS
    assert int(TOKENS * (1 - ratio)) == kept
    return ratio


def snapkv(kept: int, window: int = 8, kernel: int = 5) -> SnapKVPress:
    return SnapKVPress(removed(kept), window, kernel)


@dataclass(frozen=True)
class Case:
    press: Any
    attention: str = "sdpa"


CASES = {
    "streaming_llm": Case(StreamingLLMPress(removed(72))),
    "streaming_llm, 12 sinks": Case(StreamingLLMPress(removed(24), n_sink=12)),
    "key_norm": Case(KnormPress(removed(72))),
    "key_norm, half": Case(KnormPress(removed(192))),
    "snapkv": Case(snapkv(72)),
    "snapkv, kvpress's defaults": Case(SnapKVPress(removed(72))),
    "snapkv, half, kernel 1": Case(snapkv(192, 32, 1)),
    "pyramidkv": Case(PyramidKVPress(removed(72), 8, 5, beta=3)),
    "pyramidkv, uneven steps": Case(PyramidKVPress(removed(96), 8, 5, beta=3)),
    "pyramidkv, most of the prompt": Case(PyramidKVPress(removed(288), 8, 5, beta=3)),
    "pyramidkv, kvpress's defaults": Case(PyramidKVPress(removed(72))),
    "adakv": Case(AdaKVPress(snapkv(72))),
    "adakv, no safeguard": Case(AdaKVPress(snapkv(72), 0.0)),
    "adakv, half, large safeguard": Case(AdaKVPress(snapkv(192), 0.5)),
    "criticalkv": Case(CriticalKVPress(snapkv(72))),
    "criticalkv, half, large epsilon": Case(CriticalKVPress(snapkv(192), epsilon=0.01, first_stage_ratio=0.25)),
    "criticalkv, kvpress's defaults": Case(CriticalKVPress(SnapKVPress(removed(72)))),
    "critical_adakv": Case(CriticalAdaKVPress(snapkv(72))),
    "critical_adakv, half": Case(CriticalAdaKVPress(snapkv(192), 0.1)),
    "expected_attention": Case(ExpectedAttentionPress(removed(72))),
    "expected_attention, half, epsilon": Case(ExpectedAttentionPress(removed(192), epsilon=0.01)),
    "expected_attention, means alone": Case(
        ExpectedAttentionPress(removed(72), n_future_positions=64, use_covariance=False, use_vnorm=False)
    ),
    "observed_attention": Case(ObservedAttentionPress(removed(72)), "eager"),
    "observed_attention, half": Case(ObservedAttentionPress(removed(192)), "eager"),
}


def main() -> None:
    torch.set_num_threads(1)
    model = random_model()
    tensors = {"output_projection": torch.stack([layer.self_attn.o_proj.weight for layer in model.model.layers])}
    cos, sin = model.model.rotary_emb(tensors["output_projection"], torch.arange(TOKENS + FUTURE)[None])
    tensors |= {"cos": cos[0], "sin": sin[0]}
    for prompt in range(PROMPTS):
        ids = torch.randint(3, SHAPE["vocab_size"], (1, TOKENS), generator=torch.Generator().manual_seed(prompt))
        full = {}
        for attention in ("sdpa", "eager"):
            model.set_attn_implementation(attention)
            with recorded_queries() as queries:
                cache = prefilled(model, ids)
            full[attention] = cache
            tensors[f"{prompt}/{attention}/queries"] = torch.cat(queries)
            tensors[f"{prompt}/{attention}/keys"] = torch.cat([layer.keys for layer in cache.layers])
            tensors[f"{prompt}/{attention}/values"] = torch.cat([layer.values for layer in cache.layers])
        for name, case in CASES.items():
            model.set_attn_implementation(case.attention)
            with case.press(model):
                cache = prefilled(model, ids)
            tensors[f"{prompt}/{name}/kept"] = kept(model, cache, full[case.attention])
    versions = {package: version(package) for package in ("kvpress", "transformers", "torch")}
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, sys.argv[1], versions)


def random_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SHAPE)).eval().requires_grad_(False)
    for parameter in model.parameters():  # larger than the usual start, so that attention is not flat
        if parameter.ndim > 1:
            parameter.normal_(0, 0.2)
    return model


@torch.inference_mode()
def prefilled(model: LlamaForCausalLM, ids: Tensor) -> DynamicCache:
    cache = DynamicCache()
    model.model(input_ids=ids, past_key_values=cache)
    return cache


@contextmanager
def recorded_queries() -> Iterator[list[Tensor]]:
    """The rotated queries of every layer, as attention gets them. [1, H_q, n, d] each"""
    found: list[Tensor] = []
    rotate = modeling_llama.apply_rotary_pos_emb

    def recording(*arguments: Any, **options: Any) -> tuple[Tensor, Tensor]:
        queries, keys = rotate(*arguments, **options)
        found.append(queries)
        return queries, keys

    with patch.object(modeling_llama, "apply_rotary_pos_emb", recording):
        yield found


def kept(model: LlamaForCausalLM, cache: DynamicCache, full: DynamicCache) -> Tensor:
    """Keys that are left are found among all keys by their values, which differ from token to token. Presses with a
    budget per head leave all keys and name those to mask. [L, H_kv, n] bool"""
    masks = []
    for decoder, layer, whole in zip(model.model.layers, cache.layers, full.layers, strict=True):
        if (masked := decoder.self_attn.masked_key_indices) is not None:
            mask = torch.ones(whole.keys.shape[1:3], dtype=torch.bool)
            mask[masked[1], masked[2]] = False
        else:
            same = (layer.keys[0][:, :, None] == whole.keys[0][:, None]).all(-1)
            assert bool((same.sum(-1) == 1).all()), "a kept key is one of the prompt's, and of one token"
            mask = same.any(1)
        decoder.self_attn.masked_key_indices = None
        masks.append(mask)
    return torch.stack(masks)


if __name__ == "__main__":
    main()
