"""``kvsweep diagnostics``: run a file's diagnostics, keep every measure, and show tables and figures.

This module has QEvict's, which read texts; LORE-KV's, on the prompts of tasks, are in
:mod:`pipeline.diagnose_lorekv`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pipeline import render
from pipeline.diagnose_lorekv import run_lorekv
from pipeline.diagnostics_file import DiagnosticsFile, LoreDiagnosticsFile, load_diagnostics
from pipeline.diagnostics_lorekv import lorekv_tables
from pipeline.diagnostics_output import keep_measures
from pipeline.diagnostics_page import alone, missed_mass, page, tier_mass
from pipeline.diagnostics_summary import Diagnostics, tables
from pipeline.errors import SweepProblem
from pipeline.files import put_texts
from pipeline.location import local_folder
from pipeline.show import console
from workers.job import ModelSpec

if TYPE_CHECKING:
    from pipeline.table import Table
    from workers.diagnose import Condition
    from workers.models import LoadedModel

File = TypeVar("File", DiagnosticsFile, LoreDiagnosticsFile)


@dataclass(frozen=True)
class Asked:
    """What the command line says beside the file."""

    texts: tuple[Path, ...] = ()
    model: str | None = None
    conditions: str | None = None
    limit: int | None = None
    output: str | None = None
    data_dir: Path | None = None


def diagnostics(file: Path, asked: Asked) -> None:
    """Run what the file and the command line ask for; the output folder then has everything."""
    settings: DiagnosticsFile | LoreDiagnosticsFile = load_diagnostics(file)
    if isinstance(settings, LoreDiagnosticsFile):
        settings = _with(settings, asked)
        made = _of_lorekv(settings, asked)
    else:
        settings = _with(settings, asked)
        made = _of_qevict(settings, asked)
    for table in made:
        console().print(render.rich(table))
    for path in sorted(Path(settings.output).iterdir()):
        print(path)


def _of_qevict(settings: DiagnosticsFile, asked: Asked) -> list[Table]:
    if asked.data_dir is not None:
        raise SweepProblem("--data-dir: QEvict's diagnostics read texts, no tasks: give --text FILE")
    settings = settings.model_copy(update={"texts": [*settings.texts, *(str(path) for path in asked.texts)]})
    texts = _texts(settings.texts)
    return tables(run(settings, _loaded(settings.model), texts, asked.limit), settings.horizon)


def _of_lorekv(settings: LoreDiagnosticsFile, asked: Asked) -> list[Table]:
    if asked.texts:
        raise SweepProblem("--text: LORE-KV's diagnostics read the prompts of tasks: name some in the file's `tasks`")
    return lorekv_tables(run_lorekv(settings, _loaded(settings.model), asked.data_dir, asked.limit), settings)


def _loaded(model: ModelSpec) -> LoadedModel:
    from workers.description import ModelError
    from workers.models import load_model

    try:
        return load_model(model)
    except ModelError as error:
        raise SweepProblem(str(error)) from None


def run(settings: DiagnosticsFile, model: LoadedModel, texts: dict[str, str], limit: int | None) -> Diagnostics:
    """Every trace in turn; its measures are written when it is done, the summary at the end."""
    from workers.diagnose import ConditionError, continued, diagnose
    from workers.traces import traces_of

    length = settings.prefill + settings.continuation
    traces = traces_of(texts, model.tokenizer, settings.prefill, settings.continuation)[:limit]
    if not traces:
        raise SweepProblem(
            f"none of the texts has {length} tokens: {', '.join(texts)}; "
            "give longer ones, or shorten prefill or continuation"
        )
    conditions = _conditions(settings)
    output = Path(settings.output)
    (output / "measures").mkdir(parents=True, exist_ok=True)
    found = Diagnostics(list(settings.conditions))
    for number, trace in enumerate(traces):
        try:
            read = continued(model, trace) if settings.source == "generated" else trace
            diagnosis = diagnose(model, read, conditions, settings.horizon)
        except (ConditionError, ValueError) as error:
            raise SweepProblem(f"{trace.name}: {error}") from None
        keep_measures(output / "measures" / f"{number:05d}.parquet", trace.name, diagnosis.measures)
        found.add(trace.name, diagnosis.measures, diagnosis.held)
        console().print(f"{number + 1} of {len(traces)} traces: {trace.name}", highlight=False)
    _write(output, settings, found)
    return found


def _with(settings: File, asked: Asked) -> File:
    changes: dict[str, Any] = {}
    if asked.model is not None:
        changes["model"] = ModelSpec.named_by_source(asked.model, settings.model.dtype)
    changes["output"] = str(local_folder(asked.output or settings.output))
    chosen = settings if asked.conditions is None else settings.chosen(asked.conditions)
    return chosen.model_copy(update=changes)


def _texts(paths: Sequence[str]) -> dict[str, str]:
    """By file name, or by path where names are the same."""
    if not paths:
        raise SweepProblem("diagnostics read texts: name some in the file's `texts`, or give --text FILE")
    names = [Path(path).name for path in paths]
    found = {}
    for path, name in zip(paths, names, strict=True):
        try:
            found[name if names.count(name) == 1 else path] = Path(path).read_text(encoding="utf-8")
        except OSError as error:
            raise SweepProblem(f"the text {path} cannot be read: {error.strerror}") from None
        except UnicodeDecodeError:
            raise SweepProblem(f"the text {path} is not UTF-8") from None
    return found


def _conditions(settings: DiagnosticsFile) -> list[Condition]:
    from workers.diagnose import Condition

    return [
        Condition(label, entry.method(), entry.budget or settings.budget, settings.budget_base)
        for label, entry in settings.conditions.items()
    ]


def _write(output: Path, settings: DiagnosticsFile, found: Diagnostics) -> None:
    figures = {"Future missed mass over decoding": missed_mass(found), "Tier mass": tier_mass(found)}
    made = tables(found, settings.horizon)
    facts = {
        "Model": f"{settings.model.label} ({settings.model.dtype})",
        "Traces": f"{len(found.traces)}, {settings.prefill} + {settings.continuation} tokens, {settings.source}",
        "Budget": f"{settings.budget} of {settings.budget_base}",
        "Intervals": "95 %, bootstrap over traces",
    }
    held = {label: [vars(one) for one in many] for label, many in found.held.items()}
    summary = {
        "settings": settings.model_dump(mode="json"),
        "traces": found.traces,
        "held": held,
        "measures": found.records(),
    }
    texts = {
        "summary.json": json.dumps(summary, indent=1),
        "by_layer.csv": render.csv_text(found.layer_records()),
        "fmm.svg": alone(figures["Future missed mass over decoding"]),
        "tier_mass.svg": alone(figures["Tier mass"]),
        "diagnostics.html": page(settings.name, facts, figures, made),
        "tables.md": "\n".join(render.markdown(table) for table in made),
    }
    put_texts(output, texts)
