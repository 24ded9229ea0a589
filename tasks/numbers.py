"""GSM8K's answers: the number that a solution ends with, exactly.

    strict    the number after a marker: ``####``, ``\\boxed{...}``, "answer is", "answer:", in this order
    flexible  the last number of the text

A ``####`` counts where a number follows at once and it is not a heading ("#### 2. Add up"); the first one is taken, as
in the official check. Of the other markers the last one with a number is taken, since solutions correct themselves.
Numbers are compared as decimals: 29.00 is 29.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal

# A minus is a sign where nothing that it could be subtracted from stands before it.
_NUMBER = r"(?:(?<![\w.)\]%])-)?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|(?<![\d.])\.\d+)"
_HASHES = re.compile(rf"####[\s*:=]*(?={_NUMBER}(?![\d]|\s*[.):]\s*[^\W\d]))")
_BOXED = re.compile(r"\\boxed\s*{")
_ANSWER = re.compile(r"\banswer\b[*_\s]*(?:is|was|:|=)[\s*_:]*", re.IGNORECASE)
_SENTENCE_END = re.compile(r"[.!?](?=\s|$)|\n")

_SPELLINGS = (
    (re.compile("[\u2212\u2011]"), "-"),
    (re.compile(r"(?<=\d)(?:[\u00a0\u202f\u2009]|\{,\}|\\,|\\!)(?=\d{3})"), ","),
    (re.compile(r"\\?[$€£]|\\[()\[\]]"), ""),
)


@dataclass(frozen=True)
class Extraction:
    """``has_marker``: the text marks an answer, be it a number or not."""

    strict: Decimal | None
    flexible: Decimal | None
    has_marker: bool


def extract(solution: str) -> Extraction:
    text = solution
    for spelling, plain in _SPELLINGS:
        text = spelling.sub(plain, text)
    marked = list(_marked(text))
    strict = next((number for number in map(_stated, marked) if number is not None), None)
    numbers = re.findall(_NUMBER, text)
    return Extraction(strict, parse(numbers[-1]) if numbers else None, bool(marked))


def parse(number: str) -> Decimal:
    """``"1,234.50"`` as a decimal. Raises ``decimal.InvalidOperation`` where it is none."""
    return Decimal(number.replace(",", ""))


def _marked(text: str) -> Iterator[str]:
    """What follows the markers, the most binding one first."""
    for match in _HASHES.finditer(text):
        yield text[match.end() :].split("\n", 1)[0]
    for match in reversed(list(_BOXED.finditer(text))):
        yield _braced(text[match.end() :])
    for match in reversed(list(_ANSWER.finditer(text))):
        yield _SENTENCE_END.split(text[match.end() :], maxsplit=1)[0]


def _stated(phrase: str) -> Decimal | None:
    """The number that a phrase states: the first one, or the result where the phrase calculates."""
    result = re.findall(_NUMBER, phrase.rsplit("=", 1)[-1]) or re.findall(_NUMBER, phrase)
    return parse(result[0]) if result else None


def _braced(text: str) -> str:
    """The text up to the brace that closes it."""
    depth = 1
    for index, letter in enumerate(text):
        depth += (letter == "{") - (letter == "}")
        if depth == 0:
            return text[:index]
    return text
