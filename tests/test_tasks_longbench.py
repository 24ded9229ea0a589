"""LongBench's prompts: official templates and truncation, parts that stay apart, and records that are refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from word_tokenizer import BOS, WordTokenizer

from tasks import longbench, metrics
from tasks.cache import prepare
from tasks.prompt import PromptError, render
from tasks.registry import get_task
from tasks.sample import Sample
from tasks.sources import DataError, DataSources, content_hash
from tasks.task import TaskError
from tasks.truncate import cut_prompt, find_question

LONG = 10**6
TEMPLATES = {
    "qasper": "Read.\n\n{context}\n\nAsked: {input}\nReply: ",
    "trec": "Sort.\n{context}\n{input}",
    "samsum": "Shorten.\n\n{context}\n\n{input}",
    "gov_report": "Report:\n{context}\n\nIn short:",
    "hotpotqa": "{context}\n\n{input}",
}


def record(dataset: str = "qasper", number: int = 1, **fields: Any) -> dict[str, Any]:
    made = {
        "input": f"which one is number {number}?",
        "context": " ".join(f"word{index}" for index in range(40)),
        "answers": [f"one {number}"],
        "length": 42,
        "dataset": dataset,
        "language": "en",
        "all_classes": ["City", "State"] if dataset == "trec" else None,
        "_id": f"id{number}",
    }
    return made | fields


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    (tmp_path / "longbench" / "config").mkdir(parents=True)
    config(tmp_path, "dataset2prompt", TEMPLATES)
    limits = {name: longbench.TASKS[name].official_limit for name in TEMPLATES}
    config(tmp_path, "dataset2maxlen", limits)
    for name in TEMPLATES:
        write(tmp_path, name, [record(name)])
    return tmp_path


def config(folder: Path, name: str, content: Any) -> None:
    (folder / "longbench" / "config" / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")


def write(folder: Path, name: str, records: list[dict[str, Any]]) -> Path:
    path = folder / "longbench" / f"{name}.jsonl"
    path.write_text("".join(json.dumps(entry) + "\n" for entry in records), encoding="utf-8")
    return path


def samples(folder: Path, name: str, tokenizer: Any = None, **settings: Any) -> list[Sample]:
    task = get_task(name, {"max_length": LONG, "allow_partial": True} | settings)
    return task.samples(tokenizer or WordTokenizer(), DataSources(folder), None, 0, 1000, 0)


def prompt(sample: Sample) -> str:
    return sample.context + sample.question + sample.answer_prefix


# The shipped records


def shipped(folder: Path) -> dict[str, list[dict[str, Any]]]:
    files = sorted((folder / "longbench" / "ship").glob("*.jsonl"))
    return {path.stem: [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] for path in files}


def test_every_shipped_record_fills_its_template_to_the_letter(shared_data: Path) -> None:
    templates = json.loads((shared_data / "longbench" / "config" / "dataset2prompt.json").read_text(encoding="utf-8"))
    records = shipped(shared_data)
    assert sum(map(len, records.values())) == 29
    for name, official in records.items():
        made = samples(shared_data, name)
        assert [prompt(sample) for sample in made] == [templates[name].format(**entry) for entry in official]
        for sample, entry in zip(made, official, strict=True):
            before, after = templates[name].split("{context}")
            assert sample.context == before + entry["context"]
            assert sample.question == after.format(**entry)
            assert sample.references == tuple(entry["answers"])
            assert (sample.meta["_id"], sample.meta["length"]) == (entry["_id"], entry["length"])


def test_shipped_records_are_cut_in_the_official_order(shared_data: Path) -> None:
    tokenizer = WordTokenizer()
    for name, official in shipped(shared_data).items():
        whole = samples(shared_data, name, tokenizer)
        cut = samples(shared_data, name, tokenizer, max_length=901)
        for sample, uncut, entry in zip(cut, whole, official, strict=True):
            ids = tokenizer(prompt(uncut))["input_ids"]
            assert sample.meta["uncut_tokens"] == len(ids)
            halves = [tokenizer.decode(part, skip_special_tokens=True) for part in (ids[:450], ids[-450:])]
            assert sample.meta["truncated"] == (len(ids) > 901)
            assert prompt(sample) == ("".join(halves) if len(ids) > 901 else prompt(uncut)), entry["_id"]


def test_the_evaluation_scores_as_the_public_function(shared_data: Path) -> None:
    golden = (shared_data / "longbench" / "scorer_golden.jsonl").read_text(encoding="utf-8").splitlines()
    cases = {case["_id"]: case for case in map(json.loads, golden)}
    scored = 0
    for name in shipped(shared_data):
        for sample in samples(shared_data, name):
            case = cases.get(sample.meta["_id"])
            if case is None:
                continue
            found = metrics.score(sample.metric, case["pred"], sample.references, sample.classes)
            assert found == longbench.score(name, case["pred"], case["answers"])
            assert found == pytest.approx(case["score"], abs=1e-9)
            scored += 1
    assert scored == 13


def test_generation_limits_are_those_of_the_official_file(shared_data: Path) -> None:
    limits = json.loads((shared_data / "longbench" / "config" / "dataset2maxlen.json").read_text(encoding="utf-8"))
    for name, task in longbench.TASKS.items():
        assert get_task(name, {"max_length": 100}).generation_limit == limits[task.dataset]
    assert get_task("qasper", {"max_length": 100, "max_new_tokens": 5}).generation_limit == 5


# Truncation


@given(
    context=st.lists(st.integers(0, 999), min_size=1, max_size=60),
    question=st.lists(st.integers(0, 999), min_size=1, max_size=12),
    max_length=st.integers(2, 90),
)
def test_truncation_keeps_both_ends_and_the_length(context: list[int], question: list[int], max_length: int) -> None:
    tokenizer = WordTokenizer()
    first, last = "".join(f" c{word}" for word in context), "\n\n" + "".join(f" q{word}" for word in question)
    cut = cut_prompt(first, last, tokenizer, max_length)
    text = cut.context + cut.question
    assert cut.tokens == 1 + len(context) + len(question)
    assert cut.truncated == (cut.tokens > max_length)
    if not cut.truncated:
        assert (cut.context, cut.question) == (first, last)
        return
    assert len(tokenizer(text)["input_ids"]) <= max_length
    half = max_length // 2
    assert text.endswith("".join(f" q{word}" for word in question[-half:]))
    assert text.startswith("".join(f" c{word}" for word in context[: half - 1]))
    assert cut.question_cut == (half < len(question))
    assert cut.question == (text if cut.question_cut else last)


@pytest.mark.parametrize("max_length", [30, 31])
def test_an_odd_limit_keeps_one_token_less(data_dir: Path, max_length: int) -> None:
    (sample,) = samples(data_dir, "gov_report", max_length=max_length)
    # The first of the 30 is the special one, which decoding drops.
    assert len(WordTokenizer()(prompt(sample), add_special_tokens=False)["input_ids"]) == 29


def test_a_question_that_is_cut_is_never_appended(data_dir: Path) -> None:
    write(data_dir, "qasper", [record(input="why " * 100)])
    (sample,) = samples(data_dir, "qasper", max_length=40)
    assert sample.meta["question_cut"] is True
    tokenizer = WordTokenizer()
    assert tokenizer.decode(render(sample, tokenizer).ids).endswith("why why \nReply:<end>\n<turn>assistant\n")
    with pytest.raises(PromptError, match=r"qasper, sample 0: it has no context .* truncation left no border"):
        render(sample, tokenizer, "appended")


def test_the_question_is_found_where_a_tokenizer_tidies_blanks() -> None:
    question = "\n\nIs it so , or not ?\nAnswer: "
    assert find_question("The end .\n\nIs it so , or not ?\nAnswer: ", question) == len("The end .")
    assert find_question("The end.\n\nIs it so, or not?\nAnswer: ", question) == len("The end.")
    assert find_question("so, or not?\nAnswer: ", question) is None
    assert find_question("Is it so?\nAnswer: ", question) is None
    assert find_question("anything", "") == len("anything")


def test_a_limit_must_be_given() -> None:
    with pytest.raises(TaskError, match=r"qasper: max_length is required: the tokens of a prompt, before the chat"):
        get_task("qasper")
    for wrong in (1, -5, True, 7.5, "8k"):
        with pytest.raises(TaskError, match=f"max_length is required, not {wrong!r}"):
            get_task("qasper", {"max_length": wrong})


# The prompt that a model reads


def test_chat_tasks_are_one_user_turn(data_dir: Path) -> None:
    (sample,) = samples(data_dir, "gov_report")
    tokenizer = WordTokenizer()
    text = tokenizer.decode(render(sample, tokenizer).ids)
    assert text == f"{BOS}<turn>user\n{prompt(sample)}<end>\n<turn>assistant\n"


@pytest.mark.parametrize("name", ["trec", "samsum"])
def test_few_shot_tasks_have_one_bos_and_no_template(data_dir: Path, name: str) -> None:
    write(data_dir, name, [record(name, input="Dialogue\nSummary: ")])
    (sample,) = samples(data_dir, name)
    tokenizer = WordTokenizer()
    assert tokenizer.decode(render(sample, tokenizer).ids) == BOS + prompt(sample)
    assert prompt(sample).endswith("Summary: ")


def test_the_tasks_without_template_are_the_official_ones() -> None:
    plain = {"trec", "triviaqa", "samsum", "lcc", "repobench-p"}
    assert {task.dataset for task in longbench.TASKS.values() if not task.chat} == plain


def test_an_appended_question_leaves_the_context_in_front(data_dir: Path) -> None:
    (sample,) = samples(data_dir, "qasper", max_length=40)
    tokenizer = WordTokenizer()
    apart = render(sample, tokenizer, "appended")
    assert tokenizer.decode(apart.appended) == "\n\nAsked: which one is number 1?\nReply:<end>\n<turn>assistant\n"
    assert apart.ids + apart.appended == render(sample, tokenizer).ids


def test_samsum_alone_ends_at_a_newline_that_is_not_its_first_token(data_dir: Path) -> None:
    (samsum,), (trec,) = samples(data_dir, "samsum"), samples(data_dir, "trec")
    assert (samsum.stop, samsum.min_new_tokens) == (("\n",), 1)
    assert (trec.stop, trec.min_new_tokens) == ((), 0)


def test_trec_brings_its_classes_through_the_cache(data_dir: Path, tmp_path: Path) -> None:
    task = get_task("trec", {"max_length": 30, "allow_partial": True})
    made = [
        prepare(task, WordTokenizer(), "t", DataSources(data_dir), None, 0, 5, 0, tmp_path / "cache") for _ in range(2)
    ]
    assert made[0] == made[1]
    (sample,) = made[1]
    assert sample.classes == ("City", "State")
    assert metrics.score(sample.metric, "City\nType:", sample.references, sample.classes) == 0
    assert metrics.score(sample.metric, "City\nType:", ("City",), sample.classes) == 1
    assert sample.sample_id != replace(sample, classes=("City",)).sample_id


def test_the_last_records_classes_count_for_all(data_dir: Path) -> None:
    write(data_dir, "trec", [record("trec"), record("trec", 2, all_classes=["Date"])])
    assert [sample.classes for sample in samples(data_dir, "trec")] == [("Date",), ("Date",)]


def test_longbench_e_sorts_records_by_length(data_dir: Path) -> None:
    lengths = (0, 3999, 4000, 7999, 8000)
    write(data_dir, "hotpotqa_e", [record("hotpotqa", length, length=length) for length in lengths])
    made = samples(data_dir, "hotpotqa_e")
    assert [sample.meta["bin"] for sample in made] == ["0-4k", "0-4k", "4-8k", "4-8k", "8k+"]
    assert {sample.task for sample in made} == {"hotpotqa_e"}
    assert "bin" not in samples(data_dir, "qasper")[0].meta


# Records


def test_a_short_file_counts_only_where_asked_for(data_dir: Path) -> None:
    with pytest.raises(DataError, match=r"qasper\.jsonl has 1 records, .* has 200: .* allow_partial: true"):
        get_task("qasper", {"max_length": 9}).check(DataSources(data_dir), None)
    task = get_task("qasper", {"max_length": 9, "allow_partial": True})
    task.check(DataSources(data_dir), None)
    assert task.available(DataSources(data_dir)) == 1
    recipe = task.recipe(DataSources(data_dir))
    assert recipe["records"]["count"] == 1  # type: ignore[index]
    write(data_dir, "qasper", [record(number=number) for number in range(200)])
    complete = get_task("qasper", {"max_length": 9}).recipe(DataSources(data_dir))
    assert content_hash(complete) == content_hash(task.recipe(DataSources(data_dir))) != content_hash(recipe)
    write(data_dir, "qasper", [record(number=number) for number in range(201)])
    with pytest.raises(DataError, match="has 201 records, and LongBench's qasper has 200: give that file"):
        task.check(DataSources(data_dir), None)


def test_a_sample_never_stands_in_for_the_records(data_dir: Path) -> None:
    (data_dir / "longbench" / "ship").mkdir()
    (data_dir / "longbench" / "qasper.jsonl").rename(data_dir / "longbench" / "ship" / "qasper.jsonl")
    with pytest.raises(DataError, match=r"needs the file .*; to run on the sample .*ship/qasper\.jsonl alone"):
        get_task("qasper", {"max_length": 9}).check(DataSources(data_dir), None)
    assert len(samples(data_dir, "qasper")) == 1


def test_the_archives_folder_is_looked_in(data_dir: Path) -> None:
    (data_dir / "longbench" / "data").mkdir()
    (data_dir / "longbench" / "qasper.jsonl").rename(data_dir / "longbench" / "data" / "qasper.jsonl")
    assert len(samples(data_dir, "qasper")) == 1


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"context": " \n"}, "the context is empty"),
        ({"context": None}, "context must be text, not None"),
        ({"input": 3}, "input must be text, not 3"),
        ({"answers": "yes"}, "answers must be a list of at least one text, not 'yes'"),
        ({"answers": []}, "answers must be a list"),
        ({"length": "42"}, "length must be a whole number, not '42'"),
        ({"dataset": "hotpotqa"}, "dataset is 'hotpotqa', so this is not a record of qasper"),
        ({"_id": "id1"}, "the same _id is on line 1"),
        ({"_id": 7}, "_id must be text"),
    ],
)
def test_a_bad_record_is_named_with_its_line(data_dir: Path, fields: dict[str, Any], problem: str) -> None:
    path = write(data_dir, "qasper", [record(), record(number=2, **fields)])
    path.write_text(path.read_text().replace("\n", "\n\n", 1))
    with pytest.raises(DataError, match=rf"qasper\.jsonl, line 3 \(_id .*\): {problem}"):
        samples(data_dir, "qasper")


def test_a_missing_column_is_named(data_dir: Path) -> None:
    broken = record()
    del broken["answers"], broken["length"]
    write(data_dir, "qasper", [broken])
    with pytest.raises(DataError, match=r"line 1 \(_id 'id1'\): there is no answers, length; LongBench's columns are"):
        samples(data_dir, "qasper")


def test_trec_needs_its_classes(data_dir: Path) -> None:
    write(data_dir, "trec", [record("trec", all_classes=None)])
    with pytest.raises(DataError, match=r"line 1 .*: all_classes must list the names that trec chooses from, not None"):
        samples(data_dir, "trec")


# Templates and limits


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        ("{input}", r"qasper must hold {context} once.* it holds \['input'\]"),
        ("{context}{context}", "must hold {context} once"),
        ("{context!r}", "must hold {context} once"),
        ("{context}{answers}", r"may hold {input}; it holds \['context', 'answers'\]"),
        ("{context", "must be a text with {context} in it"),
        (7, "must be a text with {context} in it"),
    ],
)
def test_a_template_that_cannot_be_filled_is_refused(data_dir: Path, template: object, problem: str) -> None:
    config(data_dir, "dataset2prompt", TEMPLATES | {"qasper": template})
    with pytest.raises(DataError, match=rf"dataset2prompt\.json: .*{problem}"):
        samples(data_dir, "qasper")


def test_a_config_file_without_the_task_or_with_another_limit_is_refused(data_dir: Path) -> None:
    config(data_dir, "dataset2maxlen", {"qasper": 100})
    with pytest.raises(DataError, match=r"maxlen\.json: qasper is 100, and officially 128; .* set max_new_tokens"):
        samples(data_dir, "qasper")
    with pytest.raises(DataError, match=r"dataset2maxlen\.json has no entry hotpotqa"):
        samples(data_dir, "hotpotqa")


def test_the_recipe_follows_template_and_settings(data_dir: Path) -> None:
    def recipe(**settings: Any) -> str:
        task = get_task("qasper", {"max_length": LONG, "allow_partial": True} | settings)
        return content_hash(task.recipe(DataSources(data_dir)))

    before = recipe()
    assert len({before, recipe(max_length=9), recipe(max_new_tokens=9)}) == 3
    config(data_dir, "dataset2prompt", TEMPLATES | {"qasper": "{context} {input}"})
    assert recipe() != before
