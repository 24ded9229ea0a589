"""How a budget is split unevenly: over the layers of a model (PyramidKV), over the KV heads of a layer (AdaKV).

Totals are exact: what one layer or head has more, others have less.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import torch
from torch import Tensor

from kvcache.layout import CacheLayout
from kvcache.select import apportion, best_of_rows
from kvcache.window_evictor import Safeguard


def pyramid(layers: int, mean: int, beta: int, most: int) -> list[int]:
    """PyramidKV's budgets: a straight line over depth from 2 ``mean`` - ``mean`` // ``beta`` down to ``mean`` //
    ``beta``, flatter where the first layers have no more than ``most`` to keep.

    Whole numbers by largest remainder, ties to the lower layer: their sum is ``layers * mean``, which ``most`` is not
    below.
    """
    last = mean // beta
    first = 2 * mean - last
    if first > most:
        first, last = most, 2 * mean - most
    step = Fraction(first - last, max(layers - 1, 1))
    line = [first - place * step for place in range(layers)]
    return apportion(line, layers * mean, most)


def layers_of_one_size(layout: CacheLayout) -> list[list[int]]:
    """Growing layers, counted from 0, in groups whose tokens take the same bytes: only inside such a group can one
    layer give tokens to another without changing the total."""
    sizes = [layout.layers[index].token_bytes(layout.element_bytes) for index in layout.growing]
    return [[place for place, own in enumerate(sizes) if own == size] for size in dict.fromkeys(sizes)]


def head_budgets(scores: Tensor, each: int, protected: int, alpha: float, safeguard: Safeguard) -> list[int]:
    """AdaKV's budgets: a head has what it holds of the layer's best scores, but not too little.

    Two definitions of the safeguard are in use, equal at ``alpha`` 0 (no safeguard) and 1 (all heads alike):
    ``blend``, the authors': (1 - alpha) of that count and alpha of the uniform one. ``force``, kvpress's: a head's own
    best, floor(alpha * budget) with protected tokens counted in, come first; the rest is open to all.

    Args:
        scores: [H, m] of the tokens to choose from, the ``protected`` ones left out.
        each: the mean number of them that a head may keep.

    Returns:
        [H], together H * each.
    """
    share = Fraction(str(alpha))
    if safeguard == "blend":
        return blend(best_of_layer(scores, len(scores) * each), each, share)
    sure = max(int(share * (each + protected)) - protected, 0)
    own = best_of_rows(scores, torch.full(scores.shape[:1], sure, device=scores.device))
    return best_of_layer(scores.masked_fill(own, torch.inf), len(scores) * each)


def best_of_layer(scores: Tensor, total: int) -> list[int]:
    """How many of a layer's ``total`` best scores each head holds; ties by lower position, then lower head. [H, m]"""
    best = best_of_rows(scores.T.reshape(1, -1), torch.tensor([total], device=scores.device))
    return best.view(-1, len(scores)).sum(0).tolist()


def blend(counts: Sequence[int], each: int, alpha: Fraction) -> list[int]:
    """(1 - alpha) ``counts`` + alpha ``each``, halves to even; then single tokens by largest remainder, ties to the
    lower head, until the total is that of ``counts``."""
    exact = [(1 - alpha) * count + alpha * each for count in counts]
    budgets = [round(one) for one in exact]
    missing = sum(counts) - sum(budgets)
    order = sorted(range(len(budgets)), key=lambda head: (budgets[head] - exact[head], head))
    for head in order[:missing] if missing > 0 else order[len(order) + missing :]:
        budgets[head] += 1 if missing > 0 else -1
    return budgets
