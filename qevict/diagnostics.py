"""What the paper measures inside a cache (arXiv 2608.05326, §3, App. I and K): pure functions on one layer's trace.

    attention [H, T, N]    of a full-cache run: step t = 1 ... T feeds token P + t - 1, and N = P + T
    held [E]               tokens in the cache at each routing event; event 0 is the end of prefill, held = P
    tiers [E, W]           what the policy decided at each event, one state per window for all heads

Windows count from the end of the sinks. LOCAL is what is not up for routing: the protected recent region, and windows
that do not exist yet. Where the text leaves room, the choice is in the docstring and in docs/reproduction.md.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvcache.select import rank

LOCAL, FULL, QUANTIZED, EVICTED = range(4)
TIER_NAMES = ("local", "full", "quantized", "evicted")
HORIZON = 32
"""H of Eq. 13."""


def to_positions(windows: Tensor, sinks: int, window: int, tokens: int) -> Tensor:
    """The token positions of chosen windows; sinks are in none. [..., W] bool -> [..., N]"""
    by_token = windows.repeat_interleave(window, -1)[..., : max(0, tokens - sinks)]
    return pad(by_token, (sinks, tokens - sinks - by_token.shape[-1]))


def existing(held: Tensor, tokens: int, sinks: int = 0) -> Tensor:
    """Positions that exist at each event, without the first ``sinks``. [E] -> [E, N] bool"""
    position = torch.arange(tokens, device=held.device)
    return (position < held[:, None]) & (position >= sinks)


# -- Observation I ---------------------------------------------------------------------------------------------------


def future_mass(attention: Tensor, held: Tensor, sets: Tensor, horizon: int = HORIZON) -> Tensor:
    """Attention that sets of positions receive in the steps r + 1 ... min(r + H, T) after each event r.

    attention [H, T, N], held [E], sets [K, E, N] bool -> [K, H, E]
    """
    first = held - (attention.shape[2] - attention.shape[1])
    mass = attention.new_zeros(len(sets), len(attention), len(held))
    for event, start in enumerate(first.tolist()):
        received = attention[:, start : start + horizon].sum(1)
        mass[:, :, event] = torch.einsum("kn,hn->kh", sets[:, event].to(received.dtype), received)
    return mass


def future_missed_mass(
    attention: Tensor, held: Tensor, missed: Tensor, counted: Tensor, horizon: int = HORIZON
) -> Tensor:
    """Eq. 13: the share of future full-cache attention that goes to states which are inaccessible by then. [H, E]

    NaN where no step follows. As written the horizon is cut at T; :func:`complete` says which events have all of it,
    and a mean over these alone is the other convention, that of censored events.

    Args:
        missed: [E, N] bool, inaccessible positions, all of those evicted so far.
        counted: [E, N] bool, the denominator: as written all that exists at r, sinks included.
    """
    mass = future_mass(attention, held, torch.stack([missed & counted, counted]), horizon)
    return mass[0] / mass[1]


def complete(held: Tensor, total: int, horizon: int = HORIZON) -> Tensor:
    """Events whose horizon does not reach past the last of ``total`` tokens. [E] bool"""
    return held + horizon <= total


def selection_churn(retained: Tensor) -> Tensor:
    """Eq. 14: the Jaccard distance of the historical positions retained at consecutive events. [E, N] bool -> [E - 1]

    Two empty sets are at distance 0. A window that leaves the recent region and is retained counts as a change.
    """
    both = (retained[:-1] & retained[1:]).sum(-1)
    either = (retained[:-1] | retained[1:]).sum(-1)
    return torch.where(either > 0, 1 - both / either.clamp_min(1), 0.0)


# -- Observation II --------------------------------------------------------------------------------------------------


def reference_scores(
    prompt_sums: Tensor, attention: Tensor, held: Tensor, sinks: int, window: int
) -> tuple[Tensor, Tensor]:
    """Eq. 12: cumulative full-cache attention of every window at every event, and the part of it that decoding gave.

    prompt_sums [H, P], attention [H, T, N], held [E] -> [H, E, W] twice. The first starts from the prompt's own
    attention, as the policy's scores do (§4.2).
    """
    prompt, total = prompt_sums.shape[1], attention.shape[2]
    by_step = _by_window(attention, sinks, window).cumsum(1)
    steps = held - prompt
    decoded = by_step[:, (steps - 1).clamp_min(0)] * (steps > 0)[:, None]
    from_prompt = _by_window(pad(prompt_sums, (0, total - prompt)), sinks, window)
    return decoded + from_prompt[:, None], decoded


def _by_window(by_token: Tensor, sinks: int, window: int) -> Tensor:
    history = by_token[..., sinks:]
    return pad(history, (0, -history.shape[-1] % window)).unflatten(-1, (-1, window)).sum(-1)


def tier_mass(scores: Tensor, tiers: Tensor) -> Tensor:
    """Eq. 15: each tier's share of the windows' scores. scores [H, E, W], tiers [E, W] -> [4, H, E], NaN for 0 / 0.

    Sinks are no windows and have no part in it.
    """
    by_tier = torch.stack([(scores * (tiers == tier)).sum(-1) for tier in range(len(TIER_NAMES))])
    return by_tier / scores.sum(-1)


def score_agreement(policy: Tensor, full: Tensor, quantized: Tensor) -> tuple[Tensor, Tensor]:
    """Eq. 16 and 17 over the quantised windows of each event: QSA, the cosine, and R_Q, policy over full. [E] each

    policy, full [E, W], quantized [E, W] bool. NaN where nothing is quantised or nothing was received.
    """
    ours, theirs = (torch.where(quantized, scores, 0).double() for scores in (policy, full))
    norms = ours.square().sum(-1).sqrt() * theirs.square().sum(-1).sqrt()
    return (ours * theirs).sum(-1) / norms, ours.sum(-1) / theirs.sum(-1)


# -- Observation III -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Episodes:
    """Maximal runs of events in which a window is not selected: ``length`` in events, and whether it ``returned``."""

    length: Tensor
    returned: Tensor

    def lir(self, least: int) -> tuple[int, int]:
        """Eq. 18 as (returned, eligible): episodes of at least ``least`` events, each counted once."""
        eligible = self.length >= least
        return int((eligible & self.returned).sum()), int(eligible.sum())


def inactive_episodes(selected: Tensor, routed: Tensor) -> Episodes:
    """Inactive episodes of all windows. selected, routed [E, W] bool.

    A window's time begins at the first event that routes it: while recent it is neither in nor out. An episode that
    starts there counts too, and so does one that is open at the end, as not returned.
    """
    inactive = pad(routed & ~selected, (0, 0, 1, 1))
    edges = inactive[1:].int() - inactive[:-1].int()
    start_window, start = (edges.T == 1).nonzero().unbind(1)
    _, end = (edges.T == -1).nonzero().unbind(1)
    after = pad(selected & routed, (0, 0, 0, 1))
    return Episodes(end - start, after[end, start_window])


def oracle_selection(scores: Tensor, routed: Tensor, count: int) -> Tensor:
    """The ``count`` best routed windows of each event by full-cache scores, ties to the earlier one. [E, W] bool"""
    ranked = rank(scores.masked_fill(~routed, -torch.inf))
    best = torch.zeros_like(routed).scatter(1, ranked[:, :count], True)
    return best & routed


def lagged_transitions(selected: Tensor, routed: Tensor, lag: int) -> Tensor:
    """Counts behind Eq. 19: [a, b] is how often a window was in state a, and ``lag`` events later in b. [2, 2]

    Over the windows that are routed at the first of the two events.
    """
    if lag >= len(selected):
        return torch.zeros(2, 2, dtype=torch.int64)
    before, after = selected[:-lag][routed[:-lag]], selected[lag:][routed[:-lag]]
    return torch.bincount(2 * before.int() + after.int(), minlength=4).unflatten(0, (2, 2)).cpu()


def tier_transitions(tiers: Tensor) -> Tensor:
    """How often a window went from one tier to another between consecutive events. [E, W] -> [4, 4], rows are from."""
    before, after = tiers[:-1].flatten(), tiers[1:].flatten()
    return torch.bincount(4 * before.int() + after.int(), minlength=16).unflatten(0, (4, 4)).cpu()
