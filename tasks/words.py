"""Words, keys and sentences from wonderwords' lists, which RULER draws its keys and word lists from.

Entries with blanks inside or letters beyond ASCII are left out, since they blur where a word ends, and so are the
entries of its list of profanities.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import metadata, resources
from random import Random
from uuid import UUID

from tasks.sources import content_hash

SENTENCES = (
    "The {adjective} {noun} will {verb} the {noun} behind the {noun}.",
    "No {noun} can {verb} a {adjective} {noun} without a {noun}.",
    "When the {noun} began to {verb}, a {adjective} {noun} had to {verb} as well.",
    "Every {adjective} {noun} near the {noun} would rather {verb} than {verb}.",
    "They did not {verb} the {noun}, although a {adjective} {noun} had asked for it.",
    "Between the {noun} and the {noun} lies a {adjective}, {adjective} {noun}.",
    "Who would {verb} a {noun} while the {adjective} {noun} is still there?",
    "My {noun} might {verb} your {noun} before the {noun} gets {adjective}.",
    "A {noun} is rarely as {adjective} as the {noun} that we used to {verb}.",
    "She told the {noun} to {verb}, but the {noun} stayed {adjective}.",
    "If a {adjective} {noun} should {verb}, call the {noun} at once.",
    "Some say that the {noun} was {adjective} until the {noun} learned to {verb}.",
)


@dataclass(frozen=True)
class WordLists:
    nouns: tuple[str, ...]
    adjectives: tuple[str, ...]
    verbs: tuple[str, ...]

    @property
    def all(self) -> tuple[str, ...]:
        return tuple(sorted({*self.nouns, *self.adjectives, *self.verbs}))


@cache
def word_lists() -> WordLists:
    return WordLists(_words("nounlist"), _words("adjectivelist"), _words("verblist"))


@cache
def word_recipe() -> dict[str, str]:
    lists = word_lists()
    return {
        "wonderwords": metadata.version("wonderwords"),
        "sha256": content_hash([lists.nouns, lists.adjectives, lists.verbs]),
    }


def compound(rng: Random) -> str:
    """A key such as ``quiet-harbor``."""
    lists = word_lists()
    return f"{rng.choice(lists.adjectives)}-{rng.choice(lists.nouns)}"


def number(rng: Random, digits: int) -> str:
    return str(rng.randrange(10 ** (digits - 1), 10**digits))


def uuid(rng: Random) -> str:
    return str(UUID(int=rng.getrandbits(128), version=4))


def sentences(rng: Random) -> Iterator[str]:
    """Sentences without end, no plot and no meaning."""
    lists = word_lists()
    kinds = {"noun": lists.nouns, "adjective": lists.adjectives, "verb": lists.verbs}
    while True:
        filled = re.sub(r"{(\w+)}", lambda match: rng.choice(kinds[match[1]]), rng.choice(SENTENCES))
        yield re.sub(r"\b([Aa]) (?=[aeiouAEIOU])", r"\1n ", filled)


def listed(names: Sequence[str]) -> str:
    """``a``; ``a, and b``; ``a, b, and c``: RULER's way, two names included."""
    return f"{', '.join(names[:-1])}, and {names[-1]}" if len(names) > 1 else names[0]


def numbered(words: Sequence[str]) -> str:
    """``1. word 2. word`` ..."""
    return " ".join(f"{number}. {word}" for number, word in enumerate(words, start=1))


@cache
def raw_words(name: str) -> tuple[str, ...]:
    """A list of wonderwords as it is, for the official generator."""
    text = resources.files("wonderwords.assets").joinpath(f"{name}.txt").read_text(encoding="utf-8")
    return tuple(line.rstrip() for line in text.splitlines())


def _words(name: str) -> tuple[str, ...]:
    words = _entries(name) - _entries("profanitylist")
    return tuple(sorted(word for word in words if word.isascii() and " " not in word))


def _entries(name: str) -> set[str]:
    return {word.strip() for word in raw_words(name)} - {""}
