"""Isolated runs: what a method costs with the device to itself (QEvict, Appendix H.1 and Eq. 10).

    t_start ── prefill ── compress ── admit ── t_first ── N - 1 steps of the whole batch ── t_end

    TTFT = t_first - t_start      TPOT = (t_end - t_first) / (N - 1)      throughput = batch N / (t_end - t_start)

N is what every row generates, whatever the model says. Prompts come and go through the engine of all sweeps, with as
many rows as the batch has; here it decodes only once every row has its first token. Methods take turns inside a repeat,
forwards and backwards by turns, so that a machine that gets slower meanwhile is so for all of them.
"""

from __future__ import annotations

import json
import random
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import torch

from kvcache.bounded import grown
from kvcache.budget import Budget
from workers.engine import Engine
from workers.evaluate import failed_row, fill_memory, method_of, new_row
from workers.fork import FAULTS, Fork, Generation, Prompt
from workers.job import CellSpec, EngineSpec, Job
from workers.memory import leave_nothing_behind
from workers.models import LoadedModel
from workers.row import Row

OF_THE_BATCH = (
    *("budget_bytes", "charged_bytes", "kv_bytes_prefill", "kv_bytes_end", "kv_bytes_peak", "slack_bytes"),
    *("workspace_bytes", "host_bytes", "kv_bytes_full_prefill", "kv_bytes_full"),
)
"""Columns that a row holds the batch's sum of."""


def time_job(model: LoadedModel, job: Job) -> Iterator[Row]:
    """A row per repeat and cell. What a run raises costs its own row."""
    assert job.timing is not None
    unstopped = replace(model, stop_ids=frozenset())
    words = ordinary_tokens(model)
    for number in range(job.timing.warmup):
        for cell in job.cells:
            with suppress(*FAULTS):  # it fails again where it counts
                measure(unstopped, job.engine, _prompts(job, cell, words, f"warm-up {number}"))
    for sample in job.samples:
        turn = [cell for cell in job.cells if cell.cell_id in job.pending[sample.sample_id]]
        meta = {"round": uuid.uuid4().hex, "threads": torch.get_num_threads()}
        for cell in reversed(turn) if sample.index % 2 else turn:
            row = new_row(job, sample, cell)
            row.timing, row.sample_meta = "isolated", json.dumps(meta, sort_keys=True)
            try:
                run = measure(unstopped, job.engine, _prompts(job, cell, words, f"repeat {sample.index}"))
                _fill(row, unstopped, run)
            except FAULTS as error:
                row = failed_row(row, error)
            yield row


def ordinary_tokens(model: LoadedModel) -> list[int]:
    """Ids that stand for text: no special, added or stop token."""
    size, config = model.forward.get_input_embeddings().num_embeddings, model.forward.config.get_text_config()
    special = {config.bos_token_id, config.pad_token_id, *model.stop_ids}
    if model.tokenizer is not None:
        size = min(size, len(model.tokenizer))
        special |= {*model.tokenizer.all_special_ids, *model.tokenizer.get_added_vocab().values()}
    return [token for token in range(size) if token not in special]


@dataclass(frozen=True)
class Run:
    """A batch from its first prompt to its last token. Times are those of one clock, with the device caught up."""

    generations: tuple[Generation, ...]
    start: float
    first: float
    end: float
    peak_bytes: int

    @property
    def error(self) -> str:
        return self.generations[-1].error

    @property
    def ttft_s(self) -> float:
        return self.first - self.start

    @property
    def decode_s(self) -> float:
        return self.end - self.first

    @property
    def tpot_s(self) -> float:
        return self.decode_s / (len(self.generations[0].tokens) - 1)


class _Batch(Engine):
    """Decodes once every row is there. ``first`` and ``end``: when the first and the last tokens were."""

    first = end = 0.0

    def _step(self) -> Iterator[Generation]:
        if not self.first:
            if not all(self._rows):
                return
            self.first = self.model.elapsed(0.0)
        yield from super()._step()

    def _finish(self, number: int, reason: str) -> Generation:
        self.end = self.end or self.model.elapsed(0.0)  # rows end in the same step; what follows is book-keeping
        return super()._finish(number, reason)


def measure(model: LoadedModel, engine: EngineSpec, prompts: Sequence[Prompt]) -> Run:
    """Run one batch by itself, as far as it gets."""
    assert len(prompts) == engine.row_width
    leave_nothing_behind(model.device)  # fragments of the run before could make this one run out of memory
    batch = _Batch(model, engine)
    model.meter.restart()
    start = model.elapsed(0.0)
    generations = []
    for generation in batch.run(prompts):
        generations.append(generation)
        if generation.error:
            break
    return Run(tuple(generations), start, batch.first, batch.end, model.meter.peak_bytes())


def _prompts(job: Job, cell: CellSpec, words: list[int], name: str) -> list[Prompt]:
    """Made-up tokens, the same for all cells of a repeat, others in each row."""
    timing = job.timing
    assert timing is not None
    method, budget = grown(method_of(cell), job.protocol.growth), Budget.parse(cell.budget)
    prompts = []
    for row in range(job.engine.row_width):
        ids = random.Random(f"{name}/{row}").choices(words, k=timing.prompt_tokens)
        fork = Fork(cell, method, budget, f"{cell.method_seed}/{name}/{row}")
        prompts.append(Prompt(row, ids, [], timing.new_tokens, [fork], base=job.protocol.budget_base))
    return prompts


def _fill(row: Row, model: LoadedModel, run: Run) -> None:
    row.finished_at = time.time()
    if run.error:
        row.status, row.error = "failed", run.error
        return
    first = run.generations[0]
    row.prompt_tokens, row.output_tokens, row.finish_reason = len(first.prompt.ids), len(first.tokens), "length"
    row.prefill_s = sum(one.prefill_s for one in run.generations)
    row.compress_s = sum(one.compress_s for one in run.generations)
    row.ttft_s, row.tpot_s, row.decode_s = run.ttft_s, run.tpot_s, run.decode_s
    row.admit_s = run.ttft_s - row.prefill_s - row.compress_s
    row.batch_rows, row.peak_device_bytes = len(run.generations), run.peak_bytes
    for generation in run.generations:
        alone = Row(row.cell_id, row.sample_id)
        fill_memory(alone, model, generation)
        for column in OF_THE_BATCH:
            setattr(row, column, getattr(row, column) + getattr(alone, column))
        row.over_budget |= alone.over_budget
        row.method_facts = alone.method_facts
    row.kv_share = row.kv_bytes_end / row.kv_bytes_full
