"""The report of a sweep: from rows, plan and sweep to tables, figures and one self-contained page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline import appendix, figures, render, tables
from pipeline.breakdown import View, take_apart
from pipeline.page import page
from pipeline.provenance import Failure, Provenance, failures, provenance
from pipeline.results import Summary
from pipeline.sanity import Flag, flags
from pipeline.summary import planned_rows, summarize

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import Group

WIDE = ("p", "KV end", "KV peak", "Workspace")
"""Columns that a terminal does without."""
TERMINAL_TASKS = 4


@dataclass(frozen=True)
class Report:
    """What a sweep came to. ``sweep`` holds its name, output, started, config_text, versions and protocol."""

    sweep: Mapping[str, Any]
    summary: Summary
    provenance: Provenance
    flags: tuple[Flag, ...]
    failures: tuple[Failure, ...]
    views: tuple[View, ...]

    def markdown(self) -> str:
        lines = [f"# {render.plain(str(self.sweep['name']))}", "", self.status() + ".", ""]
        lines += [f"* **{flag.title}.** {render.plain(flag.text)}" for flag in self.flags]
        parts = ["\n".join(lines), *(render.markdown(tables.main_table(board)) for board in self.summary.boards)]
        for board in self.summary.boards:
            bins = appendix.bins_table(board, self.views)
            parts += [render.markdown(bins)] if bins else []
            parts += [render.markdown(table) for table in appendix.details_tables(board, self.views)]
        for table in (appendix.impossible_table(self.summary), appendix.failures_table(self.failures)):
            parts += [render.markdown(table)] if table else []
        return "\n".join(parts)

    def csv(self) -> str:
        return render.csv_text(tables.records(self.summary))

    def latex(self) -> str:
        return "\n".join(render.latex(tables.main_table(board)) for board in self.summary.boards)

    def html(self) -> str:
        return page(self.sweep, self.status(), self.summary, self.provenance, self.flags, self.failures, self.views)

    def rich(self) -> Group:
        """For the terminal: the main tables without their rarer columns, then what to know before reading them."""
        from rich.console import Group
        from rich.text import Text

        drawn = []
        for board in self.summary.boards:
            many = board.tasks if len(board.tasks) > TERMINAL_TASKS else ()
            drawn.append(render.rich(tables.main_table(board), leave_out=(*WIDE, *many)))
        notes = [
            Text.assemble((f"{flag.title}. ", "yellow" if flag.level == "warning" else "bold"), flag.text)
            for flag in self.flags
        ]
        return Group(*drawn, *notes, Text(self.status()))

    def status(self) -> str:
        """How much of the plan is there."""
        summary = self.summary
        words = [
            f"{summary.cells_done:,} of {summary.cells - summary.cells_impossible:,} cells complete",
            f"{summary.rows:,} of {summary.rows_expected:,} rows",
        ]
        words += [f"{summary.rows_failed:,} failed"] if summary.rows_failed else []
        words += [f"{summary.cells_impossible:,} cells impossible"] if summary.cells_impossible else []
        words += [f"partial: run with --limit {self.sweep.get('limit')}"] if summary.partial else []
        return ", ".join(words)

    def write(self, folder: Path) -> list[Path]:
        """``report.html``, ``table.md``, ``table.csv`` and ``table.tex`` in ``folder``."""
        return write_files(folder, self.html(), self.markdown(), self.csv(), self.latex())


def write_files(folder: Path, html: str, markdown: str, csv: str, latex: str) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    texts = {"report.html": html, "table.md": markdown, "table.csv": csv, "table.tex": latex}
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    return [folder / name for name in texts]


def build_report(rows: pd.DataFrame, cells: Sequence[Mapping[str, Any]], sweep: Mapping[str, Any]) -> Report:
    """``rows``: the store's, one per (cell_id, sample_id). ``cells``: the plan's, with the samples each expects."""
    summary = summarize(rows, cells, sweep.get("protocol", {}))
    planned = planned_rows(rows, cells)
    source = provenance(planned)
    labels = {result.configuration: figures.full_name(result) for result in summary.results}
    called = {cell_id: labels[configuration] for cell_id, configuration in summary.configurations.items()}
    return Report(
        sweep=sweep,
        summary=summary,
        provenance=source,
        flags=tuple(flags(summary, planned, source.tasks, sweep)),
        failures=tuple(failures(planned, called)),
        views=take_apart(planned, summary),
    )
