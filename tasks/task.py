"""What a task is: a frozen dataclass whose fields are its settings, and the errors that all tasks raise.

A task knows the recipe of its samples (hashed into every cell), checks that its files are there before anything
expensive, and makes samples for any tokenizer. Torch-free.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import TYPE_CHECKING, ClassVar, Protocol

if TYPE_CHECKING:
    from tasks.sample import Sample
    from tasks.sources import DataSources
    from tasks.tokens import Tokenizer


class TaskError(ValueError):
    """A task that cannot be run as asked: what is wrong, where, and how to fix it."""


class UnknownTask(TaskError):
    """No task has this name."""


class ContextTooSmall(TaskError):
    """Even the smallest haystack does not fit the context length asked for."""


class Task(Protocol):
    """``contextual``: takes a context length; ``seeded``: other seeds give other samples."""

    name: ClassVar[str]
    version: ClassVar[int]
    summary: ClassVar[str]
    contextual: ClassVar[bool]
    seeded: ClassVar[bool]

    @property
    def chat(self) -> bool:
        """Whether the task's own protocol puts the prompt into a chat template."""

    @property
    def metric(self) -> str:
        """A name in :data:`tasks.metrics.METRICS`."""

    @property
    def generation_limit(self) -> int:
        """New tokens per sample: the protocol's, unless the setting ``max_new_tokens`` says otherwise."""

    def recipe(self, sources: DataSources) -> dict[str, object]:
        """Everything that can change the samples, apart from tokenizer, seed and context length. JSON-able."""

    def check(self, sources: DataSources, context: int | None) -> None:
        """Raise :class:`TaskError` for anything missing or malformed, before anything expensive."""

    def available(self, sources: DataSources) -> int | None:
        """The number of samples on file; None where they are generated."""

    def samples(
        self, tokenizer: Tokenizer, sources: DataSources, context: int | None, seed: int, count: int, overhead: int
    ) -> list[Sample]:
        """The first ``count`` samples. ``overhead``: tokens that the chat template adds to a prompt."""


def refuse_unknown_settings(task: str, settings: Iterable[str], known: Iterable[str]) -> None:
    known = list(known)
    for setting in settings:
        if setting not in known:
            raise TaskError(
                f"task {task}: there is no setting {setting!r}{nearest(setting, known)}; it has {', '.join(known)}"
            )


def check_limit(task: str, max_new_tokens: int | None) -> None:
    if max_new_tokens is None:
        return
    if isinstance(max_new_tokens, bool) or not isinstance(max_new_tokens, int) or max_new_tokens < 1:
        raise TaskError(f"task {task}: max_new_tokens must be a whole number of at least 1, not {max_new_tokens!r}")


def check_choice(task: str, setting: str, value: object, choices: Iterable[object]) -> None:
    allowed = tuple(choices)
    if value not in allowed:
        raise TaskError(f"task {task}: {setting} must be one of {', '.join(map(repr, allowed))}, not {value!r}")


def check_context(task: str, contextual: bool, context: int | None) -> None:
    if contextual and (isinstance(context, bool) or not isinstance(context, int) or context < 1):
        raise TaskError(f"task {task} needs a context length in tokens (a whole number of at least 1), not {context!r}")
    if not contextual and context is not None:
        raise TaskError(f"task {task} has prompts of their own lengths and takes no context length, but got {context}")


def check_room(task: str, context: int | None, generation_limit: int) -> None:
    """A context length counts the tokens to generate, and must leave some for the prompt."""
    if context is not None and context <= generation_limit:
        raise ContextTooSmall(
            f"task {task}: a context of {context} tokens has no room for a prompt beside the "
            f"{generation_limit} tokens to generate; ask for a longer context"
        )


def nearest(name: str, known: Iterable[str]) -> str:
    """A suggestion to append to "there is no X": empty, or ``(did you mean a, b?)``."""
    close = difflib.get_close_matches(name, list(known), n=3, cutoff=0.5)
    return f" (did you mean {', '.join(close)}?)" if close else ""
