"""Families of tasks, as the benchmarks' own tables group them, and the scores of a family.

LongBench: QEvict's table 5 (arXiv 2608.05326), with LongBench's synthetic and code tasks beside. RULER: its categories,
needles apart by what makes them hard. A task of no family is one of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from pipeline.results import Board, Result

FAMILIES: dict[str, tuple[str, ...]] = {
    "Single-document QA": ("narrativeqa", "qasper", "multifieldqa_en"),
    "Multi-document QA": ("hotpotqa", "2wikimqa", "musique"),
    "Summarization": ("gov_report", "qmsum", "multi_news"),
    "Few-shot learning": ("trec", "triviaqa", "samsum"),
    "Counting and retrieval": ("passage_count", "passage_retrieval_en"),
    "Code": ("lcc", "repobench-p"),
    "One needle": ("niah_single_1", "niah_single_2", "niah_single_3"),
    "One needle among others": ("niah_multikey_1", "niah_multikey_2", "niah_multikey_3"),
    "Several needles": ("niah_multivalue", "niah_multiquery"),
    "Tracking": ("vt",),
    "Aggregation": ("cwe", "fwe"),
    "QA among distractors": ("qa_1", "qa_2"),
}
_FAMILY_OF = {task: family for family, tasks in FAMILIES.items() for task in tasks}


def families_of(board: Board) -> dict[str, tuple[str, ...]]:
    """Family to the board's tasks in it, in the order of the board."""
    found: dict[str, tuple[str, ...]] = {}
    for task in board.tasks:
        family = _FAMILY_OF.get(task.removesuffix("_e"), task)
        found[family] = (*found.get(family, ()), task)
    return found


def family_score(result: Result, tasks: Sequence[str]) -> float | None:
    """The unweighted mean over the family's tasks; None while one of them is incomplete."""
    estimates = [result.tasks[task].estimate for task in tasks]
    known = [estimate.value for estimate in estimates if estimate is not None]
    return fmean(known) if known and len(known) == len(estimates) else None


def front(places: Sequence[tuple[float, float]]) -> list[int]:
    """Which of the (memory, score) places no other dominates: none has at most its memory and at least its score, and
    more of one of the two (QEvict, Eq. 9). In the order of memory."""
    kept = [
        index
        for index, (memory, score) in enumerate(places)
        if not any(m <= memory and s >= score and (m < memory or s > score) for m, s in places)
    ]
    return sorted(kept, key=lambda index: places[index])
