"""Diagnostics over traces: every measure as a ratio of sums, with a bootstrap interval over traces, and its tables.

Traces of one text are resampled like any others. Layers and heads of a trace are not: they share its tokens, so that
counting each layer as a trace of its own, as the paper does, makes intervals too narrow.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

import numpy as np

from pipeline.figures import NOTHING, brackets, points, share
from pipeline.partition import SAME, Floats, Scores, partition, replicates
from pipeline.stats import CONFIDENCE, Interval
from pipeline.table import Cell, Column, Row, Table

if TYPE_CHECKING:
    from workers.diagnose import Held
    from workers.layer_measures import Measure

Key = tuple[str, str, int | None]
"""Condition, measure, parameter."""
Sums = dict[str, tuple[float, float]]
"""By trace: numerator and denominator."""

MISSED = {
    "fmm": "as written",
    "fmm_censored": "whole horizons",
    "fmm_windows": "without sinks",
    "fmm_windows_censored": "both",
    "fmm_layer_censored": "both, by layer",
    "fmm_full_only": "Q unreadable",
}
AGREEMENT = {"qsa": "QSA", "qsa_decode": "QSA, decoding", "r_q": "R_Q", "r_q_decode": "R_Q, decoding"}
MOVES = {
    "quantized_to_full": "Q to F",
    "full_to_quantized": "F to Q",
    "full_to_evicted": "F to E",
    "quantized_to_evicted": "Q to E",
    "local_to_full": "recent to F",
    "local_to_quantized": "recent to Q",
    "local_to_evicted": "recent to E",
}
TIERS = ("full", "quantized", "evicted", "local")
WHO = ("policy", "oracle")


@dataclass(frozen=True)
class Ratio:
    """A measure over traces: ``count`` is its numerator, which for rates is a number of events."""

    value: float
    interval: Interval | None
    count: float
    traces: int


class Diagnostics:
    """All traces' measures, added up."""

    def __init__(self, conditions: Sequence[str]) -> None:
        self.conditions = list(conditions)
        self.held: dict[str, list[Held]] = defaultdict(list)
        self.traces: list[str] = []
        self._whole: dict[Key, Sums] = defaultdict(dict)
        self._layers: dict[tuple[Key, int], Sums] = defaultdict(dict)

    def add(self, trace: str, measures: Iterable[Measure], held: Iterable[Held]) -> None:
        self.traces.append(trace)
        for one in held:
            self.held[one.condition].append(one)
        for measure in measures:
            key = (measure.condition, measure.name, measure.parameter)
            of_layer = [] if measure.layer is None else [self._layers[key, measure.layer]]
            for sums in (self._whole[key], *of_layer):
                above, below = sums.get(trace, (0.0, 0.0))
                sums[trace] = (above + measure.numerator, below + measure.denominator)

    def get(self, condition: str, name: str, parameter: int | None = None) -> Ratio | None:
        sums = self.sums(condition, name, parameter)
        return ratio(sums) if sums else None

    def sums(self, condition: str, name: str, parameter: int | None = None) -> Sums:
        """By trace; none where nothing was measured."""
        return self._whole.get((condition, name, parameter), {})

    def parameters(self, condition: str, name: str) -> list[int]:
        return sorted(key[2] for key in self._whole if key[:2] == (condition, name) and key[2] is not None)

    def absence(self, condition: str, who: str) -> float | None:
        """Median events away, of windows that came back after at least three."""
        lengths: list[int] = []
        for events in self.parameters(condition, f"absence_{who}"):
            found = self.get(condition, f"absence_{who}", events)
            lengths += [events] * int(found.count if found else 0)
        return median(lengths) if lengths else None

    def records(self) -> list[dict[str, object]]:
        """Every measure over all layers."""
        return [_record(key, ratio(sums), None) for key, sums in self._whole.items()]

    def layer_records(self) -> list[dict[str, object]]:
        """Every measure layer by layer, curves left out."""
        kept = ((key, layer, sums) for (key, layer), sums in self._layers.items() if not key[1].endswith("_by_event"))
        return [_record(key, ratio(sums), layer) for key, layer, sums in kept]


def ratio(sums: Sums) -> Ratio:
    """Sum over sum; the interval resamples traces, numerators and denominators together."""
    above, below = _columns(sums)
    value = float(above.sum() / below.sum())
    interval = None
    if len(sums) > 1 and np.ptp(above / below) > SAME:
        interval = middle(resampled(sums))
    return Ratio(value, interval, float(above.sum()), len(sums))


def resampled(sums: Sums) -> Floats:
    """The ratio under every bootstrap draw of traces; measures of the same traces share their draws."""
    names = sorted(sums)
    tops, bottoms = (replicates(partition(Scores.of(part, names)), "traces") for part in _columns(sums))
    return tops / bottoms


def middle(draws: Floats) -> Interval:
    """The percentile interval of bootstrap draws."""
    low, high = np.quantile(draws, [0.5 - CONFIDENCE / 2, 0.5 + CONFIDENCE / 2])
    return Interval(float(low), float(high), "bootstrap over traces")


def _columns(sums: Sums) -> tuple[Floats, Floats]:
    """Numerators and denominators, traces by name."""
    above, below = zip(*(sums[name] for name in sorted(sums)), strict=True)
    return np.array(above), np.array(below)


def _record(key: Key, found: Ratio, layer: int | None) -> dict[str, object]:
    condition, name, parameter = key
    return {
        "condition": condition,
        "measure": name,
        "parameter": parameter,
        **({} if layer is None else {"layer": layer}),
        "value": found.value,
        "low": found.interval.low if found.interval else None,
        "high": found.interval.high if found.interval else None,
        "count": found.count,
        "traces": found.traces,
    }


# -- tables ----------------------------------------------------------------------------------------------------------


def tables(found: Diagnostics, horizon: int) -> list[Table]:
    """What conditions hold, then the paper's tables 14 to 16, Eq. 15 and 19, and moves between tiers; empty ones left
    out."""
    made = [_holds(found), _missed(found, horizon), _mass(found), _agreement(found), _lir(found), _lagged(found)]
    return [table for table in (*made, _moves(found)) if table.rows]


def _holds(found: Diagnostics) -> Table:
    rows = [_row(label, [*_held(found.held[label]), *_cells(found, label, ["churn"])]) for label in found.conditions]
    caption = (
        "Windows per layer; bytes as shares of the full cache at the end of a trace: charged by the method's own rule "
        "after an event, and held at the peak. Churn (Eq. 14) per routing event, per cent."
    )
    columns = ("K_f", "K_q", "charged", "held", "churn")
    return _table(f"Conditions, {len(found.traces)} traces", columns, rows, caption)


def _missed(found: Diagnostics, horizon: int) -> Table:
    rows = [_row(label, _cells(found, label, MISSED)) for label in found.conditions]
    caption = (
        f"Eq. 13 with H = {horizon}, per cent, by head; whole horizons: without the last events; without sinks: of the "
        "windows' mass alone; by layer: mass averaged over heads first; Q unreadable: as if that tier were gone."
    )
    return _table("Future missed mass", list(MISSED.values()), rows, caption)


def _mass(found: Diagnostics) -> Table:
    rows = [
        _row(f"{label}{aside}", _cells(found, label, [f"{prefix}_{tier}" for tier in TIERS]))
        for label in found.conditions
        for prefix, aside in (("mass", ""), ("decode_mass", " decoding"))
    ]
    caption = "Eq. 15, per cent of the windows' full-cache scores; decoding: without the prompt's."
    return _table("Tier mass", TIERS, rows, caption)


def _agreement(found: Diagnostics) -> Table:
    rows = [
        _row(label, _cells(found, label, AGREEMENT, _digits))
        for label in found.conditions
        if found.get(label, "qsa") is not None
    ]
    return _table(
        "Agreement of quantised scores with the full cache's",
        list(AGREEMENT.values()),
        rows,
        "Eq. 16 and 17, by layer. Both begin with the prompt's exact scores; decoding: without them.",
    )


def _lir(found: Diagnostics) -> Table:
    least = sorted({m for label in found.conditions for who in WHO for m in found.parameters(label, f"lir_{who}")})
    rows = []
    for label, who in _selections(found, "lir"):
        cells = [_cell(found.get(label, f"lir_{who}", m)) for m in least]
        away = found.absence(label, who)
        rows.append(_row(f"{label} {who}", [*cells, Cell(NOTHING if away is None else f"{away:g}")]))
    return _table(
        "Global LIR",
        [*(f"m = {m}" for m in least), "median absence"],
        rows,
        "Eq. 18, per cent of inactive episodes of at least m events that end. Absence in events, of windows that came "
        "back after at least three.",
    )


def _lagged(found: Diagnostics) -> Table:
    lags = sorted({lag for label in found.conditions for who in WHO for lag in found.parameters(label, f"p01_{who}")})
    rows = [
        _row(f"{label} {who} {name}", [_cell(found.get(label, f"{key}_{who}", lag)) for lag in lags])
        for label, who in _selections(found, "p01")
        for key, name in (("p01", "in"), ("p10", "out"))
    ]
    columns = [f"lag {lag}" for lag in lags]
    return _table("Lagged transitions", columns, rows, "Eq. 19, per cent, by lag in events: P01 is in, P10 is out.")


def _moves(found: Diagnostics) -> Table:
    def counted(label: str, name: str) -> Cell:
        one = found.get(label, name)
        return Cell(NOTHING) if one is None else Cell(f"{one.count:.0f}", f"({points(one.value)}%)")

    rows = [_row(label, [counted(label, name) for name in MOVES]) for label in found.conditions]
    caption = (
        "Moves at consecutive events, all layers and traces together, and their share of what could move from there."
    )
    return _table("Moves between tiers", list(MOVES.values()), rows, caption)


def _selections(found: Diagnostics, name: str) -> list[tuple[str, str]]:
    return [(label, who) for label in found.conditions for who in WHO if found.parameters(label, f"{name}_{who}")]


def _held(held: Sequence[Held]) -> list[Cell]:
    if not held:
        return [Cell(NOTHING)] * 4
    windows = [str(held[0].full_windows), str(held[0].quantized_windows)]
    bytes_ = [share(max(getattr(one, name) for one in held)) for name in ("charged_share", "peak_share")]
    return [Cell(text) for text in (*windows, *bytes_)]


def _cells(
    found: Diagnostics, label: str, names: Iterable[str], form: Callable[[float | None], str] = points
) -> list[Cell]:
    return [_cell(found.get(label, name), form) for name in names]


def _cell(found: Ratio | None, form: Callable[[float | None], str] = points) -> Cell:
    return Cell(NOTHING) if found is None else Cell(form(found.value), brackets(found.interval, form))


def _digits(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.4f}"


def _row(label: str, cells: Sequence[Cell]) -> Row:
    return Row((Cell(label), *cells))


def _table(title: str, columns: Sequence[str], rows: Sequence[Row], caption: str) -> Table:
    return Table(title, (Column("", numeric=False), *(Column(name) for name in columns)), tuple(rows), caption)
