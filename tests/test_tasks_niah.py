"""The needle grid: one needle in each prompt, at the depth asked for, within the context; how answers are scored."""

from __future__ import annotations

import json
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from word_tokenizer import WordTokenizer

from tasks import niah
from tasks.fit import Parts
from tasks.haystack import Piece, Stack
from tasks.metrics import details
from tasks.metrics import score as metric_score
from tasks.niah import BEFORE, GridDraft
from tasks.prompt import prompt_overhead, render
from tasks.registry import get_task
from tasks.sample import Sample
from tasks.sources import DataError, DataSources
from tasks.task import ContextTooSmall, TaskError

TOKENIZER = WordTokenizer()
OVERHEAD = prompt_overhead(TOKENIZER, chat=True)
SENTENCES = [f"Sentence {n} goes on {'and on ' * (n * 7 % 13)}until it ends." for n in range(200)]
FILED = [
    {"sentence": "The best soup is eaten cold.", "question": "How is the best soup eaten?", "answer": "cold"},
    {"sentence": "The worst soup is blue.", "question": "Which soup is the worst?", "answer": "the blue one"},
]


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    (tmp_path / "haystack").mkdir()
    (tmp_path / "haystack" / "book.txt").write_text(" ".join(SENTENCES))
    (tmp_path / "niah").mkdir()
    (tmp_path / "niah" / "needles.json").write_text(json.dumps(FILED))
    return tmp_path


def samples(sources: DataSources, count: int, context: int = 900, seed: int = 0, **chosen: Any) -> list[Sample]:
    return get_task("niah", chosen).samples(TOKENIZER, sources, context, seed, count, OVERHEAD)


def tokens(text: str) -> int:
    return len(TOKENIZER(text, add_special_tokens=False)["input_ids"])


def needle_of(sample: Sample) -> str:
    """The one sentence of the haystack that holds the answer."""
    start = sample.context.index("The password of the old lighthouse")
    return sample.context[start : sample.context.index(".", start) + 1]


# The grid


def test_a_prefix_covers_all_depths_and_needles_change_from_round_to_round(data_dir: Path) -> None:
    made = samples(DataSources(data_dir), 12, depths=4)
    assert [sample.meta["depth"] for sample in made] == [0.0, 33.33, 66.67, 100.0] * 3
    needles = [needle_of(sample) for sample in made]
    assert [len(set(needles[start : start + 4])) for start in (0, 4, 8)] == [1, 1, 1]
    assert len(set(needles)) == 3


def test_the_default_grid_has_eleven_depths() -> None:
    assert get_task("niah").grid == (0, 10, 20, 30, 40, 50, 60, 70, 80, 90, 100)


def test_samples_do_not_depend_on_how_many_are_asked_for(data_dir: Path) -> None:
    sources = DataSources(data_dir)
    assert samples(sources, 14)[:5] == samples(sources, 5)
    assert [sample.index for sample in samples(sources, 5)] == list(range(5))


def test_a_needle_is_the_same_at_every_length_and_another_with_another_seed(data_dir: Path) -> None:
    sources = DataSources(data_dir)
    [short], [long], [other] = samples(sources, 1), samples(sources, 1, context=1500), samples(sources, 1, seed=1)
    assert short.references == long.references != other.references


def test_the_question_and_the_answer_are_the_needle_s(data_dir: Path) -> None:
    for sample in samples(DataSources(data_dir), 6):
        [answer] = sample.references
        assert answer in needle_of(sample)
        city = needle_of(sample).split(" in ")[1].split(" is ")[0]
        assert sample.question.endswith(f"Question: What is the password of the old lighthouse in {city}?")
        assert answer not in sample.question


@settings(max_examples=25)
@given(depth=st.floats(0, 100), context=st.integers(300, 2500), seed=st.integers(0, 99))
def test_the_needle_stands_once_within_a_sentence_of_its_depth_and_the_prompt_fits(
    tmp_path_factory: pytest.TempPathFactory, depth: float, context: int, seed: int
) -> None:
    folder = tmp_path_factory.getbasetemp() / "synthetic"
    (folder / "haystack").mkdir(parents=True, exist_ok=True)
    if not (folder / "haystack" / "book.txt").is_file():
        (folder / "haystack" / "book.txt").write_text(" ".join(SENTENCES))
    [sample] = samples(DataSources(folder), 1, context, seed, depths=[depth])
    needle = needle_of(sample)
    assert sample.context.count(needle) == 1
    before, after = sample.context.removeprefix(BEFORE).split(needle)
    assert not before or before.endswith(". ") or depth == 100
    there, rest = tokens(before.strip()), tokens(after.strip())
    token = 100 / (there + rest)
    seams = 2 * token  # the blanks around the needle
    assert depth - max(map(tokens, SENTENCES)) * token - seams <= there * token <= depth + seams
    assert sample.meta["depth_real"] == pytest.approx(there * token, abs=seams)
    prompt = render(sample, TOKENIZER)
    assert context - 20 <= len(prompt.ids) + sample.max_new_tokens <= context


def test_depth_0_is_the_start_and_100_the_very_end(data_dir: Path) -> None:
    for sample in samples(DataSources(data_dir), 4, depths=2):
        text = sample.context.removeprefix(BEFORE)
        assert text.startswith(needle_of(sample)) if sample.meta["depth"] == 0 else text.endswith(needle_of(sample))
        assert sample.meta["depth_real"] == sample.meta["depth"]


@given(
    sentences=st.lists(st.integers(1, 30), min_size=1, max_size=20),
    depth=st.floats(0, 100),
    share=st.floats(0.01, 1),
)
def test_the_place_is_the_last_sentence_end_at_or_before_the_depth(
    sentences: list[int], depth: float, share: float
) -> None:
    pieces = [
        Piece("end." if place == length - 1 else "word", place == 0) for length in sentences for place in range(length)
    ]
    lengths = list(accumulate((1 for _ in pieces), initial=0))
    starts = niah._sentence_starts(pieces)
    draft = GridDraft(Parts("", "", "", ("a",)), "Needle.", depth, Stack(pieces, lengths, " "), starts, 0)
    units = max(1, int(share * len(pieces)))
    target = units * depth / 100
    ends = [0, *(index + 1 for index, piece in enumerate(pieces[:units]) if piece.text == "end.")]
    expected = units if target >= units else max(end for end in ends if end <= target)
    assert draft.place(units) == expected


def test_a_text_without_full_stops_has_places_all_the_same(data_dir: Path) -> None:
    (data_dir / "haystack" / "book.txt").write_text("word " * 3000)
    made = samples(DataSources(data_dir), 5, context=1500, depths=5)
    for sample in made:
        assert sample.meta["depth_real"] == pytest.approx(sample.meta["depth"], abs=6)


def test_the_data_folder_s_essays_are_read_else_sentences_are_made(data_dir: Path) -> None:
    [essays], [made] = samples(DataSources(data_dir), 1), samples(DataSources(), 1)
    assert (essays.meta["haystack"], made.meta["haystack"]) == ("book.txt", "word-lists")
    assert "until it ends." in essays.context
    assert samples(DataSources(data_dir), 1, haystack="word-lists")[0].meta["haystack"] == "word-lists"


def test_over_real_addresses_every_place_of_a_small_grid_is_right(shared_data: Path) -> None:
    for context in (700, 1500, 3000):
        for sample in samples(DataSources(shared_data), 6, context, depths=3):
            assert sample.context.count(needle_of(sample)) == 1
            assert sample.meta["depth"] - 25 <= sample.meta["depth_real"] <= sample.meta["depth"]
            assert len(render(sample, TOKENIZER).ids) + sample.max_new_tokens <= context


# Needles of the data folder


def test_needles_of_the_data_folder_take_turns(data_dir: Path) -> None:
    made = samples(DataSources(data_dir), 6, needle="file", depths=2)
    assert [sample.references[0] for sample in made] == ["cold", "cold", "the blue one", "the blue one", "cold", "cold"]
    assert all(FILED[sample.index // 2 % 2]["sentence"] in sample.context for sample in made)
    assert made[0].question.endswith("Question: How is the best soup eaten?")
    assert made[0].meta["needle"] == "file"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([], "must be a list of needles"),
        ({"sentence": "a"}, "must be a list of needles"),
        ([FILED[0], {"sentence": "a"}], "needle 2 must have the texts sentence, question and answer"),
        ([{**FILED[0], "answer": "?!"}], "needle 1 must have the texts"),
        ([3], "needle 1 must have the texts"),
    ],
)
def test_malformed_needles_are_named(content: Any, message: str, data_dir: Path) -> None:
    (data_dir / "niah" / "needles.json").write_text(json.dumps(content))
    with pytest.raises(DataError, match=rf"needles\.json,? {message}"):
        get_task("niah", {"needle": "file"}).check(DataSources(data_dir), 900)


def test_needles_that_are_not_there_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"task niah with needle: file needs the file .*niah/needles\.json"):
        get_task("niah", {"needle": "file"}).check(DataSources(tmp_path), 900)


def test_a_haystack_that_holds_the_needle_is_refused(data_dir: Path) -> None:
    (data_dir / "haystack" / "book.txt").write_text(" ".join(FILED[0]["sentence"] for _ in range(50)))
    with pytest.raises(DataError, match=r"book\.txt holds the needle 'The best soup is eaten cold\.' itself"):
        samples(DataSources(data_dir), 1, needle="file")


# What cannot be made


def test_a_context_without_room_says_what_is_missing(data_dir: Path) -> None:
    with pytest.raises(ContextTooSmall, match="a context of 50 tokens has no room"):
        get_task("niah").check(DataSources(data_dir), 50)
    with pytest.raises(ContextTooSmall, match=r"the smallest prompt has .* ask for a longer context"):
        samples(DataSources(data_dir), 1, context=90)


def test_depths_that_fall_on_one_place_are_refused(data_dir: Path) -> None:
    (data_dir / "haystack" / "book.txt").write_text("One sentence only, but a long one, which has no end in sight.")
    with pytest.raises(ContextTooSmall, match="samples 0 and 1 are the same prompt"):
        samples(DataSources(data_dir), 2, context=300, depths=[50, 50.1])


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ({"depths": 1}, "depths must be how many"),
        ({"depths": True}, "depths must be how many"),
        ({"depths": []}, "depths must be how many"),
        ({"depths": [0, 101]}, "depths must be how many"),
        ({"depths": [5, 5]}, "depths must be how many"),
        ({"depths": "all"}, "depths must be how many"),
        ({"needle": "classic"}, "needle must be one of"),
        ({"match": "rouge"}, "match must be one of"),
        ({"haystack": 3}, "haystack must be auto"),
        ({"max_new_tokens": 0}, "max_new_tokens must be"),
    ],
)
def test_settings_are_checked(chosen: dict[str, Any], message: str) -> None:
    with pytest.raises(TaskError, match=f"task niah: {message}"):
        get_task("niah", chosen)


def test_the_recipe_knows_depths_needles_haystack_metric_and_limit(data_dir: Path) -> None:
    sources = DataSources(data_dir)
    chosen: list[dict[str, Any]] = [{}, {"depths": 3}, {"needle": "file"}, {"haystack": "word-lists"}]
    chosen += [{"match": "exact"}, {"max_new_tokens": 9}]
    recipes = [json.dumps(get_task("niah", one).recipe(sources)) for one in chosen]
    (data_dir / "haystack" / "book.txt").write_text("Another book.")
    recipes.append(json.dumps(get_task("niah").recipe(sources)))
    assert len(set(recipes)) == len(recipes)


# Scores


@pytest.mark.parametrize(
    ("prediction", "reference", "recall", "exact"),
    [
        ("It is quiet harbor 48213.", "quiet harbor 48213", 1, 1),
        ("QUIET **harbor**, 48,213!", "quiet harbor 48213", 1, 1),
        ("48213, a harbor, quiet", "quiet harbor 48213", 1, 0),
        ("a quiet harbor", "quiet harbor 48213", 2 / 3, 0),
        ("148213", "48213", 0, 0),
        ("sunny days", "a sunny day, a day", 1 / 3, 0),
        ("a day", "a day, a day", 1, 0),
        ("“day”", "day.", 1, 1),
        ("", "day", 0, 0),
    ],
)
def test_recall_counts_words_and_exact_wants_them_together(
    prediction: str, reference: str, recall: float, exact: float
) -> None:
    assert niah.score(prediction, reference) == pytest.approx(recall)
    assert niah.exact(prediction, reference) == exact
    assert details("niah_recall", prediction, [reference]) == {"recall": pytest.approx(recall), "exact": exact}
    assert metric_score("niah_recall", prediction, [reference]) == pytest.approx(recall)
    assert metric_score("niah_exact", prediction, [reference]) == exact


def test_the_best_of_several_references_counts() -> None:
    assert metric_score("niah_recall", "a red bus", ["blue car", "red bus"]) == 1


def test_a_reference_without_a_word_has_no_score() -> None:
    with pytest.raises(TaskError, match="must have a word in it"):
        niah.score("a", "?!")


@given(words=st.lists(st.from_regex(r"[a-z0-9]{1,8}", fullmatch=True), min_size=1, max_size=8), said=st.text())
def test_the_reference_scores_1_whatever_stands_around_it(words: list[str], said: str) -> None:
    reference = " ".join(words)
    assert niah.score(f"{said} {reference} {said}", reference) == niah.exact(f"{said} {reference}\n", reference) == 1
    assert niah.exact(said, reference) <= niah.score(said, reference)


def test_every_reference_answers_its_own_sample(data_dir: Path) -> None:
    for match in ("recall", "exact"):
        for sample in samples(DataSources(data_dir), 4, match=match):
            assert metric_score(sample.metric, f"It is {sample.references[0]}.", sample.references) == 1
            assert metric_score(sample.metric, sample.question, sample.references) == 0
