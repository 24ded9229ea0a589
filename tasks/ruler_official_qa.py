"""The official generator's question answering script; see :mod:`tasks.ruler_official`.

Sample i asks question i of the file. All documents are shuffled alike in every sample, the gold one at first place
before: for a given number of documents it always lands at the same place.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tasks.fit import Parts
from tasks.ruler_official import Run
from tasks.ruler_qa_corpus import Corpus

DOCUMENTS_PER_STEP = 10


@dataclass(frozen=True)
class QuestionScript:
    """``label``: what samples say of their corpus."""

    run: Run
    corpus: Corpus
    label: str

    def samples(self) -> Iterator[Parts]:
        run, step = self.run, DOCUMENTS_PER_STEP
        upper = run.three_times(run.tokens(self._draw(0, step)), step)
        units = run.most_units(lambda units: run.tokens(self._draw(0, units)) + run.new_tokens, step, upper)
        for index in range(len(self.corpus.questions)):
            yield run.fitted(lambda units, index=index: self._draw(index, units), units, step)  # type: ignore[misc]

    def _draw(self, index: int, units: int) -> Parts:
        """A prompt of ``units`` documents."""
        question, words = self.corpus.questions[index], self.run.words
        numbers = self._numbers(index, units)
        self.run.shuffle(numbers)
        texts = [
            words.text("document", i=place, document=self.corpus.documents[number])
            for place, number in enumerate(numbers, start=1)
        ]
        before, after, prefix = words.prompt(query=question.text)
        last = max(len(numbers) - 1, 1)
        depths = sorted(round(100 * numbers.index(number) / last) for number in question.gold if number in numbers)
        meta: dict[str, object] = {"haystack": "documents", "data": self.label, "id": question.name}
        meta |= {"depths": depths, "documents": len(numbers)}
        return Parts(before + "\n\n".join(texts), after, prefix, question.answers, meta)

    def _numbers(self, index: int, units: int) -> list[int]:
        question, total, rng = self.corpus.questions[index], len(self.corpus.documents), self.run.rng
        given, related = list(question.given), list(question.related)
        if units >= total:
            return (list(range(total)) * -(-units // total))[:units]
        wanted = units - len(given)
        if wanted <= len(related):
            return given + rng.sample(related, wanted)
        known = {*given, *related}
        others = [number for number in range(total) if number not in known]
        return given + related + rng.sample(others, max(0, wanted - len(related)))
