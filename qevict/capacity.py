"""How many windows fit: QEvict's byte-constrained tier allocation (§4.3, Eq. 3; accounting of App. B.4, Eq. 8).

    K_f = floor((1 - q) B_hist / M_f)        K_q = floor(q B_hist / M_q)        B_hist = total - sinks - recent

Two rules say what a budget must cover.

``paper``: what the authors' released configuration charges: the budget is cut to whole tokens, sinks and recent tokens
are taken off, windows cost their keys and values or their codes and fp16 scales. Positions, scores, tables, dormant
codes and the tokens that arrive between two routing events come on top, so the cache may exceed its budget.

``strict``: the budget covers all that is held at any moment. Every window's table entries are charged; the recent
region is charged at its largest (whole windows leave it, and a whole window of new tokens arrives before the next
event); and a promoted window whose codes stay allocated takes one quantised slot besides its full-precision one.
"""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from math import ceil, floor
from typing import Literal

from kvcache.budget import ResolvedBudget
from kvcache.layout import LayerLayout

Accounting = Literal["strict", "paper"]
Promotion = Literal["residency", "none", "exact"]

TABLE_BYTES = 9
"""Per window slot and layer: int32 window number, fp32 score, one byte (tokens held, or whether promoted)."""
NORM_BYTES = 4
"""And, for the p-norm ranker, an fp32 norm of what earlier events brought."""


PAGE_TOKENS = 64


def slots_per_page(window: int) -> int:
    """Window slots are handed out in pages."""
    return max(1, PAGE_TOKENS // window)


@dataclass(frozen=True)
class WindowBytes:
    """M_f and M_q of one layer, tables apart: bytes of a window in full precision and quantised, over all KV heads."""

    full: int
    quantized: int


@dataclass(frozen=True)
class Capacities:
    """Windows one layer may hold: ``full`` (K_f), ``quantized`` (K_q), and full-precision slots that sinks and the
    ``recent`` tokens need besides; and whether and how a quantised window may become a full one again."""

    full: int
    quantized: int
    protected_slots: int
    strict: bool
    recent: int
    promotion: Promotion = "residency"

    @property
    def ledger_slots(self) -> int:
        """Records of promoted windows stay; they count as quantised windows only where the accounting is strict."""
        stay = self.quantized > 0 and not self.strict and self.promotion == "residency"
        return self.quantized + (self.full if stay else 0)


def window_bytes(window: int, bits: int, layer: LayerLayout, element_bytes: int) -> WindowBytes:
    """Codes of keys and values, fp16 scale and offset per key channel and per value token (§4.3 "Migration-stable
    quantization"; App. B.4)."""
    codes = window * (layer.key_dim + layer.value_dim) * bits // 8
    scales = 2 * 2 * layer.key_dim + 2 * 2 * window
    return WindowBytes(window * layer.token_bytes(element_bytes), layer.kv_heads * (codes + scales))


def recent_share(recent: str) -> Decimal:
    """``25%`` as 0.25. Raises ValueError for anything but a share between 0 and 100 %."""
    try:
        share = Decimal(recent.strip().removesuffix("%").strip()) / 100
    except InvalidOperation:
        share = Decimal(0)
    if not recent.strip().endswith("%") or not 0 < share < 1:
        raise ValueError(f"recent is a number of tokens or a share of the budget such as 25%, not {recent!r}")
    return share


def recent_tokens(recent: int | str, budget: ResolvedBudget, window: int) -> int:
    """The recent region asked for, in tokens: a share of the budget's tokens comes in whole windows (App. F.1)."""
    if isinstance(recent, int):
        return recent
    return max(1, -(-ceil(recent_share(recent) * budget.tokens) // window)) * window


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
    promotion: Promotion = "residency",
    table_bytes: int = TABLE_BYTES,
    fill_full_first: bool = False,
) -> Capacities | None:
    """Resolve one layer's budget of ``layer_budget`` bytes; None when it cannot hold sinks and recent tokens.

    An unlimited budget with nothing quantised evicts nothing.
    """
    strict = accounting == "strict"
    token = layer.token_bytes(element_bytes)
    recent_most = recent + 2 * window - 1
    protected_slots = -(-sinks // window) + -(-recent_most // window)
    windows = -(-(budget.prompt_tokens + budget.new_tokens) // window)

    def held(full: int, quantized: int) -> Capacities:
        return Capacities(min(full, windows), min(quantized, windows), protected_slots, strict, recent, promotion)

    if budget.unlimited and (share == 0 or fill_full_first):
        return held(windows, 0)
    size = window_bytes(window, bits, layer, element_bytes)
    if strict:
        history = layer_budget - (sinks + recent_most) * token - protected_slots * table_bytes
        size = WindowBytes(size.full + table_bytes, size.quantized + table_bytes)
    else:
        history = (layer_budget // token - sinks - recent) * token
    if history < 0:
        return None
    full, quantized = floor((1 - share) * history / size.full), floor(share * history / size.quantized)
    ever = max(0, (budget.prompt_tokens + budget.new_tokens - sinks - recent) // window)
    if fill_full_first and full + quantized >= ever and size.full > size.quantized:
        full = min(ever, (history - ever * size.quantized) // (size.full - size.quantized))
        quantized = ever - full
    return held(full, quantized)
