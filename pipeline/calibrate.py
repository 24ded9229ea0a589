"""``kvsweep calibrate``: what a quantiser needs to know of a model, found once from a text and kept in the cache."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from kvcache.baselines.kvquant import KVQuant
from kvcache.calibration import CalibrationFacts
from kvcache.method import method_names
from pipeline.errors import SweepProblem
from pipeline.spec import nearest
from tasks.catalogue import DATA_SETS
from tasks.sources import fingerprint
from workers.description import ModelDescription, ModelError, calibrations_folder, describe
from workers.job import Dtype, ModelSpec

if TYPE_CHECKING:
    from workers.models import LoadedModel
    from workers.traces import Trace

LEAST_TOKENS = 2
"""Of a sequence beside its first ones: a token, and the one that it predicts."""


@dataclass(frozen=True)
class Asked:
    """What the command line says. ``settings`` are the method's."""

    source: str
    text: Path
    method: str
    settings: dict[str, Any]
    tokens: int = 2048
    sequences: int = 16
    gradients: bool = True
    dtype: str = "bfloat16"
    revision: str | None = None


def calibrate(asked: Asked) -> None:
    """Calibrate, unless the same was done before, and say where the result is."""
    method, spec = _method(asked), _spec(asked)
    text = _text(asked.text)
    try:
        description = describe(spec)
    except ModelError as error:
        raise SweepProblem(str(error)) from None
    _check(asked, method, description)
    facts = CalibrationFacts(
        method.name,
        method.calibrated_settings,
        description.fingerprint,
        fingerprint(asked.text),
        asked.sequences,
        asked.tokens,
        asked.gradients,
    )
    path = calibrations_folder().absolute() / facts.file_name
    if path.is_file():
        print(f"is there already: {path}")
        return
    _make(asked, method, spec, text, facts, path)
    how = "weighted by squared gradients" if asked.gradients else "unweighted"
    print(f"{how}, from {asked.sequences} sequences of {asked.tokens} tokens: {path}")


def _make(asked: Asked, method: KVQuant, spec: ModelSpec, text: str, facts: CalibrationFacts, path: Path) -> None:
    import torch

    from kvcache.calibration import save_calibration
    from workers.calibrate import NoGradients
    from workers.calibrate import calibrate as find_tables
    from workers.models import load_model

    try:
        model = load_model(spec, gradients=True)
        tables = find_tables(model, _sequences(asked, model, text), method.grid, asked.gradients)
    except (ModelError, NoGradients) as error:
        raise SweepProblem(str(error)) from None
    except torch.OutOfMemoryError:
        fewer = "--tokens 512, or --no-gradients" if asked.gradients else "--tokens 512"
        raise SweepProblem(f"{asked.source} and its sequences do not fit into memory: try {fewer}") from None
    save_calibration(path, facts, tables)


def _method(asked: Asked) -> KVQuant:
    if asked.method != KVQuant.name:
        hint = "needs no calibration" if asked.method in method_names() else "is no method"
        raise SweepProblem(f"--method: {asked.method} {hint}; {KVQuant.name} needs one")
    try:
        return KVQuant(**asked.settings)
    except ValueError as error:
        raise SweepProblem(f"--{str(error).split()[0]}: {error}") from None


def _spec(asked: Asked) -> ModelSpec:
    known = get_args(Dtype)
    if asked.dtype not in known:
        raise SweepProblem(f"--dtype: {asked.dtype!r} is no type of weights; {nearest(asked.dtype, known)}")
    return ModelSpec.named_by_source(asked.source, asked.dtype, asked.revision)  # type: ignore[arg-type]


def _text(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise SweepProblem(f"--text: {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise SweepProblem(f"--text: {path} is not UTF-8") from None
    if not text.strip():
        raise SweepProblem(f"--text: {path} is empty: give a text of a few hundred thousand words")
    if name := _test_data(path):
        raise SweepProblem(f"--text: {path} is of the data set {name}, which tasks are made of: give another text")
    return text


def _test_data(path: Path) -> str | None:
    """The data set of the tasks that a file belongs to, by its contents or by where it lies."""
    digest, place = fingerprint(path), path.absolute()
    for entry in DATA_SETS:
        if any(file.sha256 == digest or place.as_posix().endswith(f"/{file.path}") for file in entry.files):
            return entry.name
        if not entry.files and place.parent.name == entry.name:
            return entry.name
    return None


def _check(asked: Asked, method: KVQuant, description: ModelDescription) -> None:
    least, most = method.sinks + LEAST_TOKENS, description.max_positions
    if not least <= asked.tokens <= most:
        raise SweepProblem(f"--tokens: a sequence of {asked.source} has {least} to {most}, not {asked.tokens}")
    for index in description.layout.growing:
        if reason := method.unsuited(description.layout.layers[index]):
            raise SweepProblem(f"{asked.source}: {reason}")


def _sequences(asked: Asked, model: LoadedModel, text: str) -> list[Trace]:
    from workers.traces import traces_of

    found = traces_of({asked.text.name: text}, model.tokenizer, asked.tokens, 0)
    if len(found) < asked.sequences:
        raise SweepProblem(
            f"--text: {asked.text} has {len(found)} of {asked.sequences} sequences of {asked.tokens} tokens: give a "
            "longer text, or lower --sequences or --tokens"
        )
    return found[: asked.sequences]
