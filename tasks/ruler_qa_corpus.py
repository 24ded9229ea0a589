"""The questions and documents of RULER's qa_1 (SQuAD 2.0, dev set) and qa_2 (HotpotQA, dev set, distractor setting).

As in the official generator, documents are the distinct paragraphs of a file in alphabetical order, and questions that
cannot be answered are left out. A file that is not complete counts only where the setting ``allow_partial`` says so;
then every sample says what it comes from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from tasks.sources import DataError, DataSources, fingerprint, read_json


@dataclass(frozen=True)
class Question:
    """Numbers are places in a corpus: the documents that hold the answer, those that come with the question, and those
    of the same article.
    """

    name: str
    text: str
    answers: tuple[str, ...]
    gold: tuple[int, ...]
    given: tuple[int, ...]
    related: tuple[int, ...] = ()


@dataclass(frozen=True)
class Corpus:
    file: Path
    documents: tuple[str, ...]
    questions: tuple[Question, ...]


@dataclass(frozen=True)
class DataSetFiles:
    """Where a data set lies below a data folder: under the names of the ``complete`` set; a sample has any other name.

    ``questions``: those with an answer in the complete set.
    """

    folder: str
    complete: tuple[str, ...]
    questions: int
    read: Callable[[Path, Any], Corpus]

    def find(self, allow_partial: bool, sources: DataSources, needed_by: str) -> Path:
        """The complete file; else, where that is allowed, the first other one; else what is fetched, or an error."""
        for name in self.complete:
            if path := sources.find(f"{self.folder}/{name}"):
                return path
        others = sources.listing(self.folder, "*.json")
        if allow_partial and others:
            return sources.every(others[:1])[0]
        try:
            return sources.require(f"{self.folder}/{self.complete[-1]}", needed_by)
        except DataError as error:
            if not others:
                raise
            raise DataError(f"{error}; to run on the sample {others[0]} alone, set allow_partial: true") from error

    def corpus(self, allow_partial: bool, sources: DataSources, needed_by: str) -> Corpus:
        path = self.find(allow_partial, sources, needed_by)
        corpus = _corpus(self, path, fingerprint(path))
        if len(corpus.questions) != self.questions and not allow_partial:
            raise DataError(
                f"{path} has {len(corpus.questions):,} questions with an answer, and the complete set has "
                f"{self.questions:,}: give the whole file, or set allow_partial: true to run on these alone"
            )
        return corpus

    def described(self, corpus: Corpus) -> str:
        """The file's name, and how much of the complete set it is where it is not all of it."""
        count = len(corpus.questions)
        part = "" if count == self.questions else f" ({count:,} of {self.questions:,} questions)"
        return f"{corpus.file.name}{part}"


@lru_cache(maxsize=2)
def _corpus(files: DataSetFiles, path: Path, sha256: str) -> Corpus:
    # The fingerprint is part of the key alone: a file that changes is read again.
    corpus = files.read(path, read_json(path))
    if not corpus.questions:
        raise DataError(f"{path} has no question with an answer")
    names: set[str] = set()
    for question in corpus.questions:
        if question.name in names:
            raise DataError(f"{path}, question {question.name}: its id is there twice")
        names.add(question.name)
    return corpus


def _read_squad(path: Path, content: Any) -> Corpus:
    articles = [
        (where, [_text(paragraph, "context", where) for where, paragraph in paragraphs], paragraphs)
        for where, paragraphs in _articles(path, content)
    ]
    documents = sorted({text for _, texts, _ in articles for text in texts})
    number = {text: place for place, text in enumerate(documents)}
    questions = []
    for _, texts, paragraphs in articles:
        of_article = tuple(number[text] for text in texts)
        for text, (where, paragraph) in zip(texts, paragraphs, strict=True):
            here = number[text]
            related = tuple(other for other in of_article if other != here)
            for question in _squad_questions(paragraph, where):
                questions.append(replace(question, gold=(here,), given=(here,), related=related))
    return Corpus(path, tuple(documents), tuple(questions))


def _articles(path: Path, content: Any) -> Iterator[tuple[str, list[tuple[str, dict[str, Any]]]]]:
    for index, article in enumerate(_list(content, "data", str(path))):
        where = f"{path}, data[{index}]"
        paragraphs = enumerate(_list(article, "paragraphs", where))
        yield where, [(f"{where}.paragraphs[{number}]", paragraph) for number, paragraph in paragraphs]


def _squad_questions(paragraph: dict[str, Any], where: str) -> Iterator[Question]:
    for record in _list(paragraph, "qas", where):
        name = _text(record, "id", where)
        spot = f"{where}, question {name}"
        if not isinstance(record.get("is_impossible"), bool):
            raise DataError(f"{spot}: is_impossible must be true or false: the file must be SQuAD 2.0, not 1.1")
        if record["is_impossible"]:
            continue
        answers = tuple(_text(answer, "text", spot) for answer in _list(record, "answers", spot))
        if not answers:
            raise DataError(f"{spot}: it can be answered, and has no answers")
        yield Question(name, _text(record, "question", spot), answers, (), ())


def _read_hotpotqa(path: Path, content: Any) -> Corpus:
    if not isinstance(content, list):
        raise DataError(f"{path} must be a list of records, in the layout of hotpot_dev_distractor_v1.json")
    records = [
        (f"{path}, record {index}", record, _passages(record, f"{path}, record {index}"))
        for index, record in enumerate(content)
    ]
    documents = sorted({text for _, _, passages in records for _, text in passages})
    number = {text: place for place, text in enumerate(documents)}
    questions = []
    for where, record, passages in records:
        spot = f"{where} ({_text(record, '_id', where)})"
        titles = {entry[0] for entry in _list(record, "supporting_facts", spot) if isinstance(entry, list) and entry}
        gold = tuple(dict.fromkeys(number[text] for title, text in passages if title in titles))
        if not gold:
            raise DataError(f"{spot}: none of its passages has a title that is in supporting_facts")
        given = tuple(number[text] for _, text in passages)
        answer = _text(record, "answer", spot)
        questions.append(Question(record["_id"], _text(record, "question", spot), (answer,), gold, given))
    return Corpus(path, tuple(documents), tuple(questions))


def _passages(record: Any, where: str) -> list[tuple[str, str]]:
    """Titles, and passages under their titles."""
    passages = []
    for entry in _list(record, "context", where):
        match entry:
            case [str(title), list(sentences)] if sentences and all(isinstance(one, str) for one in sentences):
                passages.append((title, f"{title}\n{''.join(sentences)}"))
            case _:
                raise DataError(
                    f"{where}: context must hold pairs of a title and a list of sentences, not {entry!r:.80}"
                )
    if not passages:
        raise DataError(f"{where}: its context is empty")
    return passages


def _list(record: Any, field: str, where: str) -> list[Any]:
    if not isinstance(record, dict) or not isinstance(record.get(field), list):
        raise DataError(f"{where}: there must be a list {field}")
    entries: list[Any] = record[field]
    return entries


def _text(record: Any, field: str, where: str) -> str:
    value = record.get(field) if isinstance(record, dict) else None
    if not isinstance(value, str) or not value.strip():
        raise DataError(f"{where}: {field} must be text that is not empty, not {value!r:.40}")
    return value


SQUAD = DataSetFiles("squad", ("squad.json", "dev-v2.0.json"), 5_928, _read_squad)
HOTPOTQA = DataSetFiles("hotpotqa", ("hotpotqa.json", "hotpot_dev_distractor_v1.json"), 7_405, _read_hotpotqa)
