"""Attempts that ended without all their rows. Rows say what came of a sample; these say what it took."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Loss:
    """``what``: a group of cells, or a model that did not load. ``samples`` are those it left without some rows,
    ``rows`` how many. ``counted``: whether it cost one of its tries, as the loss of a node does not."""

    at: float
    what: str
    samples: list[int]
    rows: int
    attempt: int
    reason: str
    counted: bool
    node: str = ""

    def __str__(self) -> str:
        """``vt at 1024, seed 0, on tiny, samples 3, 4, attempt 2: ActorDiedError: ...``"""
        samples = f", samples {', '.join(map(str, self.samples))}" if self.samples else ""
        free = "" if self.counted else " (costs no try)"
        return f"{self.what}{samples}, attempt {self.attempt}: {self.reason}{free}"
