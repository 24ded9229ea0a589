"""Quality against memory by task family with its Pareto front, as in Appendix D of QEvict (arXiv 2608.05326)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from pipeline.families import families_of, family_score, front
from pipeline.figures import full_name, points, share
from pipeline.plots import INK, TIP, Look, share_axis, svg
from pipeline.results import Board, Result

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ACROSS = 3
NARROWEST = 10.0


def family_fronts(board: Board, drawn: Mapping[str, Look]) -> str | None:
    """A panel per family: every configuration at its measured share, those on the front ringed and joined by steps.

    None where there is but one family, which the macro-average shows, or nothing to draw.
    """
    families = {family: tasks for family, tasks in families_of(board).items() if _places(board, tasks)}
    if len(families) < 2:
        return None
    rows = -(-len(families) // ACROSS)

    def draw(figure: Figure, tips: list[str]) -> None:
        grid = list(figure.subplots(rows, ACROSS, sharex=True, squeeze=False).flat)
        for axes, (family, tasks) in zip(grid, families.items(), strict=False):
            axes.set_title(f"{family} ({len(tasks)})" if len(tasks) > 1 else family, loc="left")
            _panel(axes, tips, board, tasks, drawn)
        for place, axes in enumerate(grid):
            axes.set_visible(place < len(families))
            axes.tick_params(labelbottom=place + ACROSS >= len(families))
        figure.supxlabel("KV cache held at its peak, share of the full cache", fontsize=9)
        figure.supylabel("Mean score of the family", fontsize=9)

    return svg(draw, (10.0, 0.5 + 2.3 * rows), f"Pareto fronts by task family: {board.condition.model}")


def _panel(axes: Axes, tips: list[str], board: Board, tasks: Sequence[str], drawn: Mapping[str, Look]) -> None:
    full = family_score(board.baseline, tasks) if board.baseline else None
    if full is not None:
        axes.axhline(100 * full, color=INK, linewidth=0.9, linestyle=(0, (4, 2)))
    places = _places(board, tasks)
    on_front = front([(held, score) for _, held, score in places])
    steps = [places[index] for index in on_front]
    axes.step(
        [100 * held for _, held, _ in steps], [100 * score for _, _, score in steps],
        where="post", color=INK, linewidth=0.9, alpha=0.45,
    )  # fmt: skip
    for index, (result, held, score) in enumerate(places):
        look, best = drawn[result.label], index in on_front
        axes.plot(
            100 * held, 100 * score, look.marker, color=look.colour, markersize=6 if best else 4,
            markeredgecolor=INK, markeredgewidth=0.9 if best else 0, alpha=1 if best else 0.65, gid=TIP,
        )  # fmt: skip
        tips.append(f"{full_name(result)}: {points(score)}, KV {share(held)}{', on the front' if best else ''}")
    _score_axis(axes, [100 * score for _, _, score in places] + ([] if full is None else [100 * full]))
    share_axis(axes, [held for _, held, _ in places])


def _score_axis(axes: Axes, scores: Sequence[float]) -> None:
    """Room around the scores, and a range of ``NARROWEST`` points and more: less is made of nothing."""
    least, most = min(scores), max(scores)
    room = max(0.12 * (most - least), (NARROWEST - (most - least)) / 2)
    axes.set_ylim(max(least - room, -1.0), most + room)


def _places(board: Board, tasks: Sequence[str]) -> list[tuple[Result, float, float]]:
    """(configuration, share held at peak, score): the full cache is the line that they are held against."""
    found = []
    for result in board.results:
        score = family_score(result, tasks)
        if (
            score is not None
            and result.memory
            and result.memory.share_peak > 0
            and not result.configuration.is_baseline
        ):
            found.append((result, result.memory.share_peak, score))
    return found
