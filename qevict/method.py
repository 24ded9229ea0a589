"""QEvict (arXiv 2608.05326): windows of the cache live in full precision, in a recoverable low-bit tier, or nowhere.

    sinks | F F Q E Q Q E F ... | recent      one state per window and layer, for all heads alike

Scores are cumulative attention (Eq. 1); every ``window`` generated tokens the windows outside sinks and recent region
are ranked and routed anew (Eq. 4 and 5). F and Q exchange freely, with codes written once; E is final.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import TYPE_CHECKING, Any, ClassVar

from kvcache.budget import ResolvedBudget
from kvcache.layout import CacheLayout
from kvcache.method import Method, Observations
from qevict.capacity import Accounting, Capacities, capacities

if TYPE_CHECKING:
    from torch import Tensor

    from kvcache.pool import Compressed, FamilyPool, PoolShape
    from kvcache.prefill import Prefill


@dataclass(frozen=True)
class QEvict(Method):
    """Settings with the paper's names and defaults (§5, App. B.5).

    window: Ω, tokens per window and per routing interval.
    sinks, recent: protected first and last tokens, always in full precision.
    quantized_share: q, the share of the historical budget given to the low-bit tier.
    bits: of the low-bit tier, 2 or 4.
    accounting: what the budget must cover, see :mod:`qevict.capacity`.
    """

    name: ClassVar[str] = "qevict"
    version: ClassVar[int] = 1
    bounded: ClassVar[bool] = True

    window: int = 8
    sinks: int = 5
    recent: int = 32
    quantized_share: float = 0.7
    bits: int = 2
    accounting: Accounting = "strict"

    def __post_init__(self) -> None:
        if self.window < 1 or self.sinks < 0 or self.recent < 1:
            raise ValueError("window and recent must be at least 1, sinks at least 0")
        if self.window > 255:
            raise ValueError(f"a window has at most 255 tokens, not {self.window}")
        if not 0 <= self.quantized_share <= 1:
            raise ValueError(f"quantized_share is between 0 and 1, not {self.quantized_share}")
        if self.bits not in (2, 4):
            raise ValueError(f"bits is 2 or 4, not {self.bits}")
        if self.quantized_share > 0 and self.window * self.bits % 8:
            raise ValueError(f"a window of {self.window} tokens at {self.bits} bits does not fill whole bytes")
        if self.accounting not in ("strict", "paper"):
            raise ValueError(f"accounting is 'strict' or 'paper', not {self.accounting!r}")

    @property
    def family(self) -> str:
        return f"tiered (window {self.window}, sinks {self.sinks}, recent {self.recent}, {self.bits} bits)"

    def observes(self) -> Observations:
        return Observations(column_sums=True)

    def impossible(self, budget: ResolvedBudget, layout: CacheLayout) -> str | None:
        if budget.prompt_tokens <= self.sinks:
            return f"qevict needs a prompt longer than its {self.sinks} sinks, not {budget.prompt_tokens} tokens"
        if len({layout.layers[index] for index in layout.growing}) > 1:
            return "qevict needs growing layers of one shape"
        if self.capacities(budget, layout) is None:
            return (
                f"qevict must hold {self.sinks} sinks and {self.recent} recent tokens"
                f" ({self.accounting} accounting), and {budget.asked} leaves {budget.tokens} tokens"
            )
        return None

    def capacities(self, budget: ResolvedBudget, layout: CacheLayout) -> Capacities | None:
        """K_f and K_q, the same in every layer."""
        return capacities(
            budget,
            min(budget.layer_bytes),
            layout.layers[layout.growing[0]],
            layout.element_bytes,
            window=self.window,
            bits=self.bits,
            sinks=self.sinks,
            recent=self.recent,
            share=Decimal(str(self.quantized_share)),
            accounting=self.accounting,
        )

    def examine(self, prefills: Sequence[Prefill], seeds: Sequence[str]) -> list[Any]:
        return [self.prompt_scores(prefill) for prefill in prefills]

    def prompt_scores(self, prefill: Prefill) -> Tensor:
        """Prompt attention initialises the scores (§4.2): each window's column sums, mean over query heads. [L, W]

        Windows count from the end of the sinks; the last one may be incomplete and is scored as far as it goes.
        """
        import torch
        from torch.nn.functional import pad

        sums = torch.stack([layer.column_sums.mean(0) for layer in prefill.layers if layer.column_sums is not None])
        history = sums[:, self.sinks :]
        return pad(history, (0, -history.shape[1] % self.window)).unflatten(1, (-1, self.window)).sum(-1)

    def compress(self, prefill: Prefill, budget: ResolvedBudget, examined: Any) -> Compressed:
        from qevict.pool import TieredCompressed

        room = self.capacities(budget, prefill.layout)
        assert room is not None, "an impossible budget is refused before compression"
        return TieredCompressed(prefill, examined, budget, room)

    def new_pool(self, shape: PoolShape) -> FamilyPool:
        from qevict.pool import TieredPool

        return TieredPool(shape, self.window, self.sinks, self.recent, self.bits)
