"""LongBench's scores: those that the official code gave, and the traits of its ROUGE-L and edit similarity."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks import longbench, metrics
from tasks.groups import LONGBENCH, LONGBENCH_E
from tasks.longbench_metrics import classification, code_sim, count, first_line, qa_f1, retrieval
from tasks.rouge import LONGEST_WALK, align, rouge_l
from tasks.similarity import ratio
from tasks.task import TaskError, UnknownTask

IDENTICAL = 0.999999995
"""ROUGE-L of a text with itself."""


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


# Against the official code


def test_real_predictions_score_as_officially(shared_data: Path) -> None:
    cases = lines(shared_data / "longbench" / "scorer_golden.jsonl")
    assert len(cases) == 52
    for case in cases:
        found = longbench.score(case["dataset"], case["pred"], case["answers"], case["all_classes"])
        assert found == pytest.approx(case["score"], abs=1e-9), case["_id"]


def test_made_up_cases_score_as_officially(shared_data: Path) -> None:
    cases = lines(shared_data / "longbench" / "metric_golden_synthetic.jsonl")
    assert len(cases) == 56
    for case in cases:
        found = metrics.score(case["metric"], case["pred"], [case["gold"]], case["all_classes"] or ())
        assert found == pytest.approx(case["score"], abs=1e-9), case


# By task


def test_all_tasks_are_there() -> None:
    assert list(longbench.TASKS) == [
        name for base in LONGBENCH for name in (base, f"{base}_e") if name in {*LONGBENCH, *LONGBENCH_E}
    ]
    assert len(LONGBENCH) == 16
    assert len(LONGBENCH_E) == 13


def test_a_reference_scores_full_marks_and_silence_none() -> None:
    answers = {"trec": "City", "passage_count": "11", "passage_retrieval_en": "Paragraph 7", "lcc": "    return x"}
    for task in longbench.TASKS:
        answer = answers.get(task.removesuffix("_e"), "The council approved it. Twice.")
        full = IDENTICAL if "rouge" in longbench.TASKS[task].metric else 1
        assert longbench.score(task, answer, [answer], ["City", "State"]) == pytest.approx(full, abs=1e-12)
        assert longbench.score(task, "", [answer], ["City", "State"]) == 0


def test_the_best_answer_counts() -> None:
    assert longbench.score("qasper", "yes", ["unanswerable", "yes", "no"]) == 1
    assert longbench.score("gov_report", "a b", ["x", "a b"]) == pytest.approx(IDENTICAL)


@pytest.mark.parametrize("task", ["triviaqa", "samsum", "trec", "triviaqa_e", "samsum_e", "trec_e"])
def test_few_shot_tasks_score_the_first_line_alone(task: str) -> None:
    classes = ["City", "State"]
    clean = longbench.score(task, "City", ["City"], classes)
    assert longbench.score(task, "\n\nCity\nState State\n", ["City"], classes) == clean
    assert longbench.score(task, " \nCity", ["City"], classes) == 0


def test_other_tasks_score_all_lines() -> None:
    assert longbench.score("hotpotqa", "York\nNew", ["New York"]) == 1
    assert first_line("\n\n") == ""


def test_what_cannot_be_scored_is_refused() -> None:
    with pytest.raises(UnknownTask, match=r"no task 'hotpot' \(did you mean hotpotqa"):
        longbench.score("hotpot", "a", ["a"])
    with pytest.raises(TaskError, match="needs a list of at least one reference, not 'yes'"):
        longbench.score("qasper", "yes", "yes")
    with pytest.raises(TaskError, match="at least one reference"):
        longbench.score("qasper", "yes", [])
    with pytest.raises(TaskError, match="needs the names of all classes"):
        longbench.score("trec", "City", ["City"])
    with pytest.raises(TaskError, match="such as 'Paragraph 3', not '3'"):
        longbench.score("passage_retrieval_en", "3", ["3"])


# By metric


def test_qa_f1_counts_words_as_often_as_they_occur() -> None:
    assert qa_f1("yes yes no", "yes no no") == pytest.approx(2 / 3)
    assert qa_f1("The U.S.A., a country!", "usa country") == 1
    assert qa_f1("“usa”", "usa") == 0
    assert qa_f1("the", "the") == 0


def test_classification_shares_among_the_classes_named() -> None:
    assert classification("City or State", "City", ["City", "State", "Date"]) == 0.5
    assert classification("State", "City", ["City", "State"]) == 0
    assert classification("Food and drink", "Food and drink", ["Food", "Food and drink"]) == 1


def test_classification_passes_over_the_name_after_one_taken_off() -> None:
    # "a" is taken off, so "b" is never looked at; with another class between them both go.
    assert classification("ab", "ab", ["a", "b", "ab"]) == 0.5
    assert classification("ab x", "ab", ["a", "x", "b", "ab"]) == 0.5
    assert classification("ab", "ab", ["a", "ab"]) == 1


def test_counting_punishes_verbosity() -> None:
    assert count("7, or 8", "7") == 0.5
    assert retrieval("Paragraph 3 ... 3 ... 12", "Paragraph 3") == pytest.approx(2 / 3)
    assert retrieval("none", "Paragraph 3") == count("seven", "7") == 0


def test_code_takes_the_first_line_without_comment_or_fence() -> None:
    assert code_sim("```python\n# add\n// add\n  x += 1\ny", "  x += 1") == 1
    assert code_sim("# add\n\n  x += 1", "  x += 1") == 0
    assert code_sim("# add", "x") == 0


# ROUGE-L


@pytest.mark.parametrize(
    ("prediction", "reference", "expected"),
    [
        ("a d b a b", "c d a b a", 0.5714285665306124),
        ("b c c d c", "a c b c c", 0.6666666616666668),
        ("d a c d c", "a b c c d", 0.8571428522448981),
        ("a. ", "a b", 0.4999999950000001),
        ("a b. . c", "c b a", 0.5714285665306124),
        ("One. Two", "Two. One", IDENTICAL),
        ("a b a. b", "b. a a b c", 0.7999999952000001),
        ("...", "a", 0),
        ("a", "..", 0),
        ("A", "a", 0),
    ],
)
def test_rouge_l_is_that_of_the_package(prediction: str, reference: str, expected: float) -> None:
    """Figures of rouge 1.0.1: which longest alignment is taken, blank sentences, and words as sets."""
    assert rouge_l(prediction, reference) == pytest.approx(expected, abs=1e-12)


def test_an_alignment_that_overflowed_the_official_stack_scores_0() -> None:
    words = [f"w{number}" for number in range(LONGEST_WALK + 1)]
    longest, too_long = " ".join(words[:-1]), " ".join(words)
    assert rouge_l(longest, longest) == pytest.approx(IDENTICAL)
    assert rouge_l(too_long, too_long) == 0
    in_two = f"{' '.join(words[:500])}. {' '.join(words[500:])}"
    assert rouge_l(in_two, in_two) == pytest.approx(IDENTICAL)
    # Skips are steps as well.
    skipped = ["x"] * (LONGEST_WALK - 1)
    assert rouge_l(" ".join(["a", *skipped]), "a") > 0
    assert rouge_l(" ".join(["a", *skipped, "x"]), "a") == 0


@given(reference=st.lists(st.sampled_from("abc"), max_size=8), prediction=st.lists(st.sampled_from("abc"), max_size=8))
def test_an_alignment_is_a_longest_common_subsequence(reference: list[str], prediction: list[str]) -> None:
    words, steps = align(reference, prediction)
    assert len(words) == longest_by_trying(tuple(reference), tuple(prediction))
    assert is_subsequence(words, reference)
    assert is_subsequence(words, prediction)
    assert len(words) <= steps <= len(reference) + len(prediction)


@cache
def longest_by_trying(first: tuple[str, ...], second: tuple[str, ...]) -> int:
    if not first or not second:
        return 0
    with_first = 0
    if first[0] in second:
        with_first = 1 + longest_by_trying(first[1:], second[second.index(first[0]) + 1 :])
    return max(with_first, longest_by_trying(first[1:], second))


def is_subsequence(words: list[str], text: list[str]) -> bool:
    remaining = iter(text)
    return all(word in remaining for word in words)


# Edit similarity


def test_edit_similarity_is_difflibs() -> None:
    assert (ratio("tide", "diet"), ratio("diet", "tide")) == (25, 50)
    assert ratio("x", "x") == ratio("", "") == 100
    assert ratio("", "x") == ratio("x", "") == 0


def test_edit_similarity_ignores_letters_that_are_frequent_in_a_long_reference() -> None:
    assert ratio("x" + "a" * 198, "y" + "a" * 198) == 99
    assert ratio("x" + "a" * 199, "y" + "a" * 199) == 0


@given(text=st.text("ab( ", max_size=20), reference=st.text("ab( ", max_size=20))
def test_edit_similarity_is_a_whole_per_cent(text: str, reference: str) -> None:
    found = ratio(text, reference)
    assert isinstance(found, int)
    assert 0 <= found <= 100
    assert (found == 100) >= (text == reference)
