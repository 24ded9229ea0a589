"""All tasks by name: ours, those of other packages (entry points), and files of one's own (:mod:`tasks.jsonl`).

A package registers a task in the entry-point group ``kvsweep.tasks``: the task's name and its class, a frozen dataclass
as :class:`tasks.task.Task` says. No name may stand for two things.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields, is_dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any, cast

from tasks import longbench, ruler_niah
from tasks.groups import GROUPS
from tasks.gsm8k import GSM8K
from tasks.jsonl import JsonlTask
from tasks.niah import NeedleGrid
from tasks.ruler_qa import QuestionAnswering1, QuestionAnswering2
from tasks.ruler_vt import VariableTracking
from tasks.ruler_words import CommonWords, FrequentWords
from tasks.task import Task, TaskError, UnknownTask, nearest, refuse_unknown_settings

__all__ = ["Task", "TaskError", "UnknownTask", "example_task", "get_task", "group_settings", "task_names"]

ENTRY_POINTS = "kvsweep.tasks"

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
        QuestionAnswering1,
        QuestionAnswering2,
        GSM8K,
        NeedleGrid,
    )
} | longbench.TASKS


def get_task(name: str, settings: dict[str, Any] | None = None) -> Task:
    """The task with these settings; with a setting ``file``, a task of one's own under a name that no other has.

    Raises :class:`UnknownTask`, or :class:`TaskError` for settings it refuses.
    """
    chosen = settings or {}
    if name not in _registered() and "file" in chosen:
        refuse_unknown_settings(name, chosen, [field.name for field in fields(JsonlTask) if field.name != "name"])
        return cast(Task, JsonlTask(name, **chosen))
    known = _settings(name)
    if "file" in chosen and "file" not in known:
        raise TaskError(f"task {name}: the name is taken; give a task of your own (file: ...) another one")
    refuse_unknown_settings(name, chosen, known)
    return cast(Task, _task_class(name)(**chosen))


def group_settings(group: str, settings: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The settings of each member: those that it has. Raises :class:`TaskError` for one that no member has."""
    known = {
        name: [key for key in _settings(name) if key not in getattr(_task_class(name), "unused", ())]
        for name in GROUPS[group]
    }
    refuse_unknown_settings(group, settings, dict.fromkeys(setting for names in known.values() for setting in names))
    return {name: {key: settings[key] for key in settings if key in names} for name, names in known.items()}


def task_names() -> list[str]:
    return list(_registered())


def example_task(name: str) -> Task:
    """A task to describe: with the settings that its class gives as ``example`` where some are required."""
    return get_task(name, getattr(_task_class(name), "example", None))


def _settings(name: str) -> list[str]:
    return [field.name for field in fields(_task_class(name))]


def _task_class(name: str) -> type[Any]:
    registered = _registered()
    if name not in registered:
        known = [*registered, *GROUPS]
        raise UnknownTask(
            f"there is no task {name!r}{nearest(name, known)}; `kvsweep tasks` lists them, and a task of your own "
            "needs a file (docs/adding-a-task.md)"
        )
    found = registered[name]
    return _load(found) if isinstance(found, EntryPoint) else found


@cache
def _registered() -> dict[str, type[Any] | EntryPoint]:
    """Raises :class:`TaskError` for a name that is taken already."""
    registered: dict[str, type[Any] | EntryPoint] = dict(_TASKS)
    for point in _entry_points():
        if point.name in registered or point.name in GROUPS:
            package = point.dist.name if point.dist else point.module.partition(".")[0]
            raise TaskError(
                f"the package {package} registers the task {point.name!r} ({point.value}), and that name is taken: "
                "rename it there, or uninstall the package"
            )
        registered[point.name] = point
    return registered


def _entry_points() -> Iterable[EntryPoint]:
    return entry_points(group=ENTRY_POINTS)


@cache
def _load(point: EntryPoint) -> type[Any]:
    where = f"task {point.name} ({point.value})"
    try:
        task = point.load()
    except (ImportError, AttributeError) as error:
        raise TaskError(f"{where} cannot be loaded: {error}") from error
    if not isinstance(task, type) or not is_dataclass(task):
        raise TaskError(f"{where} is no dataclass: see docs/adding-a-task.md")
    lacking = [name for name in _PARTS if not hasattr(task, name)]
    if lacking:
        raise TaskError(f"{where} lacks {', '.join(lacking)}: see docs/adding-a-task.md")
    if getattr(task, "name", None) != point.name:
        raise TaskError(f"{where} calls itself {getattr(task, 'name', None)!r}: let both names be one")
    return task


_PARTS = (
    *("name", "version", "summary", "contextual", "seeded", "chat", "metric", "generation_limit"),
    *("recipe", "check", "available", "samples"),
)
