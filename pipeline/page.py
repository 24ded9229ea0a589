"""``report.html``: the whole report as one page, without script and without a link to anywhere else."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from html import escape
from typing import Any

from pipeline import plots, render
from pipeline.appendix import (
    bins_table,
    budgets_table,
    cost_table,
    data_table,
    details_tables,
    failures_table,
    impossible_table,
    settings_table,
)
from pipeline.breakdown import View, grids
from pipeline.figures import counted, name, protocol_words
from pipeline.fronts import family_fronts
from pipeline.heatmaps import heat_map, task_map
from pipeline.page_style import STYLE
from pipeline.provenance import Failure, Provenance
from pipeline.reproduce import reproduce_section
from pipeline.results import Board, Summary
from pipeline.sanity import Flag, gates
from pipeline.table import Table
from pipeline.tables import main_table, overview_table

MAP_TITLE = "Scores by task: red below the full cache, blue above it"
FRONT_TITLE = "Score by task family against measured KV share: ringed and joined, the Pareto front"
READING = (
    "A task's score is the mean over its samples, times 100. The macro-average is the unweighted mean over tasks and "
    "is given only where every task is complete, else as the number of complete tasks.",
    "Brackets hold 95 % intervals with the tasks fixed: a bootstrap over prompts; over seeds and prompts where seeds "
    "share prompts; over seeds and then prompts where each seed has its own. Prompts about one document are taken "
    "together; where a task has one document alone, there is no interval. Where all or nearly all samples score 0, or "
    "1, it is Wilson's interval. The tasks' errors combine to the macro-average's as independent ones.",
    "Differences to the full cache are paired by sample. “Within noise” means that the interval of the difference "
    "holds 0, or that p is above 0.05. p-values are from sign-flip permutations and Holm-corrected over one table.",
    "KV shares are measured on the tensors held, against the full cache for the same tokens; workspace is what "
    "outlives a step beside them. Failed samples are counted and never scored.",
    "A Pareto front is of the scores as they are: two neighbours on it may be within noise of each other, which the "
    "intervals and the paired differences tell.",
)


def page(
    sweep: Mapping[str, Any],
    status: str,
    summary: Summary,
    source: Provenance,
    flags: Sequence[Flag],
    failures: Sequence[Failure],
    views: Sequence[View],
    published: Sequence[Table] = (),
) -> str:
    """The page. Everything that comes from rows, settings or files is escaped where it enters."""
    drawn = plots.looks(
        dict.fromkeys(result.label for result in summary.results if not result.configuration.is_baseline)
    )
    contexts = dict.fromkeys(board.condition.context for board in summary.boards)
    sections = [
        ("read-first", "Read this first", _flags(flags, summary)),
        ("overview", "Macro-averages", "".join(_overview(summary, drawn))),
        ("results", "Results", "".join(_results(summary.boards, drawn))),
        ("paper", "Beside the paper", "".join(_published(published))),
        ("tasks", "Inside the tasks", "".join(_inside(summary.boards, views))),
        ("budgets", "Budgets asked and measured", "".join(_budgets(summary.boards))),
        ("cost", "Cost", "".join(_costs(summary.boards, drawn))),
        ("failures", "Failures", optional(failures_table(failures), "texts")),
        ("impossible", "Cells that cannot run", optional(impossible_table(summary), "texts")),
        ("data", "Data", optional(data_table(source.tasks) if source.tasks else None, "texts")),
        ("settings", "Methods and their settings", render.html(settings_table(summary), "texts")),
        ("reproduce", "How to run it again", reproduce_section(sweep, contexts)),
        ("provenance", "How it was run", provenance_section(sweep, source)),
        ("reading", "How to read this", "".join(f"<p>{escape(text)}</p>" for text in READING)),
    ]
    return document(sweep, _facts(sweep, status, summary, source), sections)


def document(sweep: Mapping[str, Any], facts: str, sections: Iterable[tuple[str, str, str]]) -> str:
    """A page of sections (anchor, title, body); those without a body are left out."""
    kept = [(anchor, title, body) for anchor, title, body in sections if body]
    links = "".join(f"<a href='#{anchor}'>{escape(title)}</a>" for anchor, title, _ in kept)
    bodies = "".join(f"<section id='{anchor}'><h2>{escape(title)}</h2>{body}</section>" for anchor, title, body in kept)
    title = escape(str(sweep["name"]))
    return (
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        f"<title>{title} · kvsweep</title><style>{STYLE}</style></head><body>"
        f"<header><p class='kind'>KV-cache compression sweep</p><h1>{title}</h1>"
        f"{facts}</header><nav>{links}</nav><main>{bodies}</main></body></html>\n"
    )


def _facts(sweep: Mapping[str, Any], status: str, summary: Summary, source: Provenance) -> str:
    """The head of the page: what was run, when, on what."""
    conditions = [board.condition for board in summary.boards]
    contexts = sorted({condition.context for condition in conditions})
    methods = len({result.label for result in summary.results})
    facts = {
        "Status": status,
        "Models": ", ".join(dict.fromkeys(condition.model for condition in conditions)),
        "Grid": f"{methods} methods, {len({task for board in summary.boards for task in board.tasks})} tasks, "
        f"contexts {', '.join(f'{length:,}' if length else 'own lengths' for length in contexts)}",
        "Started": when(sweep.get("started")),
        "Rows written": f"{when(source.first)} to {when(source.last)}" if source.last else "none yet",
        "Devices": counted(source.counts.get("device", {})),
        "Numerics": counted(source.counts.get("numerics", {})),
        "Output": str(sweep.get("output", "")),
    }
    return facts_list(facts)


def facts_list(facts: Mapping[str, str]) -> str:
    items = "".join(f"<div><dt>{key}</dt><dd>{escape(value)}</dd></div>" for key, value in facts.items() if value)
    return f"<dl class='facts'>{items}</dl>"


def _flags(flags: Sequence[Flag], summary: Summary) -> str:
    if not summary.rows:
        return "<p class='fine'>No rows yet.</p>"
    return gate_list(flags) + flag_list(flags)


def gate_list(flags: Sequence[Flag]) -> str:
    """What was checked, passed or not."""
    items = "".join(
        f"<li class='{'passed' if passed else 'open'}'>{'✓' if passed else '✗'} {escape(gate)}</li>"
        for gate, passed in gates(flags).items()
    )
    return f"<ul class='gates'>{items}</ul>"


def flag_list(flags: Iterable[Flag]) -> str:
    items = "".join(f"<li class='{flag.level}'><b>{escape(flag.title)}.</b> {escape(flag.text)}</li>" for flag in flags)
    return f"<ul class='flags'>{items}</ul>"


def _overview(summary: Summary, drawn: Mapping[str, plots.Look]) -> Iterator[str]:
    for board in summary.boards:
        yield f"<h3>{escape(name(board.condition))}</h3>{render.html(overview_table(board))}"
    if drawn:
        yield (
            "<p class='caption'>Green and red: better or worse than the full cache beyond noise; "
            "grey: within noise, or no macro-average.</p>"
        )


def _results(boards: Iterable[Board], drawn: Mapping[str, plots.Look]) -> Iterator[str]:
    for board in boards:
        tasks = task_map(board)
        left_out = board.tasks if tasks else ()
        yield f"<h3>{escape(name(board.condition))}</h3>{render.html(main_table(board), leave_out=left_out)}"
        figures = (
            ("Macro score against measured KV share", plots.quality_against_memory(board, drawn)),
            ("Difference to the full cache, paired", plots.differences_to_full(board, drawn)),
            (MAP_TITLE if board.baseline else "Scores by task", tasks),
            (FRONT_TITLE, family_fronts(board, drawn)),
            ("Scores by task against measured KV share", plots.task_curves(board, drawn)),
        )
        here = {label: look for label, look in drawn.items() if any(one.label == label for one in board.results)}
        shown = [f"<figure><figcaption>{title}</figcaption>{svg}</figure>" for title, svg in figures if svg]
        if shown:
            yield plots.legend(here) + "".join(shown)
            yield (
                "<p class='caption'>Dashed line and band: the full cache with its interval. Points at one share are "
                "set slightly apart; hover for the figures.</p>"
            )


def _inside(boards: Iterable[Board], views: Sequence[View]) -> Iterator[str]:
    """Tasks taken apart: needle grids over all lengths, then, board by board, length bins and further metrics."""
    for grid in grids(views):
        model = escape(grid.condition.model)
        yield (
            f"<h3>{escape(grid.task)}, depth by length: {model}</h3>"
            f"<p class='caption'>{escape(protocol_words(grid.condition))} A place holds the mean score of its samples; "
            "brighter is higher. Framed: nothing yet, or an incomplete task, which has no mean. Hover for the number "
            f"of samples.</p><figure>{heat_map(grid)}</figure>"
        )
    for board in boards:
        bins = bins_table(board, views)
        for table in (*([bins] if bins else []), *details_tables(board, views)):
            yield f"<h3>{escape(table.title)}</h3>{render.html(table)}"


def _published(tables: Iterable[Table]) -> Iterator[str]:
    for table in tables:
        yield f"<h3>{escape(table.title)}</h3>{render.html(table)}"


def _budgets(boards: Iterable[Board]) -> Iterator[str]:
    for board in boards:
        table = budgets_table(board)
        if table:
            yield f"<h3>{escape(name(board.condition))}</h3>{render.html(table)}"


def _costs(boards: Iterable[Board], drawn: Mapping[str, plots.Look]) -> Iterator[str]:
    for board in boards:
        for timing in ("isolated", "shared"):
            table = cost_table(board, timing)
            if table:
                yield f"<h3>{escape(name(board.condition))}</h3>{render.html(table)}"
                figure = plots.quality_against_time(board, drawn, timing)
                caption = "Macro score against time" + (", as this sweep took it" if timing == "shared" else "")
                here = {
                    label: look for label, look in drawn.items() if any(one.label == label for one in board.results)
                }
                if figure:
                    yield f"{plots.legend(here)}<figure><figcaption>{caption}</figcaption>{figure}</figure>"
                    yield "<p class='caption'>Star: the full cache. Beside each point, its budget.</p>"


def optional(table: Any, css: str) -> str:
    return render.html(table, css) if table else ""


def provenance_section(sweep: Mapping[str, Any], source: Provenance) -> str:
    held = {key: ", ".join(values) for key, values in source.versions.items()}
    own = {str(key): str(value) for key, value in sweep.get("versions", {}).items()}
    facts = {
        **{key.replace("_", " "): counted(counts) for key, counts in source.counts.items()},
        **{f"version of {key}": value for key, value in {**own, **held}.items()},
    }
    rows = "".join(f"<tr><td>{escape(key)}</td><td>{escape(value)}</td></tr>" for key, value in facts.items())
    protocol = escape(json.dumps(sweep.get("protocol", {}), indent=1))
    return (
        f"<div class='scroll'><table class='texts'><tbody>{rows}</tbody></table></div>"
        f"<details><summary>Protocol</summary><pre>{protocol}</pre></details>"
    )


def when(moment: object) -> str:
    """A time stamp, or a text that already is one, to the second and in UTC."""
    if isinstance(moment, int | float):
        return datetime.fromtimestamp(moment, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    return str(moment or "")
