"""GSM8K (Cobbe et al. 2021, arXiv:2110.14168): the test split, zero-shot in our own words or with eight exemplars.

Records come from ``gsm8k/test.jsonl``, wherever :mod:`tasks.sources` finds it. The eight exemplars (Wei et al. 2022)
come from ``gsm8k/cot_8shot.json`` and are a text to continue, not a chat.

The file must be the whole test split: a shorter one is refused unless ``allow_partial`` says that it is meant.

Prompts are short: compression acts on what the model writes. Watch for answers cut off at the generation limit: the
report gives their share beside the strict, the flexible and the marker rate.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, Literal

from tasks.metrics import gsm8k_flexible
from tasks.sample import Sample
from tasks.sources import DataError, DataSources, content_hash, fingerprint, read_json, read_jsonl
from tasks.task import check_choice, check_context, check_limit
from tasks.tokens import Tokenizer

TEST_FILE = "gsm8k/test.jsonl"
EXEMPLARS_FILE = "gsm8k/cot_8shot.json"
TEST_SIZE = 1319
OFFICIAL_LIMIT = 512

INSTRUCTION = (
    "\n\nReason in small steps. Close with a line that has nothing but four number signs and the result, "
    "a plain number without its unit:\n#### N"
)

_GOLD = re.compile(r"#### (-?[\d,]*\d(?:\.\d+)?)")


@dataclass(frozen=True)
class Problem:
    question: str
    answer: str


@dataclass(frozen=True)
class Exemplars:
    """``text`` ends where the question of a sample begins; ``cue`` follows it."""

    text: str
    before: str
    cue: str
    stop: tuple[str, ...]


@dataclass(frozen=True)
class GSM8K:
    """``extraction`` chooses the score: the last number, or the number after an answer marker."""

    max_new_tokens: int | None = None
    shots: Literal[0, 8] = 0
    extraction: Literal["flexible", "strict"] = "flexible"
    allow_partial: bool = False

    name: ClassVar[str] = "gsm8k"
    version: ClassVar[int] = 1
    summary: ClassVar[str] = "grade-school word problems, reasoned out step by step"
    contextual: ClassVar[bool] = False
    seeded: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_limit(self.name, self.max_new_tokens)
        check_choice(self.name, "shots", self.shots, (0, 8))
        check_choice(self.name, "extraction", self.extraction, ("flexible", "strict"))
        check_choice(self.name, "allow_partial", self.allow_partial, (False, True))

    @property
    def chat(self) -> bool:
        return self.shots == 0

    @property
    def metric(self) -> str:
        return f"gsm8k_{self.extraction}"

    @property
    def generation_limit(self) -> int:
        return self.max_new_tokens or OFFICIAL_LIMIT

    def recipe(self, sources: DataSources) -> dict[str, object]:
        if self.shots:
            wording = fingerprint(sources.require(EXEMPLARS_FILE, f"task {self.name} with shots: {self.shots}"))
        else:
            wording = content_hash(INSTRUCTION)
        return {
            "task": self.name,
            "version": self.version,
            "problems": fingerprint(self._file(sources)),
            "shots": self.shots,
            "wording": wording,
            "metric": self.metric,
            "max_new_tokens": self.generation_limit,
        }

    def check(self, sources: DataSources, context: int | None) -> None:
        check_context(self.name, self.contextual, context)
        self._problems(sources)
        self._exemplars(sources)

    def available(self, sources: DataSources) -> int | None:
        return len(self._problems(sources))

    def samples(
        self, tokenizer: Tokenizer, sources: DataSources, context: int | None, seed: int, count: int, overhead: int
    ) -> list[Sample]:
        check_context(self.name, self.contextual, context)
        exemplars, problems = self._exemplars(sources), self._problems(sources)
        wording = "own" if exemplars is None else "official"
        meta: dict[str, object] = {"shots": self.shots, "wording": wording, "benchmark_size": TEST_SIZE}
        return [self._sample(index, problem, exemplars, meta) for index, problem in enumerate(problems[:count])]

    def _sample(self, index: int, problem: Problem, exemplars: Exemplars | None, meta: dict[str, object]) -> Sample:
        if exemplars is None:
            context, question, cue = problem.question, INSTRUCTION, ""
        else:
            context, question, cue = exemplars.text, f"{exemplars.before}{problem.question}", exemplars.cue
        return Sample(
            task=self.name,
            index=index,
            context=context,
            question=question,
            answer_prefix=cue,
            references=(problem.answer,),
            max_new_tokens=self.generation_limit,
            metric=self.metric,
            stop=exemplars.stop if exemplars else (),
            chat=self.chat,
            meta=meta,
        )

    def _file(self, sources: DataSources) -> Path:
        return sources.require(TEST_FILE, f"task {self.name}")

    def _problems(self, sources: DataSources) -> tuple[Problem, ...]:
        path = self._file(sources)
        problems = _read_problems(path, fingerprint(path))
        if len(problems) > TEST_SIZE or (len(problems) < TEST_SIZE and not self.allow_partial):
            raise DataError(
                f"task {self.name}: {path} has {len(problems):,} problems, and the test split has {TEST_SIZE:,}: "
                "get the whole file, or set allow_partial: true for a shorter one"
            )
        return problems

    def _exemplars(self, sources: DataSources) -> Exemplars | None:
        if not self.shots:
            return None
        return _read_exemplars(sources.require(EXEMPLARS_FILE, f"task {self.name} with shots: {self.shots}"))


def score(prediction: str, reference: str) -> float:
    """1 where the prediction's last number is the reference's: a number, or a solution that ends with ``#### N``."""
    return gsm8k_flexible(prediction, [gold(reference if "####" in reference else f"#### {reference}")])


def gold(answer: str) -> str:
    """The number after the first ``####`` of a reference solution, without its commas."""
    match = _GOLD.search(answer)
    if match is None:
        raise DataError(f"no line '#### NUMBER' in the reference solution {answer[-60:]!r}")
    return match[1].replace(",", "")


@lru_cache(maxsize=4)
def _read_problems(path: Path, sha256: str) -> tuple[Problem, ...]:
    """The problems, each of them once."""
    # The fingerprint is part of the key alone: a file that changes is read again.
    first: dict[str, int] = {}
    problems = []
    for number, record in enumerate(read_jsonl(path), start=1):
        problem = _problem(record, f"{path}, problem {number}")
        if first.setdefault(problem.question, number) != number:
            raise DataError(f"{path}, problem {number} asks what problem {first[problem.question]} asks: remove one")
        problems.append(problem)
    return tuple(problems)


def _problem(record: dict[str, Any], where: str) -> Problem:
    question, answer = record.get("question"), record.get("answer")
    if not isinstance(question, str) or not question.strip() or not isinstance(answer, str):
        raise DataError(f"{where}: expected the text fields question and answer, got {sorted(record)}")
    try:
        return Problem(question.strip(), gold(answer))
    except DataError as error:
        raise DataError(f"{where}: {error}") from error


def _read_exemplars(path: Path) -> Exemplars:
    content = read_json(path)
    try:
        before, cue = content["doc_to_text"].split("{{question}}")
        separator, prefix = content["separator"], content["target_prefix"]
        solved = [f"{before}{shot['question']}{cue}{prefix}{shot['target']}{separator}" for shot in content["samples"]]
        stop = tuple(content["stop"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(
            f"{path} must have doc_to_text (with {{{{question}}}} once), separator, target_prefix, stop, "
            f"and samples with question and target ({error!r})"
        ) from error
    if len(solved) != 8:
        raise DataError(f"{path} has {len(solved)} samples, where eight are needed")
    return Exemplars("".join(solved), before, cue, stop)
