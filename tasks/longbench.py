"""LongBench v1 (Bai et al. 2023, arXiv:2308.14508): its 16 English and code tasks, and LongBench-E's 13 (``_e``).

Official are: templates and generation limits (:mod:`tasks.longbench_prompt`), middle truncation to ``max_length``
tokens before the chat template (:mod:`tasks.truncate`), no template for few-shot and code tasks, greedy decoding, and
the metrics. For models that came after the official list of 2023, the tokenizer's own chat template takes the place of
the hand-written ones, with one user turn.

samsum ends at a newline, since models go on with the next dialogue. Officially the id of "\\n" joins the stop ids, and
no stop id may be the first token. Here the *text* "\\n" stops, likewise barred as first token. Tokens that only contain
a newline (".\\n") then end the answer at once, where officially it would run on; but only the first line that is not
empty is scored, and that is complete by then. The one difference: an answer that begins with newline tokens of other
ids than "\\n" ends at the second of them, and scores 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from tasks import metrics
from tasks.longbench_prompt import check_limit_on_file, load_template
from tasks.longbench_records import Record, RecordFile, load_records
from tasks.sample import Sample, document_name
from tasks.sources import DataError, DataSources
from tasks.task import TaskError, UnknownTask, check_choice, check_context, check_limit, nearest
from tasks.tokens import Tokenizer
from tasks.truncate import cut_prompt


def score(task: str, prediction: str, answers: Sequence[str], all_classes: Sequence[str] | None = None) -> float:
    """The official score of one prediction, 0 to 1: the best over all answers. ``all_classes``: for trec."""
    if task not in TASKS:
        raise UnknownTask(f"LongBench has no task {task!r}{nearest(task, TASKS)}; it has {', '.join(TASKS)}")
    return metrics.score(TASKS[task].metric, prediction, answers, tuple(all_classes or ()))


def length_bin(length: int) -> str:
    """LongBench-E's, by a record's ``length`` in words."""
    return "0-4k" if length < 4000 else "4-8k" if length < 8000 else "8k+"


@dataclass(frozen=True)
class LongBench:
    """``max_length``: the tokens of a prompt above which its middle is cut; special ones count, the chat template not.

    It must be given (0 stands for not given): no two harnesses agree on it, and it moves scores.
    ``allow_partial``: accept fewer records than LongBench has.
    """

    max_length: int = 0
    max_new_tokens: int | None = None
    allow_partial: bool = False

    name: ClassVar[str]
    version: ClassVar[int] = 1
    summary: ClassVar[str]
    contextual: ClassVar[bool] = False
    seeded: ClassVar[bool] = False
    dataset: ClassVar[str]
    metric: ClassVar[str]
    official_limit: ClassVar[int]
    official_count: ClassVar[int]
    chat: ClassVar[bool]
    binned: ClassVar[bool]
    example: ClassVar[dict[str, Any]] = {"max_length": 7500}
    """Settings that are enough to describe the task."""

    def __post_init__(self) -> None:
        check_limit(self.name, self.max_new_tokens)
        check_choice(self.name, "allow_partial", self.allow_partial, (False, True))
        if isinstance(self.max_length, bool) or not isinstance(self.max_length, int) or self.max_length < 2:
            given = f", not {self.max_length!r}" if self.max_length else ""
            raise TaskError(
                f"task {self.name}: max_length is required{given}: the tokens of a prompt, before the chat template, "
                "above which its middle is cut. Usual are 3500 for models of 4K, 7500 for 8K and 31500 for 32K; leave "
                f"room for the template and {self.generation_limit} new tokens"
            )

    @property
    def generation_limit(self) -> int:
        return self.max_new_tokens or self.official_limit

    @property
    def stop(self) -> tuple[str, ...]:
        return ("\n",) if self.dataset == "samsum" else ()

    @property
    def min_new_tokens(self) -> int:
        return 1 if self.dataset == "samsum" else 0

    def recipe(self, sources: DataSources) -> dict[str, object]:
        file = self._file(sources)
        return {
            "task": self.name,
            "version": self.version,
            "records": {"sha256": file.sha256, "count": len(file.records), "official": self.official_count},
            "template": load_template(self.dataset, sources).sha256,
            "max_length": self.max_length,
            "max_new_tokens": self.generation_limit,
            "metric": self.metric,
            "chat": self.chat,
            "stop": list(self.stop),
            "min_new_tokens": self.min_new_tokens,
        }

    def check(self, sources: DataSources, context: int | None) -> None:
        check_context(self.name, self.contextual, context)
        check_limit_on_file(self.dataset, self.official_limit, sources)
        self.recipe(sources)
        if self.metric in ("count", "retrieval"):
            self._check_scorable(sources)

    def available(self, sources: DataSources) -> int | None:
        return len(self._file(sources).records)

    def samples(
        self, tokenizer: Tokenizer, sources: DataSources, context: int | None, seed: int, count: int, overhead: int
    ) -> list[Sample]:
        self.check(sources, context)
        file, template = self._file(sources), load_template(self.dataset, sources)
        return [
            self._sample(index, record, file.classes, *template.fill(record), tokenizer)
            for index, record in enumerate(file.records[:count])
        ]

    def _sample(
        self, index: int, record: Record, classes: tuple[str, ...], context: str, question: str, tokenizer: Tokenizer
    ) -> Sample:
        prompt = cut_prompt(context, question, tokenizer, self.max_length)
        meta: dict[str, object] = {
            "_id": record.id,
            "length": record.length,
            "uncut_tokens": prompt.tokens,
            "truncated": prompt.truncated,
            "benchmark_size": self.official_count,
        }
        if record.context:
            meta["document"] = document_name(record.context)
        if prompt.question_cut:
            meta["question_cut"] = True
        if self.binned:
            meta["bin"] = length_bin(record.length)
        return Sample(
            task=self.name,
            index=index,
            context=prompt.context,
            question=prompt.question,
            answer_prefix="",
            references=record.answers,
            max_new_tokens=self.generation_limit,
            metric=self.metric,
            stop=self.stop,
            chat=self.chat,
            classes=classes,
            min_new_tokens=self.min_new_tokens,
            meta=meta,
        )

    def _check_scorable(self, sources: DataSources) -> None:
        """Answers of a fixed form: one that has another would score 0 whatever is predicted."""
        file = self._file(sources)
        for record in file.records:
            if not any(metrics.score(self.metric, answer, [answer]) for answer in record.answers):
                raise DataError(
                    f"task {self.name}, record {record.id}: no prediction can match the answers {list(record.answers)}"
                )

    def _file(self, sources: DataSources) -> RecordFile:
        labelled = self.dataset == "trec"
        return load_records(self.name, self.official_count, labelled, self.allow_partial, sources)


def _task(
    dataset: str, summary: str, metric: str, limit: int, count: int, count_e: int = 0, chat: bool = True
) -> list[type[LongBench]]:
    """A task, and its counterpart in LongBench-E where there is one."""
    shared = {"dataset": dataset, "metric": metric, "official_limit": limit, "chat": chat}
    made = [_subclass(dataset, shared | {"summary": summary, "official_count": count, "binned": False})]
    if count_e:
        lengths = f"{summary}, spread evenly over lengths"
        made.append(_subclass(f"{dataset}_e", shared | {"summary": lengths, "official_count": count_e, "binned": True}))
    return made


def _subclass(name: str, constants: dict[str, Any]) -> type[LongBench]:
    return type(f"LongBench {name}", (LongBench,), {"name": name, "__module__": __name__, **constants})


_ALL = (
    _task("narrativeqa", "questions about a book or a film script", "qa_f1", 128, 200),
    _task("qasper", "questions about a scientific paper", "qa_f1", 128, 200, 224),
    _task("multifieldqa_en", "questions about an article of any field", "qa_f1", 64, 150, 150),
    _task("hotpotqa", "questions that need two of many passages", "qa_f1", 32, 200, 300),
    _task("2wikimqa", "questions that need several Wikipedia passages", "qa_f1", 32, 200, 300),
    _task("musique", "questions that need up to four passages", "qa_f1", 32, 200),
    _task("gov_report", "summary of a government report", "rouge_l", 512, 200, 300),
    _task("qmsum", "summary of a meeting, for a query", "rouge_l", 512, 200),
    _task("multi_news", "summary of several news articles", "rouge_l", 512, 200, 294),
    _task("trec", "the type of a question, after many examples", "classification_first_line", 64, 200, 300, chat=False),
    _task("triviaqa", "trivia with passages, after a few examples", "qa_f1_first_line", 32, 200, 300, chat=False),
    _task("samsum", "summary of a dialogue, after many examples", "rouge_l_first_line", 128, 200, 300, chat=False),
    _task("passage_count", "how many of the paragraphs are different", "count", 32, 200, 300),
    _task("passage_retrieval_en", "which paragraph an abstract is of", "retrieval", 32, 200, 300),
    _task("lcc", "the next line of a code file", "code_sim", 64, 500, 300, chat=False),
    _task("repobench-p", "the next line, with other files of the repository", "code_sim", 64, 500, 300, chat=False),
)
TASKS: dict[str, type[LongBench]] = {task.name: task for tasks in _ALL for task in tasks}
