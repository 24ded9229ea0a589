"""What the measurement of LORE-KV's lookahead compares, and what its model of a GPU says."""

from __future__ import annotations

import pytest

from perf import lookahead
from perf.lookahead import differences, modelled, random_prompt, scoring_times


def test_scores_are_compared_with_the_reference_before_anything_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    prefill, futures = random_prompt(300, layers=2)
    assert not differences(prefill, futures)
    reference = lookahead.window_cost
    monkeypatch.setattr(lookahead, "window_cost", lambda *given: 1.001 * reference(*given))
    assert [line.split(":")[0] for line in differences(prefill, futures)] == ["layer 0", "layer 1"]


def test_times_are_per_query(monkeypatch: pytest.MonkeyPatch) -> None:
    """96 queries of LORE-KV to 32 of SnapKV."""
    seconds = iter([0.0, 0.0, 2.0, 9.0, 1.0, 6.0])
    monkeypatch.setattr(lookahead, "_seconds", lambda run: next(seconds))
    assert scoring_times(*random_prompt(64, layers=1), rounds=2) == {
        "snapkv_s": 1.5,
        "lorekv_s": 7.5,
        "ratio_per_query": pytest.approx((4.5 + 6) / 2 / 3),
    }


def test_a_model_of_a_gpu_has_scoring_grow_with_the_prompt_and_less_than_prefill() -> None:
    short, long = modelled(16 * 1024), modelled(32 * 1024)
    assert long["scoring_s"] == pytest.approx(2 * short["scoring_s"])
    assert long["scoring_s"] / long["prefill_s"] < short["scoring_s"] / short["prefill_s"]
    assert long["lookahead_s"] < 2 * short["lookahead_s"]
