"""Needle in a haystack: one sentence hidden at a chosen depth of a text of a chosen length, and a question about it.

The grid of G. Kamradt's pressure test, in the form that work on KV-cache compression runs (PyramidKV, SnapKV): depths
by lengths, the text between the tags of a book, greedy, at most 50 new tokens. Sample i has depth i % D and needle
i // D, so the first D samples cover all depths and each further D put another needle into every cell.

    tokens of the haystack   0 ........... depth % ........ 100 %
    the needle goes to the last sentence end at or before that place; 0 is the start, 100 the end

A needle is the same at all depths and lengths, and lies in a passage drawn for each sample. The one sentence that most
published maps use is known by heart to many models, so needles are drawn here unless the data folder brings some.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any, ClassVar, Literal, NamedTuple

from tasks.draws import Draws
from tasks.fit import Parts, fit, prompt_length
from tasks.haystack import Haystack, Piece, Stack, essay_files, essays, take, word_list_sentences
from tasks.recall import niah_exact, niah_recall, words
from tasks.sample import Sample
from tasks.sources import DataError, DataSources, content_hash, fingerprint, read_json
from tasks.task import ContextTooSmall, TaskError, check_choice, check_context, check_limit, check_room
from tasks.tokens import TokenCounter, Tokenizer
from tasks.words import number, word_lists, word_recipe

NEEDLES_FILE = "niah/needles.json"
USUAL_LIMIT = 50

BEFORE = "Below is a whole book. Read it to its end; what comes after it asks for a single fact.\n\n<book>\n"
AFTER = "\n</book>\n\nAnswer from the book alone, in a few words.\nQuestion: {question}"
PREFIX = "\nAnswer:"

SENTENCE = "The password of the old lighthouse in {city} is {answer}."
QUESTION = "What is the password of the old lighthouse in {city}?"
CITIES = (
    *("Accra", "Bergen", "Bilbao", "Bordeaux", "Brisbane", "Cadiz", "Callao", "Cardiff", "Chennai", "Colombo"),
    *("Dakar", "Darwin", "Durban", "Galway", "Genoa", "Gothenburg", "Halifax", "Hamburg", "Havana", "Helsinki"),
    *("Hobart", "Izmir", "Karachi", "Lagos", "Lima", "Lisbon", "Luanda", "Malaga", "Manila", "Mombasa"),
    *("Montevideo", "Mumbai", "Nantes", "Naples", "Odesa", "Osaka", "Palermo", "Perth", "Porto", "Recife"),
    *("Riga", "Rotterdam", "Seattle", "Split", "Stavanger", "Tallinn", "Trieste", "Valencia", "Varna", "Yokohama"),
)

_SENTENCE_END = re.compile(r"[.!?][\"')\]”’]*$")


class Needle(NamedTuple):
    sentence: str
    question: str
    answer: str


def score(prediction: str, reference: str) -> float:
    """Word recall: the share of the expected answer's distinct words that the prediction has, whatever their order."""
    return niah_recall(prediction, [reference])


def exact(prediction: str, reference: str) -> float:
    """1 where the prediction holds the expected answer, case and punctuation apart."""
    return niah_exact(prediction, [reference])


@dataclass(frozen=True)
class NeedleGrid:
    """``depths``: how many, spread evenly over 0 to 100 per cent, or a list of them. ``haystack``: see
    :func:`tasks.haystack.essay_files`. ``match`` chooses the score.
    """

    depths: int | Sequence[float] = 11
    needle: Literal["random", "file"] = "random"
    haystack: str = "auto"
    match: Literal["recall", "exact"] = "recall"
    max_new_tokens: int | None = None

    name: ClassVar[str] = "niah"
    version: ClassVar[int] = 1
    summary: ClassVar[str] = "one sentence in essays, at every depth: the grid of depths by lengths"
    contextual: ClassVar[bool] = True
    seeded: ClassVar[bool] = True
    chat: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_choice(self.name, "needle", self.needle, ("random", "file"))
        if not isinstance(self.haystack, str) or not self.haystack:
            raise TaskError(
                f"task {self.name}: haystack must be auto, files, word-lists or the name of a file below haystack/, "
                f"not {self.haystack!r}"
            )
        check_choice(self.name, "match", self.match, ("recall", "exact"))
        check_limit(self.name, self.max_new_tokens)
        if not isinstance(self.depths, int):
            object.__setattr__(self, "depths", tuple(self.depths) if isinstance(self.depths, list | tuple) else ())
        _check_depths(self.name, self.depths)

    @property
    def metric(self) -> str:
        return f"niah_{self.match}"

    @property
    def generation_limit(self) -> int:
        return self.max_new_tokens or USUAL_LIMIT

    @property
    def grid(self) -> tuple[float, ...]:
        """The depths in per cent, in the order in which samples take them."""
        if isinstance(self.depths, int):
            return tuple(round(100 * step / (self.depths - 1), 2) for step in range(self.depths))
        return tuple(float(depth) for depth in self.depths)

    def recipe(self, sources: DataSources) -> dict[str, object]:
        files = self._essay_files(sources)
        own = content_hash([SENTENCE, QUESTION, CITIES])
        return {
            "task": self.name,
            "version": self.version,
            "depths": list(self.grid),
            "needles": fingerprint(self._needles_file(sources)) if self.needle == "file" else own,
            "haystack": {file.name: fingerprint(file) for file in files} or "word-lists",
            "wording": content_hash([BEFORE, AFTER, PREFIX]),
            "words": word_recipe(),
            "metric": self.metric,
            "max_new_tokens": self.generation_limit,
        }

    def check(self, sources: DataSources, context: int | None) -> None:
        check_context(self.name, self.contextual, context)
        check_room(self.name, context, self.generation_limit)
        self._haystack(sources)
        self._filed(sources)

    def available(self, sources: DataSources) -> int | None:
        return None

    def samples(
        self, tokenizer: Tokenizer, sources: DataSources, context: int | None, seed: int, count: int, overhead: int
    ) -> list[Sample]:
        self.check(sources, context)
        assert context is not None
        recipe = content_hash(self.recipe(sources))
        haystack, filed, counter = self._haystack(sources), self._filed(sources), TokenCounter(tokenizer)
        room = context - self.generation_limit - overhead
        made: dict[str, Sample] = {}
        for index in range(count):
            turn, place = divmod(index, len(self.grid))
            rng = Draws(seed, self.name, turn, recipe).stream("needle")
            needle = filed[turn % len(filed)] if filed else _drawn(rng)
            passage = Draws(seed, self.name, context, index, recipe).stream("haystack")
            sample = self._sample(index, needle, self.grid[place], haystack, passage, counter, room)
            twin = made.setdefault(sample.sample_id, sample)
            if twin is not sample:
                raise ContextTooSmall(
                    f"task {self.name}: samples {twin.index} and {index} are the same prompt: a context of {context} "
                    "tokens, or the haystack's text, is too short to tell their depths apart; ask for fewer depths"
                )
        return list(made.values())

    def _sample(
        self,
        index: int,
        needle: Needle,
        depth: float,
        haystack: Haystack,
        rng: Random,
        counter: TokenCounter,
        room: int,
    ) -> Sample:
        meta: dict[str, object] = {
            "depth": depth,
            "grid": len(self.grid),
            "needle": self.needle,
            "haystack": haystack.label,
            "wording": "own",
        }
        frame = Parts(BEFORE, AFTER.format(question=needle.question), PREFIX, (needle.answer,), meta)
        stack = take(haystack, rng, counter, room)
        tokens = prompt_length(frame, counter) + counter.count(stack.joiner + needle.sentence)
        try:
            parts = fit(
                GridDraft(frame, needle.sentence, depth, stack, _sentence_starts(stack.pieces), tokens), counter, room
            )
        except ContextTooSmall as error:
            raise ContextTooSmall(
                f"task {self.name}: {error}, once the chat template and {self.generation_limit} tokens for the answer "
                "are set aside; ask for a longer context"
            ) from error
        if parts.context.count(needle.sentence) != 1:
            raise DataError(
                f"task {self.name}: the haystack {haystack.label} holds the needle {needle.sentence!r} itself"
            )
        return Sample(
            task=self.name,
            index=index,
            context=parts.context,
            question=parts.question,
            answer_prefix=parts.answer_prefix,
            references=parts.references,
            max_new_tokens=self.generation_limit,
            metric=self.metric,
            chat=self.chat,
            meta=parts.meta,
        )

    def _haystack(self, sources: DataSources) -> Haystack:
        files = self._essay_files(sources)
        return essays(files) if files else word_list_sentences()

    def _essay_files(self, sources: DataSources) -> list[Path]:
        return essay_files(self.haystack, sources, f"task {self.name}")

    def _filed(self, sources: DataSources) -> list[Needle]:
        return _read_needles(self._needles_file(sources)) if self.needle == "file" else []

    def _needles_file(self, sources: DataSources) -> Path:
        return sources.require(NEEDLES_FILE, f"task {self.name} with needle: file")


@dataclass(frozen=True)
class GridDraft:
    """A :class:`tasks.fit.Draft`. ``starts``: the pieces before which the needle may stand."""

    frame: Parts
    needle: str
    depth: float
    stack: Stack
    starts: Sequence[int]
    frame_tokens: int
    least: int = 1

    @property
    def most(self) -> int:
        return len(self.stack.pieces)

    def tokens(self, units: int) -> int:
        return self.frame_tokens + self.stack.lengths[units]

    def parts(self, units: int) -> Parts:
        place = self.place(units)
        texts = [piece.text for piece in self.stack.pieces[:units]]
        text = self.stack.joiner.join([*texts[:place], self.needle, *texts[place:]])
        real = 100 * self.stack.lengths[place] / self.stack.lengths[units]
        meta = {**self.frame.meta, "depth_real": round(real, 2)}
        return replace(self.frame, context=self.frame.context + text, meta=meta)

    def place(self, units: int) -> int:
        """How many pieces stand before the needle: depths are counted in tokens of the haystack."""
        lengths = self.stack.lengths
        reached = bisect_right(lengths, lengths[units] * self.depth / 100, hi=units + 1) - 1
        return units if reached == units else self.starts[bisect_right(self.starts, reached) - 1]


def _sentence_starts(pieces: Sequence[Piece]) -> list[int]:
    """Where a sentence ends before a piece; in a text without sentence ends, where the haystack sees an opening."""
    openings = [index for index, piece in enumerate(pieces) if piece.opens or index == 0]
    ends = [index for index in openings if index and _SENTENCE_END.search(pieces[index - 1].text)]
    return [0, *ends] if ends else openings


def _drawn(rng: Random) -> Needle:
    lists, city = word_lists(), rng.choice(CITIES)
    answer = f"{rng.choice(lists.adjectives)} {rng.choice(lists.nouns)} {number(rng, 5)}"
    return Needle(SENTENCE.format(city=city, answer=answer), QUESTION.format(city=city), answer)


def _read_needles(path: Path) -> list[Needle]:
    content = read_json(path)
    if not isinstance(content, list) or not content:
        raise DataError(f"{path} must be a list of needles, each with sentence, question and answer")
    return [_needle(entry, f"{path}, needle {place}") for place, entry in enumerate(content, start=1)]


def _needle(entry: Any, where: str) -> Needle:
    texts = [entry.get(field) if isinstance(entry, dict) else None for field in Needle._fields]
    sound = [" ".join(text.split()) for text in texts if isinstance(text, str) and words(text)]
    if len(sound) < len(texts):
        raise DataError(f"{where} must have the texts sentence, question and answer, each with a word in it")
    return Needle(*sound)


def _check_depths(task: str, depths: int | Sequence[float]) -> None:
    if isinstance(depths, int):
        sound = not isinstance(depths, bool) and depths >= 2
    else:
        numbers = all(isinstance(depth, int | float) and not isinstance(depth, bool) for depth in depths)
        sound = numbers and 0 < len(set(depths)) == len(depths) and all(0 <= depth <= 100 for depth in depths)
    if not sound:
        raise TaskError(
            f"task {task}: depths must be how many to spread over 0 to 100 per cent (at least 2), "
            f"or a list of different per cents, not {depths!r}"
        )
