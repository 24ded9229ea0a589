"""How many windows fit: QEvict's byte-constrained tier allocation (§4.3, Eq. 3; accounting of App. B.4, Eq. 8).

    K_f = floor((1 - q) B_hist / M_f)        K_q = floor(q B_hist / M_q)        B_hist = total - sinks - recent

Two rules say what a budget must cover.

``paper``: what the authors' released configuration charges: the budget is cut to whole tokens, sinks and recent tokens
are taken off, windows cost their keys and values or their codes and fp16 scales. Positions, scores, tables, dormant
codes and the tokens that arrive between two routing events come on top, so the cache may exceed its budget.

``strict``: the budget covers all that is held at any moment. Every window's table entries are charged; the recent
region is charged at its largest (whole windows leave it, and a whole window of new tokens arrives before the next
event); and a promoted window, whose codes stay allocated, takes one quantised slot besides its full-precision one.
"""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal
from math import floor
from typing import Literal

from kvcache.budget import ResolvedBudget
from kvcache.layout import LayerLayout

Accounting = Literal["strict", "paper"]

TABLE_BYTES = 9
"""Per window slot and layer: int32 window number, fp32 score, one byte (tokens held, or whether promoted)."""


@dataclass(frozen=True)
class WindowBytes:
    """M_f and M_q of one layer, tables apart: bytes of a window in full precision and quantised, over all KV heads."""

    full: int
    quantized: int


@dataclass(frozen=True)
class Capacities:
    """Windows one layer may hold: ``full`` (K_f), ``quantized`` (K_q), and full-precision slots that sinks and the
    recent region need besides."""

    full: int
    quantized: int
    protected_slots: int
    strict: bool


def window_bytes(window: int, bits: int, layer: LayerLayout, element_bytes: int) -> WindowBytes:
    """Codes of keys and values, fp16 scale and offset per key channel and per value token (§4.3 "Migration-stable
    quantization"; App. B.4)."""
    codes = window * (layer.key_dim + layer.value_dim) * bits // 8
    scales = 2 * 2 * layer.key_dim + 2 * 2 * window
    return WindowBytes(window * layer.token_bytes(element_bytes), layer.kv_heads * (codes + scales))


def capacities(
    budget: ResolvedBudget,
    layer_budget: int,
    layer: LayerLayout,
    element_bytes: int,
    *,
    window: int,
    bits: int,
    sinks: int,
    recent: int,
    share: Decimal,
    accounting: Accounting,
) -> Capacities | None:
    """Resolve one layer's budget of ``layer_budget`` bytes; None when it cannot hold sinks and recent tokens.

    An unlimited budget with nothing quantised evicts nothing.
    """
    strict = accounting == "strict"
    token = layer.token_bytes(element_bytes)
    sink_slots = -(-sinks // window)
    recent_most = recent + 2 * window - 1
    protected_slots = sink_slots + -(-recent_most // window)
    windows = -(-(budget.prompt_tokens + budget.new_tokens) // window)
    if budget.unlimited and share == 0:
        return Capacities(windows, 0, protected_slots, strict)
    size = window_bytes(window, bits, layer, element_bytes)
    if strict:
        history = layer_budget - (sinks + recent_most) * token - protected_slots * TABLE_BYTES
        full, quantized = size.full + TABLE_BYTES, size.quantized + TABLE_BYTES
    else:
        history = (layer_budget // token - sinks - recent) * token
        full, quantized = size.full, size.quantized
    if history < 0:
        return None
    return Capacities(
        min(floor((1 - share) * history / full), windows),
        min(floor(share * history / quantized), windows),
        protected_slots,
        strict,
    )
