"""All tasks by name."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, cast

from tasks import ruler_niah
from tasks.gsm8k import GSM8K
from tasks.ruler_vt import VariableTracking
from tasks.ruler_words import CommonWords, FrequentWords
from tasks.task import Task, TaskError, UnknownTask, nearest, refuse_unknown_settings

__all__ = ["Task", "TaskDescription", "TaskError", "UnknownTask", "describe_tasks", "get_task", "task_names"]

_TASKS: dict[str, type[Any]] = {
    task.name: task
    for task in (
        ruler_niah.NiahSingle1,
        ruler_niah.NiahSingle2,
        ruler_niah.NiahSingle3,
        ruler_niah.NiahMultikey1,
        ruler_niah.NiahMultikey2,
        ruler_niah.NiahMultikey3,
        ruler_niah.NiahMultivalue,
        ruler_niah.NiahMultiquery,
        VariableTracking,
        CommonWords,
        FrequentWords,
        GSM8K,
    )
}


@dataclass(frozen=True)
class TaskDescription:
    """A line of a listing."""

    name: str
    summary: str
    metric: str
    max_new_tokens: int
    contextual: bool


def get_task(name: str, settings: dict[str, Any] | None = None) -> Task:
    """The task with these settings. Raises :class:`UnknownTask`, or :class:`TaskError` for settings it refuses."""
    if name not in _TASKS:
        raise UnknownTask(f"there is no task {name!r}{nearest(name, _TASKS)}; there are {', '.join(_TASKS)}")
    task = _TASKS[name]
    chosen = settings or {}
    refuse_unknown_settings(name, chosen, [field.name for field in fields(task)])
    return cast(Task, task(**chosen))


def task_names() -> list[str]:
    return list(_TASKS)


def describe_tasks() -> list[TaskDescription]:
    tasks = [get_task(name) for name in _TASKS]
    return [
        TaskDescription(task.name, task.summary, task.metric, task.generation_limit, task.contextual) for task in tasks
    ]
