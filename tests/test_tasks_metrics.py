"""RULER's score at its edges, and how metrics are looked up. GSM8K's extraction has tests of its own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.metrics import METRICS, score, string_match_all
from tasks.task import TaskError


@pytest.mark.parametrize(
    ("prediction", "references", "expected"),
    [
        ("The numbers are 12 and 34.", ["12", "34"], 1),
        ("12", ["12", "34", "56", "78"], 0.25),
        ("ABC def", ["abc", "DEF"], 1),
        ("  12\x00", ["12"], 1),
        ("1\x072", ["12"], 0),
        ("a\tb", ["a\nb"], 1),
        ("112", ["12"], 1),
        ("", ["12"], 0),
        (" \n\x1f", ["\n"], 0),
    ],
)
def test_string_match_all_is_the_share_of_references_found(
    prediction: str, references: list[str], expected: float
) -> None:
    assert string_match_all(prediction, references) == expected


def test_the_official_answers_score_1_and_half_of_them_half(shared_data: Path) -> None:
    for task in ("niah_multivalue", "niah_multiquery", "cwe"):
        for line in (shared_data / "ruler" / "golden_4096_cl100k" / f"{task}.jsonl").read_text().splitlines():
            answers = json.loads(line)["outputs"]
            assert string_match_all(", ".join(answers), answers) == 1
            assert string_match_all(", ".join(answers[::2]), answers) == pytest.approx(0.5)


@given(metric=st.sampled_from(sorted(METRICS)), prediction=st.text(), count=st.integers(1, 3))
def test_scores_lie_between_0_and_1(metric: str, prediction: str, count: int) -> None:
    reference = "Paragraph 7" if metric == "retrieval" else "7"
    assert 0 <= score(metric, prediction, [reference] * count, classes=["7", "17"]) <= 1


def test_an_unknown_metric_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(TaskError, match=r"no metric 'string_match' \(did you mean string_match_all"):
        score("string_match", "a", ["a"])


def test_a_sample_without_references_has_no_score() -> None:
    with pytest.raises(TaskError, match="at least one reference"):
        score("string_match_all", "a", [])
