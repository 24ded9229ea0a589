"""Scorers: utilities of prompt tokens, higher = keep. Found by a method's name, so methods rank with each other's."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from torch import Tensor

from kvcache.method import Observations
from kvcache.prefill import Prefill


@runtime_checkable
class Scorer(Protocol):
    """A method that scores prompt tokens."""

    def observes(self) -> Observations: ...

    def scores(self, prefill: Prefill, seed: str) -> list[Tensor]:
        """One [H_kv, n] fp32 tensor per growing layer."""
