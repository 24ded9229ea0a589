"""How much of an expected answer a response holds: needle grids are scored so.

recall  |words of the response & words of the answer| / |words of the answer|, as sets, the best over the references
exact   the answer's words stand in the response, one after the other

Words are lower-case runs of letters and digits; punctuation only parts them, but for the commas inside numbers. The
published scripts keep punctuation ("day." is not "day"), and some count repeated words, so that 1 is out of reach.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from tasks.task import TaskError

_WORD = re.compile(r"[^\W_]+")
_COMMA_IN_NUMBER = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")


def niah_recall(prediction: str, references: Sequence[str]) -> float:
    said = set(words(prediction))
    return max(len(said & wanted) / len(wanted) for wanted in map(set, _answers(references)))


def niah_exact(prediction: str, references: Sequence[str]) -> float:
    said = _spaced(words(prediction))
    return float(any(_spaced(wanted) in said for wanted in _answers(references)))


def words(text: str) -> list[str]:
    return _WORD.findall(_COMMA_IN_NUMBER.sub("", text).lower())


def _answers(references: Sequence[str]) -> list[list[str]]:
    answers = [words(reference) for reference in references]
    if not all(answers):
        raise TaskError(f"an expected answer must have a word in it, and one of {list(references)!r} has none")
    return answers


def _spaced(parts: list[str]) -> str:
    return f" {' '.join(parts)} "
