"""LongBench's metrics (Bai et al. 2023, arXiv:2308.14508), one prediction against one reference, from 0 to 1.

A sample's score is the best over its references (:mod:`tasks.metrics`). Nothing is stripped from a prediction but
what is said here.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence

from tasks.similarity import ratio
from tasks.task import TaskError

_ARTICLE = re.compile(r"\b(?:a|an|the)\b")
_INTEGER = re.compile(r"\d+")
_PARAGRAPH = re.compile(r"Paragraph (\d+)")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
_NOT_CODE = ("`", "#", "//")


def first_line(prediction: str) -> str:
    """The first line that is not empty: what few-shot tasks score, since models go on with the next example."""
    return prediction.lstrip("\n").split("\n", 1)[0]


def qa_f1(prediction: str, reference: str) -> float:
    """F1 of the bags of words, lower case, without ASCII punctuation and articles."""
    said, wanted = _answer_words(prediction), _answer_words(reference)
    common = (Counter(said) & Counter(wanted)).total()
    if common == 0:
        return 0.0
    precision, recall = common / len(said), common / len(wanted)
    return (2 * precision * recall) / (precision + recall)


def classification(prediction: str, reference: str, classes: Sequence[str]) -> float:
    """1 / (number of class names in the prediction), where the right one is among them.

    Names that are part of the right one do not count. The official loop takes them off the list that it walks, so that
    the name after one taken off is passed over; the same happens here.
    """
    if not classes:
        raise TaskError("classification needs the names of all classes")
    named = [name for name in classes if name in prediction]
    place = 0
    while place < len(named):
        if named[place] in reference and named[place] != reference:
            named.remove(named[place])
        place += 1
    return 1.0 / len(named) if reference in named else 0.0


def count(prediction: str, reference: str) -> float:
    """The share of the prediction's whole numbers that are the right one: saying more costs."""
    numbers = _INTEGER.findall(prediction)
    return numbers.count(reference) / len(numbers) if numbers else 0.0


def retrieval(prediction: str, reference: str) -> float:
    """As :func:`count`, with the number of a reference such as "Paragraph 3"."""
    wanted = _PARAGRAPH.search(reference)
    if wanted is None:
        raise TaskError(f"retrieval needs a reference such as 'Paragraph 3', not {reference!r}")
    return count(prediction, wanted[1])


def code_sim(prediction: str, reference: str) -> float:
    """Edit similarity of the first line without a comment or code fence, indentation included."""
    lines = prediction.lstrip("\n").split("\n")
    line = next((line for line in lines if not any(mark in line for mark in _NOT_CODE)), "")
    return ratio(line, reference) / 100


def _answer_words(text: str) -> list[str]:
    return _ARTICLE.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split()
