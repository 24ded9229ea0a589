"""LORE-KV's diagnostics: every measure by brute force and at its limits, then the run on small random models."""

from __future__ import annotations

import dataclasses
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from models import greedy, prompt_ids, tiny_gemma, tiny_llama, tiny_qwen_next
from pyarrow import parquet
from scipy.stats import spearmanr
from torch import Tensor
from word_tokenizer import WordTokenizer

import workers.models
import workers.samples
from kvcache.baselines.snapkv import SnapKV
from kvcache.budget import Budget
from lorekv.diagnostics import (
    answer_enrichment,
    answer_places,
    energy_by_depth,
    energy_by_position,
    equivalent_budget,
    jaccard,
    kept_mask,
    output_error,
    query_coverage,
    recall,
    spearman,
)
from lorekv.lookahead import sample_futures
from lorekv.method import LoreKV
from pipeline.cli import main
from pipeline.diagnostics_file import DiagnosticsFile, LoreDiagnosticsFile, load_diagnostics
from pipeline.diagnostics_lorekv import lorekv_tables
from pipeline.diagnostics_summary import Diagnostics
from pipeline.spec import SpecError
from tasks.sample import Sample
from workers.diagnose_lorekv import Comparison, DiagnosisError, Question, answered, diagnose_question
from workers.fork import Fork, Prompt, PromptForks
from workers.layer_measures import Measure
from workers.models import LoadedModel


def bits(*rows: str) -> Tensor:
    return torch.tensor([[mark == "1" for mark in row] for row in rows])


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# -- coverage ----------------------------------------------------------------------------------------------------------


def test_queries_cover_themselves_whatever_their_length() -> None:
    queries = normal(2, 5, 8)
    torch.testing.assert_close(query_coverage(queries, 3 * queries), torch.ones(2))


def test_coverage_is_the_mean_of_the_best_cosine_of_each_future_query() -> None:
    future, reference = normal(2, 4, 6, seed=1).double(), normal(2, 3, 6, seed=2).double()
    for head in range(2):
        best = [max(float(q @ r / q.norm() / r.norm()) for r in reference[head]) for q in future[head]]
        assert float(query_coverage(future, reference)[head]) == pytest.approx(sum(best) / 4, abs=1e-6)


def test_more_references_never_cover_less_and_none_cover_nothing() -> None:
    future, reference = normal(2, 4, 6, seed=1), normal(2, 9, 6, seed=2)
    by_count = torch.stack([query_coverage(future, reference[:, :count]) for count in range(1, 10)])
    assert bool((by_count.diff(dim=0) >= 0).all())
    assert bool(query_coverage(future, reference[:, :0]).isnan().all())


# -- sets and ranks ----------------------------------------------------------------------------------------------------


def test_kept_positions_become_masks() -> None:
    assert torch.equal(kept_mask([torch.tensor([0, 3]), torch.tensor([1])], 4), bits("1001", "0100"))


def test_recall_is_the_share_of_what_is_wanted() -> None:
    assert recall(bits("1100", "1111", "0011"), bits("0110", "1010", "1100")).tolist() == [0.5, 1.0, 0.0]
    assert bool(recall(bits("11"), bits("00")).isnan().all())


def test_jaccard_is_common_over_all_and_empty_sets_are_the_same() -> None:
    assert jaccard(bits("1100"), bits("0110")).tolist() == [pytest.approx(1 / 3)]
    assert jaccard(bits("00", "11"), bits("00", "11")).tolist() == [1.0, 1.0]


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=3, max_size=30))
@settings(max_examples=50)
def test_rank_correlation_is_scipys_with_ties(pairs: list[tuple[int, int]]) -> None:
    first, second = (torch.tensor(side, dtype=torch.float32) for side in zip(*pairs, strict=True))
    ours = float(spearman(first, second))
    if len(first.unique()) == 1 or len(second.unique()) == 1:
        assert ours != ours
    else:
        assert ours == pytest.approx(spearmanr(first, second).statistic, abs=1e-9)


# -- output error ------------------------------------------------------------------------------------------------------


def attention_case(tokens: int = 7, steps: int = 3, group: int = 2, dim: int = 4) -> dict[str, Tensor]:
    shapes = {"queries": (group, steps, dim), "keys": (tokens, dim), "values": (tokens, 5)}
    shapes |= {"own_keys": (steps, dim), "own_values": (steps, 5)}
    return {name: normal(*shape, seed=place) for place, (name, shape) in enumerate(shapes.items())}


def test_the_error_is_that_of_attention_without_the_evicted_tokens() -> None:
    case, kept = attention_case(), bits("1010011", "0000001")
    found = output_error(**case, kept=kept, scale=0.7)
    exact = {name: tensor.double() for name, tensor in case.items()}
    for place, mask in enumerate(kept):
        for head in range(2):
            errors = []
            for step in range(3):
                outputs = []
                for chosen in (torch.ones(7, dtype=torch.bool), mask):
                    keys = torch.cat([exact["keys"][chosen], exact["own_keys"][: step + 1]])
                    values = torch.cat([exact["values"][chosen], exact["own_values"][: step + 1]])
                    weights = (0.7 * keys @ exact["queries"][head, step]).softmax(0)
                    outputs.append(weights @ values)
                errors.append(float((outputs[1] - outputs[0]).norm() / outputs[0].norm()))
            assert float(found[place, head]) == pytest.approx(sum(errors) / 3, rel=1e-5)


def test_keeping_everything_has_no_error_and_keeping_nothing_has_some() -> None:
    found = output_error(**attention_case(), kept=bits("1111111", "0000000"), scale=0.5)
    assert bool((found[0] == 0).all())
    assert bool((found[1] > 0.1).all())


# -- budgets of equal fidelity -----------------------------------------------------------------------------------------

BUDGETS = torch.tensor([64.0, 128.0, 256.0])


@pytest.mark.parametrize(
    ("target", "expected"), [(0.8, 128.0), (0.85, 192.0), (0.7, 96.0), (0.5, 64.0), (0.95, torch.inf)]
)
def test_a_budget_of_equal_fidelity_lies_between_the_measured_ones(target: float, expected: float) -> None:
    curve = torch.tensor([0.6, 0.8, 0.9])
    assert float(equivalent_budget(BUDGETS, curve, torch.tensor(target))) == pytest.approx(expected)


def test_a_curve_that_falls_is_taken_where_it_first_reaches_the_target() -> None:
    curves, targets = torch.tensor([[0.6, 0.8, 0.7], [0.8, 0.6, 0.9]]), torch.tensor([0.75, 0.7])
    assert equivalent_budget(BUDGETS, curves, targets).tolist() == [pytest.approx(112.0), 64.0]


@given(st.lists(st.floats(0, 1), min_size=2, max_size=6), st.integers(0, 5))
@settings(max_examples=50)
def test_a_curves_own_points_are_reached_no_later_than_where_they_are(curve: list[float], at: int) -> None:
    budgets = torch.arange(1.0, len(curve) + 1)
    at = min(at, len(curve) - 1)
    found = float(equivalent_budget(budgets, torch.tensor(curve), torch.tensor(curve[at])))
    assert found <= at + 1 + 1e-6


# -- answers and energy ------------------------------------------------------------------------------------------------


def test_answers_are_found_wherever_they_stand_token_by_token() -> None:
    prompt = [5, 1, 2, 7, 1, 2, 3]
    assert answer_places(prompt, [[1, 2]]).tolist() == [False, True, True, False, True, True, False]
    assert answer_places(prompt, [[7], [2, 3], []]).tolist() == [False, False, False, True, False, True, True]
    assert not answer_places(prompt, [[1, 3], [5] * 8]).any()


def test_enrichment_is_one_for_a_choice_that_is_blind_to_the_answer() -> None:
    kept, answer = bits("10110", "01010"), bits("01010")[0]
    counted = torch.tensor([True, True, True, True, False])
    of_answer, of_all = answer_enrichment(kept, answer, counted)
    assert of_answer.tolist() == [0.5, 1.0]
    assert of_all.tolist() == [0.75, 0.5]
    every = torch.ones(1, 5, dtype=torch.bool)
    assert [float(part) for part in answer_enrichment(every, answer, counted)] == [1.0, 1.0]


def test_energy_shares_are_of_the_competing_tokens_and_of_all_layers() -> None:
    scores, counted = torch.tensor([[9.0, 1, 2, 0, 1, 3, 2, 2]]), torch.tensor([False] + [True] * 7)
    assert energy_by_position(scores, counted).tolist() == pytest.approx([1 / 11, 2 / 11, 4 / 11, 4 / 11])
    masses = torch.tensor([1.0, 1, 2, 4])
    assert energy_by_depth(masses).tolist() == [0.125, 0.125, 0.25, 0.5]
    assert energy_by_depth(masses, 2).tolist() == [0.25, 0.75]
    assert bool(energy_by_position(torch.zeros(1, 8), counted).isnan().all())


# -- the run -----------------------------------------------------------------------------------------------------------

CONTROL = LoreKV(window=8, mix=0)
LOOKAHEAD = LoreKV(window=8, particles=2, tokens=4)
CONDITIONS = {"prompt_only": CONTROL, "M=2": LOOKAHEAD, "snapkv": SnapKV(window=8)}
COMPARED = Comparison(CONDITIONS, "prompt_only", (12, 24, 64), (1, 2), 4)


def question(tokens: int = 64, new: int = 6, seed: int = 0) -> Question:
    ids = prompt_ids(tokens, seed)
    return Question("made:0", ids, [ids[20:23]], new)


def by_key(measures: list[Measure]) -> dict[tuple[str, str, int | None], list[Measure]]:
    found = defaultdict(list)
    for one in measures:
        found[one.condition, one.name, one.parameter].append(one)
    return found


def mean(measures: list[Measure]) -> float:
    return sum(one.numerator for one in measures) / sum(one.denominator for one in measures)


def test_the_answer_is_the_full_caches_own_and_its_queries_are_those_of_a_teacher_forced_future() -> None:
    model, asked = tiny_llama(), question()
    prompt = Prompt("", asked.ids, [], asked.max_new_tokens, [Fork("", LOOKAHEAD, Budget.parse("unlimited"), "0")])
    with torch.inference_mode():
        prefill = PromptForks(model, 64).prefill(prompt)
        truth = answered(model, prefill, prompt)
        own = greedy(model, asked.ids, asked.max_new_tokens)
        assert truth.tokens[0, : len(own)].tolist() == own
        forced = sample_futures([prefill], 1, len(truth.tokens[0]), 1.0, ["0"], given=truth.tokens)[0]
    for parts in ("queries", "keys", "values"):
        for ours, theirs in zip(getattr(truth, parts), getattr(forced, parts), strict=True):
            torch.testing.assert_close(ours, theirs)


@pytest.fixture(scope="module")
def found() -> dict[tuple[str, str, int | None], list[Measure]]:
    return by_key(diagnose_question(tiny_llama(), question(), COMPARED, "0"))


Found = dict[tuple[str, str, int | None], list[Measure]]


def test_the_oracle_agrees_with_itself_and_the_control_with_the_control(found: Found) -> None:
    for budget in (12, 24):
        for name in ("recall", "recall_all"):
            assert mean(found["oracle", name, budget]) == 1
            assert mean(found["prompt_only", name, budget]) < 1
        for name in ("overlap", "overlap_all", "jaccard"):
            assert mean(found["prompt_only", name, budget]) == 1
            assert mean(found["M=2", name, budget]) < 1
    assert mean(found["prompt_only", "rank_correlation", None]) == pytest.approx(1)


def test_protected_tokens_raise_recall_and_the_library_is_measured_too(found: Found) -> None:
    assert mean(found["prompt_only", "recall", 12]) < mean(found["prompt_only", "recall_all", 12])
    assert 0 < mean(found["snapkv", "recall", 24]) < 1


def test_a_budget_for_the_whole_prompt_has_no_error_and_full_recall(found: Found) -> None:
    for label in (*CONDITIONS, "oracle"):
        assert mean(found[label, "error", 64]) == 0
        assert mean(found[label, "recall", 64]) == 1
        assert mean(found[label, "answer_kept", 64]) == mean(found[label, "enrichment", 64]) == 1
        assert mean(found[label, "error", 12]) > mean(found[label, "error", 24]) > 0


def test_every_layer_and_head_is_measured(found: Found) -> None:
    assert {(one.layer, one.head) for one in found["M=2", "recall", 12]} == {
        (at, head) for at in range(3) for head in (0, 1)
    }
    assert {one.head for one in found["reference", "coverage", 0]} == set(range(6))
    assert [one.layer for one in found["M=2", "mismatch_recall_gain", 12]] == [None]


def test_more_futures_cover_no_less_and_the_window_helps_them(found: Found) -> None:
    coverage = [mean(found["reference", "coverage", count]) for count in (1, 2)]
    both = [mean(found["reference", "coverage_with_window", count]) for count in (1, 2)]
    assert coverage[0] <= coverage[1] <= both[1] <= 1
    assert max(both[0], mean(found["reference", "coverage", 0])) <= both[1]


def test_energy_is_shared_out_and_only_costs_are_energy(found: Found) -> None:
    for name in ("energy_by_depth", "energy_by_position"):
        assert sum(mean(found["oracle", name, part]) for part in range(4)) == pytest.approx(1)
        assert not any(key[:2] == ("snapkv", name) for key in found)


def test_a_lookahead_of_the_answer_itself_is_the_oracle() -> None:
    """At vanishing temperature the sampled future is the greedy answer."""
    sure = LoreKV(window=8, particles=1, tokens=6, temperature=1e-4, mix=1.0)
    compared = dataclasses.replace(COMPARED, conditions={"prompt_only": CONTROL, "sure": sure}, budgets=(12, 24))
    found = by_key(diagnose_question(tiny_llama(), question(), compared, "0"))
    for budget in (12, 24):
        assert mean(found["sure", "recall", budget]) == 1
        assert mean(found["sure", "error", budget]) == pytest.approx(mean(found["oracle", "error", budget]))


def test_conditions_do_not_change_each_other(found: Found) -> None:
    fewer = dataclasses.replace(COMPARED, conditions={"prompt_only": CONTROL, "M=2": LOOKAHEAD})
    alone = by_key(diagnose_question(tiny_llama(), question(), fewer, "0"))
    for key, measures in alone.items():
        assert mean(measures) == pytest.approx(mean(found[key]), abs=1e-6)


@pytest.mark.parametrize("build", [tiny_gemma, tiny_qwen_next])
def test_only_growing_layers_are_measured(build: Any) -> None:
    model = build()
    found = diagnose_question(model, question(new=3), dataclasses.replace(COMPARED, budgets=(16,)), "0")
    assert {one.layer for one in found} - {None} == set(range(len(model.layout.growing)))


def test_an_impossible_budget_names_its_condition() -> None:
    compared = dataclasses.replace(COMPARED, budgets=(8,))
    with pytest.raises(DiagnosisError, match=r"condition prompt_only: lorekv must keep 9 protected tokens"):
        diagnose_question(tiny_llama(), question(), compared, "0")


# -- the command -------------------------------------------------------------------------------------------------------


def file_settings(**changes: Any) -> dict[str, Any]:
    return {
        "kind": "lorekv",
        "name": "small",
        "model": {"label": "tiny", "source": "tiny", "dtype": "float32"},
        "tasks": [{"name": "niah_single_1"}, {"name": "fwe"}],
        "contexts": [512],
        "samples": 3,
        "new_tokens": 4,
        "budgets": ["24 tokens", "12 tokens"],
        "futures": [1, 2],
        "future_tokens": 4,
        "control": "prompt_only",
        "conditions": {
            "prompt_only": {"window": 8, "mix": 0},
            "M=2": {"window": 8, "particles": 2, "tokens": 4},
            "snapkv": {"name": "snapkv", "window": 8},
        },
        "output": "unused",
        **changes,
    }


def write(folder: Path, **changes: Any) -> Path:
    file = folder / "lorekv.yaml"
    file.write_text(yaml.safe_dump(file_settings(**changes)))
    return file


WORDS = ["river", "stone", "lamp", "cloud", "seven", "green", "paper", "wind", "salt", "bird", "clock"]


@pytest.fixture
def _tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(spec: object) -> LoadedModel:
        model = tiny_llama()
        model.tokenizer = WordTokenizer()
        return model

    def samples(request: workers.samples.SampleRequest) -> list[Sample]:
        made = []
        for index in range(request.count):
            context = " ".join(WORDS[(3 * place + index + place // 7) % 11] for place in range(50))
            made.append(Sample(request.task, index, context, " where is it?", "", ("seven",), 8, "em", chat=False))
        return made

    monkeypatch.setattr(workers.models, "load_model", load)
    monkeypatch.setattr(workers.samples, "make_samples", samples)


@pytest.mark.usefixtures("_tiny")
def test_the_command_writes_measures_tables_and_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "out"
    assert main(["diagnostics", str(write(tmp_path)), "--limit", "5", "--output", str(output)]) == 0
    shown = capsys.readouterr().out
    for title in ("Future-query coverage, 5 prompts", "Kept sets and outputs", "Answer tokens", "Budget equivalence"):
        assert title in shown
    summary = json.loads((output / "summary.json").read_text())
    assert summary["traces"][:3] == ["niah_single_1@512:0", "fwe@512:0", "niah_single_1@512:1"]
    held = {(one["condition"], one["measure"], one["parameter"]): one for one in summary["measures"]}
    assert held["oracle", "recall", 12]["value"] == 1
    ours = held["M=2", "recall", 12]
    assert 0 < ours["low"] <= ours["value"] <= ours["high"] < 1
    rows = [row for path in sorted((output / "measures").iterdir()) for row in parquet.read_table(path).to_pylist()]
    kept = [row for row in rows if (row["condition"], row["name"], row["parameter"]) == ("M=2", "recall", 12)]
    assert sum(row["numerator"] for row in kept) / sum(row["denominator"] for row in kept) == pytest.approx(
        ours["value"]
    )
    page = (output / "diagnostics.html").read_text()
    assert "Diagnostics of LORE-KV" in page
    assert page.count("<svg") == 3
    assert (output / "coverage.svg").read_text().startswith("<svg xmlns=")
    assert "### Budget equivalence" in (output / "tables.md").read_text()


def made_up(prompts: int) -> Diagnostics:
    """The worse the window covers a prompt's future, the more of it is gained."""
    found = Diagnostics(["prompt_only", "M=2", "oracle"])
    for place in range(prompts):
        values = {
            ("reference", "coverage", 0): 0.9 - 0.1 * place,
            ("prompt_only", "recall", 12): 0.5,
            ("prompt_only", "recall", 24): 0.7,
            ("M=2", "recall", 12): 0.5 + 0.1 * place,
            ("M=2", "recall", 24): 0.7,
            ("prompt_only", "error", 12): 0.4,
            ("prompt_only", "error", 24): 0.2,
            ("M=2", "error", 12): 0.36 - 0.03 * place,
            ("M=2", "error", 24): 0.1,
            ("oracle", "error", 12): 0.5,
            ("oracle", "error", 24): 0.2,
        }
        measures = [Measure(label, name, 0, value, 1, 0, at) for (label, name, at), value in values.items()]
        found.add(f"p{place}", measures, [])
    return found


def rows_of(found: Diagnostics, title: str, tmp_path: Path) -> list[list[str]]:
    loaded = load_diagnostics(write(tmp_path))
    assert isinstance(loaded, LoreDiagnosticsFile)
    table = next(table for table in lorekv_tables(found, loaded) if table.title.startswith(title))
    return [[str(cell) for cell in row.cells] for row in table.rows]


def test_gains_are_paired_and_correlate_with_mismatch_over_prompts(tmp_path: Path) -> None:
    first, second = rows_of(made_up(5), "Gains", tmp_path)
    assert first[:2] == ["M=2", "12"]
    assert first[2].startswith("+20.0 [+")
    assert first[3].startswith("1.00")
    assert first[5].startswith("+10.0 [+")
    assert second[2:4] == ["+0.0", "–"]  # nothing is gained, so nothing can correlate
    assert rows_of(made_up(3), "Gains", tmp_path)[0][3] == "–"


def test_budgets_of_equal_fidelity_are_told_with_what_is_known_of_them(tmp_path: Path) -> None:
    rows = {tuple(row[:2]): row[2:] for row in rows_of(made_up(5), "Budget equivalence", tmp_path)}
    budget, more = rows["M=2", "12"]
    assert budget.startswith("18 [")  # an error of 0.30, half-way between 0.4 at 12 tokens and 0.2 at 24
    assert more.startswith("+50% [+")
    assert rows["M=2", "24"] == ["≥ 24", "≥ +0%"]
    assert rows["oracle", "12"] == ["≤ 12", "≤ +0%"]
    assert rows["oracle", "24"] == ["24", "+0%"]


@pytest.mark.usefixtures("_tiny")
def test_the_control_is_always_among_the_conditions(tmp_path: Path) -> None:
    words = ["diagnostics", str(write(tmp_path, output=str(tmp_path / "out"))), "--limit", "1", "--conditions", "M=2"]
    assert main(words) == 0
    measures = json.loads((tmp_path / "out" / "summary.json").read_text())["measures"]
    assert {one["condition"] for one in measures} == {"prompt_only", "M=2", "oracle", "reference"}


@pytest.mark.usefixtures("_tiny")
def test_texts_have_no_meaning_here(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diagnostics", str(write(tmp_path)), "--text", "a.txt"]) == 2
    assert capsys.readouterr().err.startswith("--text: LORE-KV's diagnostics read the prompts of tasks")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"kind": "snapkv"}, "kind: there are no diagnostics of 'snapkv'; known: lorekv, qevict"),
        ({"budget": 3}, "budget: unknown key; did you mean budgets?"),
        ({"budgets": ["10%"]}, "budgets: a budget is a number of tokens per KV head, as in '128 tokens', not 10%"),
        ({"control": "promt_only"}, "control: there is no condition 'promt_only'; did you mean prompt_only?"),
        ({"control": "M=2"}, "conditions.M=2: must be lorekv without futures: {mix: 0}"),
        ({"control": "snapkv"}, "conditions.snapkv: must be lorekv without futures: {mix: 0}"),
        ({"contexts": []}, "contexts: niah_single_1 needs context lengths: list some"),
        ({"conditions": {"a": {"partcles": 1}}}, "conditions.a.partcles: unknown setting of lorekv"),
        ({"conditions": {"a": {"name": "full"}}}, "conditions.a: full evicts no prompt tokens"),
        ({"conditions": {"a": 3}}, "conditions.a: write settings of lorekv, as in {particles: 1}, or an evictor"),
        ({"conditions": {"prompt_only": {"mix": 0}, "oracle": {}}}, "conditions.oracle: is always there"),
    ],
)
def test_bad_files_are_told_where_they_are_bad(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    file = write(tmp_path, **changes)
    with pytest.raises(SpecError) as caught:
        load_diagnostics(file)
    assert str(caught.value).startswith(f"{file}: {said}")


def test_budgets_are_put_in_order_and_files_without_a_kind_are_qevicts(tmp_path: Path) -> None:
    loaded = load_diagnostics(write(tmp_path))
    assert isinstance(loaded, LoreDiagnosticsFile)
    assert [str(budget) for budget in loaded.budgets] == ["12 tokens", "24 tokens"]
    file = tmp_path / "qevict.yaml"
    old = {"name": "q", "model": file_settings()["model"], "budget": "20%", "conditions": {"R3": {}}, "output": "out"}
    file.write_text(yaml.safe_dump(old))
    assert isinstance(load_diagnostics(file), DiagnosticsFile)


def test_the_ready_file_compares_futures_with_the_prompt_alone() -> None:
    loaded = load_diagnostics(Path(__file__).resolve().parents[1] / "jobs" / "diagnostics" / "lorekv.yaml")
    assert isinstance(loaded, LoreDiagnosticsFile)
    methods = {label: entry.method() for label, entry in loaded.conditions.items()}
    assert methods["prompt_only"] == LoreKV(mix=0)
    assert (methods["M = 1"], methods["M = 4"]) == (LoreKV(particles=1), LoreKV(particles=4))
    assert {"64 tokens", "128 tokens"} <= {str(budget) for budget in loaded.budgets}
