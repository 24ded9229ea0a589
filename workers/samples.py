"""Making the samples of a group of cells: needs the model's tokenizer, never its weights."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from tasks.cache import prepare
from tasks.prompt import prompt_overhead, uses_chat
from tasks.registry import get_task
from tasks.sample import Sample
from tasks.sources import DataSources
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


def make_samples(request: SampleRequest) -> list[Sample]:
    """Read them from the cache, or make them. Raises :class:`tasks.task.TaskError` where that cannot be done."""
    task = get_task(request.task, request.settings)
    tokenizer = _tokenizer(request.model)
    return prepare(
        task,
        tokenizer,
        describe(request.model).tokenizer_fingerprint,
        DataSources(request.data_dir),
        request.context or None,
        request.data_seed,
        request.count,
        prompt_overhead(tokenizer, uses_chat(task.chat, request.protocol.chat_template)),
        cache_folder() / "samples",
    )


@lru_cache(maxsize=1)
def _tokenizer(model: ModelSpec) -> Any:
    from workers.models import load_tokenizer

    return load_tokenizer(model)
