"""GSM8K: published verdicts, extraction in the ways that models write numbers, prompts, and data that must be there."""

from __future__ import annotations

import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from word_tokenizer import WordTokenizer

from tasks import gsm8k
from tasks.metrics import details, score
from tasks.numbers import extract
from tasks.prompt import render
from tasks.registry import get_task
from tasks.sample import Sample
from tasks.sources import DataError, DataSources
from tasks.task import TaskError

RECORDS = [
    {"question": "Two and two?", "answer": "2+2=<<2+2=4>>4\n#### 4"},
    {"question": "A thousand and one?", "answer": "Easy.\n#### 1,001"},
    {"question": "One less than none?", "answer": "#### -1"},
]
EXEMPLARS = {
    "doc_to_text": "Q: {{question}}\nA:",
    "target_prefix": " ",
    "separator": "\n\n",
    "stop": ["Q:"],
    "samples": [{"question": f"What is {n}?", "target": f"The answer is {n}."} for n in range(8)],
}


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    (tmp_path / "gsm8k").mkdir()
    (tmp_path / "gsm8k" / "test.jsonl").write_text("\n".join(map(json.dumps, RECORDS)) + "\n")
    (tmp_path / "gsm8k" / "cot_8shot.json").write_text(json.dumps(EXEMPLARS))
    return tmp_path


def samples(sources: DataSources, count: int = 3, **settings: Any) -> list[Sample]:
    return get_task("gsm8k", {"allow_partial": True, **settings}).samples(WordTokenizer(), sources, None, 0, count, 0)


# Extraction


def test_extraction_agrees_with_the_published_verdicts(shared_data: Path) -> None:
    lines = (shared_data / "gsm8k" / "extraction_golden.jsonl").read_text(encoding="utf-8").splitlines()
    cases = [json.loads(line) for line in lines]
    assert len(cases) == 400
    wrong = [
        case
        for case in cases
        if score("gsm8k_flexible", case["solution"], [case["gold"].replace(",", "")]) != case["is_correct"]
        or gsm8k.score(case["solution"], case["gold"]) != case["is_correct"]
    ]
    assert wrong == []


def test_every_reference_solution_states_its_answer(shared_data: Path) -> None:
    sources = DataSources(shared_data)
    made = samples(sources, count=2000, allow_partial=False)
    lines = (shared_data / "gsm8k" / "test.jsonl").read_text(encoding="utf-8").splitlines()
    solutions = [json.loads(line)["answer"] for line in lines]
    assert len(made) == len(solutions) == get_task("gsm8k").available(sources) == 1319
    for sample, solution in zip(made, solutions, strict=True):
        assert score("gsm8k_flexible", solution, sample.references) == 1
        assert score("gsm8k_strict", solution, sample.references) == 1
        assert gsm8k.score(solution, solution) == gsm8k.score(f"It is {sample.references[0]}.", solution) == 1


@pytest.mark.parametrize(
    ("text", "strict", "flexible"),
    [
        ("#### 18", "18", "18"),
        ("#### $1,200.", "1200", "1200"),
        ("**#### 42**", "42", "42"),
        ("#### 18 dollars in 2 days", "18", "2"),
        ("#### 5\n#### 6", "5", "6"),
        ("#### 1. Add up\nall 5\n#### 18", "18", "18"),
        ("#### 2) Next\nthen 9", None, "9"),
        ("#### 3 + 4 = 7", "7", "7"),
        ("The answer is 18.", "18", "18"),
        ("The answer is $18. I checked it 3 times.", "18", "3"),
        ("The answer is 5. No: the answer is 6.", "6", "6"),
        ("**Answer:** 12", "12", "12"),
        ("Final answer:\n\n18", "18", "18"),
        ("The answer is 1,000.", "1000", "1000"),
        ("The answer is unknown", None, None),
        (r"so \boxed{\$18} in 3 days", "18", "3"),
        (r"\boxed{1{,}234}", "1234", "1234"),
        (r"\boxed{\text{total } 18 \text{ eggs}}", "18", "18"),
        (r"\boxed{7} and the answer is 8", "7", "8"),
        ("72, altogether", None, "72"),
        ("from 3 4", None, "4"),
        ("29.00", None, "29"),
        ("it is -5", None, "-5"),
        ("it is \u22125", None, "-5"),
        ("it is -$5", None, "-5"),
        ("10-3", None, "3"),
        ("(2)-3", None, "3"),
        ("1\u202f000 eggs", None, "1000"),
        ("that makes...5", None, "5"),
        ("a half is .5", None, "0.5"),
        ("50%", None, "50"),
        ("1,2345", None, "2345"),
        ("", None, None),
        (",", None, None),
    ],
)
def test_numbers_are_found_as_models_write_them(text: str, strict: str | None, flexible: str | None) -> None:
    found = extract(text)
    assert found.strict == (None if strict is None else Decimal(strict))
    assert found.flexible == (None if flexible is None else Decimal(flexible))


@pytest.mark.parametrize(
    ("text", "marked"),
    [("#### 4", True), ("the answer is unclear", True), (r"\boxed{x}", True), ("4", False), ("### 4", False)],
)
def test_a_marker_is_reported_with_or_without_a_number(text: str, marked: bool) -> None:
    assert extract(text).has_marker is marked


@given(value=st.decimals(-(10**9), 10**9, places=2, allow_nan=False), form=st.sampled_from(["{}", "{:,}", "{:.2f}"]))
def test_a_number_survives_its_spelling(value: Decimal, form: str) -> None:
    found = extract(f"so 3 times.\n#### {form.format(value)}")
    assert found.strict == found.flexible == value


@given(st.text(alphabet=st.one_of(st.sampled_from("#0123456789.,-$ \n{}\\answer:is=%"), st.characters())))
def test_extraction_never_fails(text: str) -> None:
    found = extract(text)
    assert found.strict is None or found.has_marker


@pytest.mark.parametrize(
    ("prediction", "strict", "flexible", "marker", "number"),
    [
        ("#### 18", 1, 1, 1, 1),
        ("so 18", 0, 1, 0, 1),
        ("The answer is 18 after 3 days", 1, 0, 1, 1),
        ("The answer is eighteen", 0, 0, 1, 0),
        ("", 0, 0, 0, 0),
    ],
)
@pytest.mark.parametrize("metric", ["gsm8k_flexible", "gsm8k_strict"])
def test_every_run_tells_all_rates_whichever_is_the_score(
    metric: str, prediction: str, strict: float, flexible: float, marker: float, number: float
) -> None:
    told = {"strict": strict, "flexible": flexible, "marker": marker, "number": number}
    assert details(metric, prediction, ["18"]) == told
    assert score(metric, prediction, ["18"]) == told[metric.removeprefix("gsm8k_")]


def test_a_reference_is_a_number_or_a_solution() -> None:
    assert gsm8k.score("1001.00 in all", "Easy.\n#### 1,001") == gsm8k.score("1001", "1,001") == 1
    assert gsm8k.score("I do not know", "4") == gsm8k.score("", "4") == 0
    with pytest.raises(DataError, match="no line '#### NUMBER'"):
        gsm8k.score("4", "four")


# Prompts


def test_zero_shot_asks_for_a_final_line_in_a_chat(data_dir: Path) -> None:
    sample = samples(DataSources(data_dir))[1]
    assert sample.context == "A thousand and one?"
    assert sample.question.endswith("\n#### N")
    assert (sample.answer_prefix, sample.stop, sample.chat) == ("", (), True)
    assert sample.references == ("1001",)
    assert (sample.max_new_tokens, sample.metric) == (512, "gsm8k_flexible")


def test_eight_shots_are_a_text_to_continue(data_dir: Path) -> None:
    tokenizer = WordTokenizer()
    [sample] = samples(DataSources(data_dir), count=1, shots=8)
    prompt = render(sample, tokenizer)
    shots = "".join(f"Q: What is {n}?\nA: The answer is {n}.\n\n" for n in range(8))
    assert tokenizer.decode(prompt.ids) == f"<bos>{shots}Q: Two and two?\nA:"
    assert (sample.chat, sample.stop) == (False, ("Q:",))
    appended = render(sample, tokenizer, "appended")
    assert tokenizer.decode(appended.appended) == "Q: Two and two?\nA:"


def test_the_references_score_1_and_nothing_scores_0(data_dir: Path) -> None:
    for extraction in ("flexible", "strict"):
        for sample in samples(DataSources(data_dir), extraction=extraction):
            assert score(sample.metric, f"#### {sample.references[0]}", sample.references) == 1
            assert score(sample.metric, "", sample.references) == 0


def test_samples_are_the_first_ones_and_no_more_than_there_are(data_dir: Path) -> None:
    sources = DataSources(data_dir)
    assert samples(sources, count=2) == samples(sources, count=9)[:2]
    assert len(samples(sources, count=9)) == get_task("gsm8k", {"allow_partial": True}).available(sources) == 3


# Data


def test_a_missing_file_is_named(tmp_path: Path, data_dir: Path) -> None:
    (data_dir / "gsm8k" / "cot_8shot.json").unlink()
    with pytest.raises(DataError, match=r"task gsm8k with shots: 8 needs the file .*cot_8shot\.json"):
        get_task("gsm8k", {"shots": 8}).recipe(DataSources(data_dir))
    (data_dir / "gsm8k" / "test.jsonl").unlink()
    for ask in (get_task("gsm8k").recipe, get_task("gsm8k").available):
        with pytest.raises(DataError, match=r"task gsm8k needs the file .*gsm8k/test\.jsonl"):
            ask(DataSources(tmp_path))


def test_a_short_file_is_refused_unless_it_is_meant(data_dir: Path) -> None:
    sources = DataSources(data_dir)
    for ask in (lambda task: task.check(sources, None), lambda task: task.available(sources)):
        with pytest.raises(DataError, match=r"test\.jsonl has 3 problems, and the test split has 1,319.*allow_partial"):
            ask(get_task("gsm8k"))
    assert {sample.meta["benchmark_size"] for sample in samples(sources)} == {1319}


def test_a_file_with_more_than_the_test_split_is_refused(data_dir: Path) -> None:
    lines = [json.dumps({"question": f"{n}?", "answer": f"#### {n}"}) for n in range(1320)]
    (data_dir / "gsm8k" / "test.jsonl").write_text("\n".join(lines))
    with pytest.raises(DataError, match=r"has 1,320 problems"):
        get_task("gsm8k", {"allow_partial": True}).check(DataSources(data_dir), None)
    (data_dir / "gsm8k" / "test.jsonl").write_text("\n".join(lines[:1319]))
    assert get_task("gsm8k").available(DataSources(data_dir)) == 1319


def test_a_repeated_question_is_named_with_its_twin(data_dir: Path) -> None:
    twin = {"question": f" {RECORDS[1]['question']}", "answer": "#### 7"}
    (data_dir / "gsm8k" / "test.jsonl").write_text("\n".join(map(json.dumps, [*RECORDS, twin])))
    with pytest.raises(DataError, match=r"test\.jsonl, problem 4 asks what problem 2 asks"):
        get_task("gsm8k").check(DataSources(data_dir), None)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"question": "Q?"}', "problem 2: expected the text fields question and answer"),
        ('{"question": "Q?", "answer": "four"}', "problem 2: no line '#### NUMBER'"),
        ("not json", "line 2 is not JSON"),
        ("[1]", "line 2: expected an object"),
    ],
)
def test_a_malformed_record_is_named(line: str, message: str, data_dir: Path) -> None:
    file = data_dir / "gsm8k" / "test.jsonl"
    file.write_text(json.dumps(RECORDS[0]) + "\n" + line)
    with pytest.raises(DataError, match=f"test.jsonl, {message}"):
        get_task("gsm8k").check(DataSources(data_dir), None)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"samples": []}, "has 0 samples, where eight are needed"),
        ({"stop": None}, "must have doc_to_text"),
        ({"doc_to_text": "no place"}, "must have doc_to_text"),
    ],
)
def test_malformed_exemplars_are_named(change: dict[str, Any], message: str, data_dir: Path) -> None:
    (data_dir / "gsm8k" / "cot_8shot.json").write_text(json.dumps(EXEMPLARS | change))
    with pytest.raises(DataError, match=f"cot_8shot.json {message}"):
        get_task("gsm8k", {"shots": 8, "allow_partial": True}).check(DataSources(data_dir), None)


def test_the_recipe_knows_data_shots_metric_and_limit(data_dir: Path) -> None:
    sources = DataSources(data_dir)
    settings: list[dict[str, Any]] = [{}, {"shots": 8}, {"extraction": "strict"}, {"max_new_tokens": 9}]
    recipes = [json.dumps(get_task("gsm8k", chosen).recipe(sources)) for chosen in settings]
    (data_dir / "gsm8k" / "test.jsonl").write_text(json.dumps(RECORDS[0]))
    recipes.append(json.dumps(get_task("gsm8k").recipe(sources)))
    assert len(set(recipes)) == 5


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"shots": 5}, "shots must be one of 0, 8, not 5"),
        ({"extraction": "loose"}, "extraction must be one of"),
        ({"allow_partial": "yes"}, "allow_partial must be one of False, True, not 'yes'"),
        ({"max_new_tokens": "many"}, "max_new_tokens must be a whole number"),
    ],
)
def test_settings_are_checked(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(TaskError, match=f"task gsm8k: {message}"):
        get_task("gsm8k", settings)


def test_a_context_length_is_refused(data_dir: Path) -> None:
    with pytest.raises(TaskError, match="takes no context length, but got 4096"):
        get_task("gsm8k").check(DataSources(data_dir), 4096)


def test_gold_is_the_first_marked_number() -> None:
    assert gsm8k.gold("#### 1,234\n#### 5") == "1234"
    with pytest.raises(DataError, match="no line"):
        gsm8k.gold("4")
