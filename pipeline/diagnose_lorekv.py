"""LORE-KV's diagnostics: run them on the prompts of tasks, one after another, and write what was found."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline import render
from pipeline.diagnostics_file import LoreDiagnosticsFile
from pipeline.diagnostics_lorekv import curves, lorekv_tables
from pipeline.diagnostics_output import keep_measures
from pipeline.diagnostics_page import alone, page
from pipeline.diagnostics_summary import Diagnostics
from pipeline.errors import SweepProblem
from pipeline.files import put_texts
from pipeline.show import console
from pipeline.spec import TaskEntry
from tasks.registry import get_task
from workers.job import Protocol
from workers.lorekv_labels import ORACLE

if TYPE_CHECKING:
    from tasks.sources import DataSources
    from workers.diagnose_lorekv import Question
    from workers.models import LoadedModel


@dataclass(frozen=True)
class SeededQuestion:
    """A prompt with the seed of its futures."""

    question: Question
    seed: str


def run_lorekv(
    settings: LoreDiagnosticsFile, model: LoadedModel, data_dir: Path | None, limit: int | None
) -> Diagnostics:
    """Every prompt in turn; its measures are written when it is done, the summary at the end."""
    from workers.diagnose_lorekv import Comparison, DiagnosisError, diagnose_question

    asked = questions(settings, model, data_dir)[:limit]
    compared = Comparison(
        {label: entry.method() for label, entry in settings.conditions.items()},
        settings.control,
        tuple(int(budget.value) for budget in settings.budgets),
        tuple(sorted(set(settings.futures))),
        settings.future_tokens,
    )
    output = Path(settings.output)
    (output / "measures").mkdir(parents=True, exist_ok=True)
    found = Diagnostics([*settings.conditions, ORACLE])
    for number, one in enumerate(asked):
        name = one.question.name
        try:
            measures = diagnose_question(model, one.question, compared, one.seed)
        except (DiagnosisError, ValueError) as error:
            raise SweepProblem(f"{name}: {error}") from None
        keep_measures(output / "measures" / f"{number:05d}.parquet", name, measures)
        found.add(name, measures, [])
        console().print(f"{number + 1} of {len(asked)} prompts: {name}", highlight=False)
    _write(output, settings, found)
    return found


def questions(settings: LoreDiagnosticsFile, model: LoadedModel, data_dir: Path | None) -> list[SeededQuestion]:
    """The prompts of all tasks and contexts, which take turns, so that the first few are of different ones."""
    from pipeline.run import data_sources

    sources = data_sources(data_dir or (Path(settings.data_dir) if settings.data_dir else None))
    kinds = []
    for entry in settings.tasks:
        contextual = get_task(entry.name, entry.settings).contextual
        for context in (entry.contexts or settings.contexts) if contextual else [0]:
            kinds.append(_of_task(settings, model, sources, entry, context))
    return [one for one in chain.from_iterable(zip_longest(*kinds)) if one is not None]


def _of_task(
    settings: LoreDiagnosticsFile, model: LoadedModel, sources: DataSources, entry: TaskEntry, context: int
) -> Iterator[SeededQuestion]:
    from tasks.prompt import render as prompt_of
    from workers import samples
    from workers.diagnose_lorekv import Question

    get_task(entry.name, entry.settings).check(sources, context or None)
    request = samples.SampleRequest(
        settings.model,
        Protocol(),
        entry.name,
        entry.settings,
        context,
        settings.seed,
        entry.samples or settings.samples,
        sources.data_dir,
        sources.cache_dir,
    )
    for sample in samples.make_samples(request):
        spelled = [text for reference in sample.references for text in (reference, f" {reference}")]
        answers = [model.tokenizer(text, add_special_tokens=False)["input_ids"] for text in spelled]
        question = Question(
            f"{entry.name}{f'@{context}' if context else ''}:{sample.index}",
            prompt_of(sample, model.tokenizer).ids,
            answers,
            min(sample.max_new_tokens, settings.new_tokens),
            sample.stop,
        )
        yield SeededQuestion(question, f"{settings.seed}/{sample.sample_id}")


def _write(output: Path, settings: LoreDiagnosticsFile, found: Diagnostics) -> None:
    made = lorekv_tables(found, settings)
    figures = curves(found, settings)
    facts = {
        "Model": f"{settings.model.label} ({settings.model.dtype})",
        "Prompts": f"{len(found.traces)} of {', '.join(dict.fromkeys(name.split(':')[0] for name in found.traces))}",
        "Control": settings.control,
        "Answers": f"greedy over the full cache, {settings.new_tokens} tokens at most",
        "Intervals": "95 %, bootstrap over prompts",
    }
    summary = {"settings": settings.model_dump(mode="json"), "traces": found.traces, "measures": found.records()}
    texts = {
        "summary.json": json.dumps(summary, indent=1),
        "by_layer.csv": render.csv_text(found.layer_records()),
        "diagnostics.html": page(settings.name, facts, figures, made, "LORE-KV"),
        "tables.md": "\n".join(render.markdown(table) for table in made),
    }
    texts |= {f"{title.split()[0].lower()}.svg": alone(drawn) for title, drawn in figures.items()}
    put_texts(output, texts)
