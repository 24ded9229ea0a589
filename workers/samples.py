"""Making the samples of a group of cells: needs the model's tokenizer, never its weights."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from tasks.cache import prepare
from tasks.prompt import PromptError, prompt_overhead, render, uses_chat
from tasks.registry import get_task
from tasks.sample import Sample
from tasks.sources import DataSources
from tasks.task import TaskError
from workers.description import cache_folder, describe
from workers.job import ModelSpec, Protocol


@dataclass(frozen=True)
class SampleRequest:
    """The first ``count`` samples of a task for one model, context (0: the task's own lengths) and data seed."""

    model: ModelSpec
    protocol: Protocol
    task: str
    settings: dict[str, Any]
    context: int
    data_seed: int
    count: int
    data_dir: Path | None
    data_cache: Path | None = None


def make_samples(request: SampleRequest) -> list[Sample]:
    """Read them from the cache, or make them.

    Raises :class:`tasks.task.TaskError` where that cannot be done, or where a prompt with its answer is longer than the
    model's positions: a context length is checked when a sweep is planned, a task's own lengths only here.
    """
    task = get_task(request.task, request.settings)
    tokenizer = _tokenizer(request.model)
    model = describe(request.model)
    samples = prepare(
        task,
        tokenizer,
        model.tokenizer_fingerprint,
        DataSources(request.data_dir, request.data_cache),
        request.context or None,
        request.data_seed,
        request.count,
        prompt_overhead(tokenizer, uses_chat(task.chat, request.protocol.chat_template)),
        cache_folder() / "samples",
    )
    if not task.contextual:
        for sample in samples:
            _check_length(sample, tokenizer, request.protocol, model.max_positions)
    return samples


def _check_length(sample: Sample, tokenizer: Any, protocol: Protocol, positions: int) -> None:
    try:
        prompt = render(sample, tokenizer, protocol.question, protocol.chat_template, protocol.answer_prefix)
    except PromptError:
        return  # this sample's rows fail with it, and the others run
    tokens = len(prompt.ids) + len(prompt.appended)
    if tokens + sample.max_new_tokens > positions:
        raise TaskError(
            f"task {sample.task}, sample {sample.index}{_record(sample)}: a prompt of {tokens} tokens and "
            f"{sample.max_new_tokens} to generate are more than the model's {positions}; set max_length where the task "
            "has it, or take a model with a longer context"
        )


def _record(sample: Sample) -> str:
    """The name that the data gives this sample, where it has one."""
    name = sample.meta.get("_id", sample.meta.get("id"))
    return f" ({name})" if name else ""


@lru_cache(maxsize=1)
def _tokenizer(model: ModelSpec) -> Any:
    from workers.models import load_tokenizer

    return load_tokenizer(model)
