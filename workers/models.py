"""Loading a model and its tokenizer, ready for the engine: registered attention, known layers, known stop tokens."""

from __future__ import annotations

import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvcache.layout import CacheLayout
from workers.architecture import GATED, layout_of
from workers.attention import ATTENTION, Step, pass_gates_on, reorder_heads
from workers.description import ELEMENT_BYTES, ModelFiles, cache_folder, describe, find_files
from workers.experts import EXPERTS, token_by_token
from workers.job import ModelSpec
from workers.linear import LinearCache
from workers.memory import PeakMeter
from workers.packed import pack_linears
from workers.partial_rotary import widened
from workers.structure import Structure

TURN_ENDS = ("<|eot_id|>", "<|im_end|>", "<end_of_turn>", "<|end_of_text|>", "<|endoftext|>")
"""Tokens that end an assistant's turn; a chat model must stop at them even where its configuration forgets one."""


@dataclass
class LoadedModel:
    """A model in memory. ``forward`` is the model's own, on this engine's attention."""

    spec: ModelSpec
    forward: Any
    tokenizer: Any
    layout: CacheLayout
    stop_ids: frozenset[int]
    device: torch.device
    dtype: torch.dtype
    max_positions: int
    meter: PeakMeter
    structure: Structure

    def output_projection(self, layer: int) -> Tensor:
        """Columns of ``o_proj`` by query head. [hidden, H_q, d_v]"""
        weight: Tensor = self.forward.get_decoder().layers[layer].self_attn.o_proj.weight
        return weight.unflatten(1, (self.layout.layers[layer].query_heads, -1))

    def read(self, tokens: Tensor, positions: Tensor, step: Step, cache: LinearCache) -> Tensor:
        """One forward pass; logits of the last column. tokens, positions [B, t] -> [B, V]"""
        options = {"use_cache": False, "cache": cache if self.layout.linear else None, "logits_to_keep": 1}
        with token_by_token(len(tokens) > 1):
            output = self.forward(input_ids=tokens, position_ids=positions, kv_step=step, **options)
        logits: Tensor = output.logits[:, -1]
        return logits

    def elapsed(self, began: float) -> float:
        """Seconds since ``began``, once the device has caught up."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter() - began

    def rotary(self, growing_layer: int, positions: Tensor) -> tuple[Tensor, Tensor]:
        """The model's own cos and sin at these positions, whole heads wide. [n] -> [n, d] each"""
        cos, sin = self.rotary_tables(growing_layer, positions)
        dim = self.layout.layers[self.layout.growing[growing_layer]].key_dim
        return (cos, sin) if cos.shape[-1] == dim else (widened(cos, dim, 1.0), widened(sin, dim, 0.0))

    def rotary_tables(self, growing_layer: int, positions: Tensor) -> tuple[Tensor, Tensor]:
        """As wide as what the model rotates of each head."""
        decoder = self.forward.get_decoder()
        like = torch.empty(0, dtype=self.dtype, device=self.device)
        arguments = [like, positions[None].to(self.device)]
        if decoder.config.model_type.startswith("gemma"):  # one table per kind of layer
            arguments.append(decoder.config.layer_types[self.layout.growing[growing_layer]])
        cos, sin = decoder.rotary_emb(*arguments)
        return cos[0], sin[0]


def load_model(spec: ModelSpec, device: torch.device | None = None, gradients: bool = False) -> LoadedModel:
    """Load weights and tokenizer. Raises ``ModelError`` for what is missing or not supported.

    ``gradients``: they can be taken through the model, whose products on a CPU are slower then.
    """
    describe(spec)
    files = find_files(spec)
    place = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = getattr(torch, spec.dtype)
    _silence()
    source, meter = _local_source(files, spec.dtype), PeakMeter(place)
    options = _hub_options(spec)
    model = _auto_class(source, options).from_pretrained(source, dtype=dtype, attn_implementation=ATTENTION, **options)
    model = model.eval().to(place)
    if not gradients:
        pack_linears(model)
        meter.restart()  # packing held the weights twice for a moment, half of it pages of the file
    return prepare(spec, model, load_tokenizer(spec), meter)


def prepare(spec: ModelSpec, model: Any, tokenizer: Any, meter: PeakMeter | None = None) -> LoadedModel:
    """Wrap a model that is in memory already."""
    model.set_attn_implementation(ATTENTION)
    config = model.config.get_text_config().to_dict()
    weight = next(model.parameters())
    layout = layout_of(config, ELEMENT_BYTES[spec.dtype], spec.label)
    stops = _stop_ids(model, tokenizer)
    limit = config["max_position_embeddings"]
    model.requires_grad_(False)
    model.get_output_embeddings().register_forward_pre_hook(_rows_together)
    meter = meter or PeakMeter(weight.device)
    structure = Structure() if tokenizer is None else Structure.of(tokenizer)
    loaded = LoadedModel(spec, model, tokenizer, layout, stops, weight.device, weight.dtype, limit, meter, structure)
    _adapt_layers(loaded, config)
    return loaded


def _rows_together(head: Any, states: tuple[Tensor]) -> tuple[Tensor]:
    """The last column of a chunk, cut out of it, is no plain matrix, and torch would copy all weights to fit it.

    A copy, since a single row counts as contiguous whatever its strides, and is as slow.
    """
    return (states[0].clone(memory_format=torch.contiguous_format),)


def _adapt_layers(model: LoadedModel, config: dict[str, Any]) -> None:
    """What some architectures need besides this engine's attention."""
    if config.get("num_experts"):
        model.forward.set_experts_implementation(EXPERTS)
    for place, index in enumerate(model.layout.growing):
        attention = model.forward.get_decoder().layers[index].self_attn
        rotated = model.rotary_tables(place, torch.zeros(1, dtype=torch.int64))[0].shape[-1]
        if rotated < (dim := model.layout.layers[index].key_dim):
            reorder_heads(attention, rotated, dim)
        if config["model_type"] in GATED:
            pass_gates_on(attention)


def load_tokenizer(spec: ModelSpec) -> Any:
    """The tokenizer alone: preparing samples needs no weights."""
    from transformers import AutoTokenizer

    _silence()
    return AutoTokenizer.from_pretrained(_local_source(find_files(spec), spec.dtype), **_hub_options(spec))


def _hub_options(spec: ModelSpec) -> dict[str, Any]:
    return {"revision": spec.revision or "main", "trust_remote_code": spec.trust_remote_code}


def _auto_class(source: str, options: dict[str, Any]) -> Any:
    """Ministral 3 comes only inside a model that also sees images; others have a class for text alone."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    kind = AutoConfig.from_pretrained(source, **options).model_type
    return AutoModelForImageTextToText if kind == "mistral3" else AutoModelForCausalLM


def _local_source(files: ModelFiles, dtype: str) -> str:
    if files.gguf is not None:
        return _converted(files.gguf, dtype)
    return str(files.folder or files.source)


def _converted(gguf: Path, dtype: str) -> str:
    """A GGUF as safetensors, dequantised once: packed weights would make every step some ten times slower.

    One copy for each dtype, so that loading maps just what it keeps.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    fingerprint = describe(ModelSpec("gguf", str(gguf))).fingerprint
    target = cache_folder() / "models" / f"{gguf.stem}-{fingerprint}-{dtype}"
    if (target / "config.json").is_file():
        return str(target)
    unfinished = target.with_name(f"{target.name}.{os.getpid()}")
    where = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    model = AutoModelForCausalLM.from_pretrained(
        **where, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
    )
    model.to(getattr(torch, dtype)).save_pretrained(unfinished)
    tokenizer = AutoTokenizer.from_pretrained(**where)
    _restore_digit_splitting(tokenizer, gguf)
    tokenizer.save_pretrained(unfinished)
    try:
        unfinished.rename(target)
    except OSError:  # another process was first; its copy is the same
        shutil.rmtree(unfinished)
    return str(target)


def _restore_digit_splitting(tokenizer: Any, gguf: Path) -> None:
    """The ``smollm`` pre-tokenizer cuts every digit apart before it cuts words; the conversion leaves that out."""
    from gguf import GGUFReader
    from tokenizers import pre_tokenizers

    field = GGUFReader(gguf).fields.get("tokenizer.ggml.pre")
    if field is not None and field.contents() == "smollm":
        backend = tokenizer.backend_tokenizer
        digits = pre_tokenizers.Digits(individual_digits=True)
        backend.pre_tokenizer = pre_tokenizers.Sequence([digits, backend.pre_tokenizer])


def _stop_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    configured = getattr(model.generation_config, "eos_token_id", None) or model.config.get_text_config().eos_token_id
    stops = set(configured if isinstance(configured, list) else [configured])
    if tokenizer is not None:
        stops.add(tokenizer.eos_token_id)
        vocabulary = tokenizer.get_added_vocab()
        stops |= {vocabulary[token] for token in TURN_ENDS if token in vocabulary}
    return frozenset(stop for stop in stops if stop is not None)


def _silence() -> None:
    """transformers' progress bars and notices have no place in a job's log."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
