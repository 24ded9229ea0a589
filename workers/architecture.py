"""What a model's configuration says of its layers: which keep what, and what this engine cannot reproduce. Torch-free.

growing   full attention: all keys and values; these layers are compressed
sliding   attention within a window: the window's keys and values                 (Mistral, Gemma)
linear    gated delta rule: a state of one size, whatever the context             (Qwen3-Next, Qwen3.5)
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvcache.layout import CacheLayout, LayerLayout

SUPPORTED = (
    "llama",
    "mistral",
    "ministral3",
    "qwen2",
    "qwen3",
    "phi3",
    "olmo2",
    "gemma3_text",
    "gemma4_text",
    "gemma4_unified_text",
    "qwen3_next",
    "qwen3_5_text",
    "qwen3_5_moe_text",
)
"""Architectures whose attention this engine reproduces; each has a test against ``generate``."""

GEMMA_4 = ("gemma4_text", "gemma4_unified_text")
GATED = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
"""Full attention here is multiplied by a gate of the query before the output projection, and comes every fourth layer;
the others are linear."""

ROTARY_TYPES = ("default", "linear", "llama3", "yarn", "proportional")
"""``longrope`` and ``dynamic`` choose frequencies from the longest sequence of a batch, so rows would not be alone."""

PARTIAL_ROTARY = (*GATED, "phi3")
"""Only the first part of each head is rotated, in half-split pairs. (``proportional`` tables span the whole head.)"""

EXPERT_TOKENS = 8
"""Tokens of a decode step that go through their experts at once. Changes no number."""

KINDS = {"full_attention": "growing", "sliding_attention": "sliding", "linear_attention": "linear"}


class ModelError(ValueError):
    """A model that cannot be found or is not supported: what, where, how to fix it."""


def layout_of(config: dict[str, Any], element_bytes: int, label: str = "model") -> CacheLayout:
    """The cache of every layer, from a configuration as transformers writes it. Raises :class:`ModelError`."""
    for reason in _obstacles(config):
        raise ModelError(f"model {label!r}: {reason}")
    kinds = _kinds(config)
    layout = CacheLayout(tuple(_layer(config, index, kinds[index]) for index in range(len(kinds))), element_bytes)
    if not layout.growing:
        raise ModelError(f"model {label!r}: no layer has full attention, so no cache grows: nothing to compress")
    return layout


def parameters_of(config: dict[str, Any]) -> int:
    """Of a decoder whose weights cannot be counted: projections, MLPs and experts, embeddings; norms left out."""
    hidden = config["hidden_size"]
    layers = layout_of(config, 1).layers
    sparse = _expert_parameters(config)
    dense = 3 * hidden * config.get("intermediate_size", 0)
    mlp = sparse + dense if config["model_type"] in GEMMA_4 else sparse or dense
    embeddings = config["vocab_size"] * hidden * (1 if config.get("tie_word_embeddings") else 2)
    by_layer = config.get("hidden_size_per_layer_input") or 0
    embeddings += config.get("vocab_size_per_layer_input", 0) * by_layer * len(layers)
    return embeddings + sum(hidden * _projected(config, layer) + mlp for layer in layers)


def mlp_width(config: dict[str, Any]) -> int:
    """Inner features of a token's MLP, all the experts that it goes to included."""
    return (config.get("intermediate_size") or 0) + _chosen_experts(config) * (config.get("moe_intermediate_size") or 0)


def copied_expert_weights(config: dict[str, Any]) -> int:
    """Weights that a decode step copies at once, for each of a few tokens its experts'."""
    return (
        EXPERT_TOKENS * _chosen_experts(config) * 3 * config["hidden_size"] * (config.get("moe_intermediate_size") or 0)
    )


def _chosen_experts(config: dict[str, Any]) -> int:
    return (config.get("num_experts_per_tok") or config.get("top_k_experts") or 0) if config.get("num_experts") else 0


def _obstacles(config: dict[str, Any]) -> Iterator[str]:
    kind = config.get("model_type")
    if kind not in SUPPORTED:
        yield f"architecture {kind!r} is not supported (supported: {', '.join(SUPPORTED)})"
    if config.get("use_bidirectional_attention") not in (None, False, "vision"):  # text is causal in the last case
        yield "bidirectional attention is not supported"
    for name, rope in _rope_parameters(config):
        variant = rope.get("rope_type", rope.get("type", "default"))
        if variant not in ROTARY_TYPES:
            yield f"rotary variant {rope} of {name} is not supported"
        if rope.get("partial_rotary_factor", 1.0) != 1.0 and variant != "proportional" and kind not in PARTIAL_ROTARY:
            yield f"partial rotary embeddings are not supported in {kind}"
    if shared := config.get("num_kv_shared_layers"):
        yield (
            f"its last {shared} layers have no keys and values of their own (num_kv_shared_layers), and a cache that"
            " layers share cannot be compressed layer by layer; choose a model without shared layers"
        )
    for name in sorted(set(config.get("layer_types") or ()) - set(KINDS)):
        yield f"layers of type {name!r} are not supported"


def _kinds(config: dict[str, Any]) -> list[str]:
    """Of every layer, as transformers names them; where the configuration is silent, by the model's own rule."""
    count, kind = config["num_hidden_layers"], config["model_type"]
    if config.get("layer_types"):
        kinds = list(config["layer_types"])
        return [*kinds[:-1], "full_attention"] if kind in GEMMA_4 else kinds
    if kind in GATED:
        period = config.get("full_attention_interval", 4)
        return ["linear_attention" if (index + 1) % period else "full_attention" for index in range(count)]
    if kind.startswith("gemma"):
        period = config.get("sliding_window_pattern", 6)
        sliding = [bool((index + 1) % period) for index in range(count)]
        sliding[-1] &= kind not in GEMMA_4
    elif kind.startswith("qwen"):
        first = config.get("max_window_layers", count) if config.get("use_sliding_window") else count
        sliding = [index >= first for index in range(count)]
    else:
        sliding = [kind in ("mistral", "ministral3", "phi3") and bool(config.get("sliding_window"))] * count
    return ["sliding_attention" if slides else "full_attention" for slides in sliding]


def _layer(config: dict[str, Any], index: int, kind: str) -> LayerLayout:
    if kind == "linear_attention":
        return LayerLayout(
            "linear",
            config["linear_num_key_heads"],
            config["linear_num_value_heads"],
            config["linear_key_head_dim"],
            config["linear_value_head_dim"],
            config["linear_conv_kernel_dim"],
        )
    heads = config["num_attention_heads"]
    own = config | _own_settings(config, index, kind)
    kv_heads = own.get("num_key_value_heads") or heads
    dim = own.get("head_dim") or config["hidden_size"] // heads
    if kind == "sliding_attention":
        return LayerLayout("sliding", heads, kv_heads, dim, dim, config["sliding_window"])
    return LayerLayout("growing", heads, kv_heads, dim, dim)


def _own_settings(config: dict[str, Any], index: int, kind: str) -> dict[str, Any]:
    """What a layer of Gemma 4 has of its own, in the spelling of published configurations or in transformers'."""
    if config["model_type"] not in GEMMA_4:
        return {}
    if "per_layer_config" in config:
        by_layer = {str(key): value for key, value in (config["per_layer_config"] or {}).items()}
        return by_layer.get(str(index), {})
    if kind != "full_attention":
        return {}
    own = {"head_dim": config.get("global_head_dim", 512)}
    if config.get("attention_k_eq_v") and config.get("num_global_key_value_heads"):
        own["num_key_value_heads"] = config["num_global_key_value_heads"]
    return own


def _rope_parameters(config: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    nested = [(name, value) for name, value in rope.items() if isinstance(value, dict)]
    return nested or [("the model", rope)]


def _projected(config: dict[str, Any], layer: LayerLayout) -> int:
    """Columns of a layer's projections from and to the hidden size."""
    if layer.kind == "linear":
        return layer.channels + 2 * layer.kv_heads * (layer.value_dim + 1)
    queries = layer.query_heads * layer.key_dim * (2 if config["model_type"] in GATED else 1)
    return queries + layer.kv_heads * (layer.key_dim + layer.value_dim) + layer.query_heads * layer.value_dim


def _expert_parameters(config: dict[str, Any]) -> int:
    experts = config.get("num_experts") or 0
    each = experts * (config.get("moe_intermediate_size") or 0) + (config.get("shared_expert_intermediate_size") or 0)
    return config["hidden_size"] * (3 * each + experts) if experts else 0
