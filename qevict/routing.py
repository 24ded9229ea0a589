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

    Ties go to the earlier window. Under strict accounting every promoted window, which keeps its codes, takes one
    quantised slot too: K_q falls by the number of promoted windows, and K_f ends where K_q would fall below zero.

    Args:
        scores: [L, C] fp32.
        windows: [L, C] window numbers, their order in the text.
        candidate: [L, C] bool; other entries stay UNTOUCHED.
        coded: [L, C] bool, windows that have a ledger record.
    """
    by_position = windows.masked_fill(~candidate, torch.iinfo(windows.dtype).max).argsort(dim=-1, stable=True)
    ranked = scores.masked_fill(~candidate, -torch.inf).gather(-1, by_position)
    order = by_position.gather(-1, rank(ranked))
    place = torch.arange(order.shape[-1], device=order.device).expand_as(order)
    records = (coded & candidate).gather(-1, order).cumsum(-1)
    if room.strict:
        full = (place < room.full) & (records <= room.quantized)
        promoted = (records * full).amax(-1, keepdim=True)
        quantized = ~full & (place < full.sum(-1, keepdim=True) + room.quantized - promoted)
    else:
        full = place < room.full
        quantized = ~full & (place < room.full + room.quantized)
    tiers = torch.where(full, FULL, torch.where(quantized, QUANTIZED, EVICTED))
    return torch.zeros_like(order).scatter(-1, order, tiers).masked_fill(~candidate, UNTOUCHED)


def nth_free(free: Tensor) -> Tensor:
    """Slots of each layer, free ones first and in order: [l, k] is the kth free one. [L, C] bool -> [L, C]"""
    return (~free).to(torch.uint8).argsort(dim=-1, stable=True)
