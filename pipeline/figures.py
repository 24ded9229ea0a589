"""How names and figures are written: scores times 100 with one decimal, intervals in brackets, bytes in their unit."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from pipeline.results import Condition, Result
from pipeline.stats import Interval

NOTHING = "–"


def name(condition: Condition) -> str:
    return f"{condition.model}, {condition.length}"


def full_name(result: Result) -> str:
    return f"{result.label} at {result.configuration.budget}"


def protocol_words(condition: Condition) -> str:
    """The protocol in a sentence."""
    question = {
        "compressed": "the question is compressed with the prompt",
        "appended": "the question is appended after compression",
    }.get(condition.question, f"question {condition.question}")
    budget = {
        "prompt": "a budget is for what the prompt leaves: generated tokens come on top of it, except in methods that "
        "bound their whole cache",
        "prompt+max_new": "a budget is for prompt and generated tokens together",
    }.get(condition.budget_base, f"budget base {condition.budget_base}")
    words = [question, budget, f"chat template {condition.chat_template}"]
    if condition.growth == "bounded":
        words.append("methods that choose once choose again every 8 new tokens, so that these stay within the budget")
    if condition.answer_prefix != "stripped":
        words.append(f"answer prefix {condition.answer_prefix}")
    return f"Protocol: {'; '.join(words)}."


def points(value: float | None) -> str:
    """A score of 0..1 as 0..100."""
    return NOTHING if value is None else f"{100 * value:.1f}"


def difference(value: float | None) -> str:
    return NOTHING if value is None else f"{100 * value:+.1f}"


def brackets(interval: Interval | None, form: Callable[[float | None], str] = points) -> str:
    return f"[{form(interval.low)}, {form(interval.high)}]" if interval else ""


def bounds(interval: Interval | None, form: Callable[[float | None], str] = points) -> str:
    """Beside a figure, which may have none."""
    return brackets(interval, form) or f"[{NOTHING}]"


def share(value: float | None) -> str:
    return NOTHING if value is None or value != value else f"{100 * value:.1f}%"


def counted(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{key} ({count:,})" for key, count in counts.items()) or NOTHING


def size(count: float) -> str:
    """Bytes in the unit that suits them."""
    for unit in ("B", "KiB", "MiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.2f} GiB"


def seconds(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.3f}" if value < 1 else f"{value:.2f}"


def probability(value: float | None) -> str:
    if value is None:
        return NOTHING
    return "<0.001" if value < 0.001 else f"{value:.3f}"
