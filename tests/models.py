"""Small random models for tests, wrapped for the engine."""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    Gemma4TextConfig,
    Gemma4UnifiedTextConfig,
    LlamaConfig,
    Ministral3Config,
    Olmo2Config,
    Phi3Config,
    Qwen2Config,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
)

from workers.job import ModelSpec
from workers.models import LoadedModel, prepare
from workers.packed import pack_linears

SHAPE = {
    "vocab_size": 128,
    "hidden_size": 96,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
GEMMA_4 = SHAPE | {
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "sliding_window": 24,
    "global_head_dim": 32,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 128,
}
LINEAR = SHAPE | {
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 32,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 256}


def tiny_llama(dtype: torch.dtype = torch.float32, **changes: Any) -> LoadedModel:
    return _loaded(LlamaConfig(**(SHAPE | changes)), dtype)


def tiny_qwen(dtype: torch.dtype = torch.float32, **changes: Any) -> LoadedModel:
    """Its projections have biases."""
    return _loaded(Qwen2Config(**(SHAPE | changes)), dtype)


def tiny_gemma(dtype: torch.dtype = torch.float32, **changes: Any) -> LoadedModel:
    """Sliding layers with a window of 24, every third layer full, query and key norms."""
    kinds = ["sliding_attention", "sliding_attention", "full_attention"]
    shape = SHAPE | {"layer_types": kinds, "sliding_window": 24, "query_pre_attn_scalar": 16}
    return _loaded(Gemma3TextConfig(**(shape | changes)), dtype)


def tiny_gemma4(dtype: torch.dtype = torch.float32, **changes: Any) -> LoadedModel:
    """Full layers have larger heads, fewer of them for keys, and keys for values; a part of a head is not rotated."""
    return _loaded(Gemma4TextConfig(**(GEMMA_4 | changes)), dtype)


def tiny_gemma4_unified(dtype: torch.dtype = torch.float32, **changes: Any) -> LoadedModel:
    shape = {name: value for name, value in GEMMA_4.items() if "per_layer" not in name}
    return _loaded(Gemma4UnifiedTextConfig(**(shape | changes)), dtype)


def tiny_gemma4_experts(dtype: torch.dtype = torch.float32, **changes: Any) -> LoadedModel:
    experts = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16}
    return tiny_gemma4(dtype, **(experts | changes))


def tiny_qwen_next(dtype: torch.dtype = torch.float32, **changes: Any) -> LoadedModel:
    """Linear layers, full ones with output gates and partly rotated heads, experts."""
    return _loaded(Qwen3NextConfig(**(LINEAR | EXPERTS | changes)), dtype)


def tiny_qwen35(dtype: torch.dtype = torch.float32, **changes: Any) -> LoadedModel:
    return _loaded(Qwen3_5TextConfig(**(LINEAR | changes)), dtype)


def tiny_qwen35_experts(dtype: torch.dtype = torch.float32, **changes: Any) -> LoadedModel:
    return _loaded(Qwen3_5MoeTextConfig(**(LINEAR | EXPERTS | changes)), dtype)


def tiny_ministral(dtype: torch.dtype = torch.float32, **changes: Any) -> LoadedModel:
    """Queries are scaled by their positions."""
    rope = YARN | {"llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 64}
    return _loaded(Ministral3Config(**(SHAPE | {"rope_parameters": rope, "sliding_window": None} | changes)), dtype)


def tiny_phi(dtype: torch.dtype = torch.float32, **changes: Any) -> LoadedModel:
    """One projection for queries, keys and values; a part of each head is rotated."""
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.75}
    return _loaded(Phi3Config(**(SHAPE | {"rope_parameters": rope} | changes)), dtype)


def tiny_olmo(dtype: torch.dtype = torch.float32, **changes: Any) -> LoadedModel:
    """Queries and keys are normalised over all heads, layers after themselves."""
    return _loaded(Olmo2Config(**(SHAPE | changes)), dtype)


def prompt_ids(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed * 1000 + length)
    return torch.randint(3, SHAPE["vocab_size"], (length,), generator=generator).tolist()


def greedy(model: LoadedModel, ids: list[int], new_tokens: int) -> list[int]:
    """transformers' own ``generate``, on its own attention, cut off before a stop token."""
    model.forward.set_attn_implementation("sdpa")
    try:
        output = model.forward.generate(
            torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.int64),
            max_new_tokens=new_tokens,
            do_sample=False,
        )
    finally:
        model.forward.set_attn_implementation("kvsweep")
    tokens = output[0, len(ids) :].tolist()
    return tokens[: next((place for place, token in enumerate(tokens) if token in model.stop_ids), len(tokens))]


def _loaded(config: Any, dtype: torch.dtype) -> LoadedModel:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="kvsweep").eval()
    with torch.no_grad():
        for parameter in model.parameters():  # larger than the usual start, so that attention is not flat
            if parameter.ndim > 1:
                parameter.normal_(0, 0.2)
            elif parameter.abs().sum() == 0:  # biases begin at zero
                parameter.normal_(0, 0.5)
    name = str(dtype).removeprefix("torch.")
    model = model.to(dtype)  # type: ignore[arg-type]
    pack_linears(model)  # as models are when they are loaded
    return prepare(ModelSpec("tiny", "memory", dtype=name), model, None)
