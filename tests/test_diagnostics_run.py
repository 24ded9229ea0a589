"""Diagnostics on small random models: the look into the pool, the two runs of a trace, the command and its files."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from models import greedy, prompt_ids, tiny_gemma, tiny_llama
from pyarrow import parquet
from qevict_cases import admitted, feed, new_token, oracles
from word_tokenizer import BOS, WordTokenizer

import workers.models
from kvcache.budget import Budget
from pipeline.cli import main
from pipeline.diagnostics_file import load_diagnostics
from pipeline.diagnostics_summary import Diagnostics, ratio
from pipeline.spec import SpecError
from qevict.diagnostics import FULL, LOCAL, reference_scores
from qevict.method import QEvict
from qevict.view import is_event, tiers_of
from workers.diagnose import (
    Condition,
    ConditionError,
    Diagnosis,
    continued,
    diagnose,
    prefill_of,
    read_in_full,
    run_policies,
)
from workers.layer_measures import Measure
from workers.models import LoadedModel
from workers.traces import Trace, traces_of

UNLIMITED = Budget.parse("unlimited")
FULL_CACHE = Condition("R0", QEvict(window=4, recent=8, quantized_share=0), UNLIMITED)
THREE_TIERS = Condition("R3", QEvict(window=4, recent=8, quantized_share=0.5, accounting="paper"), Budget.parse("30%"))


def trace(prompt: int = 64, steps: int = 32, seed: int = 0) -> Trace:
    return Trace("made", tuple(prompt_ids(prompt + steps, seed)), prompt)


def total(diagnosis: Diagnosis, condition: str, name: str) -> float:
    found = [one for one in diagnosis.measures if (one.condition, one.name) == (condition, name)]
    return sum(one.numerator for one in found) / sum(one.denominator for one in found)


# -- the look into the pool --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes", [{}, {"promotion": "none"}, {"promotion": "exact"}, {"first_eviction": "first_step"}]
)
@pytest.mark.parametrize("accounting", ["strict", "paper"])
def test_the_view_is_the_papers_algorithm(accounting: str, changes: dict[str, Any]) -> None:
    method = QEvict(window=4, sinks=3, recent=6, accounting=accounting, **changes)  # type: ignore[arg-type]
    pool, prefill, room = admitted(method, 61, "40%", 40, seed=5)
    papers = oracles(method, prefill, room, 101)
    windows = -(-(101 - method.sinks) // method.window)
    words = {"F": FULL, "Q": 2, "E": 3, "recent": LOCAL}
    seen = 0
    for step in range(40):
        if is_event(pool, 1, 61 + step):
            tiers, scores = tiers_of(pool, 1, 61 + step, windows)
            for layer, paper in enumerate(papers):
                boundary = max(0, (61 + step - room.recent - method.sinks) // method.window)
                expected = [words[paper.tier.get(number, "recent")] for number in range(windows)]
                # what has not been routed yet is there in full
                expected = [FULL if one == LOCAL and number < boundary else one for number, one in enumerate(expected)]
                assert tiers[layer].tolist() == expected
                held = [number for number, tier in paper.tier.items() if tier != "E"]
                ours = [paper.score[number] + paper.received.get(number, 0.0) for number in held]
                torch.testing.assert_close(scores[layer, held], torch.tensor(ours), rtol=1e-4, atol=1e-4)
            seen += 1
        feed(pool, step, 61 + step, seed=5)
        for layer, paper in enumerate(papers):
            paper.step(*new_token(step, layer, 5), 8**-0.5)
    assert seen >= 10


# -- the two runs ------------------------------------------------------------------------------------------------------


def test_the_reference_is_the_models_own_attention() -> None:
    model, made = tiny_llama(), trace()
    prefill = prefill_of(model, made, [FULL_CACHE], 2048)
    seen: dict[int, torch.Tensor] = {}
    with torch.inference_mode():
        read_in_full(model, prefill, made, seen.__setitem__)
        model.forward.set_attn_implementation("eager")
        own = model.forward(torch.tensor([made.ids]), output_attentions=True).attentions
    for layer, weights in enumerate(own):
        torch.testing.assert_close(seen[layer], weights[0, :, made.prefill :], rtol=1e-4, atol=1e-5)
        sums = prefill.layers[layer].column_sums
        assert sums is not None
        torch.testing.assert_close(sums, weights[0, :, : made.prefill, : made.prefill].sum(1), rtol=1e-4, atol=1e-4)


def test_a_policy_that_keeps_all_has_the_references_scores_at_every_event() -> None:
    model, made = tiny_llama(), trace()
    prefill = prefill_of(model, made, [FULL_CACHE], 2048)
    seen: dict[int, torch.Tensor] = {}
    with torch.inference_mode():
        decided = run_policies(model, prefill, made, [FULL_CACHE])[0]
        read_in_full(model, prefill, made, seen.__setitem__)
    assert decided.held.tolist() == list(range(64, 97, 4))
    assert set(decided.tiers.unique().tolist()) == {LOCAL, FULL}
    for layer, weights in seen.items():
        sums = prefill.layers[layer].column_sums
        assert sums is not None
        whole, _ = reference_scores(sums, weights, decided.held, 5, 4)
        torch.testing.assert_close(decided.scores[:, layer], whole.mean(0), rtol=1e-3, atol=1e-3)


def test_the_full_cache_misses_nothing_and_three_tiers_miss_less_than_without_the_quantised_one() -> None:
    made = diagnose(tiny_llama(), trace(), [FULL_CACHE, THREE_TIERS], horizon=8)
    for name in ("fmm", "fmm_censored", "fmm_windows", "fmm_layer", "fmm_full_only", "mass_evicted", "mass_quantized"):
        assert total(made, "R0", name) == 0
    assert 0 < total(made, "R3", "fmm") < total(made, "R3", "fmm_full_only") < 1
    tiers = [total(made, "R3", f"mass_{tier}") for tier in ("full", "quantized", "evicted", "local")]
    assert sum(tiers) == pytest.approx(1, abs=1e-5)
    assert 0.9 < total(made, "R3", "qsa") <= 1
    assert [one.condition for one in made.held] == ["R0", "R3"]
    assert made.held[1].quantized_windows > 0
    assert made.held[1].charged_share == pytest.approx(0.3, abs=0.05)


def test_conditions_do_not_change_each_other() -> None:
    model, made = tiny_llama(), trace()
    token_level = Condition("R1", dataclasses.replace(FULL_CACHE.method, window=1), Budget.parse("30%"))
    together = diagnose(model, made, [FULL_CACHE, token_level, THREE_TIERS], horizon=8)
    alone = diagnose(model, made, [THREE_TIERS], horizon=8)
    ours = [one for one in together.measures if one.condition == "R3"]
    assert [(one.name, one.layer, one.head, one.parameter) for one in ours] == [
        (one.name, one.layer, one.head, one.parameter) for one in alone.measures
    ]
    for one, other in zip(ours, alone.measures, strict=True):
        assert one.numerator == pytest.approx(other.numerator, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("promotion", ["none", "residency", "exact"])
def test_promotions_are_counted(promotion: str) -> None:
    method = QEvict(window=4, recent=8, quantized_share=0.6, accounting="paper", promotion=promotion)  # type: ignore[arg-type]
    many = [Condition("K", method, Budget.parse("50%"))]
    made = [diagnose(tiny_llama(), trace(48, 80, seed), many, horizon=8) for seed in range(2)]
    moves = [one for each in made for one in each.measures if one.name == "quantized_to_full"]
    assert (sum(one.numerator for one in moves) > 0) == (promotion != "none")
    assert sum(one.denominator for one in moves) > 0


def test_other_rankers_have_no_score_agreement() -> None:
    ranked = Condition("norm", dataclasses.replace(THREE_TIERS.method, ranker="key_norm"), THREE_TIERS.budget)
    names = {one.name for one in diagnose(tiny_llama(), trace(), [ranked], horizon=8).measures}
    assert "fmm" in names
    assert not {"qsa", "r_q"} & names


def test_sliding_layers_are_read_and_not_measured() -> None:
    model = tiny_gemma()
    layers = {one.layer for one in diagnose(model, trace(), [THREE_TIERS], horizon=8).measures}
    assert layers == set(range(len(model.layout.growing)))


def test_a_generated_continuation_is_what_the_full_cache_says() -> None:
    model, made = tiny_llama(), trace(64, 12)
    read = continued(model, made)
    assert read.ids[:64] == made.ids[:64]
    assert len(read.ids) == 76
    own = greedy(model, list(made.ids[:64]), 12)
    assert list(read.ids[64 : 64 + len(own)]) == own


def test_an_impossible_budget_names_its_condition() -> None:
    small = Condition("tiny", QEvict(), Budget.parse("1%"))
    with pytest.raises(ConditionError, match=r"condition tiny: qevict must hold 5 sinks and 32 recent tokens"):
        diagnose(tiny_llama(), trace(), [small], horizon=8)


# -- traces ------------------------------------------------------------------------------------------------------------

WORDS = ["river", "stone", "lamp", "cloud", "seven", "green", "paper", "wind", "salt", "bird", "clock"]
LONG = " ".join(WORDS[(3 * place + place // 7) % len(WORDS)] for place in range(400))


def test_traces_take_turns_and_begin_as_the_tokenizer_begins_a_text() -> None:
    tokenizer = WordTokenizer()
    made = traces_of({"a": LONG, "b": LONG[:600], "c": "short"}, tokenizer, 30, 20)
    assert [one.name for one in made][:4] == ["a:0", "b:0", "a:1", "b:1"]
    assert {len(one.ids) for one in made} == {50}
    assert {one.prefill for one in made} == {30}
    assert all(tokenizer.decode([one.ids[0]]) == BOS for one in made)
    assert BOS not in "".join(tokenizer.decode(list(one.ids[1:])) for one in made)


def test_a_tokenizer_that_opens_with_nothing_adds_nothing() -> None:
    made = traces_of({"a": LONG}, tokenizer := WordTokenizer(adds_bos=False), 30, 20)
    assert LONG.startswith(tokenizer.decode(list(made[0].ids)))
    assert tokenizer.decode([*made[0].ids, *made[1].ids]) == LONG[: len(tokenizer.decode([*made[0].ids, *made[1].ids]))]


# -- sums over traces --------------------------------------------------------------------------------------------------


def test_a_ratio_is_the_sum_over_the_sum_with_an_interval_over_traces() -> None:
    sums = {"a": (1.0, 10.0), "b": (9.0, 30.0), "c": (2.0, 10.0)}
    found = ratio(sums)
    assert found.value == pytest.approx(12 / 50)
    assert found.interval is not None
    assert 0.1 <= found.interval.low < found.value < found.interval.high <= 0.3


def test_one_trace_has_no_interval_and_neither_have_equal_ones() -> None:
    assert ratio({"a": (1.0, 10.0)}).interval is None
    assert ratio({"a": (1.0, 10.0), "b": (3.0, 30.0)}).interval is None


def test_the_median_absence_is_over_returns() -> None:
    found = Diagnostics(["R3"])
    lengths = [(3, 4.0), (8, 2.0), (20, 1.0)]
    found.add("a", [Measure("R3", "absence_policy", 0, count, 1, parameter=length) for length, count in lengths], [])
    assert found.absence("R3", "policy") == float(np.median([3] * 4 + [8] * 2 + [20]))
    assert found.absence("R3", "oracle") is None


# -- the command -------------------------------------------------------------------------------------------------------


def settings(**changes: Any) -> dict[str, Any]:
    return {
        "name": "small",
        "model": {"label": "tiny", "source": "tiny", "dtype": "float32"},
        "prefill": 48,
        "continuation": 24,
        "horizon": 8,
        "budget": "30%",
        "conditions": {
            "R0": {"budget": "unlimited", "quantized_share": 0, "recent": 8},
            "R3": {"window": 4, "quantized_share": 0.5, "recent": 8, "accounting": "paper"},
        },
        "output": "unused",
        **changes,
    }


def write(folder: Path, **changes: Any) -> Path:
    file = folder / "diagnostics.yaml"
    file.write_text(yaml.safe_dump(settings(**changes)))
    return file


@pytest.fixture
def _tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(spec: object) -> LoadedModel:
        model = tiny_llama()
        model.tokenizer = WordTokenizer()
        return model

    monkeypatch.setattr(workers.models, "load_model", load)


@pytest.mark.usefixtures("_tiny")
@pytest.mark.parametrize("source", ["text", "generated"])
def test_the_command_writes_measures_tables_and_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], source: str
) -> None:
    (tmp_path / "story.txt").write_text(LONG)
    output = tmp_path / "out"
    file = write(tmp_path, source=source, texts=["story.txt"])
    assert main(["diagnostics", str(file), "--limit", "3", "--output", str(output)]) == 0
    shown = capsys.readouterr().out
    for title in ("Conditions, 3 traces", "Future missed mass", "Tier mass", "Global LIR", "Moves between tiers"):
        assert title in shown
    summary = json.loads((output / "summary.json").read_text())
    assert summary["traces"] == ["story.txt:0", "story.txt:1", "story.txt:2"]
    by_name = {(one["condition"], one["measure"]): one for one in summary["measures"] if one["parameter"] is None}
    assert by_name["R0", "fmm"]["value"] == 0
    assert 0 < by_name["R3", "fmm"]["value"] < 1
    rows = [row for path in sorted((output / "measures").iterdir()) for row in parquet.read_table(path).to_pylist()]
    kept = [row for row in rows if (row["condition"], row["name"]) == ("R3", "fmm")]
    assert {row["head"] for row in kept} == set(range(6))
    assert {row["layer"] for row in kept} == set(range(3))
    value = sum(row["numerator"] for row in kept) / sum(row["denominator"] for row in kept)
    assert value == pytest.approx(by_name["R3", "fmm"]["value"])
    page = (output / "diagnostics.html").read_text()
    assert page.count("<svg") == 2
    assert "<script" not in page
    assert (output / "fmm.svg").read_text().startswith("<svg xmlns=")
    assert "R3" in (output / "by_layer.csv").read_text()


@pytest.mark.usefixtures("_tiny")
def test_conditions_can_be_chosen(tmp_path: Path) -> None:
    (tmp_path / "story.txt").write_text(LONG)
    file, output = write(tmp_path, output=str(tmp_path / "out")), tmp_path / "out"
    words = ["diagnostics", str(file), "--text", str(tmp_path / "story.txt"), "--limit", "1", "--conditions", "R3"]
    assert main(words) == 0
    assert {one["condition"] for one in json.loads((output / "summary.json").read_text())["measures"]} == {"R3"}


@pytest.mark.usefixtures("_tiny")
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--conditions", "R9"], "--conditions: there is no condition 'R9'; known: R0, R3"),
        ([], "diagnostics read texts: name some in the file's `texts`, or give --text FILE"),
        (["--text", "nowhere.txt"], "the text nowhere.txt cannot be read: No such file or directory"),
    ],
)
def test_what_is_missing_is_said_in_one_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    assert main(["diagnostics", str(write(tmp_path)), *words]) == 2
    assert capsys.readouterr().err == f"{said}\n"


@pytest.mark.usefixtures("_tiny")
def test_texts_that_are_too_short_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "story.txt").write_text(LONG)
    assert main(["diagnostics", str(write(tmp_path, prefill=10**6, texts=["story.txt"]))]) == 2
    said = "none of the texts has 1000024 tokens: story.txt; give longer ones, or shorten prefill or continuation\n"
    assert capsys.readouterr().err == said


@pytest.mark.usefixtures("_tiny")
def test_a_condition_that_cannot_run_is_bad_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "story.txt").write_text(LONG)
    file = write(tmp_path, budget="1%", texts=["story.txt"], output=str(tmp_path / "out"))
    assert main(["diagnostics", str(file), "--conditions", "R3"]) == 2
    assert capsys.readouterr().err.startswith("story.txt:0: condition R3: qevict must hold 5 sinks and 8 recent tokens")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"horizn": 3}, "horizn: unknown key; did you mean horizon?"),
        ({"conditions": {}}, "conditions: Dictionary should have at least 1 item"),
        ({"conditions": {"R3": {"windo": 8}}}, "conditions.R3.windo: unknown setting of qevict; did you mean window?"),
        ({"conditions": {"R3": {"window": 0}}}, "conditions.R3"),
        ({"conditions": {"R3": 8}}, "conditions.R3: write settings of qevict"),
        ({"budget": "0%"}, "budget: a budget must be above 0"),
        ({"source": "both"}, "source: Input should be 'text' or 'generated'"),
    ],
)
def test_bad_files_are_told_where_they_are_bad(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    file = write(tmp_path, **changes)
    with pytest.raises(SpecError) as caught:
        load_diagnostics(file)
    assert str(caught.value).startswith(f"{file}: {said}")


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "diagnostics.yaml"
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(SpecError, match="is not UTF-8 text"):
        load_diagnostics(file)


def test_texts_are_relative_to_their_file(tmp_path: Path) -> None:
    loaded = load_diagnostics(write(tmp_path, texts=["a.txt", "/b.txt"]))
    assert loaded.texts == [str(tmp_path / "a.txt"), "/b.txt"]
