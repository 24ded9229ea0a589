"""Two selections of configurations against each other, sample by sample: ``qevict@10%`` against ``snapkv@10%``."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any

from pipeline import figures, render, stats, tables
from pipeline.results import PROTOCOL, Result
from pipeline.stats import Comparison
from pipeline.summary import cells_of, compare_results, summarize

if TYPE_CHECKING:
    import pandas as pd
    from rich.table import Table as RichTable

TERMINAL_TASKS = 3
FIELDS = ("model", "context", "method", "budget", *PROTOCOL)


class CompareError(ValueError):
    """A selection that finds nothing, or what must not be compared: why, and what to ask instead."""


@dataclass(frozen=True)
class Compared:
    """Pairs of configurations with first minus second, p-values Holm-corrected over all of them."""

    pairs: tuple[tuple[Result, Result, Comparison], ...]

    def markdown(self) -> str:
        return render.markdown(tables.comparison_table(self.pairs))

    def rich(self) -> RichTable:
        """For a terminal, which has no room for many tasks."""
        return render.rich(tables.comparison_table(self.pairs, TERMINAL_TASKS))


def compare(
    rows: pd.DataFrame,
    first: str,
    second: str,
    cells: Sequence[Mapping[str, Any]] | None = None,
    allow_protocols: bool = False,
) -> Compared:
    """First minus second on the samples both have, for every pair that agrees in all that neither selection names.

    A selection is ``METHOD``, ``METHOD@BUDGET``, or ``field=value`` with commas between (model, context, method,
    budget and protocol). Raises :class:`CompareError`; so it does where the two are
    the same but for their protocols, unless ``allow_protocols``.
    """
    wanted, other = _selection(first), _selection(second)
    results = summarize(rows, cells_of(rows) if cells is None else cells, {}).results
    named = {*wanted, *other}
    candidates = [
        (one, two)
        for one, two in product(_chosen(results, wanted, first), _chosen(results, other, second))
        if one is not two and _agree(one, two, named)
    ]
    pairs = [(one, two) for one, two in candidates if allow_protocols or not _protocol_gap(one, two)]
    if not pairs and candidates:
        gap = ", ".join(f"{name} {a} and {b}" for name, a, b in _protocol_gap(*candidates[0]))
        raise CompareError(f"{first} and {second} ran under different protocols ({gap}): allow that to compare them")
    if not pairs:
        raise CompareError(f"no {first} matches a {second} in model, context and budget: name the fields that differ")
    comparisons = [compare_results(one, two) for one, two in pairs]
    corrected = stats.holm([comparison.p for comparison in comparisons])
    return Compared(
        tuple(
            (one, two, dataclasses.replace(comparison, p_holm=p))
            for (one, two), comparison, p in zip(pairs, comparisons, corrected, strict=True)
        )
    )


def _selection(text: str) -> dict[str, str]:
    if "=" not in text:
        method, _, budget = text.partition("@")
        return {"method": method.strip()} | ({"budget": budget.strip()} if budget else {})
    selection = {}
    for part in text.split(","):
        field, _, value = part.partition("=")
        if field.strip() not in FIELDS:
            raise CompareError(f"{text!r}: {field.strip()!r} is no field; fields: {', '.join(FIELDS)}")
        selection[field.strip()] = value.strip()
    return selection


def _chosen(results: Sequence[Result], selection: Mapping[str, str], text: str) -> list[Result]:
    chosen = [one for one in results if all(value in _values(one, field) for field, value in selection.items())]
    if not chosen:
        known = ", ".join(dict.fromkeys(figures.full_name(one) for one in results))
        raise CompareError(f"{text!r} finds nothing; there are: {known or 'no rows'}")
    return chosen


def _values(result: Result, field: str) -> tuple[str, ...]:
    configuration = result.configuration
    if field == "method":
        return configuration.method, result.label
    holder = configuration if field == "budget" else configuration.condition
    return (str(getattr(holder, field)),)


def _agree(one: Result, two: Result, named: set[str]) -> bool:
    free = {"method", *PROTOCOL} if "method" in named else {*PROTOCOL}
    if one.configuration.is_baseline or two.configuration.is_baseline:
        free.add("budget")
    return all(_values(one, field) == _values(two, field) for field in FIELDS if field not in named | free)


def _protocol_gap(one: Result, two: Result) -> list[tuple[str, str, str]]:
    ours, theirs = one.configuration.condition.protocol, two.configuration.condition.protocol
    return [(name, ours[name], theirs[name]) for name in PROTOCOL if ours[name] != theirs[name]]
