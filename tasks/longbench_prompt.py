"""LongBench's prompt templates, read from the official file and never typed again: their typos are part of them.

A template is taken apart at its context: what stands before belongs to the part that may be compressed, what follows is
the question. Filled and joined, the parts are the official prompt to the letter, blanks at its end included.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from string import Formatter
from typing import Any

from tasks.longbench_records import Record
from tasks.sources import DataError, DataSources, content_hash, read_json

PROMPTS = "longbench/config/dataset2prompt.json"
LIMITS = "longbench/config/dataset2maxlen.json"


@dataclass(frozen=True)
class Template:
    """``before`` and ``after`` the context; both may hold ``{input}``."""

    before: str
    after: str

    @property
    def sha256(self) -> str:
        return content_hash([self.before, self.after])

    def fill(self, record: Record) -> tuple[str, str]:
        """Context and question."""
        return self.before.format(input=record.input) + record.context, self.after.format(input=record.input)


def load_template(dataset: str, sources: DataSources) -> Template:
    path = sources.require(PROMPTS, f"task {dataset}")
    text = _entry(path, dataset)
    try:
        names = [name for _, name, _, _ in Formatter().parse(text) if name is not None]
    except (ValueError, TypeError) as error:
        raise DataError(f"{path}: {dataset} must be a text with {{context}} in it ({error})") from error
    if names.count("context") != 1 or set(names) - {"context", "input"} or text.count("{context}") != 1:
        raise DataError(f"{path}: {dataset} must hold {{context}} once, and may hold {{input}}; it holds {names}")
    return Template(*text.split("{context}"))


def check_limit_on_file(dataset: str, official_limit: int, sources: DataSources) -> None:
    """The file's generation limit is the official one, so that listings can name it without the file."""
    path = sources.require(LIMITS, f"task {dataset}")
    limit = _entry(path, dataset)
    if limit != official_limit:
        raise DataError(
            f"{path}: {dataset} is {limit!r}, and officially {official_limit}; for another limit set max_new_tokens"
        )


def _entry(path: Path, dataset: str) -> Any:
    content = read_json(path)
    if not isinstance(content, dict) or dataset not in content:
        raise DataError(f"{path} has no entry {dataset}")
    return content[dataset]
