"""The sweep file: what it says, and what is said about a bad one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import stub_worker
import yaml

from kvcache.budget import Budget
from pipeline.diagnostics_file import load_diagnostics
from pipeline.spec import SpecError, load_sweep


@pytest.fixture(autouse=True)
def _stubs(monkeypatch: pytest.MonkeyPatch) -> None:
    stub_worker.install(monkeypatch)


def sweep(**changes: Any) -> dict[str, Any]:
    """A good sweep with some sections replaced; None leaves one out."""
    content: dict[str, Any] = {
        "name": "quick",
        "models": [{"label": "tiny", "source": "tiny"}],
        "contexts": [1024],
        "tasks": ["niah_single_1"],
        "methods": ["full", "window"],
        "budgets": ["10%"],
        "output": "results/quick",
    }
    return {key: value for key, value in {**content, **changes}.items() if value is not None}


def write(folder: Path, **changes: Any) -> Path:
    file = folder / "sweep.yaml"
    file.write_text(yaml.safe_dump(sweep(**changes)))
    return file


def complaint(folder: Path, **changes: Any) -> str:
    file = write(folder, **changes)
    with pytest.raises(SpecError) as caught:
        load_sweep(file)
    text = str(caught.value)
    assert text.startswith(f"{file}: ")
    assert "\n" not in text
    return text.removeprefix(f"{file}: ")


def test_names_stand_for_entries_without_settings(tmp_path: Path) -> None:
    loaded = load_sweep(write(tmp_path, tasks=["niah_single_1", {"name": "vt", "samples": 4, "max_new_tokens": 20}]))
    assert [(task.name, task.samples, task.settings) for task in loaded.tasks] == [
        ("niah_single_1", None, {}),
        ("vt", 4, {"max_new_tokens": 20}),
    ]


def test_a_method_takes_its_settings_beside_its_name(tmp_path: Path) -> None:
    loaded = load_sweep(write(tmp_path, methods=[{"name": "window", "label": "wide", "window": 64, "decay": 1}]))
    entry = loaded.methods[0]
    assert (entry.shown, entry.method().settings()) == ("wide", {"window": 64, "decay": 1.0})


def test_budgets_are_read_as_people_write_them(tmp_path: Path) -> None:
    file = tmp_path / "sweep.yaml"
    text = yaml.safe_dump(sweep(budgets=None)) + "budgets: [10%, 0.2, 128 tokens, unlimited, 1]\n"
    file.write_text(text)
    assert [str(budget) for budget in load_sweep(file).budgets] == ["10%", "20%", "128 tokens", "unlimited", "100%"]
    assert load_sweep(file).budgets[0] == Budget.parse("10%")


def test_the_first_line_of_an_executable_file_is_a_comment(tmp_path: Path) -> None:
    file = tmp_path / "sweep.yaml"
    file.write_text("#!/usr/bin/env -S python -m pipeline\n" + yaml.safe_dump(sweep()))
    assert load_sweep(file).name == "quick"


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"none\.yaml: cannot be read: No such file"):
        load_sweep(tmp_path / "none.yaml")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("name: [", "is not valid YAML"),
        ("just words", "is not a sweep"),
        ("name: a\nname: b\n", "the key 'name' occurs twice"),
        (b"\xff\xfe", "is not UTF-8"),
    ],
)
def test_what_is_no_sweep_at_all_is_refused(tmp_path: Path, text: str | bytes, said: str) -> None:
    file = tmp_path / "sweep.yaml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(SpecError, match=said):
        load_sweep(file)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"smaples": 5}, "smaples: unknown key; did you mean samples?"),
        ({"engine": {"row_widht": 32}}, "engine.row_widht: unknown key; did you mean row_width?"),
        ({"engine": {"row_width": 0}}, "engine.row_width: must be at least 1"),
        ({"cluster": {"max_actor": 2}}, "cluster.max_actor: unknown key; did you mean max_actors?"),
        (
            {"models": [{"label": "a", "sorce": "b", "source": "b"}]},
            "models[0].sorce: unknown key; did you mean source",
        ),
        ({"models": [{"label": "a"}]}, "models[0].source: is missing"),
        ({"models": None}, "models: is missing"),
        ({"models": []}, "models: List should have at least 1 item"),
        ({"models": [{"label": "a", "source": "b", "dtype": "fp8"}]}, "models[0].dtype: Input should be 'bfloat16'"),
        ({"models": [{"label": "a", "source": "b"}, {"label": "a", "source": "c"}]}, "models: a is listed twice"),
        ({"name": False}, "name: Input should be a valid string, not False; quote it if it is a name"),
        ({"protocol": {"question": "after"}}, "protocol.question: Input should be 'compressed' or 'appended'"),
        ({"samples": 0}, "samples: Input should be greater than or equal to 1"),
        ({"samples": True}, "samples: Input should be a valid integer, not True"),
        ({"contexts": [1024, 1024]}, "contexts: 1024 is listed twice"),
        ({"contexts": None}, "contexts: niah_single_1 needs context lengths"),
        ({"seeds": [-1]}, "seeds[0]: Input should be greater than or equal to 0"),
    ],
)
def test_a_bad_field_is_named(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    assert complaint(tmp_path, **changes).startswith(said)


@pytest.mark.parametrize(
    ("budget", "said"),
    [
        (0, "a budget must be above 0"),
        ("0%", "a budget must be above 0"),
        ("130%", "a budget is at most 100 %"),
        (1.3, "a budget is at most 100 %"),
        ("128.5 tokens", "tokens come whole"),
        ("lots", "is not a budget"),
        (True, "is not a budget"),
    ],
)
def test_a_budget_that_means_nothing_is_refused(tmp_path: Path, budget: Any, said: str) -> None:
    text = complaint(tmp_path, budgets=["10%", budget])
    assert text.startswith("budgets[1]: ")
    assert said in text


def test_one_budget_written_twice_is_refused(tmp_path: Path) -> None:
    assert complaint(tmp_path, budgets=["10%", 0.1]) == "budgets: 10% is listed twice"


@pytest.mark.parametrize(
    ("method", "said"),
    [
        ("windwo", "methods[1]: unknown method 'windwo'; did you mean window?"),
        ({"name": "window", "widow": 3}, "methods[1].widow: unknown setting of window; did you mean window?"),
        ({"name": "window", "window": "wide"}, "methods[1].window: Input should be a valid integer"),
        ({"name": "window", "window": 0}, "methods[1]: window must be at least 1"),
        ({"window": 3}, "methods[1]: write a method's name"),
        ("full", "methods: full is listed twice: give each setting a label of its own"),
    ],
)
def test_a_bad_method_is_named_with_the_nearest(tmp_path: Path, method: Any, said: str) -> None:
    assert complaint(tmp_path, methods=["full", method]).startswith(said)


@pytest.mark.parametrize(
    ("task", "said"),
    [
        ("niah_singel_1", "tasks[0]: there is no task 'niah_singel_1' (did you mean niah_single_1"),
        ({"name": "vt", "max_tokens": 3}, "tasks[0]: task vt: there is no setting 'max_tokens'"),
        ({"name": "gsm8k", "contexts": [1024]}, "tasks[0].contexts: gsm8k has lengths of its own"),
    ],
)
def test_a_bad_task_is_named_with_the_nearest(tmp_path: Path, task: Any, said: str) -> None:
    assert complaint(tmp_path, tasks=[task]).startswith(said)


def test_every_problem_gets_a_line(tmp_path: Path) -> None:
    file = write(tmp_path, samples=0, budgets=["130%"])
    with pytest.raises(SpecError) as caught:
        load_sweep(file)
    assert [field for field, _ in caught.value.problems] == ["samples", "budgets[0]"]
    assert len(str(caught.value).splitlines()) == 2


def test_a_relative_file_starts_from_the_sweep_files_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    entry = {"name": "own", "file": "own.jsonl", "metric": "qa_f1", "max_new_tokens": 4}
    write(tmp_path, tasks=[entry])
    loaded = load_sweep(Path("..") / "sweep.yaml")
    assert Path(loaded.tasks[0].settings["file"]).resolve() == tmp_path / "own.jsonl"


# Groups


@pytest.mark.parametrize(
    ("group", "settings", "count", "first", "last"),
    [
        ("ruler", {}, 13, "niah_single_1", "qa_2"),
        ("ruler-11", {}, 11, "niah_single_1", "fwe"),
        ("longbench", {"max_length": 3500}, 16, "narrativeqa", "repobench-p"),
        ("longbench-12", {"max_length": 3500}, 12, "narrativeqa", "samsum"),
        ("longbench-e", {"max_length": 3500}, 13, "qasper_e", "repobench-p_e"),
    ],
)
def test_a_group_stands_for_its_members(
    tmp_path: Path, group: str, settings: dict[str, Any], count: int, first: str, last: str
) -> None:
    loaded = load_sweep(
        write(tmp_path, tasks=[{"name": group, "samples": 3, "max_new_tokens": 5, **settings}, "gsm8k"])
    )
    *members, alone = loaded.tasks
    assert (len(members), members[0].name, members[-1].name) == (count, first, last)
    assert {(task.samples, task.place, task.group) for task in members} == {(3, 0, group)}
    assert all(task.settings == {"max_new_tokens": 5, **settings} for task in members)
    assert (alone.name, alone.place, alone.group) == ("gsm8k", 1, "")


def test_members_of_a_group_get_the_settings_that_they_have(tmp_path: Path) -> None:
    loaded = load_sweep(write(tmp_path, tasks=[{"name": "ruler-11", "haystack": "word-lists", "wording": "own"}]))
    settings = {task.name: task.settings for task in loaded.tasks}
    assert settings["niah_single_2"] == {"haystack": "word-lists", "wording": "own"}
    assert settings["niah_single_1"] == settings["vt"] == {"wording": "own"}


@pytest.mark.parametrize(
    ("tasks", "said"),
    [
        (["vt", "ruler"], "tasks: vt is listed twice, by itself and in ruler"),
        (["ruler", "vt"], "tasks: vt is listed twice, in ruler and by itself"),
        (["ruler", "ruler-11"], "tasks: niah_single_1 is listed twice, in ruler and in ruler-11"),
        (["vt", "vt"], "tasks: vt is listed twice"),
        (["gsm8k", {"name": "ruler", "wordng": "own"}], "tasks[1]: task ruler: there is no setting 'wordng' (did you"),
        ([{"name": "ruler", "wording": "odd"}], "tasks[0]: ruler: task niah_single_1: wording must be one of"),
        (["longbench"], "tasks[0]: longbench: task narrativeqa: max_length is required"),
        (
            [{"name": "longbench", "max_length": 99, "contexts": [9]}],
            "tasks[0].contexts: narrativeqa has lengths of its",
        ),
        (["rulr"], "tasks[0]: there is no task 'rulr' (did you mean ruler"),
    ],
)
def test_a_bad_group_is_named(tmp_path: Path, tasks: list[Any], said: str) -> None:
    assert complaint(tmp_path, tasks=tasks).startswith(said)


def test_a_file_of_diagnostics_is_no_sweep(tmp_path: Path) -> None:
    file = tmp_path / "inside.yaml"
    file.write_text("model: tiny\nconditions: {R0: {}}\n")
    with pytest.raises(SpecError, match=r"is a file of diagnostics, not a sweep: run `kvsweep diagnostics .*inside"):
        load_sweep(file)


def test_a_sweep_is_no_file_of_diagnostics(tmp_path: Path) -> None:
    file = tmp_path / "sweep.yaml"
    file.write_text(yaml.safe_dump(sweep()))
    with pytest.raises(SpecError, match=r"is a sweep, not a file of diagnostics: run `kvsweep run .*sweep.yaml`"):
        load_diagnostics(file)
