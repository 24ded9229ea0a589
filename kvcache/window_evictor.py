"""What SnapKV shares with the methods that build on its score: settings, what they observe, what they protect."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from kvcache.evict import PromptEvictor
from kvcache.method import Observations

if TYPE_CHECKING:
    from torch import Tensor

    from kvcache.prefill import Prefill

Safeguard = Literal["blend", "force"]


@dataclass(frozen=True)
class WindowEvictor(PromptEvictor):
    """The last ``window`` queries score and are kept; their attention is pooled over ``kernel`` neighbours (§4.2 of
    SnapKV, arXiv 2404.14469). Defaults are those of SnapKV's LongBench runs."""

    window: int = 32
    kernel: int = 7
    pooling: Literal["max", "avg"] = "max"

    def __post_init__(self) -> None:
        if self.window < 1 or self.kernel < 1 or self.kernel % 2 == 0:
            raise ValueError(
                f"window must be at least 1 and kernel odd, not window={self.window}, kernel={self.kernel}"
            )
        if self.pooling not in ("max", "avg"):
            raise ValueError(f"pooling is 'max' or 'avg', not {self.pooling!r}")

    @property
    def protected_ends(self) -> tuple[int, int]:
        return 0, self.window

    def observes(self) -> Observations:
        return Observations(queries=self.window)

    def scores(self, prefill: Prefill, seed: str) -> list[Tensor]:
        from kvcache.window import pooled_window_scores

        settings = self.window, self.kernel, self.pooling
        return [pooled_window_scores(layer, prefill.tokens, *settings) for layer in prefill.layers]

    def head_budgets(self, scores: Tensor, each: int, window: int) -> list[int]:
        """What each head of a layer keeps beside the window, ``each`` in the mean. scores [H_kv, n - w] -> [H_kv]"""
        return [each] * len(scores)


@dataclass(frozen=True)
class AdaptiveHeads(WindowEvictor):
    """AdaKV's head budgets (arXiv 2407.11550): ``alpha`` is the safeguard, 0.2 as in the authors' runs, and
    ``safeguard`` which of its two definitions holds; see :func:`kvcache.allocate.head_budgets`."""

    alpha: float = 0.2
    safeguard: Safeguard = "blend"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.alpha <= 1:
            raise ValueError(f"alpha is between 0 and 1, not {self.alpha}")
        if self.safeguard not in get_args(Safeguard):
            raise ValueError(f"safeguard is {' or '.join(map(repr, get_args(Safeguard)))}, not {self.safeguard!r}")

    def head_budgets(self, scores: Tensor, each: int, window: int) -> list[int]:
        from kvcache.allocate import head_budgets

        return head_budgets(scores, each, window, self.alpha, self.safeguard)
