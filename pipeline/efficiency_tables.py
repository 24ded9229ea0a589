"""The tables of a timing sweep: QEvict's Table 4 for every method, where the time and the memory go, plain records."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from pipeline.appendix import settings_words
from pipeline.efficiency import FIGURES, RATIOS, Efficiency, Spread, Timed
from pipeline.figures import NOTHING, seconds, share, size
from pipeline.table import Cell, Column, Row, Table, Tone

MORE_IS_BETTER = ("throughput",)
ENOUGH_PAIRS = 3
"""With fewer no ratio is called better or worse."""


def efficiency_table(one: Efficiency, new_tokens: int) -> Table:
    """TTFT, TPOT, throughput and peak memory, each beside its ratio to the full cache."""
    columns = (
        Column("Method", numeric=False),
        Column("Budget", numeric=False),
        Column("TTFT s", about="from the first prompt to the first token of every row, compression included"),
        Column("TTFT/full", about="of the full cache's in the same repeats"),
        Column("TPOT ms", about="between two tokens of a row"),
        Column("TPOT/full", about="of the full cache's in the same repeats"),
        Column("Tokens/s", about="all tokens of the batch, over prefill and decode together"),
        Column("Rate/full", about="of the full cache's in the same repeats"),
        Column("Peak memory", about="model, caches, workspace, and what a step needs"),
        Column("Peak/full", about="of the full cache's in the same repeats"),
        Column("KV peak", about="most bytes that the caches of the batch held"),
        Column("Workspace", about="copies beside the caches that outlive a step"),
        Column("Repeats", about="finished runs"),
    )
    rows = [Row(tuple(_figures(result)), result.budget) for result in one.results]
    words = (
        f"Every row generates {new_tokens:,} tokens. Medians over repeats, with the least and the most in brackets; "
        "ratios are taken inside each repeat, where the methods ran one after the other."
    )
    return Table(str(one.setting), columns, tuple(rows), words)


def stages_table(one: Efficiency) -> Table:
    """Where the time goes, and what memory is cache."""
    titles = ("Prefill s", "Compress s", "Admit s", "Decode s")
    kinds = ("prefill_s", "compress_s", "admit_s", "decode_s")
    columns = (
        Column("Method", numeric=False),
        Column("Budget", numeric=False),
        *(Column(title) for title in titles),
        *(Column(title) for title in ("KV prefill", "KV end", "KV peak", "KV share", "Workspace", "Host")),
    )
    sizes = ("kv_bytes_prefill", "kv_bytes_end", "kv_bytes_peak")
    rows = []
    for result in one.results:
        cells = [Cell(result.label), Cell(result.budget), *(_cell(result, kind, seconds) for kind in kinds)]
        cells += [_plain(result, kind, size) for kind in sizes] + [_plain(result, "kv_share", share)]
        cells += [_plain(result, kind, size) for kind in ("workspace_bytes", "host_bytes")]
        rows.append(Row(tuple(cells), result.budget))
    words = (
        "Seconds of a whole batch. Admit: from the last compression to the first tokens, moving what was kept into its "
        "place. Prefill, compress and admit are the TTFT. Bytes are of all caches of the batch; the share is of the "
        "full cache for the same tokens, at the end."
    )
    return Table(f"Stages: {one.setting}", columns, tuple(rows), words)


def impossible_table(found: Iterable[Efficiency]) -> Table | None:
    rows = [
        Row((Cell(str(one.setting)), Cell(result.name), Cell(result.impossible)))
        for one in found
        for result in one.results
        if result.impossible
    ]
    columns = tuple(Column(title, False) for title in ("Setting", "Method", "Reason"))
    return Table("Impossible cells", columns, tuple(rows)) if rows else None


def settings_table(found: Iterable[Efficiency]) -> Table:
    """Every method's settings, once."""
    seen = {(result.label, result.settings): result.method for one in found for result in one.results}
    rows = [
        Row((Cell(label), Cell(method), Cell(settings_words(settings)))) for (label, settings), method in seen.items()
    ]
    columns = tuple(Column(title, False) for title in ("Shown as", "Method", "Settings"))
    return Table("Settings", columns, tuple(rows))


def records(found: Sequence[Efficiency], new_tokens: int) -> list[dict[str, Any]]:
    """Plain figures, unrounded, one record per method, budget and setting; None where there is no figure.

    Times are seconds, memory is bytes, throughput is tokens per second; ``_ratio``: to the full cache.
    """
    return [_record(one, result, new_tokens) for one in found for result in one.results]


def _record(one: Efficiency, result: Timed, new_tokens: int) -> dict[str, Any]:
    setting = one.setting
    record: dict[str, Any] = {"model": setting.model, "prompt_tokens": setting.prompt_tokens}
    record |= {"new_tokens": new_tokens, "batch": setting.batch, "method": result.method, "label": result.label}
    record |= {"settings": json.dumps(json.loads(result.settings)), "budget": result.budget}
    record |= {"repeats": result.repeats, "expected": result.expected, "failed": result.failed, "pairs": result.pairs}
    record |= {"over_budget": result.over_budget}
    for names, spreads, suffix in ((FIGURES, result.figures, ""), (RATIOS, result.ratios, "_ratio")):
        for name in names:
            for part in ("median", "least", "most"):
                title = f"{name}{suffix}" if part == "median" else f"{name}{suffix}_{part}"
                record[title] = getattr(spreads[name], part) if name in spreads else None
    return record


def _figures(result: Timed) -> Iterable[Cell]:
    yield Cell(result.label)
    yield Cell(result.budget)
    if result.impossible:
        yield Cell("impossible", tone="muted")
        yield from [Cell(NOTHING, tone="muted")] * 10
        return
    for name, form in zip(RATIOS, (seconds, _milliseconds, _rate, size), strict=True):
        yield _plain(result, name, form) if form is size else _cell(result, name, form)
        yield _ratio(result, name)
    yield _plain(result, "kv_bytes_peak", size)
    yield _plain(result, "workspace_bytes", size)
    aside = "" if result.repeats == result.expected else f"of {result.expected:,}"
    yield Cell(f"{result.repeats:,}", f"{aside}, {result.failed} failed".lstrip(", ") if result.failed else aside)


def _cell(result: Timed, name: str, form: Callable[[float], str]) -> Cell:
    if name not in result.figures:
        return Cell(NOTHING, tone="muted")
    spread = result.figures[name]
    return Cell(form(spread.median), f"[{form(spread.least)}, {form(spread.most)}]")


def _plain(result: Timed, name: str, form: Callable[[float], str]) -> Cell:
    return Cell(form(result.figures[name].median)) if name in result.figures else Cell(NOTHING, tone="muted")


def _ratio(result: Timed, name: str) -> Cell:
    if result.is_baseline or name not in result.ratios:
        return Cell(NOTHING, tone="muted")
    spread = result.ratios[name]
    told = f"[{spread.least:.2f}, {spread.most:.2f}]" + (f" of {result.pairs}" * (result.pairs < result.repeats))
    return Cell(f"{spread.median:.2f}", told, _tone(name, spread, result.pairs))


def _tone(name: str, spread: Spread, pairs: int) -> Tone:
    """Better or worse only where every repeat says so."""
    if pairs < ENOUGH_PAIRS or spread.least <= 1 <= spread.most:
        return ""
    return "better" if (spread.least > 1) == (name in MORE_IS_BETTER) else "worse"


def _milliseconds(value: float) -> str:
    return f"{1000 * value:.2f}" if value < 0.1 else f"{1000 * value:.0f}"


def _rate(value: float) -> str:
    return f"{value:.1f}" if value < 1000 else f"{value:,.0f}"
