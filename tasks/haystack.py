"""Haystacks: texts of any length as streams of pieces, and needles put between them.

    essays      texts from the data folder, from a sentence drawn per sample, from the start again where they end
    word lists  sentences made up from word lists, where there are no text files
    noise       one line, repeated
    needles     lines that look like the needle, with other keys

A piece is short (at most ``WORDS_PER_PIECE`` words), so that a text can fill its length closely; a needle stands only
before a piece that opens a sentence or a line.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, islice, repeat
from pathlib import Path
from random import Random
from typing import NamedTuple

from tasks.fit import Parts, prompt_length
from tasks.sources import DataError, DataSources, fingerprint, read_json, read_text
from tasks.tokens import TokenCounter
from tasks.words import sentences

DEPTHS = tuple(round(100 * step / 39) for step in range(40))
"""RULER's depths in per cent."""

WORDS_PER_PIECE = 12
WORDS_PER_SENTENCE = 60  # a text without full stops still has places for needles

OFFICIAL_ESSAYS = "PaulGrahamEssays.json"

_SENTENCE_END = re.compile(r"[.!?][\"')\]”’]*$")
_NO_SENTENCE_END = re.compile(r"^[\"'(\[“‘]*(Mr|Mrs|Ms|Dr|St|No|vs|[A-Z])\.$")  # titles and initials


class Piece(NamedTuple):
    text: str
    opens: bool


@dataclass(frozen=True)
class Haystack:
    """``label`` says in every sample what it lay in; ``joiner`` stands between pieces."""

    label: str
    joiner: str
    stream: Callable[[Random], Iterator[Piece]]


@dataclass(frozen=True)
class Stack:
    """The pieces that one sample may use: ``lengths[n]`` is about the number of tokens of the first n."""

    pieces: Sequence[Piece]
    lengths: Sequence[int]
    joiner: str

    def text(self, units: int, needles: Sequence[tuple[int, str]]) -> str:
        """The first ``units`` pieces with needles at depths in per cent; equal depths keep the order given."""
        openings = [index for index in range(units) if self.pieces[index].opens] + [units]
        spots: dict[int, list[str]] = {}
        for depth, needle in needles:
            nearest = bisect_right(openings, units * depth // 100) - 1
            spots.setdefault(openings[nearest], []).append(needle)
        texts: list[str] = []
        for index in range(units + 1):
            texts += spots.get(index, [])
            texts += [self.pieces[index].text] if index < units else []
        return self.joiner.join(texts)


@dataclass(frozen=True)
class HaystackDraft:
    """A :class:`tasks.fit.Draft`: ``frame`` is the prompt with an empty haystack, where ``context`` ends."""

    frame: Parts
    needles: Sequence[tuple[int, str]]
    stack: Stack
    frame_tokens: int
    least: int = 1

    @property
    def most(self) -> int:
        return len(self.stack.pieces)

    def tokens(self, units: int) -> int:
        return self.frame_tokens + self.stack.lengths[units]

    def parts(self, units: int) -> Parts:
        return replace(self.frame, context=self.frame.context + self.stack.text(units, self.needles))


def haystack_draft(
    frame: Parts, needles: Sequence[tuple[int, str]], haystack: Haystack, rng: Random, counter: TokenCounter, room: int
) -> HaystackDraft:
    tokens = prompt_length(frame, counter)
    tokens += sum(counter.count(haystack.joiner + needle) for _, needle in needles)
    return HaystackDraft(frame, needles, take(haystack, rng, counter, room), tokens)


def take(haystack: Haystack, rng: Random, counter: TokenCounter, room: int) -> Stack:
    """As many pieces as can be needed to fill ``room`` tokens."""
    pieces: list[Piece] = []
    counts: list[int] = []
    stream = haystack.stream(rng)
    while sum(counts) <= room * 1.1 + 64:
        fresh = list(islice(stream, 128))
        pieces += fresh
        counts += counter.pieces([haystack.joiner + piece.text for piece in fresh])
    return Stack(pieces, list(accumulate(counts, initial=0)), haystack.joiner)


def essay_files(choice: str, sources: DataSources, needed_by: str) -> list[Path]:
    """The files below ``haystack/`` that a setting asks for; none: sentences are made from word lists.

    ``auto`` and ``files``: the essays of the official generator where they are there, else all ``*.txt``; ``files``
    insists. Other choices are the name of one file.
    """
    if choice == "word-lists":
        return []
    if choice not in ("auto", "files"):
        return [sources.require(f"haystack/{choice}", needed_by)]
    official = sources.find(f"haystack/{OFFICIAL_ESSAYS}")
    files = [official] if official else sources.every(sources.listing("haystack", "*.txt"))
    if choice == "files" and not files:
        raise DataError(
            f"{needed_by}: haystack is 'files', and the data folder {sources.data_dir} has neither "
            f"haystack/{OFFICIAL_ESSAYS} nor haystack/*.txt"
        )
    return files


def essay_text(files: Sequence[Path]) -> str:
    """The text of all files. ``.json``: an object with a field ``text``, as the official generator keeps its essays."""
    text = "\n".join(_text(file) for file in files)
    if not text.strip():
        raise DataError(f"the haystack files have no text: {', '.join(map(str, files))}")
    return text


def _text(file: Path) -> str:
    if file.suffix != ".json":
        return read_text(file)
    content = read_json(file)
    if not isinstance(content, dict) or not isinstance(content.get("text"), str):
        raise DataError(f"{file} must be an object with a field text that holds the essays")
    text: str = content["text"]
    return text


def essays(files: Sequence[Path]) -> Haystack:
    """The texts of ``files`` one after the other, white space collapsed."""
    pieces, openings = _essay_pieces(tuple(files), tuple(fingerprint(file) for file in files))

    def stream(rng: Random) -> Iterator[Piece]:
        yield from islice(pieces, rng.choice(openings), None)
        while True:
            yield from pieces

    return Haystack(", ".join(file.name for file in files), " ", stream)


def word_list_sentences() -> Haystack:
    return Haystack("word-lists", " ", lambda rng: _cut(map(str.split, sentences(rng))))


def noise(line: str) -> Haystack:
    return Haystack("noise", "\n", lambda rng: repeat(Piece(line, True)))


def lines(label: str, stream: Callable[[Random], Iterator[str]]) -> Haystack:
    return Haystack(label, "\n", lambda rng: (Piece(line, True) for line in stream(rng)))


@lru_cache(maxsize=4)
def _essay_pieces(files: tuple[Path, ...], fingerprints: tuple[str, ...]) -> tuple[tuple[Piece, ...], tuple[int, ...]]:
    """All pieces, and where a sentence opens."""
    # The fingerprints are part of the key alone: files that change are read again.
    pieces = tuple(_cut(_sentences(essay_text(files).split())))
    return pieces, tuple(index for index, piece in enumerate(pieces) if piece.opens)


def _sentences(words: Iterable[str]) -> Iterator[list[str]]:
    sentence: list[str] = []
    for word in words:
        sentence.append(word)
        if _SENTENCE_END.search(word) and not _NO_SENTENCE_END.match(word):
            yield sentence
            sentence = []
    if sentence:
        yield sentence


def _cut(sentences: Iterable[list[str]]) -> Iterator[Piece]:
    for words in sentences:
        for start in range(0, len(words), WORDS_PER_PIECE):
            yield Piece(" ".join(words[start : start + WORDS_PER_PIECE]), start % WORDS_PER_SENTENCE == 0)
