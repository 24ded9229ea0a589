"""One actor as the driver sees it: what it is doing, since when, and for how long it may."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, Literal

from pipeline.spec import Cluster
from pipeline.work import Work


@dataclass
class Slot:
    """``waiting`` is a reference, or the stream of a running job. ``since``: the last sign of life in this phase."""

    actor: Any
    waiting: Any
    phase: Literal["starting", "idle", "loading", "running", "suspect"] = "starting"
    since: float = field(default_factory=time.monotonic)
    entered: float = field(default_factory=time.monotonic)
    model: str | None = None
    node: str | None = None
    around: frozenset[str] = frozenset()
    """The nodes that were there when it was asked for: where it starts is known only once it has."""
    work: Work | None = None
    probed: float = 0.0
    short: bool = False
    """Whether it has run out of memory before: something of that may be held still."""
    condemned: str = ""
    """Why the driver itself stopped this actor."""

    def enter(self, phase: Literal["idle", "loading", "running", "suspect"], waiting: Any = None) -> None:
        self.phase, self.waiting = phase, waiting
        self.since = self.entered = time.monotonic()

    @property
    def age(self) -> float:
        return time.monotonic() - self.since

    def overdue(self, cluster: Cluster) -> str:
        """What it has exceeded, if anything."""
        stall, limit = cluster.stall_timeout_s, cluster.job_timeout_s
        if self.phase == "running" and stall is not None and self.age > stall:
            return f"no row for {stall:g} s (stall_timeout_s)"
        if self.phase in ("loading", "running") and limit is not None and time.monotonic() - self.entered > limit:
            return f"not done after {limit:g} s (job_timeout_s)"
        return ""
