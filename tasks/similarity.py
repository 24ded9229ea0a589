"""Edit similarity of two lines of code, as LongBench reports it: ``fuzz.ratio`` of fuzzywuzzy 0.18.

fuzzywuzzy takes python-Levenshtein where that is installed and difflib where it is not, and the two differ by more than
a point over LongBench's code tasks. Published scores are difflib's, whatever is installed here.
"""

from __future__ import annotations

from difflib import SequenceMatcher


def ratio(text: str, reference: str) -> int:
    """0 to 100. Not symmetric: difflib looks for pieces of ``text`` in ``reference``."""
    if text == reference:
        return 100
    if not text or not reference:
        return 0
    return round(100 * SequenceMatcher(None, text, reference).ratio())
