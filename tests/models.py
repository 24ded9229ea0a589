"""Small random models for tests, wrapped for the engine."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig, Qwen2Config

from workers.job import ModelSpec
from workers.models import LoadedModel, prepare

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
    return prepare(ModelSpec("tiny", "memory", dtype=name), model.to(dtype), None)  # type: ignore[arg-type]
