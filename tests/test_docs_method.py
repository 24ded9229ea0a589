"""The method of ``docs/adding-a-method.md``: its code runs, and does what the page says."""

from __future__ import annotations

import re
import sys
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType

import pytest
import torch
import yaml
from attention_prompts import SCALE, kept, prompt
from models import prompt_ids, tiny_llama

from kvcache import method as registry
from kvcache.baselines.full import Full
from kvcache.budget import Budget
from kvcache.evict import PromptEvictor
from kvcache.method import Method, method_class
from pipeline.spec import MethodEntry
from workers.engine import Engine
from workers.fork import Fork, Prompt
from workers.job import EngineSpec

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGE = (DOCS / "adding-a-method.md").read_text(encoding="utf-8")


def block(language: str) -> str:
    [text] = re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)
    return str(text)


@pytest.fixture
def documented(monkeypatch: pytest.MonkeyPatch) -> type[PromptEvictor]:
    """The class of the page, registered as the page says."""
    entries = tomllib.loads(block("toml"))["project"]["entry-points"][registry.ENTRY_POINTS]
    ((name, value),) = entries.items()
    point = EntryPoint(name, value, registry.ENTRY_POINTS)
    package, module = ModuleType(point.module.partition(".")[0]), ModuleType(point.module)
    for made in (package, module):
        monkeypatch.setitem(sys.modules, made.__name__, made)  # where dataclasses look it up
    exec(compile(block("python"), module.__name__, "exec"), vars(module))
    monkeypatch.setattr(registry, "_registered", lambda: {name: point})
    found = method_class(name)
    assert issubclass(found, PromptEvictor)
    assert found.name == name
    return found


def test_the_code_is_short() -> None:
    assert len([line for line in block("python").splitlines() if line]) < 40


def test_it_keeps_what_the_last_query_attends_to(documented: type[PromptEvictor]) -> None:
    prefill = prompt(50)
    found = kept(documented(), prefill, 12)
    for layer, heads in zip(prefill.layers, found, strict=True):
        assert layer.queries is not None
        for head, own in enumerate(heads):
            of_group = [layer.keys[head] @ layer.queries[2 * head + one, -1] * SCALE for one in (0, 1)]
            mean = sum(torch.softmax(scores, 0) for scores in of_group)
            assert isinstance(mean, torch.Tensor)
            best = (mean[4:49].topk(7).indices + 4).tolist()
            assert own == [*range(4), *sorted(best), 49]


def test_it_runs_through_the_engine(documented: type[PromptEvictor]) -> None:
    methods: list[Method] = [Full(), documented()]
    forks = [
        Fork((one.name, text), one, Budget.parse(text), "0") for one in methods for text in ("unlimited", "30%", "5%")
    ]
    finished = Engine(tiny_llama(), EngineSpec(4, 64)).run([Prompt("", prompt_ids(80), [], 8, forks)])
    found = {one.fork.key: one for one in finished}
    assert found["last_query", "unlimited"].tokens == found["full", "unlimited"].tokens
    small = found["last_query", "30%"]
    assert not small.error
    assert small.budget is not None
    assert small.at_prefill.held == small.budget.total_bytes
    assert "must keep 5 protected tokens" in found["last_query", "5%"].error


def test_a_sweep_file_names_it_with_its_settings(documented: type[PromptEvictor]) -> None:
    *_, entry = yaml.safe_load(block("yaml"))["methods"]
    assert MethodEntry.model_validate(entry).method() == documented(sinks=8)  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="sinks must be at least 0"):
        documented(sinks=-1)  # type: ignore[call-arg]


def test_the_list_of_methods_leads_to_the_page() -> None:
    assert "(adding-a-method.md)" in (DOCS / "methods.md").read_text(encoding="utf-8")
