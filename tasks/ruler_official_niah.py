"""The official generator's needle-in-a-haystack script; see :mod:`tasks.ruler_official`."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate, pairwise
from random import Random
from uuid import UUID

from tasks.fit import Parts
from tasks.haystack import DEPTHS
from tasks.ruler_official import Run
from tasks.ruler_official_sentences import cut_sentences
from tasks.words import listed, raw_words

WORDS_PER_STEP = 500
LINES_PER_STEP = 25
LINES_PER_SHORT_STEP = 5


@dataclass(frozen=True)
class NiahScript:
    """``essays``: the text of the haystack, where it is one of essays."""

    run: Run
    around: str
    key_kind: str
    value_kind: str
    keys: int
    values: int
    queries: int
    haystack: str
    essays: str = ""

    def samples(self) -> Iterator[Parts]:
        run, step = self.run, self._step()
        upper = run.three_times(run.tokens(self._draw(step)), step)
        units = run.most_units(lambda units: run.tokens(self._draw(units)) + run.new_tokens, step, upper)
        while True:
            yield self._located(run.fitted(self._draw, units, step))

    def _step(self) -> int:
        if self.around == "essays":
            return WORDS_PER_STEP
        return LINES_PER_SHORT_STEP if self.run.short else LINES_PER_STEP

    def _draw(self, units: int) -> Parts:
        """A prompt of ``units`` words (of essays) or lines."""
        rng = self.run.rng
        keys: list[str] = []
        values: list[list[str]] = []
        for _ in range(self.keys):
            keys.append(_RANDOM[self.key_kind](rng))
            values.append([_RANDOM[self.value_kind](rng) for _ in range(self.values)])
        needles = [self._needle(key, value) for key, of_key in zip(keys, values, strict=True) for value in of_key]
        self.run.shuffle(needles)
        text = self._among_sentences(needles, units) if self.around == "essays" else self._among_lines(needles, units)
        asked = rng.sample(range(self.keys), self.queries)
        single = self.queries * self.values == 1
        before, after, prefix = self.run.words.prompt(
            singular=single,
            type_needle_v=self.value_kind[:-1] if single else self.value_kind,
            query=listed([keys[index] for index in asked]),
        )
        references = tuple(value for index in asked for value in values[index])
        places = [round(100 * text.find(value) / len(text)) for value in references]
        meta: dict[str, object] = {"haystack": self.haystack, "depths": places}
        return Parts(before + text, after, prefix, references, meta)

    def _needle(self, key: str, value: str) -> str:
        return self.run.words.text("needle", type_needle_v=self.value_kind, key=key, value=value)

    def _among_sentences(self, needles: Sequence[str], units: int) -> str:
        words = _words(self.essays)
        repeats = -(-units // len(words))
        sentences = cut_sentences(" ".join((words * repeats)[:units]).strip())
        depths = self.run.rng.sample(DEPTHS, len(needles))
        cuts = [0, *sorted(int(len(sentences) * (depth / 100)) for depth in depths), len(sentences)]
        texts: list[str] = []
        for number, (start, end) in enumerate(pairwise(cuts)):
            texts += [" ".join(sentences[start:end]), *needles[number : number + 1]]
        return " ".join(texts)

    def _among_lines(self, needles: Sequence[str], units: int) -> str:
        rng = self.run.rng
        if self.around == "noise":
            lines = [self.run.words.text("noise")] * units
        else:
            lines = [self._needle(_RANDOM[self.key_kind](rng), _RANDOM[self.value_kind](rng)) for _ in range(units)]
        places = sorted(rng.sample(range(units), len(needles)), reverse=True)
        for place, needle in zip(places, needles, strict=True):
            lines.insert(place, needle)
        return "\n".join(lines)

    def _located(self, parts: Parts) -> Parts:
        text = parts.context + parts.question
        place = self.run.counter.count(text[: text.find(parts.references[0])])
        return replace(parts, meta={**parts.meta, "token_position_answer": place})


@cache
def _words(text: str) -> tuple[str, ...]:
    # Not str.split(): a text that ends in white space gives an empty word, which counts when the text repeats.
    return tuple(re.sub(r"\s+", " ", text).split(" "))


class Compounds(Sequence[str]):
    """All pairs ``adjective-noun`` in alphabetical order, as one list of millions would hold them, without the list.

    Pairs that begin with the same adjective stand together, except where an adjective with its hyphen begins another
    one: those are sorted together.
    """

    def __init__(self, adjectives: Sequence[str], nouns: Sequence[str]) -> None:
        self._nouns = sorted(set(nouns))
        groups: list[list[str]] = []
        for opening in sorted({f"{adjective}-" for adjective in adjectives}):
            if groups and opening.startswith(groups[-1][0]):
                groups[-1].append(opening)
            else:
                groups.append([opening])
        self._groups: list[str | list[str]] = [
            group[0] if len(group) == 1 else sorted({opening + noun for opening in group for noun in self._nouns})
            for group in groups
        ]
        sizes = (len(self._nouns) if isinstance(group, str) else len(group) for group in self._groups)
        self._starts = list(accumulate(sizes, initial=0))

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, index: int) -> str:  # type: ignore[override]
        number = bisect_right(self._starts, index) - 1
        group, place = self._groups[number], index - self._starts[number]
        return group + self._nouns[place] if isinstance(group, str) else group[place]


@cache
def _compounds() -> Compounds:
    return Compounds(raw_words("adjectivelist"), raw_words("nounlist"))


_RANDOM: dict[str, Callable[[Random], str]] = {
    "words": lambda rng: rng.choice(_compounds()),
    "numbers": lambda rng: str(rng.randint(10**6, 10**7 - 1)),
    "uuids": lambda rng: str(UUID(int=rng.getrandbits(128), version=4)),
}
