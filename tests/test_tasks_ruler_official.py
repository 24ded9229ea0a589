"""The official generator: its own samples to the byte, its wording from its own data, and an end where it has none."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from word_tokenizer import WordTokenizer

from tasks.registry import get_task
from tasks.ruler import METRIC_OF
from tasks.ruler_official import record
from tasks.ruler_official_niah import Compounds
from tasks.ruler_official_words import zeta_counts
from tasks.ruler_words import frequencies
from tasks.sample import Sample
from tasks.sources import DataError, DataSources
from tasks.task import ContextTooSmall, TaskError
from tasks.wording import load_wording
from tasks.words import numbered

GOLDEN = "golden_4096_cl100k"
ESSAYS = ("niah_single_2", "niah_single_3", "niah_multikey_1", "niah_multivalue", "niah_multiquery")
WITHOUT_ESSAYS = [name for name in METRIC_OF if name not in ESSAYS]


class Cl100k:
    """The tokenizer of the golden samples."""

    def __init__(self, encoding: Any) -> None:
        self.encoding = encoding

    def __call__(self, text: str, *, add_special_tokens: bool = True) -> dict[str, list[int]]:
        return {"input_ids": self.encoding.encode(text)}


@pytest.fixture(scope="module")
def cl100k() -> Cl100k:
    tiktoken = pytest.importorskip("tiktoken", reason="the golden samples need tiktoken: pip install -e '.[dev]'")
    package = importlib.util.find_spec("llama_index")
    roots = [Path(root) for root in (package.submodule_search_locations or ())] if package else []
    folders = [folder for root in roots if (folder := root / "core" / "_static" / "tiktoken_cache").is_dir()]
    if not folders:
        pytest.skip("cl100k_base comes with llama-index-core: pip install --no-deps llama-index-core")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TIKTOKEN_CACHE_DIR", str(folders[0]))
        return Cl100k(tiktoken.get_encoding("cl100k_base"))


def official(
    name: str,
    sources: DataSources,
    tokenizer: Any,
    context: int = 4096,
    count: int = 3,
    seed: int = 0,
    overhead: int = 0,
) -> list[Sample]:
    chosen: dict[str, Any] = {"generator": "official"}
    chosen |= {"haystack": "state_of_the_union_1945-2006.txt"} if name in ESSAYS else {}
    chosen |= {"allow_partial": True} if name.startswith("qa") else {}
    task = get_task(name, chosen)
    task.check(sources, context)
    return task.samples(tokenizer, sources, context, seed, count, overhead)


# The bytes


@pytest.mark.parametrize("name", METRIC_OF)
def test_the_golden_samples_are_reproduced_to_the_byte(name: str, shared_data: Path, cl100k: Cl100k) -> None:
    if name in ESSAYS:
        pytest.importorskip("nltk", reason="the official generator cuts essays with nltk: pip install -e '.[official]'")
    golden = (shared_data / "ruler" / GOLDEN / f"{name}.jsonl").read_text().splitlines()
    made = official(name, DataSources(shared_data), cl100k)
    assert [json.dumps(record(sample)) for sample in made] == golden
    assert {sample.meta["generator"] for sample in made} == {"official"}


@pytest.mark.parametrize("name", WITHOUT_ESSAYS)
def test_seeds_are_the_official_ones_from_42_and_samples_do_not_depend_on_their_number(
    name: str, shared_data: Path
) -> None:
    sources, tokenizer = DataSources(shared_data), WordTokenizer()
    first, second = official(name, sources, tokenizer, 3000, count=2)
    assert official(name, sources, tokenizer, 3000, count=3)[:2] == [first, second]
    [other] = official(name, sources, tokenizer, 3000, count=1, seed=1)
    assert (first.meta["random_seed"], other.meta["random_seed"]) == (42, 43)
    assert first.context != other.context


@pytest.mark.parametrize("name", WITHOUT_ESSAYS)
def test_a_chat_template_takes_its_tokens_from_the_context(name: str, shared_data: Path) -> None:
    tokenizer = WordTokenizer()
    for sample in official(name, DataSources(shared_data), tokenizer, 2600, count=2, overhead=150):
        text = sample.context + sample.question + sample.answer_prefix
        length = len(tokenizer(text, add_special_tokens=False)["input_ids"]) + sample.max_new_tokens
        assert sample.meta["length"] == length <= 2600 - 150
        assert sample.meta["length_w_model_temp"] == length + 150


def test_a_chat_template_that_leaves_no_room_for_the_example_is_refused(shared_data: Path) -> None:
    with pytest.raises(
        TaskError, match=r"task vt: .* in 500 tokens less the chat template's 400, at any context length"
    ):
        official("vt", DataSources(shared_data), WordTokenizer(), 8192, overhead=400)


@settings(max_examples=30)
@given(
    st.lists(st.text("ab-", min_size=1, max_size=4), min_size=1, max_size=12),
    st.lists(st.text("ab-", min_size=1, max_size=3), min_size=1, max_size=6),
)
def test_compounds_are_the_sorted_list_of_all_pairs(adjectives: list[str], nouns: list[str]) -> None:
    pairs = Compounds(adjectives, nouns)
    assert list(pairs) == sorted({f"{adjective}-{noun}" for adjective in adjectives for noun in nouns})


def test_both_generators_count_coded_words_alike() -> None:
    assert zeta_counts(2060, 81, 2.0) == frequencies(2060, 81)


def test_essays_that_are_too_short_are_repeated(shared_data: Path, tmp_path: Path) -> None:
    pytest.importorskip("nltk", reason="the official generator cuts essays with nltk: pip install -e '.[official]'")
    shutil.copytree(shared_data / "ruler", tmp_path / "ruler")
    (tmp_path / "haystack").mkdir()
    essays = {"text": "It rained on Monday. Mr. Ames stayed in.\n\nHe read a book about rain. "}
    (tmp_path / "haystack" / "PaulGrahamEssays.json").write_text(json.dumps(essays))
    task = get_task("niah_multikey_1", {"generator": "official"})
    [sample] = task.samples(WordTokenizer(), DataSources(tmp_path), 8192, 0, 1, 0)
    assert sample.meta["haystack"] == "PaulGrahamEssays.json"
    assert sample.context.count("on Monday.") > 200
    assert 0.9 * 8192 < int(str(sample.meta["length"])) <= 8192


# Contexts that are too small


@pytest.mark.parametrize("name", WITHOUT_ESSAYS)
@pytest.mark.parametrize("room", [20, 110])
def test_a_context_in_which_the_official_scripts_would_draw_for_ever_is_refused(
    name: str, room: int, shared_data: Path
) -> None:
    context = get_task(name).generation_limit + room
    with pytest.raises(ContextTooSmall, match=f"{name}.*too small"):
        official(name, DataSources(shared_data), WordTokenizer(), context, count=1)


def test_a_list_longer_than_the_first_dictionary_needs_the_second(shared_data: Path, tmp_path: Path) -> None:
    shutil.copytree(shared_data / "ruler", tmp_path / "ruler")
    with pytest.raises(DataError, match=r"different words.*english_words\.json"):
        official("cwe", DataSources(tmp_path), WordTokenizer(), 131_072, count=1)
    words = {str(index): f"word{index}" for index in range(30_000)}
    (tmp_path / "ruler" / "english_words.json").write_text(json.dumps(words))
    [sample] = official("cwe", DataSources(tmp_path), WordTokenizer(), 131_072, count=1)
    assert all(word.startswith("word") for word in sample.references)


# The wording


@pytest.mark.parametrize("family", ["niah", "variable_tracking", "qa"])
def test_official_sentences_are_taken_from_an_official_sample(family: str, shared_data: Path) -> None:
    wording = load_wording(family, "official", DataSources(shared_data))
    assert wording.source == "official"
    assert wording.files[0] == "ruler/templates.json"
    assert wording.files[1].startswith(f"ruler/{GOLDEN}/")


@pytest.mark.parametrize("name", ["niah_single_1", "niah_multikey_2", "niah_multikey_3", "vt"])
def test_our_own_generator_writes_all_of_the_official_wording(name: str, shared_data: Path) -> None:
    [ours] = get_task(name).samples(WordTokenizer(), DataSources(shared_data), 4096, 0, 1, 0)
    assert (ours.meta["generator"], ours.meta["wording"]) == ("own", "official")
    theirs = json.loads((shared_data / "ruler" / GOLDEN / f"{name}.jsonl").read_text().splitlines()[0])
    assert _shapes(ours.context + ours.question) == _shapes(theirs["input"])
    assert _shape(ours.answer_prefix) == _shape(theirs["answer_prefix"])


def _shapes(text: str) -> set[str]:
    return {_shape(line) for line in text.split("\n")}


def _shape(line: str) -> str:
    """Names, numbers and uuids apart."""
    return re.sub(r"[\w.?:]*[-\d][-\w.?:]*|\b[A-Z]{3,}\b", "*", line)


def test_sentences_of_a_file_go_before_those_of_a_sample(shared_data: Path, tmp_path: Path) -> None:
    shutil.copytree(shared_data / "ruler", tmp_path / "ruler")
    (tmp_path / "ruler" / "sentences.json").write_text(
        json.dumps({"niah": {"needle": "{key} {value}", "noise": "Hum."}})
    )
    wording = load_wording("niah", "auto", DataSources(tmp_path))
    assert wording.texts["needle"] == "{key} {value}"
    assert wording.files == ("ruler/templates.json", "ruler/sentences.json")
    assert load_wording("qa", "auto", DataSources(tmp_path)).files[1] == f"ruler/{GOLDEN}/qa_1.jsonl"
    (tmp_path / "ruler" / "sentences.json").write_text(json.dumps({"niah": {"needle": "{key} {value}"}}))
    with pytest.raises(DataError, match=r"sentences\.json: niah must have needle, noise"):
        load_wording("niah", "auto", DataSources(tmp_path))


def test_templates_without_their_sentences_are_not_mixed_with_our_own(shared_data: Path, tmp_path: Path) -> None:
    (tmp_path / "ruler").mkdir()
    shutil.copy(shared_data / "ruler" / "templates.json", tmp_path / "ruler")
    sources = DataSources(tmp_path)
    assert load_wording("niah", "auto", sources).source == "own"
    assert load_wording("common_words_extraction", "auto", sources).source == "official"
    with pytest.raises(DataError, match=r"needs its needle, noise beside .*niah_single_1\.jsonl"):
        get_task("niah_single_1", {"wording": "official"}).check(sources, 4096)
    with pytest.raises(DataError, match="needs its needle, noise"):
        get_task("niah_single_1", {"generator": "official"}).check(sources, 4096)


@pytest.mark.parametrize("line", ["{}", '{"input": "Something else", "outputs": ["1"]}', "[1]", "{"])
def test_a_sample_of_another_generator_is_refused(line: str, shared_data: Path, tmp_path: Path) -> None:
    (tmp_path / "ruler" / "niah_single_1").mkdir(parents=True)
    shutil.copy(shared_data / "ruler" / "templates.json", tmp_path / "ruler")
    (tmp_path / "ruler" / "niah_single_1" / "validation.jsonl").write_text(line)
    with pytest.raises(DataError, match=r"validation\.jsonl, line 1"):
        load_wording("niah", "auto", DataSources(tmp_path))


# Settings and what is missing


@pytest.mark.parametrize(
    ("name", "chosen", "message"),
    [
        ("vt", {"generator": "theirs"}, "generator must be one of 'own', 'official'"),
        ("vt", {"generator": "official", "wording": "own"}, "writes the official wording"),
        ("niah_single_2", {"generator": "official", "haystack": "word-lists"}, "in essays, not in word lists"),
        ("niah_single_2", {"haystack": "essays"}, "haystack must be"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(name: str, chosen: dict[str, Any], message: str) -> None:
    with pytest.raises(TaskError, match=f"task {name}: .*{message}"):
        get_task(name, chosen)


def test_the_official_generator_needs_essays_and_nltk(
    shared_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(shared_data / "ruler", tmp_path / "ruler")
    task = get_task("niah_single_2", {"generator": "official"})
    with pytest.raises(DataError, match=r"needs essays: put haystack/PaulGrahamEssays\.json"):
        task.check(DataSources(tmp_path), 4096)
    monkeypatch.setitem(sys.modules, "nltk", None)
    with pytest.raises(DataError, match=r"NLTK, which is not installed: pip install 'kvsweep\[official\]'"):
        task.check(DataSources(shared_data), 4096)


def test_the_model_of_nltk_is_missed_by_name(shared_data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = pytest.importorskip("nltk").data
    monkeypatch.setattr(data, "path", ["/nowhere"])
    monkeypatch.setattr("tasks.ruler_official_sentences.find_spec", lambda name: None)
    with pytest.raises(DataError, match=r"no tokenizers/punkt_tab/english in /nowhere: .*punkt_tab"):
        get_task("niah_single_2", {"generator": "official"}).check(DataSources(shared_data), 4096)


def test_generator_and_wording_are_part_of_the_recipe(shared_data: Path) -> None:
    sources = DataSources(shared_data)
    own, theirs = get_task("cwe").recipe(sources), get_task("cwe", {"generator": "official"}).recipe(sources)
    assert (own["generator"], theirs["generator"]) == ("own", "official c3f5e3b4")
    assert own["wording"] == theirs["wording"]


def test_numbered_words() -> None:
    assert numbered(["a", "b"]) == "1. a 2. b"
