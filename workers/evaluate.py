"""A job's samples become prompts, its cells forks of them, and what the engine finishes becomes rows."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

from kvcache.bounded import grown
from kvcache.budget import Budget
from kvcache.method import Method, method_class
from tasks.metrics import details, score
from tasks.prompt import render
from tasks.sample import Sample
from workers.engine import Engine
from workers.fork import FAULTS, Fork, Generation, Prompt
from workers.job import CellSpec, Job
from workers.memory import OutOfMemory, lacks_memory
from workers.models import LoadedModel
from workers.row import Row


def run_job(model: LoadedModel, job: Job) -> Iterator[Row]:
    """All rows of a job, as they finish. A sample's own exception fails its rows, not the job.

    Raises :class:`~workers.memory.OutOfMemory` where the job needs more than there is: its parts may do with it.
    """
    try:
        yield from _rows(model, job)
    except (MemoryError, RuntimeError) as error:
        if not lacks_memory(error):
            raise
        raise OutOfMemory(f"{type(error).__name__}: {error}") from error


def _rows(model: LoadedModel, job: Job) -> Iterator[Row]:
    cells = {cell.cell_id: (cell, grown(method_of(cell), job.protocol.growth)) for cell in job.cells}
    failed: list[Row] = []
    engine = Engine(model, job.engine)
    for generation in engine.run(_prompts(model, job, cells, failed)):
        while failed:
            yield failed.pop()
        sample, cell = generation.prompt.key, generation.fork.key
        row = new_row(job, sample, cell)
        try:
            _fill(row, model, sample, generation)
        except FAULTS as error:
            row = failed_row(new_row(job, sample, cell), error)
        yield row
    yield from failed


def method_of(cell: CellSpec) -> Method:
    return method_class(cell.method)(**cell.settings)


def _prompts(
    model: LoadedModel, job: Job, cells: dict[str, tuple[CellSpec, Method]], failed: list[Row]
) -> Iterator[Prompt]:
    for sample in job.samples:
        pending = [cells[cell_id] for cell_id in job.pending.get(sample.sample_id, ())]
        if not pending:
            continue
        try:
            prompt = render(
                sample,
                model.tokenizer,
                job.protocol.question,
                job.protocol.chat_template,
                job.protocol.answer_prefix,
            )
        except FAULTS as error:
            failed.extend(failed_row(new_row(job, sample, cell), error) for cell, _ in pending)
            continue
        forks = [Fork(cell, method, Budget.parse(cell.budget), _seed(cell, sample)) for cell, method in pending]
        yield Prompt(
            sample,
            prompt.ids,
            prompt.appended,
            sample.max_new_tokens,
            forks,
            stop=sample.stop,
            min_new_tokens=sample.min_new_tokens,
            base=job.protocol.budget_base,
        )


def _seed(cell: CellSpec, sample: Sample) -> str:
    """Of a method's own randomness: of the seed and the sample, whatever runs beside it."""
    return f"{cell.method_seed}/{sample.sample_id}"


def new_row(job: Job, sample: Sample, cell: CellSpec) -> Row:
    """A row with all that is known before anything runs."""
    row = Row(
        cell.cell_id,
        sample.sample_id,
        model=job.model.label,
        method=cell.label or cell.method,
        settings=json.dumps(cell.settings, sort_keys=True),
        budget=cell.budget,
        budget_base=job.protocol.budget_base,
        method_seed=cell.method_seed,
        question=job.protocol.question,
        growth=job.protocol.growth,
        chat_template=job.protocol.chat_template,
        answer_prefix=job.protocol.answer_prefix,
        dtype=job.model.dtype,
        attention=job.model.attention,
        row_width=job.engine.row_width,
        references=list(sample.references),
        metric=sample.metric,
        sample_index=sample.index,
        sample_meta=json.dumps(sample.meta, sort_keys=True),
    )
    for name, value in job.coordinates.items():
        setattr(row, name, value)
    return row


def _fill(row: Row, model: LoadedModel, sample: Sample, generation: Generation) -> None:
    row.finished_at = time.time()
    row.prefill_s, row.compress_s = generation.prefill_s, generation.compress_s
    row.prompt_tokens = len(generation.prompt.ids) + len(generation.prompt.appended)
    if generation.error or generation.budget is None:
        row.status, row.error = "failed", generation.error
        return
    row.prediction = generation.text(model.tokenizer)
    row.score = score(sample.metric, row.prediction, sample.references, sample.classes)
    row.details = json.dumps(details(sample.metric, row.prediction, sample.references))
    row.output_tokens, row.finish_reason = len(generation.tokens), generation.finish_reason
    row.decode_s, row.batch_rows = generation.decode_s, generation.batch_rows
    fill_memory(row, model, generation)
    row.peak_device_bytes = model.meter.peak_bytes()


def fill_memory(row: Row, model: LoadedModel, generation: Generation) -> None:
    """The budget asked for beside the bytes held; compared on the budget's own base."""
    budget, layout = generation.budget, model.layout
    assert budget is not None
    row.kv_bytes_prefill = generation.at_prefill.held
    row.kv_bytes_end = generation.at_end.held
    row.kv_bytes_peak = max(generation.peak_held, row.kv_bytes_end)
    row.charged_bytes = generation.at_end.charged or row.kv_bytes_end
    row.slack_bytes, row.workspace_bytes = generation.at_end.slack, generation.at_end.workspace
    row.host_bytes = generation.at_end.host
    row.method_facts = json.dumps(generation.method_facts, sort_keys=True)
    row.kv_bytes_full_prefill = layout.full_bytes(len(generation.prompt.ids))
    # The last token is never fed, so no cache holds it.
    row.kv_bytes_full = layout.full_bytes(generation.held_tokens)
    row.kv_share = row.kv_bytes_end / row.kv_bytes_full
    row.budget_bytes = budget.total_bytes
    compared = row.kv_bytes_prefill if budget.base == "prompt" else row.kv_bytes_peak
    bounded = generation.fork.method.bounded and budget.base == "prompt"
    row.over_budget = not budget.unlimited and max(compared, row.kv_bytes_peak * bounded) > row.budget_bytes


def failed_row(row: Row, error: Exception) -> Row:
    row.status, row.error = "failed", f"{type(error).__name__}: {error}"
    row.finished_at = time.time()
    return row
