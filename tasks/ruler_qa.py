"""RULER's question answering (section 3 of the paper): one answer among documents that do not hold it.

A question's own documents are always there. The haystack is made of the other documents that come with the question,
then of those of the same article, then of all others, each kind in an order drawn per sample. Every document has its
place from a draw of its own, so the gold ones lie anywhere, at any length.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, islice
from random import Random
from typing import ClassVar

from tasks.draws import Draws
from tasks.fit import Draft, Parts, prompt_length
from tasks.ruler import Conditions, RulerTask
from tasks.ruler_official import Run
from tasks.ruler_official_qa import QuestionScript
from tasks.ruler_qa_corpus import HOTPOTQA, SQUAD, Corpus, DataSetFiles, Question
from tasks.sources import DataSources, fingerprint
from tasks.task import check_choice
from tasks.wording import Wording

PROBE = 32
"""Documents that are counted at a time."""


@dataclass(frozen=True)
class QuestionAnswering(RulerTask):
    """``allow_partial``: accept a file with fewer questions than the data set has."""

    allow_partial: bool = False

    family = "qa"
    official_limit = 32
    files: ClassVar[DataSetFiles]

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(self.name, "allow_partial", self.allow_partial, (False, True))

    @property
    def parameters(self) -> dict[str, object]:
        return {"dataset": self.files.folder}

    def recipe(self, sources: DataSources) -> dict[str, object]:
        path = self.files.find(self.allow_partial, sources, f"task {self.name}")
        return super().recipe(sources) | {"data": {path.name: fingerprint(path)}}

    def check(self, sources: DataSources, context: int | None) -> None:
        super().check(sources, context)
        self._corpus(sources)

    def available(self, sources: DataSources) -> int | None:
        return len(self._corpus(sources).questions)

    def draft(self, index: int, draws: Draws, conditions: Conditions) -> Draft:
        corpus, words = self._corpus(conditions.sources), conditions.words
        question = corpus.questions[_order(self.name, conditions.seed, len(corpus.questions))[index]]
        before, after, prefix = words.prompt(query=question.text)
        meta: dict[str, object] = {"haystack": "documents", "data": self.files.described(corpus), "id": question.name}
        frame = Parts(before, after, prefix, question.answers, meta)
        return documents_draft(frame, words, corpus, question, draws, conditions)

    def official(self, run: Run) -> Iterator[Parts]:
        corpus = self._corpus(run.sources)
        return QuestionScript(run, corpus, self.files.described(corpus)).samples()

    def _corpus(self, sources: DataSources) -> Corpus:
        return self.files.corpus(self.allow_partial, sources, f"task {self.name}")


class QuestionAnswering1(QuestionAnswering):
    name = "qa_1"
    summary = "questions on one of many Wikipedia paragraphs (SQuAD 2.0)"
    files = SQUAD


class QuestionAnswering2(QuestionAnswering):
    name = "qa_2"
    summary = "questions on two of many Wikipedia passages (HotpotQA)"
    files = HOTPOTQA


@dataclass(frozen=True)
class DocumentsDraft:
    """A :class:`tasks.fit.Draft` whose units are documents beside the gold ones. ``ranks`` put all of them in order."""

    frame: Parts
    words: Wording
    gold: Sequence[str]
    others: Sequence[str]
    ranks: Sequence[float]
    lengths: Sequence[int]
    least: int = 0

    @property
    def most(self) -> int:
        return len(self.others)

    def tokens(self, units: int) -> int:
        return self.lengths[units]

    def parts(self, units: int) -> Parts:
        shown = [*self.gold, *self.others[:units]]
        order = sorted(range(len(shown)), key=self.ranks.__getitem__)
        texts = [self.words.text("document", i=number, document=shown[at]) for number, at in enumerate(order, start=1)]
        last = max(len(shown) - 1, 1)
        depths = sorted(round(100 * order.index(at) / last) for at in range(len(self.gold)))
        meta = {**self.frame.meta, "depths": depths, "documents": len(shown)}
        return replace(self.frame, context=self.frame.context + "\n\n".join(texts), meta=meta)


def documents_draft(
    frame: Parts, words: Wording, corpus: Corpus, question: Question, draws: Draws, conditions: Conditions
) -> DocumentsDraft:
    stream = _others(draws.stream("documents"), corpus, question)
    others: list[str] = []
    counts: list[int] = []
    total = 0
    while total <= conditions.room * 1.1:
        fresh = [corpus.documents[number] for number in islice(stream, PROBE)]
        if not fresh:
            break
        lengths = _document_tokens(fresh, words, conditions)
        others, counts, total = others + fresh, counts + lengths, total + sum(lengths)
    gold = [corpus.documents[number] for number in question.gold]
    fixed = prompt_length(frame, conditions.counter) + sum(_document_tokens(gold, words, conditions))
    rng = draws.stream("ranks")
    ranks = [rng.random() for _ in range(len(gold) + len(others))]
    return DocumentsDraft(frame, words, gold, others, ranks, list(accumulate(counts, initial=fixed)))


def _document_tokens(documents: Sequence[str], words: Wording, conditions: Conditions) -> list[int]:
    """A number of two digits stands for all, so that a document is counted once for all samples."""
    texts = [words.text("document", i=10, document=document) + "\n\n" for document in documents]
    return conditions.counter.pieces(texts)


def _others(rng: Random, corpus: Corpus, question: Question) -> Iterator[int]:
    """Without end: where all documents have been taken, they come again. None where all documents are gold."""
    near = [number for kind in (question.given, question.related) for number in _shuffled(rng, kind)]
    taken = set(question.gold)
    for number in near:
        if number not in taken:
            taken.add(number)
            yield number
    everything = range(len(corpus.documents))
    yield from (number for number in _shuffled(rng, everything) if number not in taken)
    while len(everything) > len(question.gold):
        yield from (number for number in _shuffled(rng, everything) if number not in question.gold)


def _shuffled(rng: Random, numbers: Sequence[int]) -> Iterator[int]:
    """A shuffle that costs no more than what is taken of it (Fisher and Yates, from the front)."""
    moved: dict[int, int] = {}
    for first in range(len(numbers)):
        chosen = rng.randrange(first, len(numbers))
        yield numbers[moved.get(chosen, chosen)]
        moved[chosen] = moved.get(first, first)


@lru_cache(maxsize=8)
def _order(task: str, seed: int, count: int) -> tuple[int, ...]:
    """Which question a sample asks: the same at every context length."""
    order = list(range(count))
    Draws(seed, task).stream("questions").shuffle(order)
    return tuple(order)
