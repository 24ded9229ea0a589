"""Finding tasks by name, without heavy imports; finding files; keeping prepared samples."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from word_tokenizer import WordTokenizer

from tasks.cache import prepare
from tasks.draws import Draws
from tasks.metrics import METRICS
from tasks.registry import UnknownTask, example_task, get_task, task_names
from tasks.sample import Sample
from tasks.sources import DataError, DataSources, fingerprint, read_text
from tasks.tokens import TokenCounter


def prepared(folder: Path, count: int, seed: int = 0, context: int = 600, tokenizer: str = "t") -> list[Sample]:
    task = get_task("niah_single_1")
    return prepare(task, WordTokenizer(), tokenizer, DataSources(), context, seed, count, 10, folder)


def test_planning_imports_nothing_heavy() -> None:
    check = (
        "import sys; from tasks.registry import example_task, get_task, task_names;"
        "from tasks.sources import DataSources; [example_task(name).metric for name in task_names()];"
        "get_task('niah_single_2').recipe(DataSources());"
        "print(sorted({'torch', 'transformers', 'datasets', 'numpy', 'ray'} & set(sys.modules)))"
    )
    root = Path(__file__).resolve().parents[1]
    done = subprocess.run([sys.executable, "-c", check], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_every_task_describes_itself() -> None:
    for name in task_names():
        task = example_task(name)
        assert task.name == name
        assert task.metric in METRICS
        assert task.summary
    assert example_task("gsm8k").generation_limit == 512
    assert not example_task("gsm8k").contextual


def test_an_unknown_task_is_refused_with_the_nearest_names() -> None:
    with pytest.raises(UnknownTask, match=r"no task 'niah_singel_2' \(did you mean niah_single_2"):
        get_task("niah_singel_2")


def test_tasks_are_values() -> None:
    assert get_task("vt", {"max_new_tokens": 9}) == get_task("vt", {"max_new_tokens": 9}) != get_task("vt")


def test_equal_questions_are_samples_of_their_own(tmp_path: Path) -> None:
    class Twice(type(get_task("vt"))):  # type: ignore[misc]
        def samples(self, *arguments: Any) -> list[Sample]:
            first = Sample("vt", 0, "context", "question", "", ("a",), 8, "string_match_all")
            return [first, replace(first, index=1), replace(first, index=2, question="another")]

    arguments = Twice(), WordTokenizer(), "t", DataSources(), 600, 0, 3, 10, tmp_path
    made, read = prepare(*arguments), prepare(*arguments)
    assert made == read
    assert [sample.repeat for sample in made] == [0, 1, 0]
    assert len({sample.sample_id for sample in made}) == 3


def test_streams_differ_by_purpose_and_identity_and_repeat() -> None:
    draws = Draws(0, "vt", 4096)
    first = draws.stream("depths").random()
    assert draws.stream("depths").random() == first
    assert len({first, draws.stream("words").random(), Draws(1, "vt", 4096).stream("depths").random()}) == 3
    assert Draws("a", "b").stream("c").random() != Draws("a b").stream("c").random()


def test_pieces_are_counted_once_and_forgotten_when_they_are_too_many() -> None:
    class Counting(WordTokenizer):
        seen = 0

        def _ids(self, text: str, add_special_tokens: bool) -> list[int]:
            self.seen += 1
            return super()._ids(text, add_special_tokens)

    tokenizer = Counting()
    counter = TokenCounter(tokenizer)
    assert counter.pieces(["a b", "c", "a b"]) == counter.pieces(["a b", "c", "a b"]) == [2, 1, 2]
    assert tokenizer.seen == 2
    counter.remembered = 2
    assert counter.pieces(["c", "d e f"]) == [1, 3]
    assert counter.pieces(["a b"]) == [2]


# Files


def test_a_data_folder_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"there is no folder .*/nowhere"):
        DataSources(tmp_path / "nowhere")
    folder = tmp_path / "gone"
    folder.mkdir()
    sources = DataSources(folder)
    folder.rmdir()
    with pytest.raises(DataError, match=r"there is no folder .*/gone"):
        sources.find("ruler/templates.json")


def test_a_fingerprint_follows_the_content(tmp_path: Path) -> None:
    file = tmp_path / "a"
    file.write_text("one")
    first = fingerprint(file)
    assert fingerprint(file) == first
    file.write_text("three")
    assert fingerprint(file) != first


def test_a_file_that_is_not_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"\xff\xfe")
    with pytest.raises(DataError, match="a is not UTF-8 text"):
        read_text(tmp_path / "a")


# Prepared samples


def test_prepared_samples_are_read_back_as_they_were_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = prepared(tmp_path, count=4)
    monkeypatch.setattr(type(get_task("niah_single_1")), "samples", lambda *args: pytest.fail("made again"))
    assert prepared(tmp_path, count=4) == made
    assert prepared(tmp_path, count=2) == made[:2]


def test_more_samples_than_are_kept_replace_them(tmp_path: Path) -> None:
    few, many = prepared(tmp_path, count=2), prepared(tmp_path, count=5)
    assert many[:2] == few
    [file] = tmp_path.glob("*.jsonl")
    assert len(file.read_text().splitlines()) == 1 + 5


def test_other_seeds_contexts_and_tokenizers_have_other_files(tmp_path: Path) -> None:
    prepared(tmp_path, 1)
    prepared(tmp_path, 1, seed=1)
    prepared(tmp_path, 1, context=700)
    prepared(tmp_path, 1, tokenizer="u")
    assert len(list(tmp_path.glob("*.jsonl"))) == 4


@pytest.mark.parametrize("damage", ["cut", "edit", "swap", "short", "binary", "array"])
def test_a_damaged_file_is_made_again_with_a_warning(
    damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = prepared(tmp_path, count=3)
    [file] = tmp_path.glob("*.jsonl")
    sound = file.read_text()
    lines = sound.splitlines()
    edited = json.dumps(json.loads(lines[2]) | {"meta": {}})
    file.write_bytes(
        {
            "cut": sound[:-40].encode(),
            "edit": "\n".join([*lines[:2], edited, lines[3], ""]).encode(),
            "swap": "\n".join([lines[0], lines[2], lines[1], lines[3], ""]).encode(),
            "short": "\n".join([*lines[:3], ""]).encode(),
            "binary": b"\xff\x00",
            "array": b"[1]\n[2]\n[3]\n",
        }[damage]
    )
    with caplog.at_level(logging.WARNING):
        assert prepared(tmp_path, count=3) == made
    assert "is damaged" in caplog.text
    assert file.read_text() == sound


def test_concurrent_writers_leave_one_sound_file(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda _: prepared(tmp_path, count=3), range(16)))
    assert all(result == results[0] for result in results)
    assert len(list(tmp_path.glob("*.jsonl"))) == 1


def test_a_task_on_file_gives_no_more_than_it_has(tmp_path: Path) -> None:
    (tmp_path / "gsm8k").mkdir()
    (tmp_path / "gsm8k" / "test.jsonl").write_text('{"question": "Q?", "answer": "#### 4"}')
    task, sources, folder = get_task("gsm8k", {"allow_partial": True}), DataSources(tmp_path), tmp_path / "prepared"
    for seed in (0, 1):
        [sample] = prepare(task, WordTokenizer(), "t", sources, None, seed, 10, 0, folder)
        assert sample.references == ("4",)
    assert len(list(folder.glob("*.jsonl"))) == 1  # seeds change nothing
