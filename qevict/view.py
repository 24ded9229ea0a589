"""A look into a tiered pool: in which tier each window of a row is, and with which score. Changes nothing."""

from __future__ import annotations

import torch
from torch import Tensor

from qevict.diagnostics import EVICTED, FULL, LOCAL, QUANTIZED
from qevict.pool import TieredPool


def is_event(pool: TieredPool, row: int, tokens: int) -> bool:
    """Whether a row that holds ``tokens`` has just been routed, or has just been admitted."""
    held = pool._held[row]
    return tokens == held.prompt_tokens or held.is_due(tokens)


def tiers_of(pool: TieredPool, row: int, tokens: int, windows: int) -> tuple[Tensor, Tensor]:
    """Tiers and scores of a row that holds ``tokens``. [L, windows] each, scores fp32, 0 for windows that are gone.

    A window in the recent region, the incomplete last one included, is LOCAL, and so is one that does not exist yet.
    """
    held = pool._held[row]
    numbers, ranked, coded = pool.tiers.table(held, slice(0, pool.layers))
    promoted = pool.ledger["promoted"][:, held.code_pages].flatten(1)
    promoted = torch.cat([torch.zeros_like(coded[:, : coded.shape[1] - promoted.shape[1]]), promoted], 1)
    # Free slots and sinks go to a column that is cut off again.
    column = torch.where(numbers >= 0, numbers, windows).long()
    tiers = torch.full((len(numbers), windows + 1), EVICTED, dtype=torch.int64, device=numbers.device)
    tiers.scatter_(1, column, torch.where(coded & ~promoted, QUANTIZED, FULL))
    tiers[:, pool._boundary(row, tokens) :] = LOCAL
    scores = torch.zeros(tiers.shape, device=numbers.device).scatter_(1, column, ranked)
    return tiers[:, :windows], scores[:, :windows]
