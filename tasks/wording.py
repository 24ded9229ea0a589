"""The words around RULER's haystacks: one wording built in, and the official one where the data folder has it.

The official templates and answer prefixes are read from ``<data_dir>/ruler/templates.json`` and are not part of this
package. What that file does not hold (the needle's sentence, the noise line, the form of an assignment) is ours in
both wordings, unless the file gives it under the names used here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

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
    "freq_words_extraction": {
        "template": (
            "A transmission of made-up words; dots stand for silence.\n{context}\n\n"
            "Apart from the silence, what was sent most often? Name three words and nothing else."
        ),
        "answer_prefix": " The three words sent most often:",
    },
}

BESIDE_OFFICIAL = {"niah": {"needle": "Among the special magic {type_needle_v} kept for {key} there is {value}."}}
"""Where our own sentence would not go with the official question."""

_PLACEHOLDERS = {
    "niah": {"context", "query", "type_needle_v", "key", "value"},
    "variable_tracking": {"context", "query", "num_v", "variable", "value", "source"},
    "common_words_extraction": {"context"},
    "freq_words_extraction": {"context"},
}


@dataclass(frozen=True)
class Wording:
    """``source``: "own" or "official". Texts have placeholders in braces."""

    source: str
    texts: dict[str, str]

    @property
    def sha256(self) -> str:
        return content_hash(self.texts)

    def text(self, name: str, **values: object) -> str:
        return fill(self.texts[name], **values)

    def prompt(self, singular: bool = False, **values: object) -> tuple[str, str, str]:
        """What stands before the haystack, what stands after it, and the answer prefix."""
        before, after = self.texts["template"].split("{context}")
        texts = (before, after, self.texts["answer_prefix"])
        before, after, prefix = map(_in_singular, texts) if singular else texts
        return fill(before, **values), fill(after, **values), fill(prefix, **values)


def load_wording(family: str, choice: WordingChoice, sources: DataSources) -> Wording:
    """``auto``: official where the data folder has it, else our own."""
    path = sources.require(TEMPLATES, "the official wording") if choice == "official" else sources.find(TEMPLATES)
    if choice == "own" or path is None:
        return Wording("own", OWN[family])
    content = read_json(path)
    try:
        official = content["tasks"][family]
        template, prefix = official["template"], official["answer_prefix"]
    except (KeyError, TypeError) as error:
        raise DataError(f"{path}: tasks.{family} must have a template and an answer_prefix ({error!r})") from error
    ours = OWN[family] | BESIDE_OFFICIAL.get(family, {})
    texts = ours | {"template": template, "answer_prefix": prefix}
    texts |= {name: official[name] for name in ours if name in official}
    for name, text in texts.items():
        _check(f"{path}: tasks.{family}.{name}", name, text, _PLACEHOLDERS[family])
    return Wording("official", texts)


def fill(text: str, **values: object) -> str:
    """``str.format`` for the names given alone: braces elsewhere are text."""
    for name, value in values.items():
        text = text.replace(f"{{{name}}}", str(value))
    return text


def _in_singular(text: str) -> str:
    # RULER's own rule, applied to the words of the template alone.
    for plural, singular in ((r"\bSome\b", "A"), (r"\bare all\b", "is"), (r"\bare\b", "is")):
        text = re.sub(plural, singular, text)
    return text


def _check(where: str, name: str, text: object, known: set[str]) -> None:
    if not isinstance(text, str):
        raise DataError(f"{where} must be text, not {text!r}")
    unknown = set(re.findall(r"{(\w+)}", text)) - known
    if unknown:
        raise DataError(f"{where} has the unknown placeholder {', '.join(sorted(unknown))}; known: {sorted(known)}")
    if name == "template" and text.count("{context}") != 1:
        raise DataError(f"{where} must hold {{context}} exactly once")
