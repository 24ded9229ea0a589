"""Figures and page of the diagnostics: the paper's Figure 1, and every table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING

from pipeline import plots, render
from pipeline.diagnostics_summary import TIERS, Diagnostics
from pipeline.figures import brackets, points
from pipeline.page_style import STYLE
from pipeline.table import Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TIER_COLOURS = {"full": "#3f83c9", "quantized": "#3a9d6e", "evicted": "#c9504a", "local": "#7f8794"}


def missed_mass(found: Diagnostics) -> str:
    """Figure 1a: FMM over decoding. Dashed: as if the quantised tier could not be read."""
    looks = plots.looks(found.conditions)

    def draw(figure: Figure, tips: list[str]) -> None:
        axes = figure.subplots()
        axes.set_xlabel("Generated tokens at the routing event")
        axes.set_ylabel("Future missed mass, per cent")
        for label, look in looks.items():
            quantizes = any(one.quantized_windows for one in found.held[label])
            for name, line in (("fmm_by_event", "-"), ("fmm_full_only_by_event", "--"))[: 1 + quantizes]:
                at = found.parameters(label, name)
                ratios = [found.get(label, name, tokens) for tokens in at]
                heights = [100 * one.value for one in ratios if one]
                kind = label if line == "-" else f"{label}, Q unreadable"
                axes.plot(at, heights, color=look.colour, linestyle=line, linewidth=1.2, label=kind)
                if len(at) <= 64:
                    for tokens, one in zip(at, ratios, strict=True):
                        axes.plot(tokens, 100 * one.value if one else 0, ".", color=look.colour, gid=plots.TIP)
                        tips.append(f"{kind}, {tokens} tokens: {points(one.value if one else None)}")
        axes.set_ylim(bottom=0)
        axes.legend(frameon=False, fontsize=8, ncols=2)

    return plots.svg(draw, (8.0, 4.0), "Future missed mass over decoding")


def tier_mass(found: Diagnostics) -> str:
    """Figure 1b: what share of the full cache's attention each tier holds."""

    def draw(figure: Figure, tips: list[str]) -> None:
        axes = figure.subplots()
        for place, label in enumerate(found.conditions):
            start = 0.0
            for tier in TIERS:
                mass = found.get(label, f"mass_{tier}")
                if mass is None:
                    continue
                name = tier if place == 0 else None
                axes.barh(place, 100 * mass.value, left=start, height=0.6, color=TIER_COLOURS[tier], label=name)
                start += 100 * mass.value
                axes.plot(start - 50 * mass.value, place, ".", color="none", gid=plots.TIP)
                tips.append(f"{label}, {tier}: {points(mass.value)} {brackets(mass.interval)}")
        axes.set_yticks(range(len(found.conditions)), found.conditions)
        axes.invert_yaxis()
        axes.set_xlabel("Share of the windows' full-cache attention, per cent")
        axes.legend(frameon=False, fontsize=8, ncols=4, loc="lower center", bbox_to_anchor=(0.5, 1.0))

    return plots.svg(draw, (8.0, 0.9 + 0.4 * len(found.conditions)), "Tier mass")


def alone(inline: str) -> str:
    """A figure as a file of its own."""
    return inline.replace("<svg", "<svg xmlns='http://www.w3.org/2000/svg'", 1)


def page(
    name: str, facts: Mapping[str, object], figures: Mapping[str, str], tables: Sequence[Table], of: str = "QEvict"
) -> str:
    """Figures and tables, without script or links."""
    items = "".join(f"<div><dt>{escape(key)}</dt><dd>{escape(str(value))}</dd></div>" for key, value in facts.items())
    drawn = "".join(f"<figure><figcaption>{escape(title)}</figcaption>{svg}</figure>" for title, svg in figures.items())
    tabled = "".join(f"<section><h2>{escape(table.title)}</h2>{render.html(table)}</section>" for table in tables)
    return (
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        f"<title>{escape(name)} · kvsweep</title><style>{STYLE}</style></head><body>"
        f"<header><p class='kind'>Diagnostics of {escape(of)}</p><h1>{escape(name)}</h1>"
        f"<dl class='facts'>{items}</dl></header>"
        f"<main>{drawn}{tabled}</main></body></html>\n"
    )
