"""DefensiveKV and Layer-DefensiveKV: brute force, the limits where they become other methods, exact totals."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from output_prompts import kept_by, random_prompt, total, window_parts
from torch import Tensor

from kvcache.baselines.adakv import AdaKV
from kvcache.baselines.defensivekv import DefensiveKV, LayerDefensiveKV
from kvcache.prefill import Prefill


def defensive_by_hand(prefill: Prefill, budget: int, window: int, kernel: int, share: float, bias: str) -> list[Any]:
    """Scores with the first stage on top, as the card words it, by loops in fp64. [layers] of [H_kv, n - w]"""
    found, prefix = [], prefill.tokens - window
    for layer in prefill.layers:
        heads, group = len(layer.keys), layer.output_projection.shape[1] // len(layer.keys)
        scores, means, own_share = [], [], []
        for head in range(heads):
            _, attention, values, _ = window_parts(layer, head, window)
            rows = attention[..., :prefix].flatten(0, 1)
            risks = []
            for row in rows:
                reach = kernel // 2
                pooled = torch.stack([row[max(0, i - reach) : i + reach + 1].sum() / kernel for i in range(prefix)])
                risks.append(pooled * row.sum() / pooled.sum())
            risk = torch.stack(risks).max(0).values
            norm = sum(
                (values[:prefix] @ layer.output_projection[:, head * group + one].double().T).abs().sum(-1) / group
                for one in range(group)
            )
            scores.append((risk.clamp(min=float(risk.mean())), norm))
            means.append(rows.mean(0))
            own_share.append(1 - float(rows.sum(1).mean()))
        if bias == "repo":
            own_share = [float(torch.stack(means)[:, -window:].sum(1).mean())] * heads
        norms = sum(norm for _, norm in scores)
        final = torch.stack([risk * norm / norms for risk, norm in scores])
        best = float(final.max())
        for head, mean in enumerate(means):
            mass, left = 0.0, mean / mean.sum()
            for token in left.argsort(descending=True)[: budget - window].tolist():
                mass += float(left[token])
                if mass >= share - own_share[head]:
                    break
                final[head, token] = best + 1e-9
        found.append(final)
    return found


@pytest.mark.parametrize("bias", ["paper", "repo"])
@pytest.mark.parametrize(("budget", "share"), [(20, 0.9), (30, 0.5), (30, 0.9)])
def test_defensivekv_keeps_what_brute_force_keeps(bias: Any, budget: int, share: float) -> None:
    settings = {"window": 6, "kernel": 5, "first_stage": share, "bias": bias}
    prefill = random_prompt(60, 6, layers=3)
    by_hand = defensive_by_hand(prefill, budget, 6, 5, share, bias)
    window = [*range(54, 60)]

    def best(rows: Tensor) -> list[list[int]]:
        places = [(head, token) for token in range(54) for head in range(len(rows))]  # ties by position, then head
        chosen = sorted(places, key=lambda place: -float(rows[place]))[: len(rows) * (budget - 6)]
        return [sorted(token for own, token in chosen if own == head) + window for head in range(len(rows))]

    assert kept_by(DefensiveKV(**settings), prefill, budget) == [best(rows) for rows in by_hand]  # type: ignore[arg-type]
    of_model = best(torch.cat(by_hand))
    found = kept_by(LayerDefensiveKV(**settings), prefill, budget)  # type: ignore[arg-type]
    assert [head for layer in found for head in layer] == of_model


def test_the_two_readings_of_the_bias_differ() -> None:
    prefill = random_prompt(60, 6)
    masses = [DefensiveKV(window=6, bias=bias)._risk(prefill.layers[0], 60).mass for bias in ("paper", "repo")]
    assert masses[0][0] != masses[0][1], "the window's own share differs from head to head"
    assert masses[1][0] == masses[1][1]


@given(st.integers(1, 60), st.integers(1, 12), st.integers(0, 40), st.integers(1, 3), st.integers(0, 3))
def test_defensive_totals_are_exact(tokens: int, window: int, more: int, layers: int, seed: int) -> None:
    prefill = random_prompt(tokens, window, layers=layers, seed=seed)
    budget = min(window + more, tokens)
    ends = set(range(max(tokens - window, 0), tokens))
    by_layer = kept_by(DefensiveKV(window=window), prefill, budget)
    of_model = kept_by(LayerDefensiveKV(window=window), prefill, budget)
    assert all(sum(map(len, layer)) == 2 * budget for layer in by_layer)
    assert total(of_model) == layers * 2 * budget
    for head in (head for layer in (*by_layer, *of_model) for head in layer):
        assert head == sorted(set(head))
        assert ends <= set(head)


def test_layers_of_different_sizes_do_not_trade_tokens() -> None:
    prefill = random_prompt(40, 6, layers=3)
    wide = prefill.layers[1]
    prefill.layers[1] = replace(
        wide, values=torch.cat([wide.values] * 2, -1), output_projection=torch.cat([wide.output_projection] * 2, -1)
    )
    counts = [sum(map(len, layer)) for layer in kept_by(LayerDefensiveKV(window=6), prefill, 15)]
    assert counts[1] == 2 * 15
    assert counts[0] + counts[2] == 2 * 2 * 15
    assert counts[0] != counts[2]


def test_layer_defensivekv_of_one_layer_is_defensivekv() -> None:
    prefill = random_prompt(60, 8)
    assert kept_by(LayerDefensiveKV(window=8), prefill, 21) == kept_by(DefensiveKV(window=8), prefill, 21)


def test_defensivekv_of_one_query_and_equal_norms_is_adakv_without_safeguard() -> None:
    """Where all that is kept lies above the heads' means: below them tokens tie."""
    prefill = random_prompt(60, 1, group=1)
    prefill.layers[0].values[:] = torch.randn(8)
    prefill.layers[0].output_projection[:, 1] = prefill.layers[0].output_projection[:, 0]
    plain = DefensiveKV(window=1, kernel=1, first_stage=0)
    adakv = kept_by(AdaKV(window=1, kernel=1, alpha=0), prefill, 3)
    assert kept_by(plain, prefill, 3) == adakv
    attention = torch.stack([window_parts(prefill.layers[0], head, 1)[1][0, 0, :59] for head in range(2)])
    kept = torch.stack([attention[head, token] for head in range(2) for token in adakv[0][head][:-1]])
    assert float(kept.min()) > float(attention.mean(1).max())
    assert len(adakv[0][0]) != len(adakv[0][1])


def test_a_defensive_score_is_no_less_than_any_querys_and_pooling_keeps_row_sums() -> None:
    prefill = random_prompt(60, 6)
    layer = prefill.layers[0]
    (scores,) = DefensiveKV(window=6).scores(prefill, "0")
    norms = layer.projected_value_norms[:, :54]
    for head in range(2):
        rows = window_parts(layer, head, 6)[1][..., :54].flatten(0, 1)
        pooled = torch.nn.functional.avg_pool1d(rows[None], 5, 1, 2)[0]
        pooled *= rows.sum(-1, keepdim=True) / pooled.sum(-1, keepdim=True)
        share = norms[head] / norms.sum(0)
        assert bool((scores[head, :54] >= (pooled * share).max(0).values * (1 - 1e-5)).all())
