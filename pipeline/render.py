"""A table as Markdown, LaTeX, HTML, or for the terminal; records as CSV. Whatever a row says is escaped here."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from itertools import groupby
from typing import TYPE_CHECKING, Any

from pipeline.table import Cell, Column, Table

if TYPE_CHECKING:
    from rich.table import Table as RichTable

RICH_STYLES = {"better": "green", "worse": "red", "muted": "dim", "warning": "yellow"}
LATEX = {
    **{character: f"\\{character}" for character in "&%$#_{}"},
    **{"~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "\\": r"\textbackslash{}"},
    **{"–": "--", "Δ": r"$\Delta$", "<": "$<$", ">": "$>$"},
}


def markdown(table: Table) -> str:
    """A pipe table under a heading, with its caption."""
    lines = [f"### {plain(table.title)}", ""]
    if table.caption:
        lines += [plain(table.caption), ""]
    lines.append(_markdown_line(column.title for column in table.columns))
    lines.append("|" + "|".join("---:" if column.numeric else "---" for column in table.columns) + "|")
    lines += [_markdown_line(str(cell) for cell in row.cells) for row in table.rows]
    return "\n".join(lines) + "\n"


def latex(table: Table) -> str:
    """A ``table`` with ``booktabs`` rules, a line between groups."""
    shape = "".join("r" if column.numeric else "l" for column in table.columns)
    lines = [r"\begin{table}", r"\centering", rf"\caption{{{_latex_text(f'{table.title}. {table.caption}'.strip())}}}"]
    lines += [rf"\begin{{tabular}}{{{shape}}}", r"\toprule"]
    lines.append(_latex_line(_latex_text(column.title) for column in table.columns))
    for _, rows in groupby(table.rows, key=lambda row: row.group):
        lines += [r"\midrule", *(_latex_line(map(_latex_cell, row.cells)) for row in rows)]
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", r"\end{table}"]) + "\n"


def html(table: Table, css: str = "", leave_out: Sequence[str] = ()) -> str:
    """A table in a frame that scrolls sideways, its first column staying in view, without columns in ``leave_out``."""
    kept = [index for index, column in enumerate(table.columns) if column.title not in leave_out]
    columns = [table.columns[index] for index in kept]
    head = "".join(_html_head(column) for column in columns)
    body = []
    for _, rows in groupby(table.rows, key=lambda row: row.group):
        body.append(f"<tbody>{''.join(_html_row([row.cells[i] for i in kept], columns) for row in rows)}</tbody>")
    caption = f"<p class='caption'>{escape(table.caption)}</p>" if table.caption else ""
    frame = f"<div class='scroll'><table class='{css}'><thead><tr>{head}</tr></thead>{''.join(body)}</table></div>"
    return caption + frame


def rich(table: Table, leave_out: Sequence[str] = ()) -> RichTable:
    """For the terminal, without the columns named in ``leave_out``."""
    from rich import box
    from rich.table import Table as RichTable
    from rich.text import Text

    drawn = RichTable(title=Text(table.title), caption=Text(table.caption), box=box.SIMPLE_HEAD, title_justify="left")
    kept = [index for index, column in enumerate(table.columns) if column.title not in leave_out]
    for index in kept:
        column = table.columns[index]
        drawn.add_column(Text(column.title), justify="right" if column.numeric else "left", no_wrap=not index)
    for _, rows in groupby(table.rows, key=lambda row: row.group):
        for row in rows:
            cells = [row.cells[index] for index in kept]
            drawn.add_row(*(Text(str(cell), style=RICH_STYLES.get(cell.tone, "")) for cell in cells))
        drawn.add_section()
    return drawn


def csv_text(records: Sequence[Mapping[str, Any]]) -> str:
    """Records as CSV; an absent figure is an empty field."""
    if not records:
        return ""
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(records[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    return text.getvalue()


def plain(text: str) -> str:
    """``text`` on one line of Markdown, without a meaning of its own there or in HTML."""
    return re.sub(r"([\\`*_|~])", r"\\\1", escape(" ".join(text.split()), quote=False))


def _markdown_line(cells: Iterator[str]) -> str:
    return "| " + " | ".join(plain(cell) for cell in cells) + " |"


def _latex_line(cells: Iterable[str]) -> str:
    return " & ".join(cells) + r" \\"


def _latex_cell(cell: Cell) -> str:
    text = _latex_text(str(cell))
    return {"best": rf"\textbf{{{text}}}", "second": rf"\underline{{{text}}}"}.get(cell.mark, text)


def _latex_text(text: str) -> str:
    return "".join(LATEX.get(character, character) for character in " ".join(text.split()))


def _html_head(column: Column) -> str:
    about = f" title='{escape(column.about)}'" if column.about else ""
    return f"<th class='{'number' if column.numeric else 'text'}'{about}>{escape(column.title)}</th>"


def _html_row(cells: Sequence[Cell], columns: Sequence[Column]) -> str:
    return f"<tr>{''.join(_html_cell(*pair) for pair in zip(cells, columns, strict=True))}</tr>"


def _html_cell(cell: Cell, column: Column) -> str:
    text, aside = escape(cell.text), escape(cell.aside)
    if column.numeric:
        text, aside = (re.sub(r"-(?=\d)", "\N{MINUS SIGN}", part) for part in (text, aside))
    css = f"{'number' if column.numeric else 'text'} {cell.tone}".strip()
    return f"<td class='{css}'>{text}{f' <small>{aside}</small>' if aside else ''}</td>"
