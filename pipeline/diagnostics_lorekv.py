"""Tables and figures of LORE-KV's diagnostics (arXiv 2610.07643, §4.5, App. F). Prompts are the unit of every interval:
layers and heads of a prompt share its tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from pipeline import plots
from pipeline.diagnostics_file import LoreDiagnosticsFile
from pipeline.diagnostics_summary import Diagnostics, Ratio, Sums, middle, resampled
from pipeline.figures import NOTHING, brackets, difference, points
from pipeline.partition import RANDOM_SEED, SAME, Floats
from pipeline.stats import Interval
from pipeline.table import Cell, Column, Row, Table
from workers.lorekv_labels import ORACLE, REFERENCE, WINDOW

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LABELS = ("budget",)
DRAWS = 2000
"""Of prompts, for rank correlations over prompts."""
LEAST_PROMPTS = 4
"""Fewer have no rank correlation worth a number."""


def lorekv_tables(found: Diagnostics, settings: LoreDiagnosticsFile) -> list[Table]:
    """Coverage (F.2), kept sets and outputs (F.3), gains and mismatch (§4.5), composition (F.5), energy (F.6), budgets
    of equal fidelity (F.7); empty ones left out."""
    made = [
        _coverage(found),
        _fidelity(found, settings),
        _shift(found, settings),
        _gains(found, settings),
        _answers(found, settings),
        _energy(found, "energy_by_depth", "Energy by depth of the layer, from the first to the last"),
        _energy(found, "energy_by_position", "Energy by position in the prompt, from its start to its end"),
        _equivalence(found, settings),
    ]
    return [table for table in made if table.rows]


def _coverage(found: Diagnostics) -> Table:
    rows = []
    for count in found.parameters(REFERENCE, "coverage"):
        name = "window" if count == WINDOW else f"M = {count}"
        names = ("coverage", "coverage_with_window")
        rows.append(_row((name,), [_cell(found.get(REFERENCE, one, count), _digits) for one in names]))
    caption = "Mean over the true future queries of the largest cosine to a reference query, by query head."
    return _table(f"Future-query coverage, {len(found.traces)} prompts", (), ["alone", "with window"], rows, caption)


def _fidelity(found: Diagnostics, settings: LoreDiagnosticsFile) -> Table:
    names = ("recall", "recall_all", "error")
    rows = [
        _row((label, str(budget)), [_cell(found.get(label, name, budget)) for name in names])
        for label, budget in _each(found, settings)
    ]
    caption = (
        "Per cent. Recall of what the future-query oracle keeps, over tokens that compete, and with those that are "
        "always kept; output error relative to the full cache's, at the true future queries. By KV head."
    )
    return _table("Kept sets and outputs", LABELS, ["recall", "with protected", "output error"], rows, caption)


def _shift(found: Diagnostics, settings: LoreDiagnosticsFile) -> Table:
    names = ("overlap", "overlap_all", "jaccard")
    rows = []
    for label, budget in _each(found, settings):
        if label != settings.control:
            cells = [_cell(found.get(label, name, budget)) for name in names]
            rows.append(_row((label, str(budget)), [*cells, _cell(found.get(label, "rank_correlation"), _digits)]))
    caption = (
        f"Against {settings.control}. Per cent of its tokens that are kept too: those that compete, and with the "
        "protected ones; Jaccard index of those that compete. Spearman's correlation is of their scores."
    )
    columns = ["overlap", "with protected", "Jaccard", "rank correlation"]
    return _table("Shift of what is kept", LABELS, columns, rows, caption)


def _gains(found: Diagnostics, settings: LoreDiagnosticsFile) -> Table:
    rows = []
    for label, budget in _each(found, settings):
        if label in (settings.control, ORACLE):
            continue
        cells = []
        for name, sign in (("recall", 1.0), ("error", -1.0)):
            ours, theirs = (found.sums(one, name, budget) for one in (label, settings.control))
            cells.append(_gain_cell(ours, theirs, sign))
            cells.append(_mismatch_cell(found.sums(REFERENCE, "coverage", WINDOW), ours, theirs, sign))
            cells.append(_cell(found.get(label, f"mismatch_{name}_gain", budget), _digits))
        rows.append(_row((label, str(budget)), cells))
    columns = [f"{what}{how}" for what in ("recall", "fidelity") for how in ("", ", over prompts", ", over heads")]
    caption = (
        f"Over {settings.control}, in points: recall, and output error saved. Then Spearman's correlation of the gain "
        "with the mismatch, 1 - coverage of the window: over prompts, and over all heads inside a prompt."
    )
    return _table("Gains, and prompt-to-future mismatch", LABELS, columns, rows, caption)


def _answers(found: Diagnostics, settings: LoreDiagnosticsFile) -> Table:
    rows, prompts = [], 0
    for label, budget in _each(found, settings):
        kept, over = found.get(label, "answer_kept", budget), found.get(label, "enrichment", budget)
        if kept is not None:
            prompts = kept.traces
            rows.append(_row((label, str(budget)), [_cell(kept), _cell(over, _digits)]))
    caption = (
        f"{prompts} of {len(found.traces)} prompts hold their reference answer, token by token, outside of what is "
        "protected. Kept: per cent of its tokens. Enrichment: over the share of all competing tokens that is kept."
    )
    return _table("Answer tokens", LABELS, ["kept", "enrichment"], rows, caption)


def _energy(found: Diagnostics, name: str, title: str) -> Table:
    rows, bins = [], 0
    for label in found.conditions:
        if parts := found.parameters(label, name):
            bins = len(parts)
            rows.append(_row((label,), [_cell(found.get(label, name, part)) for part in parts]))
    columns = [f"{part + 1} of {bins}" for part in range(bins)]
    return _table(title, (), columns, rows, "Shares of the competing tokens' score, per cent.")


def _equivalence(found: Diagnostics, settings: LoreDiagnosticsFile) -> Table:
    """F.7; the curve of the control, resampled together with the condition's own fidelity."""
    from torch import from_numpy

    from lorekv.diagnostics import equivalent_budget

    budgets = _budgets(settings)
    curve = [found.sums(settings.control, "error", budget) for budget in budgets]
    if len(budgets) < 2 or not all(curve):
        return _table("Budget equivalence", LABELS, ["control's budget"], [], "")
    measured = from_numpy(np.array(budgets, dtype=np.float64))
    fidelity = 1 - np.stack([_with_value(sums) for sums in curve], -1)
    rows = []
    for label, budget in _each(found, settings):
        if label != settings.control:
            target = 1 - _with_value(found.sums(label, "error", budget))
            reached = equivalent_budget(measured, from_numpy(fidelity), from_numpy(target)).numpy()
            cells = [_budget_cell(reached, budgets), _extra_cell(reached, budget, budgets)]
            rows.append(_row((label, str(budget)), cells))
    caption = (
        f"The budget at which {settings.control} reaches a condition's fidelity (1 - output error), interpolated "
        "between the budgets run, and how much more that is. ≥: not reached at the largest; ≤: reached at the smallest."
    )
    return _table("Budget equivalence", LABELS, ["control's budget", "more"], rows, caption)


# -- figures -----------------------------------------------------------------------------------------------------------


def curves(found: Diagnostics, settings: LoreDiagnosticsFile) -> dict[str, str]:
    """Recall and output error by budget, coverage by the number of futures."""
    budgets = _budgets(settings)
    labels = {label: label for label in found.conditions}
    by_budget = "Budget, tokens per KV head"
    return {
        "Recall of the oracle's tokens": _curves(
            found, labels, "recall", budgets, (by_budget, "Recall of the oracle's tokens, per cent")
        ),
        "Error of attention's output": _curves(
            found, labels, "error", budgets, (by_budget, "Relative output error, per cent")
        ),
        "Coverage of the true future queries": _curves(
            found,
            {REFERENCE: "futures (0: the window)"},
            "coverage",
            found.parameters(REFERENCE, "coverage"),
            ("Sampled futures", "Coverage of the true future queries, per cent"),
        ),
    }


def _curves(
    found: Diagnostics, labels: dict[str, str], name: str, at: Sequence[int], axis_names: tuple[str, str]
) -> str:
    looks = plots.looks(labels)

    def draw(figure: Figure, tips: list[str]) -> None:
        axes = figure.subplots()
        axes.set_xlabel(axis_names[0])
        axes.set_ylabel(axis_names[1])
        axes.set_xticks(list(at))
        for label, look in looks.items():
            known = [(place, one) for place in at if (one := found.get(label, name, place))]
            axes.plot(
                [place for place, _ in known],
                [100 * one.value for _, one in known],
                color=look.colour,
                linestyle=look.line,
                linewidth=1.2,
                label=labels[label],
            )
            for place, one in known:
                if one.interval:
                    ends = [100 * one.interval.low, 100 * one.interval.high]
                    axes.plot([place, place], ends, color=look.colour, linewidth=1, alpha=0.5)
                axes.plot(place, 100 * one.value, look.marker, color=look.colour, markersize=4, gid=plots.TIP)
                tips.append(f"{labels[label]}, {place}: {points(one.value)} {brackets(one.interval)}")
        axes.legend(frameon=False, fontsize=8, ncols=2)

    return plots.svg(draw, (7.0, 3.6), axis_names[1])


# -- cells -------------------------------------------------------------------------------------------------------------


def _each(found: Diagnostics, settings: LoreDiagnosticsFile) -> list[tuple[str, int]]:
    return [(label, budget) for budget in _budgets(settings) for label in found.conditions]


def _budgets(settings: LoreDiagnosticsFile) -> list[int]:
    return [int(budget.value) for budget in settings.budgets]


def _with_value(sums: Sums) -> Floats:
    """The measure itself, then its bootstrap draws."""
    above, below = (sum(part) for part in zip(*sums.values(), strict=True))
    return np.concatenate([[above / below], resampled(sums)])


def _gain_cell(ours: Sums, theirs: Sums, sign: float) -> Cell:
    """Paired: both sides under the same draws of prompts."""
    if not ours or ours.keys() != theirs.keys():
        return Cell(NOTHING)
    draws = sign * (_with_value(ours) - _with_value(theirs))
    interval = middle(draws[1:]) if len(ours) > 1 and np.ptp(draws) > SAME else None
    return Cell(difference(float(draws[0])), brackets(interval, difference))


def _mismatch_cell(coverage: Sums, ours: Sums, theirs: Sums, sign: float) -> Cell:
    """Spearman's correlation over prompts, resampled by prompts."""
    from torch import from_numpy

    from lorekv.diagnostics import spearman

    if not ours or not coverage.keys() == ours.keys() == theirs.keys() or len(ours) < LEAST_PROMPTS:
        return Cell(NOTHING)
    covered, one, other = (
        np.array([above / below for _, (above, below) in sorted(sums.items())]) for sums in (coverage, ours, theirs)
    )
    picks = np.random.default_rng([RANDOM_SEED, len(ours)]).integers(0, len(ours), size=(DRAWS, len(ours)))
    picks = np.concatenate([np.arange(len(ours))[None], picks])
    found = spearman(from_numpy((sign * (one - other))[picks]), from_numpy((1 - covered)[picks])).numpy()
    if np.isnan(found[0]):
        return Cell(NOTHING)
    return Cell(_digits(float(found[0])), brackets(middle(found[1:][~np.isnan(found[1:])]), _digits))


def _budget_cell(reached: Floats, budgets: Sequence[int]) -> Cell:
    def form(value: float | None) -> str:
        assert value is not None
        if np.isinf(value):
            return f"≥ {budgets[-1]}"
        return f"≤ {budgets[0]}" if value <= budgets[0] else f"{value:.0f}"

    return Cell(form(float(reached[0])), brackets(_ends(reached), form))


def _extra_cell(reached: Floats, budget: int, budgets: Sequence[int]) -> Cell:
    def form(value: float | None) -> str:
        assert value is not None
        bounded = min(value, float(budgets[-1]))
        mark = "≥ " if np.isinf(value) else "≤ " if value <= budgets[0] else ""
        return f"{mark}{100 * (bounded / budget - 1):+.0f}%"

    return Cell(form(float(reached[0])), brackets(_ends(reached), form))


def _ends(reached: Floats) -> Interval | None:
    """Infinite draws are draws: quantiles without interpolation."""
    if len(set(reached.tolist())) == 1:
        return None
    low, high = np.quantile(reached[1:], [0.025, 0.975], method="nearest")
    return Interval(float(low), float(high), "bootstrap over traces")


def _cell(found: Ratio | None, form: Callable[[float | None], str] = points) -> Cell:
    return Cell(NOTHING) if found is None else Cell(form(found.value), brackets(found.interval, form))


def _digits(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.2f}"


def _row(names: Sequence[str], cells: Sequence[Cell]) -> Row:
    return Row((*(Cell(name) for name in names), *cells), "".join(names[1:]))


def _table(title: str, further: Sequence[str], columns: Sequence[str], rows: Sequence[Row], caption: str) -> Table:
    """``further``: columns of names after the first."""
    named = (Column("", numeric=False), *(Column(name) for name in further))
    return Table(title, (*named, *(Column(name) for name in columns)), tuple(rows), caption)
