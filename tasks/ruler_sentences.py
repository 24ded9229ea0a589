"""RULER's official sentences that its template file does not hold: the needle, the noise line, assignments, documents.

They are not part of this package. They are read from ``<data_dir>/ruler/sentences.json``, by family and by the names
used here; or else taken from a sample that the official generator wrote, ``<data_dir>/ruler/*/niah_single_1.jsonl``
and its like (``ruler/niah_single_1/validation.jsonl``, as the generator's script lays them):

    needle        the one line of the haystack that does not repeat, where its key and its answer are known
    noise         the line that repeats
    assign, copy  the lines of the chain, where its names and its value are known
    document      what stands before the first text, where its number is 1
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tasks.sources import DataError, DataSources, read_json, read_jsonl

SENTENCES = "ruler/sentences.json"

NAMES: dict[str, tuple[str, ...]] = {
    "niah": ("needle", "noise"),
    "variable_tracking": ("noise", "assign", "copy"),
    "common_words_extraction": (),
    "freq_words_extraction": (),
    "qa": ("document",),
}

_SAMPLE_OF = {"niah": "niah_single_1", "variable_tracking": "vt", "qa": "qa_1"}


def find_sentences(family: str, template: str, sources: DataSources) -> tuple[dict[str, str], str] | None:
    """The official sentences and the file they come from; None where the data folder has neither kind of file."""
    if not NAMES[family]:
        return {}, ""
    path = sources.find(SENTENCES)
    if path is not None and (listed := _listed(path, family)):
        return listed, SENTENCES
    for path in _samples(_SAMPLE_OF[family], sources):
        return _derived(path, family, template), f"ruler/{path.parent.name}/{path.name}"
    return None


def places(family: str) -> str:
    """For an error: where :func:`find_sentences` looks."""
    return f"{SENTENCES}, ruler/*/{_SAMPLE_OF[family]}.jsonl and ruler/{_SAMPLE_OF[family]}/validation.jsonl"


def _samples(task: str, sources: DataSources) -> list[Path]:
    patterns = (f"*/{task}.jsonl", f"{task}/validation.jsonl")
    found = [sorted(sources.listing("ruler", pattern)) for pattern in patterns]
    return next((sources.every(names[:1]) for names in found if names), [])


def _listed(path: Path, family: str) -> dict[str, str]:
    content = read_json(path)
    if isinstance(content, dict) and family not in content:
        return {}
    try:
        return {name: content[family][name] for name in NAMES[family]}
    except (KeyError, TypeError) as error:
        raise DataError(f"{path}: {family} must have {', '.join(NAMES[family])} ({error!r})") from error


def _derived(path: Path, family: str, template: str) -> dict[str, str]:
    records = read_jsonl(path)
    try:
        texts = _DERIVE[family](records[0], template)
    except (IndexError, KeyError, TypeError) as error:
        raise DataError(f"{path}, line 1 is not a sample of the official generator ({error!r})") from error
    if texts is None:
        raise DataError(
            f"{path}, line 1 does not have the shape of ruler/templates.json: it is no sample of the official "
            f"generator, or of another version; give the sentences in {SENTENCES}"
        )
    return texts


def _niah(record: dict[str, Any], template: str) -> dict[str, str] | None:
    found = _match(in_singular(template), record["input"])
    if found is None:
        return None
    lines = found["context"].split("\n")
    noise = _most_common(lines)
    needles = [line for line in lines if line != noise]
    values = {"key": found["query"], "value": record["outputs"][0], "type_needle_v": f"{found['type_needle_v']}s"}
    if len(needles) != 1 or not all(value in needles[0] for value in values.values()):
        return None
    return {"needle": _with_holes(needles[0], values), "noise": noise}


def _variable_tracking(record: dict[str, Any], template: str) -> dict[str, str] | None:
    before = template.split("{context}")[0]
    # A solved example stands before the text itself.
    found = _match(template, record["input"][record["input"].rindex(before) :]) if before in record["input"] else None
    if found is None:
        return None
    lines = found["context"].split("\n")
    noise = _most_common(lines)
    chain = [line for line in lines if line != noise]
    first, second = record["outputs"][:2]
    assign = _with_holes(chain[0], {"variable": first, "value": found["query"]})
    copy = _with_holes(chain[1], {"variable": second, "source": first})
    sound = "{variable}" in assign and "{value}" in assign and "{variable}" in copy and "{source}" in copy
    return {"noise": noise, "assign": assign, "copy": copy} if sound else None


def _qa(record: dict[str, Any], template: str) -> dict[str, str] | None:
    found = _match(template, record["input"])
    if found is None:
        return None
    label = found["context"].split("\n")[0]
    sound = label.count("1") == 1 and f"\n\n{label.replace('1', '2')}\n" in found["context"]
    return {"document": label.replace("1", "{i}") + "\n{document}"} if sound else None


_DERIVE: dict[str, Callable[[dict[str, Any], str], dict[str, str] | None]] = {
    "niah": _niah,
    "variable_tracking": _variable_tracking,
    "qa": _qa,
}


def in_singular(template: str) -> str:
    """RULER's own rule for one needle: plain replacement in the template, wherever the letters stand."""
    for plural, singular in (("Some", "A"), ("are all", "is"), ("are", "is"), ("answers", "answer")):
        template = template.replace(plural, singular)
    return template


def _match(template: str, text: str) -> re.Match[str] | None:
    """What stands in the template's placeholders; a placeholder that comes again holds the same."""
    seen: set[str] = set()
    pattern = ""
    for part in re.split(r"({\w+})", template):
        name = part[1:-1]
        if not re.fullmatch(r"{\w+}", part):
            pattern += re.escape(part)
        elif name in seen:
            pattern += f"(?P={name})"
        else:
            seen.add(name)
            pattern += f"(?P<{name}>.+)" if name == "context" else f"(?P<{name}>.+?)"
    return re.fullmatch(pattern, text, re.DOTALL)


def _most_common(lines: list[str]) -> str:
    return Counter(lines).most_common(1)[0][0]


def _with_holes(line: str, values: dict[str, str]) -> str:
    for name, value in values.items():
        line = line.replace(value, f"{{{name}}}")
    return line
