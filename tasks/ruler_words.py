"""RULER's aggregation tasks (section 3 of the paper): the common words of a list, the most frequent coded words."""

from __future__ import annotations

import math
import string
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from random import Random

from tasks.draws import Draws
from tasks.fit import Draft, Parts, prompt_length
from tasks.ruler import Conditions, RulerTask
from tasks.ruler_official import SHORT_BELOW, Run
from tasks.ruler_official_words import CommonWordsScript, FrequentWordsScript
from tasks.tokens import TokenCounter
from tasks.words import compound, numbered, word_lists


@dataclass(frozen=True)
class Repeats:
    """How often common and other words stand in a list, and how many words its solved example has."""

    common: int
    other: int
    example_common: int
    example_other: int
    example_words: int


LONG = Repeats(common=30, other=3, example_common=10, example_other=3, example_words=40)
SHORT = Repeats(common=6, other=1, example_common=3, example_other=1, example_words=20)
COMMON_WORDS = 10

ALPHA = 2.0
ZETA_OF_ALPHA = math.pi**2 / 6
TOKENS_PER_CODED_WORD = 50
CODED_LETTERS = 6
SILENCE = "..."
LEAST_VOCABULARY = 10


class CommonWords(RulerTask):
    """A numbered list in which ten words are far more common than the rest, after a solved example."""

    name = "cwe"
    summary = "the ten common words of a numbered list"
    family = "common_words_extraction"
    official_limit = 120

    @property
    def parameters(self) -> dict[str, object]:
        return {"common_words": COMMON_WORDS, "long": asdict(LONG), "short": asdict(SHORT), "short_below": SHORT_BELOW}

    def draft(self, index: int, draws: Draws, conditions: Conditions) -> Draft:
        repeats = SHORT if conditions.context < SHORT_BELOW else LONG
        # An entry is its number and its word: two tokens at least.
        vocabulary = _shuffled_words(draws.stream("words"), conditions.room // (2 * repeats.other) + 100)
        common, vocabulary = _common(vocabulary)
        example_common, vocabulary = _common(vocabulary)
        split = repeats.example_words - COMMON_WORDS
        example_others, others = vocabulary[:split], vocabulary[split:]
        example = example_common * repeats.example_common + example_others * repeats.example_other
        draws.stream("example").shuffle(example)
        before, after, prefix = conditions.words.prompt()
        solved = f"{before}{numbered(example)}{after}{prefix} {numbered(example_common)}"
        frame = Parts(f"{solved}\n{before}", after, prefix, tuple(common), {"haystack": "numbered words"})
        return WordListDraft(frame, others, repeats, draws, conditions.counter)

    def official(self, run: Run) -> Iterator[Parts]:
        chosen = SHORT if run.short else LONG
        example = (chosen.example_common, chosen.example_other)
        repeats = (chosen.common, chosen.other)
        return CommonWordsScript(run, COMMON_WORDS, repeats, example, chosen.example_words).samples()


class WordListDraft:
    """Units are the words that are not common; each stands ``repeats.other`` times in the list."""

    least = COMMON_WORDS

    def __init__(self, frame: Parts, others: list[str], repeats: Repeats, draws: Draws, counter: TokenCounter) -> None:
        self.frame, self.others, self.repeats, self.draws = frame, others, repeats, draws
        self.most = len(others)
        self.common = [word for word in frame.references for _ in range(repeats.common)]
        fixed = prompt_length(frame, counter) + sum(counter.pieces([f" {word}" for word in self.common]))
        lengths = [repeats.other * length for length in counter.pieces([f" {word}" for word in others])]
        numbers = [f" {number}." for number in range(1, self._entries(self.most) + 1)]
        self.word_tokens = list(accumulate(lengths, initial=fixed))
        self.number_tokens = list(accumulate(counter.pieces(numbers), initial=0))

    def tokens(self, units: int) -> int:
        return self.word_tokens[units] + self.number_tokens[self._entries(units)]

    def parts(self, units: int) -> Parts:
        words = self.common + self.others[:units] * self.repeats.other
        self.draws.stream("order").shuffle(words)
        return replace(self.frame, context=self.frame.context + numbered(words))

    def _entries(self, units: int) -> int:
        return len(self.common) + self.repeats.other * units


def _shuffled_words(rng: Random, count: int) -> list[str]:
    """At least ``count`` different words; pairs of words where the lists are too short."""
    words = list(word_lists().all)
    rng.shuffle(words)
    distinct = dict.fromkeys(words)
    while len(distinct) < count:
        distinct.setdefault(compound(rng))
    return list(distinct)[:count]


def _common(vocabulary: Sequence[str]) -> tuple[list[str], list[str]]:
    """The first words of which none hides inside another, which would answer for it; and all others."""
    common: list[str] = []
    for word in vocabulary:
        clashes = any(word.lower() in other.lower() or other.lower() in word.lower() for other in common)
        if len(word) > 2 and not clashes:
            common.append(word)
        if len(common) == COMMON_WORDS:
            break
    return common, [word for word in vocabulary if word not in common]


class FrequentWords(RulerTask):
    """Coded words whose frequencies fall with the square of their rank; the first rank is silence."""

    name = "fwe"
    summary = "the three most frequent made-up words"
    family = "freq_words_extraction"
    official_limit = 50

    @property
    def parameters(self) -> dict[str, object]:
        return {"alpha": ALPHA, "tokens_per_coded_word": TOKENS_PER_CODED_WORD, "letters": CODED_LETTERS}

    def draft(self, index: int, draws: Draws, conditions: Conditions) -> Draft:
        rng, coded = draws.stream("words"), {SILENCE: None}
        while len(coded) < max(conditions.context // TOKENS_PER_CODED_WORD, LEAST_VOCABULARY):
            coded["".join(rng.choices(string.ascii_lowercase, k=CODED_LETTERS))] = None
        before, after, prefix = conditions.words.prompt()
        frame = Parts(before, after, prefix, tuple(coded)[1:4], {"haystack": "coded words"})
        return FrequencyDraft(frame, list(coded), draws, conditions)

    def official(self, run: Run) -> Iterator[Parts]:
        return FrequentWordsScript(run, ALPHA, CODED_LETTERS, TOKENS_PER_CODED_WORD, SILENCE).samples()


class FrequencyDraft:
    """Units are the words of the text, before their number per rank is rounded down."""

    least = 100  # ranks 4 and 5 differ by then

    def __init__(self, frame: Parts, coded: list[str], draws: Draws, conditions: Conditions) -> None:
        self.frame, self.coded, self.draws = frame, coded, draws
        self.most = max(self.least, conditions.room)
        self.lengths = conditions.counter.pieces([f" {word}" for word in coded])
        self.fixed = prompt_length(frame, conditions.counter)

    def tokens(self, units: int) -> int:
        counts = frequencies(units, len(self.coded))
        return self.fixed + sum(count * length for count, length in zip(counts, self.lengths, strict=True))

    def parts(self, units: int) -> Parts:
        counts = frequencies(units, len(self.coded))
        words = [word for word, count in zip(self.coded, counts, strict=True) for _ in range(count)]
        self.draws.stream("order").shuffle(words)
        return replace(self.frame, context=self.frame.context + " ".join(words))


def frequencies(total: int, vocabulary: int) -> list[int]:
    """Occurrences of the ranks 1, 2, ... in a text of about ``total`` words."""
    return [int(total * rank**-ALPHA / ZETA_OF_ALPHA) for rank in range(1, vocabulary + 1)]
