"""The report of a sweep: from rows, plan and sweep to tables, figures and one self-contained page."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline import appendix, figures, render, tables
from pipeline.breakdown import View, take_apart
from pipeline.files import put_texts
from pipeline.page import page
from pipeline.provenance import Failure, Provenance, failures, provenance
from pipeline.published_tables import AVERAGE, beside_published, published_table
from pipeline.results import Summary
from pipeline.sanity import Flag, flags
from pipeline.summary import planned_rows, summarize
from pipeline.table import Table

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
    published: tuple[Table, ...] = ()
    """Ours beside the papers' tables, where that was asked for."""

    def markdown(self) -> str:
        lines = [f"# {render.plain(str(self.sweep['name']))}", "", self.status() + ".", ""]
        lines += [f"* **{flag.title}.** {render.plain(flag.text)}" for flag in self.flags]
        lines += [""] if self.flags else []
        parts = ["\n".join(lines), *(render.markdown(tables.main_table(board)) for board in self.summary.boards)]
        parts += [render.markdown(table) for table in self.published]
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
        """The papers' layout first, then the main tables, then what was put beside the papers."""
        layouts = [
            layout(board) for layout in (tables.papers_table, tables.main_table) for board in self.summary.boards
        ]
        return "\n".join(render.latex(table) for table in (*layouts, *self.published))

    def leaderboard(self) -> str:
        return json.dumps(tables.leaderboard(self.summary, self.sweep), indent=1, allow_nan=False) + "\n"

    def beside(self, names: Sequence[str]) -> Report:
        """With the papers' tables of these names; raises :class:`~pipeline.errors.SweepProblem`."""
        sources = {str(label): str(one.get("source", "")) for label, one in self.sweep.get("models", {}).items()}
        made = [beside_published(self.summary, sources, published_table(name)) for name in names]
        return replace(self, published=tuple(made))

    def html(self) -> str:
        told = (self.provenance, self.flags, self.failures, self.views, self.published)
        return page(self.sweep, self.status(), self.summary, *told)

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
        beside = [render.rich(_averages(table), leave_out=("Task",)) for table in self.published]
        return Group(*drawn, *beside, *notes, Text(self.status()))

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
        """``report.html``, ``table.md``, ``table.csv``, ``table.tex`` and ``leaderboard.json`` in ``folder``."""
        files = write_files(folder, self.html(), self.markdown(), self.csv(), self.latex())
        return files + put_texts(folder, {"leaderboard.json": self.leaderboard()})


def _averages(table: Table) -> Table:
    """A paper's table for the terminal: the averages alone."""
    task = [column.title for column in table.columns].index("Task")
    return replace(table, rows=tuple(row for row in table.rows if row.cells[task].text == AVERAGE))


def write_files(folder: Path, html: str, markdown: str, csv: str, latex: str) -> list[Path]:
    return put_texts(folder, {"report.html": html, "table.md": markdown, "table.csv": csv, "table.tex": latex})


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
