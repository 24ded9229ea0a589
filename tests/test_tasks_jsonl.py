"""Tasks of one's own: prompts in a JSONL file, classes behind an entry point, and the documentation of both."""

from __future__ import annotations

import json
import re
import sys
import types
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import stub_worker
import yaml
from test_spec import sweep
from word_tokenizer import WordTokenizer

from pipeline.plan import expand
from pipeline.spec import load_sweep
from tasks import registry
from tasks.metrics import score
from tasks.prompt import PromptError, render
from tasks.registry import example_task, get_task, task_names
from tasks.sample import Sample
from tasks.sources import DataError, DataSources
from tasks.task import TaskError

PAGE = (Path(__file__).resolve().parents[1] / "docs" / "adding-a-task.md").read_text(encoding="utf-8")
GOOD = {"prompt": "What is 1 and 1?", "references": ["2"]}


def block(language: str) -> str:
    [text] = re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)
    return str(text)


def write(folder: Path, *records: object) -> Path:
    file = folder / "own.jsonl"
    file.write_text("\n".join(record if isinstance(record, str) else json.dumps(record) for record in records))
    return file


def made(file: Path, sources: DataSources | None = None, **settings: Any) -> list[Sample]:
    task = get_task("own", {"file": str(file), "metric": "string_match_all", "max_new_tokens": 8, **settings})
    return task.samples(WordTokenizer(), sources or DataSources(), None, 0, 100, 0)


def complaint(file: Path, **settings: Any) -> str:
    with pytest.raises(TaskError) as caught:
        made(file, **settings)
    return str(caught.value)


def test_records_about_one_text_share_a_document_unless_they_name_their_own(tmp_path: Path) -> None:
    about = [{"context": text, "question": f"{text}?", "references": ["2"], "id": text} for text in ("one", "two")]
    again = {**about[0], "question": "And then?", "id": "again"}
    own = {**about[0], "question": "Or else?", "id": "own", "meta": {"document": "a book"}}
    first, second, third, fourth, fifth = made(write(tmp_path, *about, again, own, GOOD))
    assert first.meta["document"] == third.meta["document"] != second.meta["document"]
    assert fourth.meta["document"] == "a book"
    assert "document" not in fifth.meta


# The documentation


def test_the_documented_file_is_a_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stub_worker.install(monkeypatch)
    (tmp_path / "invoices.jsonl").write_text(block("json"))
    file = tmp_path / "sweep.yaml"
    file.write_text(yaml.safe_dump(sweep(tasks=yaml.safe_load(block("yaml"))["tasks"])))
    loaded, sources = load_sweep(file), DataSources()
    grid = expand(loaded, file, sources)
    assert {(cell.task, cell.samples, cell.context) for cell in grid.cells} == {("invoices", 3, 0)}
    [entry] = loaded.tasks
    first, second, third = get_task(entry.name, entry.settings).samples(WordTokenizer(), sources, None, 0, 50, 0)
    assert first.context + first.question == "Invoice 17. Total: 310 EUR. Due on 4 May.\n\nWhen is it due?"
    assert (second.references, second.max_new_tokens, first.max_new_tokens) == (("95",), 8, 32)
    assert third.meta == {"kind": "short", "file": "invoices.jsonl"}
    assert first.meta["id"] == "a-17"
    assert all(score(sample.metric, sample.references[0], sample.references[:1]) == 1 for sample in (first, third))


@pytest.fixture
def entry_points(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[EntryPoint]]:
    points: list[EntryPoint] = []
    monkeypatch.setattr(registry, "_entry_points", lambda: points)
    registry._registered.cache_clear()
    registry._load.cache_clear()
    yield points
    registry._registered.cache_clear()
    registry._load.cache_clear()


@pytest.fixture
def line_lookup(monkeypatch: pytest.MonkeyPatch) -> EntryPoint:
    """The documented class, and the entry point that the documentation gives it."""
    name, value = re.findall(r'^(\S+) = "(.*)"$', block("toml"), re.MULTILINE)[0]
    module = types.ModuleType(value.partition(":")[0])
    monkeypatch.setitem(sys.modules, "my_package", types.ModuleType("my_package"))
    monkeypatch.setitem(sys.modules, module.__name__, module)  # where dataclasses look it up
    exec(compile(block("python"), module.__name__, "exec"), module.__dict__)
    return EntryPoint(name, value, registry.ENTRY_POINTS)


def test_the_documented_class_is_a_task(entry_points: list[EntryPoint], line_lookup: EntryPoint) -> None:
    entry_points.append(line_lookup)
    assert "line-lookup" in task_names()
    assert example_task("line-lookup").name == "line-lookup"
    task, tokenizer = get_task("line-lookup", {"max_new_tokens": 9}), WordTokenizer()
    samples = task.samples(tokenizer, DataSources(), 400, 0, 5, 10)
    assert samples == task.samples(tokenizer, DataSources(), 400, 0, 5, 10)
    assert samples != task.samples(tokenizer, DataSources(), 400, 1, 5, 10)
    for sample in samples:
        assert f"Line {sample.meta['line']}: {sample.references[0]}\n" in sample.context
        assert 300 < len(render(sample, tokenizer).ids) + 9 <= 400
    with pytest.raises(TaskError, match="too small"):
        task.samples(tokenizer, DataSources(), 60, 0, 1, 10)


@pytest.mark.parametrize("name", ["vt", "ruler"])
def test_a_registered_name_that_is_taken_is_refused(
    name: str, entry_points: list[EntryPoint], line_lookup: EntryPoint
) -> None:
    entry_points.append(EntryPoint(name, line_lookup.value, registry.ENTRY_POINTS))
    with pytest.raises(TaskError, match=rf"my_package\S* registers the task '{name}'.* that name is taken"):
        get_task("gsm8k")


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("no_such_module:Task", "cannot be loaded: No module named 'no_such_module'"),
        ("json:dumps", "is no dataclass"),
        ("tasks.sample:Sample", "lacks name, version"),
        ("tasks.gsm8k:GSM8K", "calls itself 'gsm8k'"),
    ],
)
def test_what_is_no_task_is_refused_when_it_is_used(value: str, said: str, entry_points: list[EntryPoint]) -> None:
    entry_points.append(EntryPoint("mine", value, registry.ENTRY_POINTS))
    assert get_task("vt").name == "vt"
    with pytest.raises(TaskError, match=re.escape(said)):
        get_task("mine")


# Records


def test_a_prompt_as_it_is_has_no_context_to_compress_alone(tmp_path: Path) -> None:
    [sample] = made(write(tmp_path, GOOD))
    assert (sample.context, sample.question) == ("", GOOD["prompt"])
    assert render(sample, WordTokenizer()).ids
    with pytest.raises(PromptError, match="no context to compress"):
        render(sample, WordTokenizer(), "appended")


def test_an_appended_question_is_the_records(tmp_path: Path) -> None:
    tokenizer = WordTokenizer()
    [sample] = made(write(tmp_path, {"context": "Long.", "question": "What?", "references": "x"}), separator=" ")
    assert "What?" in tokenizer.decode(render(sample, tokenizer, "appended").appended)


def test_settings_of_a_record_go_before_the_tasks(tmp_path: Path) -> None:
    record = {**GOOD, "max_new_tokens": 3, "stop": "\n", "answer_prefix": " It is", "classes": ["2", "3"]}
    file = write(tmp_path, record, {**GOOD, "prompt": "What is 2 and 2?"})
    first, second = made(file, chat=False)
    assert (first.max_new_tokens, first.stop, first.answer_prefix, first.classes) == (3, ("\n",), " It is", ("2", "3"))
    assert (second.max_new_tokens, second.chat) == (8, False)
    settings = {"file": str(file), "metric": "string_match_all", "max_new_tokens": 8}
    assert get_task("own", settings).generation_limit == 8


def test_a_long_prompt_loses_its_middle_and_keeps_its_question(tmp_path: Path) -> None:
    context = " ".join(f"w{index}" for index in range(200))
    [sample] = made(write(tmp_path, {"context": context, "question": "What is it?", "references": "x"}), max_length=40)
    assert sample.question == "What is it?"
    assert "w0 " in sample.context
    assert "w100" not in sample.context
    assert "w199" in sample.context
    assert sample.meta["truncated"] is True


def test_another_file_is_another_recipe_and_another_place_is_not(tmp_path: Path) -> None:
    def recipe(folder: str, record: dict[str, Any]) -> dict[str, object]:
        (tmp_path / folder).mkdir(exist_ok=True)
        file = write(tmp_path / folder, record)
        return get_task("own", {"file": str(file), "metric": "qa_f1", "max_new_tokens": 8}).recipe(DataSources())

    assert recipe("a", GOOD) == recipe("b", GOOD)
    assert recipe("a", GOOD) != recipe("c", {**GOOD, "references": ["two"]})


def test_the_file_is_among_those_that_were_found(tmp_path: Path) -> None:
    sources, file = DataSources(), write(tmp_path, GOOD)
    made(file, sources)
    assert sources.resolution()["files"][str(file)]["from"] == "own file"


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ({"prompt": "Q?", "refrences": ["2"]}, "there is no field 'refrences' (did you mean references?)"),
        ({"prompt": "Q?"}, "references is missing"),
        ({"prompt": "Q?", "references": []}, "references must be text, or a list of at least one text, not []"),
        ({"prompt": "Q?", "references": [2]}, "references must be text, or a list of at least one text, not [2]"),
        ({"prompt": "Q?", "references": ["2", " "]}, "references holds an empty text"),
        ({"prompt": " ", "references": ["2"]}, "prompt is empty"),
        ({"prompt": None, "references": ["2"]}, "prompt must be text, not None"),
        ({"context": "", "question": "Q?", "references": ["2"]}, "context is empty"),
        ({"context": "C", "references": ["2"]}, "question is missing; a record has prompt, or context and question"),
        ({"references": ["2"]}, "prompt is missing; a record has prompt, or context and question"),
        ({"prompt": "Q?", "context": "C", "references": ["2"]}, "prompt stands for the whole text"),
        ({**GOOD, "prompt": "Other?", "id": "a"}, "id 'a' is that of line 1"),
        ({**GOOD, "id": "b"}, "the same record as line 1"),
        ({**GOOD, "max_new_tokens": 0}, "max_new_tokens must be a whole number of at least 1, not 0"),
        ({**GOOD, "stop": [""]}, "stop holds an empty text"),
        ({**GOOD, "meta": "x"}, "meta must be an object, not 'x'"),
        ({**GOOD, "id": 1.5}, "id must be text or a whole number, not 1.5"),
        ('{"prompt": "cut of', "is not JSON"),
        ("[1]", "expected an object with fields"),
    ],
)
def test_a_bad_record_is_named_by_file_line_and_field(tmp_path: Path, record: object, said: str) -> None:
    file = write(tmp_path, {**GOOD, "id": "a"}, "", record)
    text = complaint(file)
    assert text.startswith(f"task own: {file}, line 3")
    assert said in text


@pytest.mark.parametrize(
    ("metric", "record", "said"),
    [
        ("gsm8k_flexible", {"prompt": "Q?", "references": ["two"]}, "no answer matches the reference 'two'"),
        ("qa_f1", {"prompt": "Q?", "references": ["the"]}, "no answer matches the reference 'the'"),
        ("classification", {"prompt": "Q?", "references": ["two"]}, "needs classes, with the references among them"),
        ("retrieval", {"prompt": "Q?", "references": ["two"]}, "cannot read the reference 'two'"),
    ],
)
def test_references_that_the_metric_cannot_read_are_found_before_anything_runs(
    tmp_path: Path, metric: str, record: object, said: str
) -> None:
    text = complaint(write(tmp_path, record), metric=metric)
    assert ", line 1: " in text
    assert said in text


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"metric": "string_match_al"}, "there is no metric 'string_match_al' (did you mean string_match_all"),
        ({"metric": ""}, "metric is required; there are string_match_all"),
        ({"metric": ["qa_f1"]}, "there is no metric ['qa_f1']"),
        ({"metrc": "qa_f1"}, "task own: there is no setting 'metrc' (did you mean metric?)"),
        ({"max_length": 1}, "max_length must be a whole number of at least 2, not 1"),
        ({"chat": "yes"}, "chat must be one of True, False, not 'yes'"),
        ({"max_new_tokens": None}, "line 1: neither the record nor the task says max_new_tokens"),
        ({"max_new_tokens": 0}, "max_new_tokens must be a whole number of at least 1"),
    ],
)
def test_a_bad_setting_is_named(tmp_path: Path, settings: dict[str, Any], said: str) -> None:
    assert said in complaint(write(tmp_path, GOOD), **settings)


def test_a_name_that_is_taken_is_refused(tmp_path: Path) -> None:
    settings = {"file": str(write(tmp_path, GOOD)), "metric": "qa_f1"}
    for name, said in (("gsm8k", "the name is taken"), ("ruler", "that of a group"), ("a/b", "letters, digits")):
        with pytest.raises(TaskError, match=said):
            get_task(name, settings)


def test_a_file_that_is_not_there_or_has_nothing_in_it_is_refused(tmp_path: Path) -> None:
    assert complaint(tmp_path / "none.jsonl") == f"task own needs the file {tmp_path}/none.jsonl, which is not there"
    with pytest.raises(DataError, match="has no records"):
        made(write(tmp_path, ""))
