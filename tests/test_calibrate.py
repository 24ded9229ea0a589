"""Calibrating KVQuant: what is found is that of the model's own projections, kept once, and what a plan makes of it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from models import prompt_ids, tiny_gemma, tiny_llama, tiny_qwen, tiny_qwen35
from tiny_model import WORDS, save_tiny_model
from torch import Tensor

import workers.models
from kvcache.baselines.kvquant import KVQuant
from kvcache.calibration import read_facts, read_tables
from kvcache.codebook import nearest, uniform_codebook
from kvcache.layout import LayerLayout
from kvcache.sparse_grid import SparseGrid
from pipeline.cli import main
from pipeline.plan import Cell, expand
from pipeline.spec import load_sweep
from tasks.sources import DataSources
from workers.calibrate import NoGradients, _read, calibrate
from workers.models import LoadedModel
from workers.traces import Trace

GRID = SparseGrid(bits=3, outliers=0.1, sinks=2)
TRACES = [Trace(str(seed), tuple(prompt_ids(60, seed)), 60) for seed in range(3)]


@contextmanager
def projections(model: LoadedModel) -> Iterator[dict[str, list[Tensor]]]:
    """What the key and value projections of all layers put out meanwhile, by ``layer.kind``. [n, C] each"""
    kept: dict[str, list[Tensor]] = {}

    def keep(name: str) -> Any:
        def hook(module: Any, arguments: Any, output: Tensor) -> None:
            if output.requires_grad:
                output.retain_grad()
            kept.setdefault(name, []).append(output)

        return hook

    layers = enumerate(model.forward.get_decoder().layers)
    parts = [(f"{index}.{kind}", getattr(one.self_attn, f"{kind}_proj")) for index, one in layers for kind in "kv"]
    hooks = [part.register_forward_hook(keep(name)) for name, part in parts]
    yield kept
    for hook in hooks:
        hook.remove()


@pytest.mark.parametrize("build", [tiny_llama, tiny_qwen], ids=["llama", "qwen"])
def test_thresholds_are_percentiles_of_keys_before_rotation(build: type) -> None:
    """Biases included, first tokens left out; half of the outliers at either end."""
    model: LoadedModel = build()
    with projections(model) as kept:
        tables = calibrate(model, TRACES, GRID, gradients=False)
    for layer in range(3):
        keys = torch.cat([one[0, GRID.sinks :] for one in kept[f"{layer}.k"][:3]]).numpy()
        for name, share in (("key_low", 5), ("key_high", 95)):
            np.testing.assert_allclose(tables[f"{layer}.{name}"], np.percentile(keys, share, axis=0), atol=5e-3)


def test_weights_are_squared_gradients_of_the_loss() -> None:
    """As transformers' own attention and loss give them, at the outputs of the projections."""
    model = tiny_qwen()
    found = dict(_read(model, TRACES[0], 2, gradients=True))
    model.forward.set_attn_implementation("sdpa")
    ids = torch.tensor([TRACES[0].ids])
    start = model.forward.get_input_embeddings().register_forward_hook(lambda m, i, out: out.requires_grad_())
    with projections(model) as kept:
        model.forward(input_ids=ids, labels=ids).loss.backward()
    start.remove()
    for layer, seen in found.items():
        for kind, x, weights in (("k", seen.keys, seen.key_weights), ("v", seen.values, seen.value_weights)):
            (expected,) = kept[f"{layer}.{kind}"]
            torch.testing.assert_close(x, expected[0, 2:].detach(), rtol=1e-4, atol=1e-5)
            assert expected.grad is not None
            assert weights is not None
            torch.testing.assert_close(weights, expected.grad[0, 2:].square(), rtol=1e-3, atol=1e-9)
            assert float(weights.max()) > 0


@pytest.mark.parametrize("gradients", [False, True])
def test_codebooks_fit_what_was_read_better_than_equal_steps(gradients: bool) -> None:
    model = tiny_llama()
    tables = calibrate(model, TRACES, GRID, gradients)
    losses: dict[str, list[float]] = {"fitted": [0.0] * 3, "equal": [0.0] * 3}
    for trace in TRACES:
        for layer, seen in _read(model, trace, GRID.sinks, gradients):
            low, high = tables[f"{layer}.key_low"], tables[f"{layer}.key_high"]
            scaled, within = (2 * seen.keys - low - high) / (high - low), (seen.keys >= low) & (seen.keys <= high)
            weights = torch.ones_like(scaled) if seen.key_weights is None else seen.key_weights
            for name, book in (("fitted", tables[f"{layer}.key_codebook"]), ("equal", uniform_codebook(8))):
                error = (scaled - book[nearest(scaled, book).long()]).square() * weights
                losses[name][layer] += float(error[within].sum())
    assert all(fitted < equal for fitted, equal in zip(losses["fitted"], losses["equal"], strict=True))
    for name, table in tables.items():
        assert not table.requires_grad
        if name.endswith("codebook"):
            assert table.tolist() == sorted(table.tolist())
            assert float(table.abs().max()) <= 1


def test_gradients_change_the_codebooks_and_not_the_thresholds() -> None:
    model = tiny_llama()
    plain, weighted = (calibrate(model, TRACES, GRID, gradients) for gradients in (False, True))
    for name, table in plain.items():
        assert torch.equal(table, weighted[name]) == ("codebook" not in name)
    assert all(parameter.grad is None for parameter in model.forward.parameters())


def test_hybrid_models_are_calibrated_where_their_cache_grows() -> None:
    assert {name.split(".")[0] for name in calibrate(tiny_gemma(), TRACES, GRID, gradients=True)} == {"2"}
    linear = tiny_qwen35()
    assert {name.split(".")[0] for name in calibrate(linear, TRACES, GRID, gradients=False)} == {"1", "3"}
    with pytest.raises(NoGradients, match="--no-gradients"):
        calibrate(linear, TRACES, GRID, gradients=True)


# -- the command -----------------------------------------------------------------------------------------------------


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVSWEEP_CACHE", str(tmp_path / "cache"))
    return save_tiny_model(tmp_path / "model")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(" ".join(f"w{place * place % WORDS}" for place in range(400)))
    return path


def asked(model: Path, text: Path, *more: str) -> list[str]:
    sizes = ["--tokens", "64", "--sequences", "4", "--dtype", "float32"]
    return ["calibrate", str(model), "--text", str(text), *sizes, *more]


def calibrations(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache" / "calibrations").iterdir())


def test_a_calibration_is_made_once(
    model: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """For the same model, text and settings; the second time nothing is loaded."""
    assert main(asked(model, text)) == 0
    (path,) = calibrations(tmp_path)
    assert capsys.readouterr().out == f"weighted by squared gradients, from 4 sequences of 64 tokens: {path}\n"
    facts = read_facts(path)
    assert (facts.method, facts.settings) == ("kvquant", {"bits": 3, "outliers": 0.01, "sinks": 1})
    assert (facts.weighted, facts.tokens, facts.sequences) == (True, 64, 4)
    assert {len(table) for name, table in read_tables(path).items() if "codebook" in name} == {8}

    with monkeypatch.context() as patched:
        patched.setattr(workers.models, "load_model", lambda spec: pytest.fail("nothing is loaded"))
        assert main(asked(model, text)) == 0
    assert capsys.readouterr().out == f"is there already: {path}\n"
    assert main(asked(model, text, "--no-gradients", "--bits", "2")) == 0
    assert capsys.readouterr().out.startswith("unweighted, from 4 sequences")
    text.write_text(text.read_text() + " w1")
    assert main(asked(model, text)) == 0
    assert len(calibrations(tmp_path)) == 3


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("--sequences", "9"), "has 6 of 9 sequences of 64 tokens: give a longer text"),
        (("--tokens", "2"), "--tokens: a sequence of "),
        (("--tokens", "5000"), "has 3 to 4096, not 5000"),
        (("--bits", "7"), "--bits: bits is among (2, 3, 4), not 7"),
        (("--outliers", "1.5"), "--outliers: outliers is between 0 and 1"),
        (("--method", "kivi"), "--method: kivi needs no calibration; kvquant needs one"),
        (("--method", "kv"), "--method: kv is no method"),
        (("--dtype", "float8"), "--dtype: 'float8' is no type of weights"),
        (("--text", "none.txt"), "--text: none.txt cannot be read: No such file or directory"),
    ],
)
def test_bad_input_is_one_line(
    model: Path, text: Path, capsys: pytest.CaptureFixture[str], more: tuple[str, ...], said: str
) -> None:
    assert main(asked(model, text, *more)) == 2
    told = capsys.readouterr()
    assert said in told.err
    assert len(told.err.splitlines()) == 1
    assert told.out == ""


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("empty.txt", b" \n", "is empty"),
        ("latin.txt", b"caf\xe9", "is not UTF-8"),
        ("haystack/essay.txt", b"w1 w2", "is of the data set haystack, which tasks are made of"),
        ("gsm8k/test.jsonl", b"{}", "is of the data set gsm8k, which tasks are made of"),
    ],
)
def test_texts_that_will_not_do(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, content: bytes, said: str
) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    assert main(asked(model, path)) == 2
    assert f"--text: {path} {said}" in capsys.readouterr().err


def test_what_does_not_fit_into_memory_says_what_would(
    model: Path, text: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("workers.calibrate.calibrate", full)
    assert main(asked(model, text)) == 2
    assert "try --tokens 512, or --no-gradients" in capsys.readouterr().err


# -- the plan --------------------------------------------------------------------------------------------------------


def cells(folder: Path, models: list[Path], *methods: dict[str, Any]) -> list[Cell]:
    file = folder / "sweep.yaml"
    sweep = {
        "name": "calibrated",
        "models": [{"label": path.name, "source": str(path), "dtype": "float32"} for path in models],
        "contexts": [512],
        "tasks": ["niah_single_1"],
        "methods": [{"name": "kvquant", "label": str(place), **one} for place, one in enumerate(methods)],
        "budgets": ["10%"],
        "output": "out",
    }
    file.write_text(yaml.safe_dump(sweep))
    return expand(load_sweep(file), file, DataSources()).cells


def test_a_sweep_finds_the_calibration_of_each_model(model: Path, text: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(model, other)
    (other / "generation_config.json").write_text('{"eos_token_id": 3}')
    for cell, source in zip(cells(tmp_path, [model, other], {"bits": 3}), (model, other), strict=True):
        assert cell.impossible == (
            f"kvquant has no calibration of {source}: run `kvsweep calibrate {source} --text FILE --bits 3`"
        )
        assert cell.spec.settings["calibration"] == ""
    assert main(asked(model, text)) == 0
    first, second = cells(tmp_path, [model, other], {"bits": 3})
    (path,) = calibrations(tmp_path)
    assert (first.impossible, first.spec.settings["calibration"]) == (None, str(path))
    assert "has no calibration of" in str(second.impossible)
    (wanted,) = cells(tmp_path, [model], {"bits": 2, "sinks": 5})
    assert str(wanted.impossible).endswith("--text FILE --bits 2 --sinks 5`")


def test_a_cell_changes_with_its_calibration_and_not_with_its_place(
    model: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (missing,) = cells(tmp_path, [model], {})
    assert main(asked(model, text)) == 0
    (found,) = cells(tmp_path, [model], {})
    shutil.copytree(tmp_path / "cache", tmp_path / "moved")
    monkeypatch.setenv("KVSWEEP_CACHE", str(tmp_path / "moved"))
    (moved,) = cells(tmp_path, [model], {})
    assert moved.spec.settings != found.spec.settings
    assert moved.cell_id == found.cell_id != missing.cell_id
    assert main(asked(model, text, "--sequences", "3")) == 0
    (which,) = cells(tmp_path, [model], {})
    names = sorted(path.name for path in (tmp_path / "moved" / "calibrations").iterdir())
    assert f"several calibrations of {model}: set calibration to one of {', '.join(names)}" in str(which.impossible)
    chosen = cells(tmp_path, [model], *({"calibration": name} for name in names))
    assert [cell.impossible for cell in chosen] == [None, None]
    assert len({cell.cell_id for cell in chosen}) == 2


def test_a_calibration_of_another_model_or_setting_is_refused(model: Path, text: Path, tmp_path: Path) -> None:
    assert main(asked(model, text)) == 0
    (path,) = calibrations(tmp_path)
    other = tmp_path / "other"
    shutil.copytree(model, other)
    (other / "generation_config.json").write_text('{"eos_token_id": 3}')
    own = [{"calibration": str(path)}, {"calibration": str(path), "bits": 2}, {"calibration": "/none/x.safetensors"}]
    reasons = [cell.impossible for cell in cells(tmp_path, [other], *own)]
    command = f"run `kvsweep calibrate {other} --text FILE"
    assert reasons == [
        f"kvquant: its calibration is of another model; {command} --bits 3`",
        "kvquant: its calibration is for bits 3, outliers 0.01, sinks 1, not bits 2, outliers 0.01, sinks 1; "
        f"{command} --bits 2`",
        f"kvquant: the calibration /none/x.safetensors cannot be read: No such file or directory; {command} --bits 3`",
    ]


def test_a_file_that_is_no_calibration_says_so(tmp_path: Path) -> None:
    broken = tmp_path / "kvquant-0.safetensors"
    broken.write_bytes(b"nothing of the kind")
    with pytest.raises(ValueError, match="is not a calibration: `kvsweep calibrate` writes them"):
        KVQuant().fitted("model", "source", tmp_path)
    assert KVQuant().unsuited(LayerLayout("growing", 2, 1, 16, 16)) is None
