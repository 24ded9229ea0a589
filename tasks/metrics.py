"""Scores of one prediction against its references, from 0 to 1. A task's score is the mean over its samples.

string_match_all  RULER: the share of references found in the prediction, whatever their case
gsm8k_flexible    the last number is the right one
gsm8k_strict      the number after an answer marker is the right one
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from tasks.numbers import extract, parse
from tasks.task import TaskError, nearest

_CONTROL = re.compile(r"[\x00-\x1f]")


def score(metric: str, prediction: str, references: Sequence[str]) -> float:
    if metric not in METRICS:
        raise TaskError(f"there is no metric {metric!r}{nearest(metric, METRICS)}; there are {', '.join(METRICS)}")
    if not references:
        raise TaskError(f"{metric} needs at least one reference")
    return METRICS[metric](prediction, references)


def string_match_all(prediction: str, references: Sequence[str]) -> float:
    text = _CONTROL.sub("\n", prediction.strip()).strip().lower()
    return sum(reference.lower() in text for reference in references) / len(references)


def gsm8k_flexible(prediction: str, references: Sequence[str]) -> float:
    found = extract(prediction).flexible
    return float(found is not None and found in [parse(reference) for reference in references])


def gsm8k_strict(prediction: str, references: Sequence[str]) -> float:
    found = extract(prediction).strict
    return float(found is not None and found in [parse(reference) for reference in references])


METRICS: dict[str, Callable[[str, Sequence[str]], float]] = {
    "string_match_all": string_match_all,
    "gsm8k_flexible": gsm8k_flexible,
    "gsm8k_strict": gsm8k_strict,
}
