"""The words around RULER's haystacks: one wording built in, and the official one where the data folder has it.

The official wording is not part of this package. Templates and answer prefixes are read from
``<data_dir>/ruler/templates.json``, sentences that this file does not hold from where :mod:`tasks.ruler_sentences`
finds them. A wording is official as a whole or our own as a whole, never a mixture.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from tasks.ruler_sentences import NAMES, find_sentences, in_singular, places
from tasks.sources import DataError, DataSources, content_hash, read_json

TEMPLATES = "ruler/templates.json"
WORDINGS = ("auto", "official", "own")
WordingChoice = Literal["auto", "official", "own"]

OWN: dict[str, dict[str, str]] = {
    "niah": {
        "template": (
            "The document below holds the entries of a registry, each one under a name.\n\n{context}\n\n"
            "Which {type_needle_v} are filed under {query}?"
        ),
        "answer_prefix": " Filed under {query}:",
        "needle": "Filed in the registry under {key}, among its {type_needle_v}: {value}.",
        "noise": "Rain falls on the roof. A door opens. Someone walks by. The clock ticks on. Then it is quiet.",
    },
    "variable_tracking": {
        "template": (
            "Lines of a small program stand between the lines of these notes. LET A = 5 stores a number under a name; "
            "LET B = A gives B what A holds.\n\n{context}\n\nWhich names hold {query} once every line has run?"
        ),
        "answer_prefix": " {num_v} names hold {query}:",
        "noise": "Rain falls on the roof. A door opens. Someone walks by. The clock ticks on. Then it is quiet.",
        "assign": "LET {variable} = {value}",
        "copy": "LET {variable} = {source}",
    },
    "common_words_extraction": {
        "template": (
            "A tally sheet, one word per entry:\n{context}\n\nSome words have far more entries than the rest. "
            "Which ten have the most?"
        ),
        "answer_prefix": " The ten words with the most entries:",
    },
    "qa": {
        "template": (
            "Some pages from an archive:\n\n{context}\n\n"
            "Use these pages to reply in as few words as you can, with no sentence around them: {query}"
        ),
        "answer_prefix": " Reply:",
        "document": "[Page {i}]\n{document}",
    },
    "freq_words_extraction": {
        "template": (
            "A transmission of made-up words; dots stand for silence.\n{context}\n\n"
            "Apart from the silence, what was sent most often? Name three words and nothing else."
        ),
        "answer_prefix": " The three words sent most often:",
    },
}

_PLACEHOLDERS = {
    "niah": {"context", "query", "type_needle_v", "key", "value"},
    "variable_tracking": {"context", "query", "num_v", "variable", "value", "source"},
    "common_words_extraction": {"context"},
    "qa": {"context", "query", "i", "document"},
    "freq_words_extraction": {"context"},
}


@dataclass(frozen=True)
class Wording:
    """``source``: "own" or "official", then with the files it was read from. Texts have placeholders in braces."""

    source: str
    texts: dict[str, str]
    files: tuple[str, ...] = ()

    @property
    def recipe(self) -> dict[str, object]:
        return {"source": self.source, "files": list(self.files), "sha256": content_hash(self.texts)}

    @property
    def meta(self) -> dict[str, object]:
        where: dict[str, object] = {"wording_from": ", ".join(self.files)} if self.files else {}
        return {"wording": self.source, **where}

    def text(self, name: str, **values: object) -> str:
        return fill(self.texts[name], **values)

    def prompt(self, singular: bool = False, **values: object) -> tuple[str, str, str]:
        """What stands before the haystack, what stands after it, and the answer prefix."""
        texts = (*self.texts["template"].split("{context}"), self.texts["answer_prefix"])
        before, after, prefix = (fill(in_singular(text) if singular else text, **values) for text in texts)
        return before, after, prefix


def load_wording(family: str, choice: WordingChoice, sources: DataSources) -> Wording:
    """``auto``: official where the data folder has all of it, else our own."""
    path = sources.require(TEMPLATES, "the official wording") if choice == "official" else sources.find(TEMPLATES)
    if choice == "own" or path is None:
        return Wording("own", OWN[family])
    content = read_json(path)
    try:
        official = content["tasks"][family]
        texts = {name: official[name] for name in ("template", "answer_prefix")}
    except (KeyError, TypeError) as error:
        raise DataError(f"{path}: tasks.{family} must have a template and an answer_prefix ({error!r})") from error
    files: tuple[str, ...] = (TEMPLATES,)
    _check(f"{path}: tasks.{family}", texts, _PLACEHOLDERS[family])
    if NAMES[family]:
        found = find_sentences(family, texts["template"], sources)
        if found is None and choice == "auto":
            return Wording("own", OWN[family])
        if found is None:
            raise DataError(
                f"the official wording of {family} needs its {', '.join(NAMES[family])} beside {path}: none of "
                f"{places(family)} is in the data folder; see docs/tasks.md"
            )
        sentences, file = found
        _check(f"{file}: {family}", sentences, _PLACEHOLDERS[family])
        texts, files = texts | sentences, (*files, file)
    return Wording("official", texts, files)


def fill(text: str, **values: object) -> str:
    """``str.format`` for the names given alone: braces elsewhere are text."""
    for name, value in values.items():
        text = text.replace(f"{{{name}}}", str(value))
    return text


def _check(where: str, texts: dict[str, str], known: set[str]) -> None:
    for name, text in texts.items():
        if not isinstance(text, str):
            raise DataError(f"{where}.{name} must be text, not {text!r}")
        unknown = set(re.findall(r"{(\w+)}", text)) - known
        if unknown:
            raise DataError(
                f"{where}.{name} has the unknown placeholder {', '.join(sorted(unknown))}; known: {sorted(known)}"
            )
        if name == "template" and text.count("{context}") != 1:
            raise DataError(f"{where}.{name} must hold {{context}} exactly once")
