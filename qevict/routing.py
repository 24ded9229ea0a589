"""Dynamic routing (Eq. 4 and 5, Algorithm 1): which windows are full, quantised, evicted. Pure functions on tables.

Everything is vectorised over layers: tables are [L, C], one entry per window slot.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvcache.select import rank
from qevict.capacity import Capacities

UNTOUCHED, FULL, QUANTIZED, EVICTED = range(4)


def assign_tiers(scores: Tensor, windows: Tensor, candidate: Tensor, coded: Tensor, room: Capacities) -> Tensor:
    """The tier of every candidate: the K_f best are full, the next K_q quantised, the rest evicted.

    Ties go to the earlier window. Without promotion the K_f best are those among windows that have no codes. Under
    strict accounting a promoted window that keeps its codes takes one quantised slot too: K_q falls by the number of
    promoted windows, and K_f ends where K_q would fall below zero.

    Args:
        scores: [L, C] fp32.
        windows: [L, C] window numbers, their order in the text.
        candidate: [L, C] bool; other entries stay UNTOUCHED.
        coded: [L, C] bool, windows that have a ledger record.
    """
    by_position = windows.masked_fill(~candidate, torch.iinfo(windows.dtype).max).argsort(dim=-1, stable=True)
    ranked = scores.masked_fill(~candidate, -torch.inf).gather(-1, by_position)
    order = by_position.gather(-1, rank(ranked))
    coded_candidate = (coded & candidate).gather(-1, order)
    ranked_candidate = candidate.gather(-1, order)
    eligible = ranked_candidate & ~coded_candidate if room.promotion == "none" else ranked_candidate
    full = eligible & (eligible.cumsum(-1) <= room.full)
    promoted = torch.zeros_like(order[:, :1])
    if room.strict and room.promotion == "residency":
        records = coded_candidate.cumsum(-1)
        full &= records <= room.quantized
        promoted = (records * full).amax(-1, keepdim=True)
    rest = ranked_candidate & ~full
    quantized = rest & (rest.cumsum(-1) <= room.quantized - promoted)
    tiers = torch.where(full, FULL, torch.where(quantized, QUANTIZED, EVICTED))
    return torch.zeros_like(order).scatter(-1, order, tiers).masked_fill(~candidate, UNTOUCHED)


def nth_free(free: Tensor) -> Tensor:
    """Slots of each layer, free ones first and in order: [l, k] is the kth free one. [L, C] bool -> [L, C]"""
    return (~free).to(torch.uint8).argsort(dim=-1, stable=True)
