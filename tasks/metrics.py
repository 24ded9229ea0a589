"""Scores of one prediction against its references, from 0 to 1. A task's score is the mean over its samples.

string_match_all  RULER: the share of references found in the prediction, whatever their case
string_match_part RULER's question answering: 1 where any of the references is found
gsm8k_flexible    the last number is the right one
gsm8k_strict      the number after an answer marker is the right one
niah_recall       the share of the expected answer's words that the prediction has
niah_exact        the prediction holds the expected answer

LongBench, the best over all references (:mod:`tasks.longbench_metrics`, :mod:`tasks.rouge`); with ``_first_line`` the
prediction is cut down to its first line before:

qa_f1             words in common
rouge_l           longest common subsequences
classification    names of classes; needs ``classes``
count, retrieval  whole numbers
code_sim          edit similarity of a line of code
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from tasks.longbench_metrics import classification, code_sim, count, first_line, qa_f1, retrieval
from tasks.numbers import extract, parse
from tasks.recall import niah_exact, niah_recall
from tasks.rouge import rouge_l
from tasks.task import TaskError, nearest

Metric = Callable[[str, Sequence[str], Sequence[str]], float]
"""Of a prediction, its references and the names of all classes."""

_CONTROL = re.compile(r"[\x00-\x1f]")


def score(metric: str, prediction: str, references: Sequence[str], classes: Sequence[str] = ()) -> float:
    if metric not in METRICS:
        raise TaskError(f"there is no metric {metric!r}{nearest(metric, METRICS)}; there are {', '.join(METRICS)}")
    if isinstance(references, str) or not references:
        raise TaskError(f"{metric} needs a list of at least one reference, not {references!r}")
    return METRICS[metric](prediction, references, classes)


def details(metric: str, prediction: str, references: Sequence[str]) -> dict[str, float]:
    """Further figures on a prediction, from 0 to 1, shown beside the score and never in its place; most have none."""
    return _DETAILS[metric](prediction, references) if metric in _DETAILS else {}


def string_match_all(prediction: str, references: Sequence[str]) -> float:
    return sum(_found(prediction, references)) / len(references)


def string_match_part(prediction: str, references: Sequence[str]) -> float:
    return float(any(_found(prediction, references)))


def _found(prediction: str, references: Sequence[str]) -> list[bool]:
    text = _CONTROL.sub("\n", prediction.strip()).strip().lower()
    return [reference.lower() in text for reference in references]


def gsm8k_flexible(prediction: str, references: Sequence[str]) -> float:
    found = extract(prediction).flexible
    return float(found is not None and found in [parse(reference) for reference in references])


def gsm8k_strict(prediction: str, references: Sequence[str]) -> float:
    found = extract(prediction).strict
    return float(found is not None and found in [parse(reference) for reference in references])


def _without_classes(metric: Callable[[str, Sequence[str]], float]) -> Metric:
    return lambda prediction, references, classes: metric(prediction, references)


def _best(metric: Callable[[str, str], float]) -> Metric:
    return lambda prediction, references, classes: max(metric(prediction, reference) for reference in references)


def _best_class(prediction: str, references: Sequence[str], classes: Sequence[str]) -> float:
    return max(classification(prediction, reference, classes) for reference in references)


def _of_first_line(metric: Metric) -> Metric:
    return lambda prediction, references, classes: metric(first_line(prediction), references, classes)


METRICS: dict[str, Metric] = {
    "string_match_all": _without_classes(string_match_all),
    "string_match_part": _without_classes(string_match_part),
    "gsm8k_flexible": _without_classes(gsm8k_flexible),
    "gsm8k_strict": _without_classes(gsm8k_strict),
    "niah_recall": _without_classes(niah_recall),
    "niah_exact": _without_classes(niah_exact),
    "qa_f1": _best(qa_f1),
    "qa_f1_first_line": _of_first_line(_best(qa_f1)),
    "rouge_l": _best(rouge_l),
    "rouge_l_first_line": _of_first_line(_best(rouge_l)),
    "classification": _best_class,
    "classification_first_line": _of_first_line(_best_class),
    "count": _best(count),
    "retrieval": _best(retrieval),
    "code_sim": _best(code_sim),
}


def _gsm8k_details(prediction: str, references: Sequence[str]) -> dict[str, float]:
    found = extract(prediction)
    return {
        "strict": gsm8k_strict(prediction, references),
        "flexible": gsm8k_flexible(prediction, references),
        "marker": float(found.has_marker),
        "number": float(found.flexible is not None),
    }


def _niah_details(prediction: str, references: Sequence[str]) -> dict[str, float]:
    return {"recall": niah_recall(prediction, references), "exact": niah_exact(prediction, references)}


_DETAILS: dict[str, Callable[[str, Sequence[str]], dict[str, float]]] = {
    "gsm8k_flexible": _gsm8k_details,
    "gsm8k_strict": _gsm8k_details,
    "niah_recall": _niah_details,
    "niah_exact": _niah_details,
}
