"""A table free of any format: what a cell says and how it is meant, never how it is drawn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Tone = Literal["", "better", "worse", "muted", "warning"]
Mark = Literal["", "best", "second"]
"""Bold and underlined in the papers' tables."""


@dataclass(frozen=True)
class Column:
    title: str
    numeric: bool = True
    about: str = ""
    """What the column means, for a reader who asks."""


@dataclass(frozen=True)
class Cell:
    """``text`` is the figure, ``aside`` its interval or its unit's detail."""

    text: str
    aside: str = ""
    tone: Tone = ""
    mark: Mark = ""

    def __str__(self) -> str:
        return f"{self.text} {self.aside}".strip()


@dataclass(frozen=True)
class Row:
    cells: tuple[Cell, ...]
    group: str = ""
    """Rows of one group stand together under its name."""


@dataclass(frozen=True)
class Table:
    title: str
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    caption: str = ""
