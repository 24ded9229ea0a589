"""The kernels that :mod:`perf.kernels` compiles: types of arguments and constants, as the launchers give them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from kvcache.kernels import column_sums, owned_attention
from kvcache.kernels.owned_attention import padded
from lorekv.kernels import deletion_scores
from qevict.kernels.tiered_attention import CODE_SPLIT, FULL_SPLIT, PAGE, SCORED_PAGES, STAGES, WARPS

HEADS = 8


@dataclass(frozen=True)
class Variant:
    """A kernel with its compile-time constants. Where ``looped``, its one loop is counted: an iteration attends to
    ``pairs`` pairs of a key's and a value's element, or scores as many pairs of a query and a token."""

    name: str
    module: str
    function: str
    arguments: dict[str, str]
    constants: dict[str, Any]
    warps: int
    stages: int
    looped: bool = False
    pairs: int = 0
    options: dict[str, Any] = field(default_factory=dict)


def variants() -> list[Variant]:
    """Head sizes 64 and 128, groups of 4 and 8, both widths of codes, windows of 8 and 32; the gated one first."""
    return [
        attend_codes(128, 4, 8, 2),
        attend_codes(128, 4, 8, 4),
        attend_codes(128, 8, 8, 2),
        attend_codes(64, 4, 8, 2),
        attend_codes(128, 4, 32, 2),
        attend_full(128, 4, 8),
        attend_owned(128, 4),
        attend_owned(64, 8),
        join_splits(128, 4),
        combine(128, 4),
        add_scores(4, 8),
        quantize(128, 8, 2),
        sums("row_log_sums", 128, 4),
        sums("column_sums", 128, 4),
        *(deletion(function, 128, 4) for function in ("attend_prompt", "value_norms", "deletion_costs")),
        deletion("deletion_costs", 64, 8),
    ]


def attend_codes(dim: int, group: int, window: int, bits: int) -> Variant:
    import triton.language as tl

    codes = {"BITS": bits, "PAGES": CODE_SPLIT, "PAIR": 2, "COMPUTE": tl.float16, "PACKED": True}
    constants = _attention_constants(dim, group, window) | codes
    scales = ("key_scale", "key_offset", "value_scale", "value_offset", "cos", "sin")
    arguments = {
        **_ATTENTION_ARGUMENTS,
        **dict.fromkeys(scales, "*fp16"),
        "key_codes": "*u8",
        "value_codes": "*u32",
        "windows": "*i32",
        "first_split": "i32",
    }
    name = f"attend_codes int{bits} d{dim} g{group} w{window}"
    return Variant(name, _TIERS, "attend_codes", arguments, constants, 2 * WARPS, STAGES, True, 2 * PAGE * dim)


def attend_full(dim: int, group: int, window: int) -> Variant:
    import triton.language as tl

    constants = _attention_constants(dim, group, window) | {"PAGES": FULL_SPLIT, "FULL": tl.bfloat16}
    arguments = {**_ATTENTION_ARGUMENTS, "fill": "*u8", "keys": "*bf16", "values": "*bf16"}
    name = f"attend_full bf16 d{dim} g{group} w{window}"
    return Variant(name, _TIERS, "attend_full", arguments, constants, WARPS, STAGES, True, PAGE * dim)


_TIERS = "qevict.kernels.triton_tiers"
_ATTENTION_ARGUMENTS = {
    **dict.fromkeys(("rows", "tables", "counts"), "*i32"),
    **dict.fromkeys(("partial", "stats", "mass", "peaks"), "*fp32"),
    **dict.fromkeys(("width", "total_width", "splits"), "i32"),
    "queries": "*bf16",
    "scale": "fp32",
}


def _attention_constants(dim: int, group: int, window: int) -> dict[str, Any]:
    return {"H": HEADS, "G": group, "HEADS": padded(group), "D": dim, "DV": dim, "OMEGA": window}


def attend_owned(dim: int, group: int) -> Variant:
    import triton.language as tl

    arguments = {
        **dict.fromkeys(("queries", "keys", "values"), "*bf16"),
        **dict.fromkeys(("owners", "tables", "lengths"), "*i32"),
        **dict.fromkeys(("partial", "stats"), "*fp32"),
        **dict.fromkeys(("width", "splits"), "i32"),
        "scale": "fp32",
    }
    sizes = {"G": group, "HEADS": padded(group), "D": dim, "DV": dim}
    constants = sizes | {"PAGES": owned_attention.SPLIT, "COMPUTE": tl.bfloat16}
    name, warps, stages = f"attend_owned bf16 d{dim} g{group}", owned_attention.WARPS, owned_attention.STAGES
    return Variant(name, _OWNED, "attend_owned", arguments, constants, warps, stages, True, PAGE * dim)


def join_splits(dim: int, group: int) -> Variant:
    arguments = {
        **dict.fromkeys(("partial", "stats"), "*fp32"),
        **dict.fromkeys(("owners", "lengths"), "*i32"),
        "output": "*bf16",
        "splits": "i32",
    }
    constants = {"G": group, "DV": dim, "PAGES": owned_attention.SPLIT}
    return Variant(f"join_splits d{dim} g{group}", _OWNED, "join_splits", arguments, constants, 1, STAGES)


_OWNED = "kvcache.kernels.triton_owned_pages"


def combine(dim: int, group: int) -> Variant:
    arguments = {
        **dict.fromkeys(("partial", "stats", "output", "log_sums"), "*fp32"),
        **dict.fromkeys(("rows", "full_count", "code_count"), "*i32"),
        **dict.fromkeys(("full_splits", "splits"), "i32"),
    }
    constants = {"H": HEADS, "G": group, "DV": dim, "FULL_PAGES": FULL_SPLIT, "CODE_PAGES": CODE_SPLIT}
    return Variant(f"combine d{dim} g{group}", _TIERS, "combine", arguments, constants, 1, STAGES)


def add_scores(group: int, window: int) -> Variant:
    arguments = {
        **dict.fromkeys(("mass", "peaks", "log_sums", "full_score", "code_score"), "*fp32"),
        **dict.fromkeys(("rows", "full_pages", "full_count", "code_pages", "code_count"), "*i32"),
        **dict.fromkeys(("full_width", "code_width"), "i32"),
    }
    constants = {
        "H": HEADS,
        "H_PADDED": HEADS,
        "G": group,
        "HEADS": padded(group),
        "OMEGA": window,
        "PAGES": SCORED_PAGES,
    }
    return Variant(f"add_scores g{group} w{window}", _TIERS, "add_scores", arguments, constants, 1, STAGES)


def quantize(dim: int, window: int, bits: int) -> Variant:
    arguments = {
        **dict.fromkeys(("keys", "values"), "*bf16"),
        **dict.fromkeys(("windows", "layers", "pages", "places"), "*i32"),
        **dict.fromkeys(("key_codes", "value_codes"), "*u8"),
        **dict.fromkeys(("key_scale", "key_offset", "value_scale", "value_offset"), "*fp16"),
        **dict.fromkeys(("table_windows", "layer_pages"), "i32"),
        "rotary": "*fp32",
    }
    constants = {"H": HEADS, "SLOTS": PAGE // window, "OMEGA": window, "D": dim, "DV": dim, "BITS": bits}
    options = {"enable_fp_fusion": False}
    module, name = "qevict.kernels.triton_quantize", f"quantize_windows int{bits} d{dim} w{window}"
    return Variant(name, module, "quantize_windows", arguments, constants, 4, STAGES, options=options)


def sums(function: str, dim: int, group: int) -> Variant:
    import triton.language as tl

    arguments = {
        **dict.fromkeys(("queries", "keys"), "*bf16"),
        **dict.fromkeys(("log_sums", "sums"), "*fp32"),
        **dict.fromkeys(("count", "key_stride", "sum_stride", "start"), "i32"),
        "scale": "fp32",
    }
    tile = {"QUERIES": column_sums.FUSED_QUERIES, "KEYS": column_sums.FUSED_KEYS}
    constants = {"G": group, "D": dim, "COMPUTE": tl.bfloat16, **tile}
    module, warps = "kvcache.kernels.triton_column_sums", column_sums.WARPS
    return Variant(f"{function} d{dim} g{group}", module, function, arguments, constants, warps, column_sums.STAGES)


def deletion(function: str, dim: int, group: int) -> Variant:
    import triton.language as tl

    arguments = {
        **dict.fromkeys(("queries", "keys", "values"), "*bf16"),
        **dict.fromkeys(("weights", "log_sums", "output", "projected", "output_norms", "norms", "grams"), "*fp32"),
        **dict.fromkeys(("peaks", "most_distance", "of_window", "of_futures"), "*fp32"),
        **dict.fromkeys(("count", "window", "tokens", "split_tokens", "key_stride", "value_stride"), "i32"),
        **dict.fromkeys(("scale", "surviving"), "fp32"),
        **dict.fromkeys(("visible", "most"), "*i32"),
    }
    keys, queries = deletion_scores.FUSED_KEYS, deletion_scores.FUSED_QUERIES
    constants = {"G": group, "DV": dim, "KEYS": keys, "COMPUTE": tl.bfloat16}
    by_query = function != "value_norms"
    constants |= {"D": dim, "QUERIES": queries} if by_query else {"CHANNELS": deletion_scores.CHANNELS}
    module, warps, stages = "lorekv.kernels.triton_deletion", deletion_scores.WARPS, deletion_scores.STAGES
    name, pairs = f"{function} d{dim} g{group}", keys * queries
    return Variant(name, module, function, arguments, constants, warps, stages, by_query, pairs)
