"""The ready sweeps and diagnostics of the papers: they load as they stand, and their budgets can be met."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from kvcache.budget import Budget
from kvcache.layout import CacheLayout, LayerLayout
from lorekv.method import LoreKV
from pipeline.diagnostics_file import load_diagnostics
from pipeline.spec import load_sweep
from qevict.method import QEvict
from tasks.groups import LONGBENCH_12, RULER
from tasks.registry import get_task

JOBS = Path(__file__).resolve().parents[1] / "jobs"
SWEEPS = sorted([*JOBS.glob("qevict_*.yaml"), *JOBS.glob("lorekv_*.yaml")])
DIAGNOSTICS = sorted((JOBS / "diagnostics").glob("*.yaml"))
LAYOUTS = {
    "llama-3.1-8b": CacheLayout((LayerLayout("growing", 32, 8, 128, 128),) * 32, 2),
    "mistral-7b": CacheLayout((LayerLayout("growing", 32, 8, 128, 128),) * 32, 2),
    "qwen2.5-7b": CacheLayout((LayerLayout("growing", 28, 4, 128, 128),) * 28, 2),
    "qwen2.5-14b": CacheLayout((LayerLayout("growing", 40, 8, 128, 128),) * 48, 2),
    "smollm2-135m": CacheLayout((LayerLayout("growing", 9, 3, 64, 64),) * 30, 2),
}
"""Of the papers' models, from their published configurations, and of the quickstart's."""
USUAL_PROMPT = {"gsm8k": 157}
"""Tokens; 157 is the median of GSM8K's prompts for these models. Others: 8,000, and RULER its context."""


def test_the_papers_tables_have_a_file() -> None:
    assert {path.stem for path in SWEEPS} >= {
        "qevict_ruler",
        "qevict_longbench",
        "qevict_longbench_32k",
        "qevict_longbench_paper",
        "qevict_gsm8k",
        "qevict_gsm8k_baselines",
        "qevict_ablations",
        "qevict_rankers",
        "qevict_promotion",
        "qevict_efficiency",
        "lorekv_longbench",
        "lorekv_ruler",
        "lorekv_niah",
        "lorekv_ablations",
        "lorekv_mix",
        "lorekv_quickstart",
    }
    assert {path.stem for path in DIAGNOSTICS} >= {"qevict", "qevict_promotion"}


@pytest.mark.parametrize("path", SWEEPS, ids=lambda path: path.stem)
def test_a_ready_sweep_runs_under_its_name_on_the_papers_models(path: Path) -> None:
    sweep = load_sweep(path)
    assert sweep.name == path.stem.replace("_", "-")
    assert sweep.output == f"results/{sweep.name}"
    assert {model.label for model in sweep.models} <= set(LAYOUTS)
    assert sweep.methods[0].shown == "full"


@pytest.mark.parametrize("path", SWEEPS, ids=lambda path: path.stem)
def test_its_budgets_can_be_met_on_usual_prompts(path: Path) -> None:
    sweep = load_sweep(path)
    for model in sweep.models:
        for entry in sweep.tasks:
            task = get_task(entry.name, entry.settings)
            prompt = USUAL_PROMPT.get(entry.name, 8000)
            if sweep.contexts:
                prompt = sweep.contexts[0] - task.generation_limit
            for asked in sweep.budgets:
                layout = LAYOUTS[model.label]
                sizes = prompt, task.generation_limit, sweep.protocol.budget_base, layout
                reasons = {}
                for one in sweep.methods:
                    method = one.method()
                    own = Budget.parse("unlimited") if method.fixed else asked
                    reasons[one.shown] = method.impossible(own.resolve(*sizes), layout)
                assert not any(reasons.values()), (entry.name, str(asked), reasons)


def test_the_efficiency_is_that_of_table_4_and_can_be_measured() -> None:
    sweep = load_sweep(JOBS / "qevict_efficiency.yaml")
    timing = sweep.timing
    assert timing is not None
    assert (timing.prompt_tokens, timing.new_tokens, timing.batch) == ([256], 1024, [32])
    assert QEvict() in [one.method() for one in sweep.methods]
    layout = LAYOUTS[sweep.models[0].label]
    for asked in sweep.budgets:
        budget = asked.resolve(256, 1024, sweep.protocol.budget_base, layout)
        assert not any(one.method().impossible(budget, layout) for one in sweep.methods)


def test_ruler_is_all_of_it_at_32k() -> None:
    sweep = load_sweep(JOBS / "qevict_ruler.yaml")
    assert {task.name for task in sweep.tasks} == set(RULER)
    assert (sweep.contexts, sweep.samples, [str(one) for one in sweep.budgets]) == ([32768], 500, ["20%"])
    assert all(one.settings["recent"] == 64 for one in sweep.methods if one.name == "qevict")


@pytest.mark.parametrize(
    ("name", "max_length"),
    [("qevict_longbench", 127500), ("qevict_longbench_paper", 127500), ("qevict_longbench_32k", 31500)],
)
def test_longbench_is_the_twelve_tasks_of_the_tables(name: str, max_length: int) -> None:
    sweep = load_sweep(JOBS / f"{name}.yaml")
    assert [task.name for task in sweep.tasks] == list(LONGBENCH_12)
    assert {task.settings["max_length"] for task in sweep.tasks} == {max_length}
    assert [str(one) for one in sweep.budgets] == ["5%", "10%", "20%"]


def test_the_ablations_change_one_setting_at_a_time() -> None:
    methods = [one.method() for one in load_sweep(JOBS / "qevict_ablations.yaml").methods[1:]]
    ours = [one for one in methods if isinstance(one, QEvict) and one.accounting == "paper"]
    default = ours[0].settings()
    changed = [{key: value for key, value in one.settings().items() if value != default[key]} for one in ours[1:]]
    assert changed == [
        *({"window": size} for size in (4, 16, 32)),
        *({"quantized_share": share} for share in (0.1, 0.3, 0.5, 0.9)),
        {"bits": 4},
    ]


def test_lorekvs_ablations_change_one_thing_at_a_time_and_leave_no_setting_out() -> None:
    """Pooled AnDPro and the adaptive number of futures, which needs a larger most, change two."""
    methods = [one.method() for one in load_sweep(JOBS / "lorekv_ablations.yaml").methods]
    ours = [one for one in methods if isinstance(one, LoreKV)]
    default = LoreKV().settings()
    assert ours[0] == LoreKV()
    changed = [{key for key, value in one.settings().items() if value != default[key]} for one in ours[1:]]
    several = [keys for keys in changed if len(keys) > 1]
    assert several == [{"atypicality", "entropy"}, {"objective", "kernel"}, {"particles", "stop_change"}]
    assert set().union(*changed) == set(default) - {"window", "temperature"}


@pytest.mark.parametrize("name", ["lorekv_longbench", "lorekv_ruler", "lorekv_niah"])
def test_lorekvs_budgets_are_tokens_of_the_prompt(name: str) -> None:
    sweep = load_sweep(JOBS / f"{name}.yaml")
    assert [str(one) for one in sweep.budgets] == ["128 tokens", "256 tokens", "512 tokens", "1024 tokens"]
    assert (sweep.protocol.question, sweep.protocol.budget_base) == ("compressed", "prompt")


def test_lorekvs_quickstart_gives_every_method_the_same_bytes() -> None:
    """Methods that evict once keep 64, 128 and 256 tokens of the prompt; with 32 new ones they hold what is asked."""
    sweep = load_sweep(JOBS / "lorekv_quickstart.yaml")
    layout = LAYOUTS["smollm2-135m"]
    kept = []
    for asked in sweep.budgets:
        budget = asked.resolve(2000, 32, sweep.protocol.budget_base, layout)
        kept.append(budget.prompt_budget)
        assert budget.total_bytes == layout.full_bytes(budget.prompt_budget + 32)
    assert kept == [64, 128, 256]
    assert {entry.settings["max_new_tokens"] for entry in sweep.tasks} == {32}


def test_the_mix_is_chosen_on_a_seed_that_nothing_else_uses() -> None:
    sweep = load_sweep(JOBS / "lorekv_mix.yaml")
    assert [one.settings["mix"] for one in sweep.methods[1:]] == [0, 0.25, 0.5, 0.75, 1]
    assert not {*sweep.seeds} & {
        seed for path in SWEEPS if path.stem != "lorekv_mix" for seed in load_sweep(path).seeds
    }


def test_the_diagnostics_have_the_papers_capacities() -> None:
    loaded = load_diagnostics(JOBS / "diagnostics" / "qevict.yaml")
    room = {}
    for label, entry in loaded.conditions.items():
        layout = LAYOUTS["llama-3.1-8b"]
        asked = entry.budget or loaded.budget
        budget = asked.resolve(loaded.prefill, loaded.continuation, loaded.budget_base, layout)
        found = entry.method().capacities(budget, layout)
        assert found is not None
        room[label] = found.full, found.quantized
    assert list(room) == ["R0", "R1", "R2", "R3", "R4"]
    assert (room["R3"], room["R4"]) == ((7, 28), (1, 11))
    assert (room["R1"], room["R2"]) == ((116, 0), (14, 0))


def test_promotion_is_compared_with_all_else_equal() -> None:
    loaded = load_diagnostics(JOBS / "diagnostics" / "qevict_promotion.yaml")
    assert (loaded.prefill, loaded.continuation) == (256, 1024)
    methods = {label: entry.method() for label, entry in loaded.conditions.items()}
    assert {methods[label].promotion for label in ("none", "residency", "exact")} == {"none", "residency", "exact"}
    for label in ("none", "residency", "exact"):
        assert {**methods[label].settings(), "promotion": ""} == {**methods["none"].settings(), "promotion": ""}


@pytest.mark.parametrize("path", DIAGNOSTICS, ids=lambda path: path.stem)
def test_diagnostics_are_executable(path: Path) -> None:
    assert path.read_text().startswith("#!/usr/bin/env -S python -m pipeline diagnostics\n")
    assert os.access(path, os.X_OK)
    assert re.fullmatch(r"results/[\w.-]+", load_diagnostics(path).output)
