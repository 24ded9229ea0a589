"""The report of a timing sweep: efficiency in place of scores, in the files that every report has."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvcache.bounded import INTERVAL
from pipeline import render
from pipeline.appendix import failures_table
from pipeline.efficiency import Efficiency, efficiency, timed_rows
from pipeline.efficiency_tables import efficiency_table, impossible_table, records, settings_table, stages_table
from pipeline.figures import counted
from pipeline.page import document, facts_list, flag_list, optional, provenance_section, when
from pipeline.provenance import Failure, Provenance, failures, provenance
from pipeline.report import write_files
from pipeline.reproduce import reproduce_section
from pipeline.sanity import Flag

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import Group

WIDE = ("KV peak", "Workspace")
"""Columns that a terminal does without."""
FEW_REPEATS = 3
READING = (
    "Each run had its device to itself: one actor at a time, one method at a time, after a warm-up that is not "
    "counted. Prompts are random tokens, the same for all methods of a repeat; every row generates the same number of "
    "tokens, whatever the model says.",
    "TTFT: from the first prompt to the moment when every row of the batch has its first token, with prefill, "
    "compression and the move of what was kept. TPOT: the time after that, over the tokens after the first. Tokens per "
    "second: all tokens that the batch generated, over TTFT and decoding together (QEvict, Eq. 10).",
    "Peak memory of a GPU is its allocator's; of a CPU it is what the process's resident memory grew by since the "
    "model began to load, so it holds what the allocator kept. Either counts the model, the caches, workspace and what "
    "a step needs; KV peak counts caches alone.",
    "Brackets hold the least and the most of the repeats. A ratio compares two runs of one repeat, and is coloured "
    "where every repeat says the same.",
)


@dataclass(frozen=True)
class EfficiencyReport:
    """What a timing sweep came to. ``sweep``: as in :class:`pipeline.report.Report`, with ``timing``."""

    sweep: Mapping[str, Any]
    found: tuple[Efficiency, ...]
    provenance: Provenance
    flags: tuple[Flag, ...]
    failures: tuple[Failure, ...]

    @property
    def new_tokens(self) -> int:
        return int(self.sweep["timing"]["new_tokens"])

    def markdown(self) -> str:
        lines = [f"# {render.plain(str(self.sweep['name']))}", "", self.status() + ".", ""]
        lines += [f"* **{flag.title}.** {render.plain(flag.text)}" for flag in self.flags]
        parts = ["\n".join(lines), *(render.markdown(efficiency_table(one, self.new_tokens)) for one in self.found)]
        parts += [render.markdown(stages_table(one)) for one in self.found]
        for table in (impossible_table(self.found), failures_table(self.failures)):
            parts += [render.markdown(table)] if table else []
        return "\n".join(parts)

    def csv(self) -> str:
        return render.csv_text(records(self.found, self.new_tokens))

    def latex(self) -> str:
        return "\n".join(render.latex(efficiency_table(one, self.new_tokens)) for one in self.found)

    def html(self) -> str:
        sections = [
            ("read-first", "Read this first", flag_list(self.flags) if self.flags else ""),
            ("efficiency", "Efficiency", "".join(self._tables(stages=False))),
            ("stages", "Where time and memory go", "".join(self._tables(stages=True))),
            ("failures", "Failures", optional(failures_table(self.failures), "texts")),
            ("impossible", "Cells that cannot run", optional(impossible_table(self.found), "texts")),
            ("settings", "Methods and their settings", render.html(settings_table(self.found), "texts")),
            ("reproduce", "How to run it again", reproduce_section(self.sweep, self._lengths())),
            ("provenance", "How it was run", provenance_section(self.sweep, self.provenance)),
            ("reading", "How to read this", "".join(f"<p>{escape(text)}</p>" for text in READING)),
        ]
        return document(self.sweep, facts_list(self._facts()), sections)

    def rich(self) -> Group:
        from rich.console import Group
        from rich.text import Text

        drawn = [render.rich(efficiency_table(one, self.new_tokens), leave_out=WIDE) for one in self.found]
        notes = [
            Text.assemble((f"{flag.title}. ", "yellow" if flag.level == "warning" else "bold"), flag.text)
            for flag in self.flags
        ]
        return Group(*drawn, *notes, Text(self.status()))

    def status(self) -> str:
        """How much of the plan is there."""
        cells = [result for one in self.found for result in one.results]
        possible = [result for result in cells if not result.impossible]
        done = sum(result.repeats >= result.expected for result in possible)
        failed = sum(result.failed for result in possible)
        rows = sum(result.repeats + result.failed for result in possible)
        words = [f"{done:,} of {len(possible):,} cells complete"]
        words += [f"{rows:,} of {sum(result.expected for result in possible):,} rows"]
        words += [f"{failed:,} failed"] if failed else []
        words += [f"{len(cells) - len(possible):,} cells impossible"] if len(possible) < len(cells) else []
        words += [f"partial: run with --limit {self.sweep['limit']}"] if self.sweep.get("limit") else []
        return ", ".join(words)

    def write(self, folder: Path) -> list[Path]:
        """``report.html``, ``table.md``, ``table.csv`` and ``table.tex`` in ``folder``."""
        return write_files(folder, self.html(), self.markdown(), self.csv(), self.latex())

    def _tables(self, stages: bool) -> Iterator[str]:
        for one in self.found:
            table = stages_table(one) if stages else efficiency_table(one, self.new_tokens)
            yield f"<h3>{escape(str(one.setting))}</h3>{render.html(table)}"

    def _lengths(self) -> list[int]:
        return list(dict.fromkeys(one.setting.prompt_tokens for one in self.found))

    def _facts(self) -> dict[str, str]:
        timing, source = self.sweep["timing"], self.provenance
        return {
            "Status": self.status(),
            "Models": ", ".join(dict.fromkeys(one.setting.model for one in self.found)),
            "Runs": f"{timing['repeats']} repeats after {timing['warmup']} to warm up, {self.new_tokens:,} new tokens",
            "Started": when(self.sweep.get("started")),
            "Rows written": f"{when(source.first)} to {when(source.last)}" if source.last else "none yet",
            "Machines": "; ".join(dict.fromkeys(machine for one in self.found for machine in one.machines)),
            "Numerics": counted(source.counts.get("numerics", {})),
            "Output": str(self.sweep.get("output", "")),
        }


def efficiency_report(
    rows: pd.DataFrame, cells: Sequence[Mapping[str, Any]], sweep: Mapping[str, Any]
) -> EfficiencyReport:
    """``rows``: the store's, one per (cell_id, sample_id). ``cells``: the plan's."""
    planned, found = timed_rows(rows, cells), efficiency(rows, cells)
    called = {result.cell_id: result.name for one in found for result in one.results}
    settings = {result.cell_id: str(one.setting) for one in found for result in one.results}
    return EfficiencyReport(
        sweep=sweep,
        found=found,
        provenance=provenance(planned),
        flags=tuple(sorted(_flags(sweep, found, len(rows) - len(planned)), key=lambda flag: flag.level != "warning")),
        failures=tuple(failures(planned.assign(task=planned["cell_id"].map(settings)), called)),
    )


def _flags(sweep: Mapping[str, Any], found: Sequence[Efficiency], outside: int) -> Iterator[Flag]:
    if sweep.get("protocol", {}).get("growth") == "bounded":
        text = f"Generated tokens stay within the budget: methods choose again every {INTERVAL}, while they decode."
        yield Flag("note", "Bounded growth", text)
    for one in found:
        if not any(result.is_baseline and result.repeats for result in one.results):
            text = f"{one.setting}: the full cache was not timed, so there are no ratios to it."
            yield Flag("warning", "No baseline", text)
        if len(one.machines) > 1:
            text = f"{one.setting}: medians mix {'; '.join(one.machines)}. Ratios do not: they are inside a repeat."
            yield Flag("warning", "Several machines", text)
        over = [f"{result.name}, {result.over_budget}" for result in one.results if result.over_budget]
        if over:
            text = f"{one.setting}: repeats that held more than was asked: {'; '.join(over)}."
            yield Flag("warning", "Over budget", text)
        failed = [f"{result.name} {result.failed}" for result in one.results if result.failed]
        if failed:
            yield Flag("warning", "Failed rows", f"{one.setting}: {', '.join(failed)}.")
        if any(0 < result.repeats < FEW_REPEATS for result in one.results):
            text = f"{one.setting}: fewer than {FEW_REPEATS} repeats say little on how times swing."
            yield Flag("note", "Few repeats", text)
    if outside:
        text = f"{outside:,} rows of the output belong to cells or repeats outside this plan; not shown."
        yield Flag("note", "Rows outside the plan", text)
