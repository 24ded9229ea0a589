"""Groups of tasks: one name in a sweep file for the tasks that a benchmark, or a paper's table, consists of."""

from __future__ import annotations

RULER_SYNTHETIC = (
    *("niah_single_1", "niah_single_2", "niah_single_3", "niah_multikey_1", "niah_multikey_2", "niah_multikey_3"),
    *("niah_multivalue", "niah_multiquery", "vt", "cwe", "fwe"),
)
RULER = (*RULER_SYNTHETIC, "qa_1", "qa_2")

LONGBENCH_12 = (
    *("narrativeqa", "qasper", "multifieldqa_en", "hotpotqa", "2wikimqa", "musique"),
    *("gov_report", "qmsum", "multi_news", "trec", "triviaqa", "samsum"),
)
"""In the order of QEvict's tables 3 and 6 (arXiv 2608.05326)."""
LONGBENCH = (*LONGBENCH_12, "passage_count", "passage_retrieval_en", "lcc", "repobench-p")
LONGBENCH_E = (
    *("qasper_e", "multifieldqa_en_e", "hotpotqa_e", "2wikimqa_e", "gov_report_e", "multi_news_e", "trec_e"),
    *("triviaqa_e", "samsum_e", "passage_count_e", "passage_retrieval_en_e", "lcc_e", "repobench-p_e"),
)

GROUPS: dict[str, tuple[str, ...]] = {
    "ruler": RULER,
    "ruler-11": RULER_SYNTHETIC,
    "longbench": LONGBENCH,
    "longbench-12": LONGBENCH_12,
    "longbench-e": LONGBENCH_E,
}
SUMMARIES = {
    "ruler": "all of RULER",
    "ruler-11": "RULER without question answering: nothing to download",
    "longbench": "LongBench's English and code tasks",
    "longbench-12": "the twelve of them in QEvict's tables",
    "longbench-e": "LongBench-E: the same kinds of task, spread evenly over lengths",
}
