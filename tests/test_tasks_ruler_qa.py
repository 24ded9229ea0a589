"""RULER's question answering: gold documents anywhere, files read strictly, a sample never taken for the whole."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
from word_tokenizer import WordTokenizer

from tasks.prompt import prompt_overhead, render
from tasks.registry import get_task
from tasks.ruler import METRIC_OF, score
from tasks.sample import Sample
from tasks.sources import DataError, DataSources
from tasks.task import ContextTooSmall, TaskError

QA = ("qa_1", "qa_2")
OVERHEAD = prompt_overhead(WordTokenizer(), chat=True)


def squad(articles: int = 6, paragraphs: int = 5) -> dict[str, Any]:
    """Paragraph p of article a says what the colour of thing a-p is; one question of each has no answer."""

    def paragraph(a: int, p: int) -> dict[str, Any]:
        text = f"Thing {a}x{p} is of colour{a}x{p}. " + f"Much else is known of article {a}. " * 4
        answer = {"id": f"q{a}-{p}", "question": f"Which colour is thing {a}x{p}?", "is_impossible": False}
        answer["answers"] = [
            {"text": f"colour{a}x{p}", "answer_start": 0},
            {"text": f"of colour{a}x{p}", "answer_start": 0},
        ]
        none = {"id": f"n{a}-{p}", "question": "Why?", "is_impossible": True, "answers": []}
        return {"context": text, "qas": [answer, none]}

    return {"data": [{"paragraphs": [paragraph(a, p) for p in range(paragraphs)]} for a in range(articles)]}


def hotpotqa(records: int = 12) -> list[dict[str, Any]]:
    return [
        {
            "_id": f"h{index}",
            "question": f"Who lives where {index} is?",
            "answer": f"person{index}",
            "supporting_facts": [[f"Place {index}", 0], [f"Home {index}", 0]],
            "context": [
                [f"Place {index}", [f"Here is {index}. ", "It is quiet."]],
                [f"Home {index}", [f"In it lives person{index}. " * 2]],
                *([f"Else {index}-{other}", ["Nothing of the kind. " * 8]] for other in range(8)),
            ],
        }
        for index in range(records)
    ]


@pytest.fixture
def sources(tmp_path: Path) -> DataSources:
    for folder, name, content in (("squad", "dev-v2.0.json", squad()), ("hotpotqa", "hotpotqa.json", hotpotqa())):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / name).write_text(json.dumps(content))
    return DataSources(tmp_path)


def samples(name: str, sources: DataSources, context: int = 900, count: int = 3, seed: int = 0) -> list[Sample]:
    task = get_task(name, {"allow_partial": True})
    return task.samples(WordTokenizer(), sources, context, seed, count, OVERHEAD)


# Samples


@pytest.mark.parametrize("name", QA)
def test_the_gold_documents_are_there_once_and_hold_the_answer(name: str, sources: DataSources) -> None:
    for sample in samples(name, sources, count=10):
        assert sample.context.count(f" {sample.references[0]}.") >= 1
        pages = sample.context.split("\n\n[Page ")
        gold = [page for page in pages if f" {sample.references[0]}." in page]
        assert len(gold) == 1
        number = int(gold[0].split("]")[0].split(" ")[-1].removeprefix("[Page "))
        depths = sample.meta["depths"]
        assert isinstance(depths, list)
        assert round(100 * (number - 1) / (int(str(sample.meta["documents"])) - 1)) in depths
        assert len(depths) == (1 if name == "qa_1" else 2)


@pytest.mark.parametrize("name", QA)
def test_the_gold_documents_lie_anywhere(name: str, sources: DataSources) -> None:
    depths = [
        depth for seed in range(6) for sample in samples(name, sources, 1200, 12, seed) for depth in _depths(sample)
    ]
    assert len({depth // 10 for depth in depths}) >= 10
    assert 40 < mean(depths) < 60
    assert min(depths) == 0
    assert max(depths) == 100


def _depths(sample: Sample) -> list[int]:
    depths = sample.meta["depths"]
    assert isinstance(depths, list)
    return depths


@pytest.mark.parametrize("name", QA)
def test_samples_depend_on_seed_and_index_not_on_their_number(name: str, sources: DataSources) -> None:
    made = samples(name, sources, count=4)
    assert samples(name, sources, count=2) == made[:2]
    assert len({sample.question for sample in made}) == 4
    assert [sample.question for sample in samples(name, sources, count=4, seed=1)] != [s.question for s in made]
    assert [sample.question for sample in samples(name, sources, 700, count=4)] == [s.question for s in made]


@pytest.mark.parametrize("name", QA)
def test_there_are_as_many_samples_as_questions_with_an_answer(name: str, sources: DataSources) -> None:
    questions = {"qa_1": 30, "qa_2": 12}[name]
    assert get_task(name, {"allow_partial": True}).available(sources) == questions
    assert len({sample.meta["id"] for sample in samples(name, sources, 600, 500)}) == questions


@pytest.mark.parametrize("name", QA)
def test_prompts_never_exceed_their_context_and_repeat_documents_where_there_are_too_few(
    name: str, sources: DataSources
) -> None:
    tokenizer = WordTokenizer()
    for context in (600, 1000, 12_000):
        for sample in samples(name, sources, context, 2):
            length = len(render(sample, tokenizer).ids) + sample.max_new_tokens
            assert 0.85 * context <= length <= context
    assert sample.context.count("Page") > 150


@pytest.mark.parametrize("name", QA)
def test_a_context_that_does_not_hold_the_gold_documents_is_refused(name: str, sources: DataSources) -> None:
    with pytest.raises(ContextTooSmall, match=f"{name}.*too small"):
        samples(name, sources, context=100)


def test_the_shipped_samples_are_filled(shared_data: Path) -> None:
    for name in QA:
        for sample in samples(name, DataSources(shared_data), 2048, 2):
            assert 0.85 * 2048 <= len(render(sample, WordTokenizer()).ids) + 32 <= 2048
            assert sample.meta["wording"] == "official"


# Scores


@pytest.mark.parametrize("name", METRIC_OF)
def test_all_references_score_1_and_nothing_scores_0(name: str) -> None:
    references = ["Alpha", "beta 7", "GAMMA"]
    assert score(name, " and ".join(references).lower(), references) == 1
    assert score(name, "", references) == 0
    part = METRIC_OF[name] == "string_match_part"
    assert score(name, "It is\tBETA 7\x00.", references) == (1 if part else pytest.approx(1 / 3))
    assert part == name.startswith("qa")


def test_scoring_knows_its_tasks() -> None:
    with pytest.raises(TaskError, match=r"RULER has no task 'qa_3' \(did you mean qa"):
        score("qa_3", "x", ["x"])
    with pytest.raises(TaskError, match="at least one reference"):
        score("qa_1", "x", [])


# Files


@pytest.mark.parametrize("name", QA)
def test_a_sample_is_not_taken_for_the_whole(name: str, sources: DataSources) -> None:
    with pytest.raises(DataError, match=r"json has \d+ questions .* the complete set has .*allow_partial: true"):
        get_task(name).check(sources, 900)
    [sample] = samples(name, sources, count=1)
    assert sample.meta["data"] in ("dev-v2.0.json (30 of 5,928 questions)", "hotpotqa.json (12 of 7,405 questions)")


def test_another_name_is_named_and_needs_a_word(shared_data: Path) -> None:
    sources = DataSources(shared_data)
    with pytest.raises(DataError, match=r"dev-v2\.0\.json.*squad_dev-v2\.0_half\.json alone, set allow_partial: true"):
        get_task("qa_1").check(sources, 4096)
    recipe = get_task("qa_1", {"allow_partial": True}).recipe(sources)
    assert list(recipe["data"]) == ["squad_dev-v2.0_half.json"]  # type: ignore[call-overload]
    [sample] = samples("qa_1", sources, count=1)
    assert sample.meta["data"] == "squad_dev-v2.0_half.json (2,910 of 5,928 questions)"


@pytest.mark.parametrize("name", QA)
def test_data_that_is_not_there_is_asked_for_by_path(name: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=rf"task {name} needs the file .*(dev-v2\.0|hotpot_dev_distractor_v1)\.json"):
        get_task(name).check(DataSources(tmp_path), 4096)


def _squad_without(field: str) -> Any:
    content = squad()
    del content["data"][1]["paragraphs"][2]["qas"][0][field]
    return content


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([], "there must be a list data"),
        ({"data": [{"paragraphs": [{"qas": []}]}]}, r"data\[0\].paragraphs\[0\]: context must be text"),
        (_squad_without("is_impossible"), r"paragraphs\[2\], question q1-2: is_impossible.*SQuAD 2.0"),
        (_squad_without("answers"), r"question q1-2: there must be a list answers"),
        (_squad_without("question"), r"question q1-2: question must be text"),
        (_squad_without("id"), r"paragraphs\[2\]: id must be text"),
        ({"data": squad()["data"] * 2}, r"question q0-0: its id is there twice"),
        ({"data": []}, "no question with an answer"),
    ],
)
def test_a_malformed_squad_names_the_record_and_why(content: Any, message: str, sources: DataSources) -> None:
    assert sources.data_dir is not None
    (sources.data_dir / "squad" / "dev-v2.0.json").write_text(json.dumps(content))
    with pytest.raises(DataError, match=rf"dev-v2\.0\.json.*{message}"):
        get_task("qa_1", {"allow_partial": True}).check(sources, 900)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"context": []}, r"record 3: its context is empty"),
        ({"context": [["Title", "text"]]}, r"record 3: context must hold pairs"),
        ({"context": [["Title", []]]}, r"record 3: context must hold pairs"),
        ({"supporting_facts": [["Elsewhere", 0]]}, r"record 3 \(h3\): none of its passages"),
        ({"answer": ""}, r"record 3 \(h3\): answer must be text"),
        ({"_id": "h2"}, r"question h2: its id is there twice"),
        ({"_id": None}, r"record 3: _id must be text"),
    ],
)
def test_a_malformed_hotpotqa_names_the_record_and_why(
    change: dict[str, Any], message: str, sources: DataSources
) -> None:
    assert sources.data_dir is not None
    records = hotpotqa()
    records[3] |= change
    (sources.data_dir / "hotpotqa" / "hotpotqa.json").write_text(json.dumps(records))
    with pytest.raises(DataError, match=rf"hotpotqa\.json.*{message}"):
        get_task("qa_2", {"allow_partial": True}).check(sources, 900)
