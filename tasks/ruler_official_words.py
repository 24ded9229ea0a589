"""The official generator's scripts for common words and for frequent words; see :mod:`tasks.ruler_official`."""

from __future__ import annotations

import string
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from tasks.fit import Parts
from tasks.ruler_official import Run
from tasks.sources import DataError, DataSources, read_json
from tasks.task import ContextTooSmall
from tasks.words import numbered, raw_words

ENGLISH_WORDS = "ruler/english_words.json"
WORDS_PER_STEP = 10
WORDS_OF_THE_PROBE = 4096

SHRINKS = 32  # steps in which a text of coded words grows or shrinks: its length over this


@dataclass
class CommonWordsScript:
    """``repeats`` and ``example``: how often common and other words stand in a list of so many different words."""

    run: Run
    common_words: int
    repeats: tuple[int, int]
    example: tuple[int, int]
    example_words: int

    def samples(self) -> Iterator[Parts]:
        run = self.run
        per_word = run.tokens(self._draw(WORDS_OF_THE_PROBE)) / WORDS_OF_THE_PROBE
        upper = int(run.length // per_word) * 2
        units = run.most_units(lambda units: run.tokens(self._draw(units)) + run.new_tokens, WORDS_PER_STEP, upper)
        while True:
            yield run.fitted(self._draw, units, WORDS_PER_STEP)

    def _draw(self, units: int) -> Parts:
        """A prompt whose list has ``units`` different words."""
        solved_list, solved = self._list(self.example_words, *self.example)
        listed, common = self._list(units, *self.repeats)
        before, after, prefix = self.run.words.prompt()
        shown = f"{before}{solved_list}{after}{prefix} {numbered(solved)}\n{before}"
        return Parts(shown + listed, after, prefix, tuple(common), {"haystack": "numbered words"})

    def _list(self, count: int, common_repeats: int, other_repeats: int) -> tuple[str, list[str]]:
        source = self._wonderwords if count <= len(self._wonderwords) else english_words(self.run.sources, count)
        words = self.run.rng.sample(source, count)
        common, others = words[: self.common_words], words[self.common_words :]
        entries = common * common_repeats + others * other_repeats
        self.run.shuffle(entries)
        return numbered(entries), common

    @cached_property
    def _wonderwords(self) -> list[str]:
        words = sorted({*raw_words("nounlist"), *raw_words("adjectivelist"), *raw_words("verblist")})
        self.run.shuffle(words)
        return words


def english_words(sources: DataSources, count: int) -> list[str]:
    """The second, longer list of the official generator, which long contexts need."""
    needed_by = f"generator: official draws {count:,} different words, more than wonderwords has, and"
    path = sources.require(ENGLISH_WORDS, needed_by)
    content = read_json(path)
    words = list(content.values()) if isinstance(content, dict) else []
    if len(words) < count or not all(isinstance(word, str) for word in words):
        raise DataError(f"{path} must be an object of at least {count:,} words, each under a key of its own")
    return words


@dataclass
class FrequentWordsScript:
    run: Run
    alpha: float
    letters: int
    tokens_per_word: int
    silence: str

    def samples(self) -> Iterator[Parts]:
        words = self._grown()
        while True:
            yield self._shrunk(words)

    @property
    def _room(self) -> int:
        return self.run.length - self.run.new_tokens

    def _grown(self) -> int:
        """The words of the longest text that is still too short, in steps from below."""
        vocabulary = self._vocabulary()
        words, step = self._room // self.letters, self._room // SHRINKS
        while self.run.tokens(self._text(vocabulary, words)) < self._room:
            words += step
        return words - step

    def _shrunk(self, words: int) -> Parts:
        vocabulary = self._vocabulary()
        while words > 0:
            parts = self._text(vocabulary, words)
            length = self.run.tokens(parts)
            if length <= self._room:
                return self.run.described(parts, length + self.run.new_tokens)
            words -= self._room // SHRINKS
        raise ContextTooSmall(f"the official generator's coded text does not fit {max(self._room, 0)} tokens")

    def _vocabulary(self) -> list[str]:
        size = self._room // self.tokens_per_word
        if size < 4:  # silence and three answers
            raise ContextTooSmall(f"{max(self._room, 0)} tokens give the official generator fewer than 4 coded words")
        rng = self.run.rng

        def coded() -> str:
            return "".join(rng.choices(string.ascii_lowercase, k=self.letters))

        drawn = {coded() for _ in range(size)}
        while len(drawn) < size:
            drawn.add(coded())
        words = sorted(drawn)
        self.run.shuffle(words)
        return [self.silence, *words[1:]]

    def _text(self, vocabulary: Sequence[str], words: int) -> Parts:
        counts = zeta_counts(words, len(vocabulary), self.alpha)
        entries = [word for word, count in zip(vocabulary, counts, strict=True) for _ in range(count)]
        self.run.shuffle(entries)
        before, after, prefix = self.run.words.prompt()
        return Parts(before + " ".join(entries), after, prefix, tuple(vocabulary[1:4]), {"haystack": "coded words"})


def zeta_counts(words: int, vocabulary: int, alpha: float) -> list[int]:
    """How often each rank stands in a text of ``words``, in the arithmetic of numpy and scipy."""
    import numpy as np
    from scipy.special import zeta

    ranks = np.arange(1, vocabulary + 1)
    counts: list[int] = (words * (ranks**-alpha) / zeta(alpha)).astype(int).tolist()
    return counts
