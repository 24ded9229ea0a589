"""Rows of what could not be run: a failure is a row with its error, never a score of 0."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable

from pipeline.plan import Plan
from pipeline.work import Work
from tasks.sample import Sample
from workers.row import Row


def failed_rows(plan: Plan, work: Work, samples: Iterable[Sample], error: str) -> list[Row]:
    """A failed row for every pair that ``work`` still misses. ``samples``: those with missing pairs."""
    group, protocol = work.group, plan.sweep.protocol
    cells = {cell.cell_id: cell.spec for cell in group.cells}
    return [
        Row(
            cell_id=cell_id,
            sample_id=sample.sample_id,
            attempt=work.attempt,
            status="failed",
            error=error,
            model=group.model.label,
            method=cells[cell_id].label,
            settings=json.dumps(cells[cell_id].settings, sort_keys=True),
            budget=cells[cell_id].budget,
            budget_base=protocol.budget_base,
            context=group.context,
            task=group.task.name,
            data_seed=group.data_seed,
            method_seed=cells[cell_id].method_seed,
            question=protocol.question,
            growth=protocol.growth,
            chat_template=protocol.chat_template,
            answer_prefix=protocol.answer_prefix,
            dtype=group.model.dtype,
            attention=group.model.attention,
            row_width=group.engine.row_width,
            references=list(sample.references),
            metric=sample.metric,
            sample_index=sample.index,
            sample_limit=plan.limit or 0,
            timing="isolated" if group.timing else "shared",
            sample_meta=json.dumps(sample.meta, sort_keys=True),
            finished_at=time.time(),
        )
        for sample in samples
        for cell_id in sorted(work.missing[sample.index])
    ]
