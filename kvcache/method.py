"""What a KV-cache method is: its settings, what it asks prefill to record, and what it keeps.

A method is a frozen dataclass; its fields are the settings of its paper and go into the hash of every cell that uses
it. Settings import no torch: planning reads them. The tensors live in the functions that ``compress`` calls.
"""

from __future__ import annotations

import dataclasses
import difflib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from kvcache.budget import ResolvedBudget
from kvcache.layout import CacheLayout

if TYPE_CHECKING:
    from kvcache.pool import Compressed, FamilyPool, PoolShape
    from kvcache.prefill import Prefill

ENTRY_POINTS = "kvsweep.methods"


@dataclass(frozen=True)
class Observations:
    """What prefill records on the way: the last ``queries`` rotated queries of every growing layer, the attention that
    every key received from all prompt queries (``column_sums``), mean and covariance of all queries but the first k,
    before rotation, for every k in ``query_moments``, mean and variance of the hidden states that enter attention
    (``hidden_moments``), and the probe queries (:mod:`kvcache.probes`) of every share in ``probes``."""

    queries: int = 0
    column_sums: bool = False
    query_moments: frozenset[int] = frozenset()
    hidden_moments: bool = False
    probes: frozenset[float] = frozenset()

    def __or__(self, other: Observations) -> Observations:
        return Observations(
            max(self.queries, other.queries),
            self.column_sums or other.column_sums,
            self.query_moments | other.query_moments,
            self.hidden_moments or other.hidden_moments,
            self.probes | other.probes,
        )


@dataclass(frozen=True)
class Method(ABC):
    """A compression method. Subclasses are frozen dataclasses named in the entry-point group ``kvsweep.methods``."""

    name: ClassVar[str]
    version: ClassVar[int]
    """Raised with every change that can move a number: rows of another version are other cells."""
    bounded: ClassVar[bool] = False
    """Whether the method itself keeps generated tokens within the budget."""
    fixed: ClassVar[bool] = False
    """Whether its settings alone say what it holds, so that budgets change nothing: a sweep has one cell of it."""

    @property
    def stochastic(self) -> bool:
        """Whether two seeds can give two results on the same prompt."""
        return False

    def observes(self) -> Observations:
        return Observations()

    def impossible(self, budget: ResolvedBudget, layout: CacheLayout) -> str | None:
        """Why this budget cannot be met, in words, or None. Torch-free: ``plan`` asks."""
        return None

    def examine(self, prefills: Sequence[Prefill], seeds: Sequence[str]) -> list[Any]:
        """What does not depend on the budget (scores, lookahead): once per prompt, given to every ``compress``.

        Several prompts at once, so that extra forward passes can share their products; the result for a prompt does
        not depend on the others.
        """
        return [None] * len(prefills)

    def peak_bytes(self, budget: ResolvedBudget, layout: CacheLayout) -> int:
        """The most that a row's cache holds: its budget, and new tokens where the method adds them to it. Torch-free:
        ``plan`` asks."""
        grown = 0 if self.bounded or budget.base == "prompt+max_new" else layout.full_bytes(budget.new_tokens)
        return min(budget.total_bytes + grown, layout.full_bytes(budget.prompt_tokens + budget.new_tokens))

    def workspace_bytes(self, budget: ResolvedBudget, layout: CacheLayout) -> int:
        """What copies that outlive a step take on a CPU, beside a row's cache, at most. Torch-free: ``plan`` asks."""
        return 0

    def fitted(self, model: str, source: str, folder: Path) -> Method:
        """This method with what was calibrated for a model: by its fingerprint, among the files of ``folder``. Raises
        :class:`NotCalibrated`, whose text names the command that would do it for ``source``. Torch-free: ``plan`` asks.
        """
        return self

    @abstractmethod
    def compress(self, prefill: Prefill, budget: ResolvedBudget, examined: Any) -> Compressed:
        """What to keep of a prompt, and in which form."""

    @property
    @abstractmethod
    def family(self) -> str:
        """The storage family; rows of one family share a pool."""

    @abstractmethod
    def new_pool(self, shape: PoolShape) -> FamilyPool:
        """An empty pool of this method's storage family."""

    def settings(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @property
    def identity(self) -> list[Any]:
        """Everything about the method that can change a number: what a cell's hash takes of it."""
        return [self.name, self.version, self.settings()]


class NotCalibrated(ValueError):
    """A method needs a calibration of the model that is not there, or another than the one it was given."""


class UnknownMethod(ValueError):
    """A method name that no installed package provides."""


@cache
def _registered() -> dict[str, Any]:
    return {point.name: point for point in entry_points(group=ENTRY_POINTS)}


def method_names() -> list[str]:
    return sorted(_registered())


def method_class(name: str) -> type[Method]:
    """The class registered under ``name``; raises :class:`UnknownMethod` naming the nearest ones."""
    points = _registered()
    if name not in points:
        near = difflib.get_close_matches(name, points, n=3)
        hint = f"did you mean {', '.join(near)}?" if near else f"known methods: {', '.join(sorted(points))}"
        if not points:
            hint = "no methods are registered: install the package (pip install -e .)"
        raise UnknownMethod(f"unknown method {name!r}; {hint}")
    return points[name].load()
