"""Plots as inline SVG: no script, no link, and readable on light and dark pages alike.

Ink is drawn in ``currentColor``, methods in colours of middle lightness. Every point tells its figures on hover.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from io import StringIO
from typing import TYPE_CHECKING, Any

from pipeline.figures import bounds, difference, full_name, points, share
from pipeline.results import Board, Result
from pipeline.stats import Comparison, Interval, Macro

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK = "#0a0b0c"
"""Stands for the page's own text colour until the SVG is written."""
COLOURS = (
    *("#3f83c9", "#e07b39", "#3a9d6e", "#c9504a", "#8a6fc9"),
    *("#a1785a", "#d070b0", "#7f8794", "#b5a22e", "#2fa5b5"),
)
MARKERS = "os^Dv"
MARKER_SHAPES = {
    "o": "<circle cx='14' cy='6' r='3.6'/>",
    "s": "<rect x='10.6' y='2.6' width='6.8' height='6.8'/>",
    "^": "<path d='M14 1.8 18 9.4H10z'/>",
    "D": "<path d='M14 1.4 18.4 6 14 10.6 9.6 6z'/>",
    "v": "<path d='M14 10.2 18 2.6H10z'/>",
}
STYLE = {
    "svg.fonttype": "none",
    "text.parse_math": False,
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.6,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": INK,
    "grid.alpha": 0.12,
    "grid.linewidth": 0.6,
}
COLUMNS = 4
PIXELS_PER_INCH = 108
"""So that letters have one size in all figures, and no figure grows beyond it."""
TIP = "tip"
"""Marks the artists that get a title, in the order in which they are drawn."""


@dataclass(frozen=True)
class Look:
    """How a method is drawn, everywhere on the page."""

    colour: str
    marker: str
    line: str


def looks(labels: Iterable[str]) -> dict[str, Look]:
    """A look per method: ten colours, five markers, dashes from the eleventh on."""
    return {
        label: Look(COLOURS[index % 10], MARKERS[index % 5], ("-", "--", ":")[index // 10 % 3])
        for index, label in enumerate(labels)
    }


def legend(drawn: Mapping[str, Look]) -> str:
    """Methods with their looks, as HTML that wraps."""
    dashes = {"-": "", "--": " stroke-dasharray='5 3'", ":": " stroke-dasharray='1.5 2.5'"}
    items = [
        f"<li><svg width='28' height='12' viewBox='0 0 28 12' aria-hidden='true' fill='{look.colour}'>"
        f"<path d='M0 6H28' stroke='{look.colour}' stroke-width='1.6'{dashes[look.line]}/>{MARKER_SHAPES[look.marker]}"
        f"</svg>{escape(label)}</li>"
        for label, look in drawn.items()
    ]
    return f"<ul class='legend'>{''.join(items)}</ul>"


def quality_against_memory(board: Board, drawn: Mapping[str, Look]) -> str | None:
    """Macro-average with its interval against the share of the full cache held at peak; None with nothing to draw."""
    if not any(result.macro.value is not None and result.memory for result in board.results):
        return None

    def draw(figure: Figure, tips: list[str]) -> None:
        axes = figure.subplots()
        axes.set_xlabel("KV cache held at its peak, share of the full cache")
        axes.set_ylabel("Macro score")
        _curves(axes, tips, board, drawn, lambda result: (result.macro.value, result.macro.interval), bars=True)

    return svg(draw, (9.0, 4.4), f"Macro score against measured KV share: {board.condition.model}")


def quality_against_time(board: Board, drawn: Mapping[str, Look], timing: str) -> str | None:
    """Macro-average against seconds per sample, from one kind of run; the full cache as a star."""
    places = [
        (one, cost.prefill_s + cost.compress_s + cost.decode_s)
        for one in board.results
        for cost in one.costs
        if cost.timing == timing and one.macro.value is not None
    ]
    if len(places) < 2:
        return None

    def draw(figure: Figure, tips: list[str]) -> None:
        axes = figure.subplots()
        axes.set_xlabel("Seconds per sample: prefill, compression and decoding, medians")
        axes.set_ylabel("Macro score")
        for result, taken in places:
            look = drawn.get(result.label, Look(INK, "*", "-"))
            value, interval = 100 * (result.macro.value or 0.0), result.macro.interval
            if interval is not None:
                ends = [100 * interval.low, 100 * interval.high]
                axes.plot([taken, taken], ends, color=look.colour, linewidth=1, alpha=0.45, solid_capstyle="butt")
            axes.plot(
                taken, value, look.marker, color=look.colour, markersize=5 if look.colour != INK else 9,
                markeredgewidth=0, gid=TIP,
            )  # fmt: skip
            tips.append(f"{full_name(result)}: {points(result.macro.value)} {bounds(interval)}, {taken:.3g} s")
            axes.annotate(
                result.configuration.budget, (taken, value), (4, 4), textcoords="offset points", fontsize=7, alpha=0.75
            )
        axes.margins(x=0.12)

    return svg(draw, (9.0, 3.6), f"Macro score against time, {timing} runs: {board.condition.model}")


def task_curves(board: Board, drawn: Mapping[str, Look]) -> str | None:
    """Small multiples: each task's score against the share of the full cache held at peak; None for one task, whose
    score is the macro-average."""
    tasks = [task for task in board.tasks if any(result.tasks[task].estimate for result in board.results)]
    if not tasks or len(board.tasks) < 2:
        return None
    columns = min(COLUMNS, len(tasks))
    rows = -(-len(tasks) // columns)

    def draw(figure: Figure, tips: list[str]) -> None:
        grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
        for axes, task in zip(grid.flat, tasks, strict=False):
            axes.set_title(task, loc="left")
            _curves(axes, tips, board, drawn, _score_of(task), bars=len(drawn) <= 5)
        for axes in list(grid.flat)[len(tasks) :]:
            axes.set_visible(False)
        for column in range(columns):
            lowest = [axes for axes in grid[:, column] if axes.get_visible()][-1:]
            for axes in lowest:
                axes.tick_params(labelbottom=True)
        figure.supxlabel("KV cache held at its peak, share of the full cache", fontsize=9)

    return svg(draw, (2.5 * columns, 0.5 + 1.75 * rows), f"Scores by task: {board.condition.model}")


def differences_to_full(board: Board, drawn: Mapping[str, Look]) -> str | None:
    """Paired differences to the full cache with their intervals: methods down, a panel per budget."""
    compared = [(one, one.against_full) for one in board.results if one.against_full]
    compared = [(one, comparison) for one, comparison in compared if comparison.macro.value is not None]
    if not compared:
        return None
    budgets = [budget for budget in board.budgets if any(one.configuration.budget == budget for one, _ in compared)]
    labels = [label for label in drawn if any(one.label == label for one, _ in compared)]

    def draw(figure: Figure, tips: list[str]) -> None:
        panels = figure.subplots(1, len(budgets), sharex=True, sharey=True, squeeze=False)[0]
        for axes, budget in zip(panels, budgets, strict=True):
            axes.set_title(budget, loc="left")
            axes.axvline(0, color=INK, linewidth=0.8)
            for result, comparison in compared:
                if result.configuration.budget == budget:
                    _difference(axes, labels.index(result.label), comparison.macro, drawn[result.label])
                    tips.append(f"{full_name(result)}: {_words(comparison)}")
        panels[0].set_yticks(range(len(labels)), labels)
        panels[0].set_ylim(len(labels) - 0.4, -0.6)
        figure.supxlabel("Difference to the full cache, points", fontsize=9)

    width = min(10.0, 2.4 + 2.0 * len(budgets))
    return svg(draw, (width, 0.9 + 0.24 * len(labels)), f"Differences to the full cache: {board.condition.model}")


def _score_of(task: str) -> Callable[[Result], tuple[float | None, Interval | None]]:
    def score(result: Result) -> tuple[float | None, Interval | None]:
        estimate = result.tasks[task].estimate
        return (estimate.value, estimate.interval) if estimate else (None, None)

    return score


def _curves(
    axes: Axes,
    tips: list[str],
    board: Board,
    drawn: Mapping[str, Look],
    score: Callable[[Result], tuple[float | None, Interval | None]],
    bars: bool,
) -> None:
    """One curve per method, the full cache as a level with its interval as a band."""
    level, band = score(board.baseline) if board.baseline else (None, None)
    if level is not None:
        axes.axhline(100 * level, color=INK, linewidth=0.9, linestyle=(0, (4, 2)))
    if band is not None:
        axes.axhspan(100 * band.low, 100 * band.high, color=INK, alpha=0.06, linewidth=0)
    shares = []
    step = min(0.012, 0.14 / max(len(drawn) - 1, 1))
    for place, (label, look) in enumerate(drawn.items()):
        results = [one for one in board.results if one.label == label and one.memory and score(one)[0] is not None]
        results.sort(key=lambda result: result.memory.share_peak if result.memory else 0.0)
        aside = 1 + step * (place - (len(drawn) - 1) / 2)
        spots = [(one, one.memory.share_peak) for one in results if one.memory and one.memory.share_peak > 0]
        shares += [held for _, held in spots]
        values = [100 * (score(one)[0] or 0.0) for one, _ in spots]
        x = [100 * held * aside for _, held in spots]
        axes.plot(x, values, color=look.colour, linestyle=look.line, linewidth=1.1, alpha=0.85)
        for (result, held), at, value in zip(spots, x, values, strict=True):
            interval = score(result)[1]
            if bars and interval is not None:
                ends = [100 * interval.low, 100 * interval.high]
                axes.plot([at, at], ends, color=look.colour, linewidth=1, alpha=0.55, solid_capstyle="butt")
            axes.plot(at, value, look.marker, color=look.colour, markersize=4, markeredgewidth=0, gid=TIP)
            tips.append(f"{full_name(result)}: {points(score(result)[0])} {bounds(interval)}, KV {share(held)}")
    share_axis(axes, shares)


def share_axis(axes: Axes, shares: Sequence[float]) -> None:
    """Percent, on a logarithmic scale where budgets span more than a factor of four, else with room on both sides."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

    if shares and max(shares) > 4 * min(shares):
        axes.set_xscale("log")
        ticks = [1, 2, 5, 10, 20, 50, 100]
        least, most = 100 * min(shares) * 0.8, 100 * max(shares) * 1.25
        axes.xaxis.set_major_locator(FixedLocator([tick for tick in ticks if least <= tick <= most]))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xlim(least, most)
    else:
        if shares:
            axes.set_xlim(100 * min(shares) * 0.85, 100 * max(shares) * 1.15)
        axes.xaxis.set_major_locator(MaxNLocator(4))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}%"))


def _difference(axes: Axes, row: int, macro: Macro, look: Look) -> None:
    if macro.interval is not None:
        ends = [100 * macro.interval.low, 100 * macro.interval.high]
        axes.plot(ends, [row, row], color=look.colour, linewidth=1.6, alpha=0.6, solid_capstyle="butt")
    at = 100 * (macro.value or 0.0)
    axes.plot(at, row, look.marker, color=look.colour, markersize=5, markeredgewidth=0, gid=TIP)


def _words(comparison: Comparison) -> str:
    macro = comparison.macro
    return f"{difference(macro.value)} {bounds(macro.interval, difference)}, {comparison.verdict}"


def svg(draw: Callable[[Figure, list[str]], None], inches: tuple[float, float], about: str) -> str:
    """Draw a figure and write it as SVG that can stand inside a page. ``draw`` adds the tips of the points it draws."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    style: Any = {**STYLE, "svg.hashsalt": about}
    tips: list[str] = []
    text = StringIO()
    with rc_context(style):
        figure = Figure(figsize=inches, layout="constrained")
        draw(figure, tips)
        figure.savefig(text, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    return _inline(text.getvalue(), tips, about, round(PIXELS_PER_INCH * inches[0]))


def _inline(svg: str, tips: Sequence[str], about: str, widest: int) -> str:
    """Without prologue, links and size; ids made unique on the page; ink in the page's colour; tips as titles."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", svg, flags=re.DOTALL)
    svg = re.sub(r"\s(xmlns(:xlink)?|version|width|height)=\"[^\"]*\"", "", svg, count=5)
    svg = svg.replace("xlink:href", "href").replace(INK, "currentColor")
    for words in tips:
        svg = svg.replace(f'<g id="{TIP}">', f"<g><title>{escape(words)}</title>", 1)
    mark = f"p{zlib.crc32(svg.encode()):x}"
    svg = re.sub(r'(id="|href="#|url\(#)', rf"\g<1>{mark}-", svg)
    start = f"<svg role='img' aria-label='{escape(about)}' class='plot' style='max-width:{widest}px'"
    return svg.replace("<svg", start, 1)
