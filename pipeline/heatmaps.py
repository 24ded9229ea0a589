"""Heat maps, every value written out.

Of needle grids: depths down, lengths across, a panel per method and budget. Of tasks: methods and budgets down, tasks
across, coloured by the difference to the full cache.

Cividis goes from dark blue to yellow in even steps of lightness, so it reads without colour vision and in print.
"""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

from pipeline.breakdown import Grid, Panel
from pipeline.figures import NOTHING, bounds, difference, full_name, points
from pipeline.plots import COLUMNS, INK, TIP, svg
from pipeline.results import Board, TaskResult
from pipeline.tables import ranked

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

CELLS_ACROSS = 40
"""Cells side by side that values can still be read in."""
DARK, LIGHT = "#101418", "#fdfdfd"
DARK_TEXT_ABOVE = 0.2
"""The luminance from which dark text has more contrast than light text."""
MOST_TICKS = 12
FULL_COLOUR_AT = 0.5
"""Of a difference in score."""


def task_map(board: Board) -> str | None:
    """Scores by task: red below the full cache on that task, blue above, by the number of points; None for one task.

    Without a full cache to compare with, cividis by score.
    """
    rows = [result for result in ranked(board) if result.scored]
    if len(board.tasks) < 2 or not rows:
        return None
    names = [full_name(result) for result in rows]

    def draw(figure: Figure, tips: list[str]) -> None:
        axes = figure.subplots()
        for y, (result, name) in enumerate(zip(rows, names, strict=True)):
            for x, task in enumerate(board.tasks):
                _task_cell(axes, x, y, board, result.tasks[task])
                tips.append(_task_words(name, board, result.tasks[task]))
        axes.set_xlim(-0.5, len(board.tasks) - 0.5)
        axes.set_ylim(len(rows) - 0.5, -0.5)
        axes.set_xticks(
            range(len(board.tasks)), board.tasks, fontsize=7.5, rotation=35, ha="left", rotation_mode="anchor"
        )
        axes.xaxis.tick_top()
        axes.set_yticks(range(len(rows)), [textwrap.shorten(name, 44) for name in names], fontsize=7.5)
        axes.tick_params(length=0)
        axes.grid(visible=False)
        axes.spines[:].set_visible(False)

    width = min(10.0, 2.8 + 0.62 * len(board.tasks))
    return svg(
        draw, (width, 1.1 + 0.23 * len(rows)), f"Scores by task, against the full cache: {board.condition.model}"
    )


def _task_cell(axes: Axes, x: int, y: int, board: Board, task: TaskResult) -> None:
    if task.estimate is None:
        _cell(axes, x, y, f"({points(task.partial)})" if task.partial is not None else NOTHING, None)
        return
    gap = _gap(board, task)
    colour = _colour(task.estimate.value) if gap is None else _diverging(gap)
    _cell(axes, x, y, points(task.estimate.value), colour)


def _task_words(name: str, board: Board, task: TaskResult) -> str:
    if task.estimate is None:
        return f"{name}, {task.task}: {task.state}, {task.scored} of {task.expected}"
    gap = _gap(board, task)
    words = f"{name}, {task.task}: {points(task.estimate.value)} {bounds(task.estimate.interval)}"
    return words if gap is None else f"{words}, {difference(gap)} to the full cache"


def _gap(board: Board, task: TaskResult) -> float | None:
    full = board.baseline.tasks[task.task].estimate if board.baseline else None
    return None if full is None or task.estimate is None else task.estimate.value - full.value


def _diverging(gap: float) -> tuple[float, float, float]:
    """Red to blue over a pale middle; ``FULL_COLOUR_AT`` of difference has the full colour."""
    from matplotlib import colormaps

    return colormaps["RdBu"](0.5 + 0.42 * max(-1.0, min(1.0, gap / FULL_COLOUR_AT)))[:3]


def heat_map(grid: Grid) -> str:
    """All panels of a grid, the full cache first."""
    columns = max(1, min(COLUMNS, CELLS_ACROSS // len(grid.lengths)))
    rows = -(-len(grid.panels) // columns)

    def draw(figure: Figure, tips: list[str]) -> None:
        places = figure.subplots(rows, columns, squeeze=False)
        for axes, panel in zip(places.flat, grid.panels, strict=False):
            _panel(axes, grid, panel, tips)
        for axes in list(places.flat)[len(grid.panels) :]:
            axes.set_visible(False)
        figure.supxlabel("Context, tokens", fontsize=9)
        figure.supylabel("Depth of the needle, per cent", fontsize=9)

    height = 0.4 + rows * (0.75 + 0.17 * len(grid.depths))
    return svg(draw, (10.0, height), f"{grid.task}, depth by length: {grid.condition.model}")


def _panel(axes: Axes, grid: Grid, panel: Panel, tips: list[str]) -> None:
    name = full_name(panel.result)
    mean = "incomplete" if panel.mean is None else f"mean {points(panel.mean)}"
    axes.set_title(f"{textwrap.fill(name, 34)}\n{mean}", loc="left", fontsize=8.5)
    for x, length in enumerate(grid.lengths):
        for y, depth in enumerate(grid.depths):
            part = panel.parts.get((length, depth))
            here = f"{name}, {length:,} tokens, depth {depth:g}%"
            if part is None:
                _cell(axes, x, y, NOTHING, None)
                tips.append(f"{here}: no sample")
                continue
            unfinished = length in panel.open_lengths
            text = f"{100 * part.value:.0f}"
            _cell(axes, x, y, f"({text})" if unfinished else text, None if unfinished else _colour(part.value))
            tips.append(f"{here}: {points(part.value)}, n = {part.samples}{' so far' if unfinished else ''}")
    axes.set_xlim(-0.5, len(grid.lengths) - 0.5)
    axes.set_ylim(len(grid.depths) - 0.5, -0.5)
    axes.set_xticks(range(len(grid.lengths)), [_length(length) for length in grid.lengths], fontsize=7.5)
    every = -(-len(grid.depths) // MOST_TICKS)
    axes.set_yticks(range(0, len(grid.depths), every), [f"{depth:g}" for depth in grid.depths[::every]], fontsize=7.5)
    axes.tick_params(length=0)
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)


def _cell(axes: Axes, x: int, y: int, text: str, colour: tuple[float, float, float] | None) -> None:
    """Filled, or a frame alone where there is no value to stand beside others."""
    from matplotlib.patches import Rectangle

    box = Rectangle((x - 0.48, y - 0.46), 0.96, 0.92, gid=TIP, facecolor=colour or "none", linewidth=0)
    if colour is None:
        box.set(edgecolor=INK, linewidth=0.5, linestyle=(0, (2, 2)))
    axes.add_patch(box)
    ink = INK if colour is None else DARK if _luminance(colour) > DARK_TEXT_ABOVE else LIGHT
    axes.text(x, y, text, ha="center", va="center", fontsize=7, color=ink)


def _colour(value: float) -> tuple[float, float, float]:
    from matplotlib import colormaps

    return colormaps["cividis"](value)[:3]


def _luminance(colour: tuple[float, float, float]) -> float:
    """WCAG's relative luminance of an sRGB colour."""
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in colour)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def _length(length: int) -> str:
    if not length:
        return "own"
    return f"{length // 1024}K" if length % 1024 == 0 else f"{length:,}"
