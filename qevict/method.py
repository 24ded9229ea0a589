"""QEvict (arXiv 2608.05326): windows of the cache live in full precision, in a recoverable low-bit tier, or nowhere.

    sinks | F F Q E Q Q E F ... | recent      one state per window and layer, for all heads alike

Scores are cumulative attention (Eq. 1); every ``window`` generated tokens the windows outside sinks and recent region
are ranked and routed anew (Eq. 4 and 5). F and Q exchange freely, with codes written once; E is final.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from kvcache.budget import ResolvedBudget
from kvcache.layout import CacheLayout
from kvcache.method import Method, Observations
from qevict.capacity import (
    NORM_BYTES,
    TABLE_BYTES,
    Accounting,
    Capacities,
    Promotion,
    capacities,
    recent_share,
    recent_tokens,
    slots_per_page,
    window_bytes,
)
from qevict.rankers import ranking_method

if TYPE_CHECKING:
    from kvcache.pool import Compressed, FamilyPool, PoolShape
    from kvcache.prefill import Prefill

FirstEviction = Literal["prefill", "first_step", "after_window"]


@dataclass(frozen=True)
class QEvict(Method):
    """Settings with the paper's names and defaults (§5, App. B.5).

    window: Ω, tokens per window and per routing interval.
    sinks, recent: protected first and last tokens, always in full precision; ``recent`` may be a share of the budget's
        tokens, such as 25% (App. F.1).
    quantized_share: q, the share of the historical budget given to the low-bit tier.
    bits: of the low-bit tier, 2 or 4.
    accounting: what the budget must cover, see :mod:`qevict.capacity`.
    ranker: what ranks windows, see :mod:`qevict.rankers`; ``decay`` (λ) and ``p`` are those of the rankers so named.
    promotion: a quantised window that ranks high becomes a full one again as what its codes say (``residency``,
        App. K), not at all (``none``), or as the original, which is kept in host memory (``exact``).
    first_eviction: at the end of prefill, after the first generated token has attended to the whole prompt
        (``first_step``), or after Ω have (``after_window``).
    fill_full_first: where nothing would be evicted, quantise only what does not fit in full precision.
    """

    name: ClassVar[str] = "qevict"
    version: ClassVar[int] = 3
    bounded: ClassVar[bool] = True

    window: int = 8
    sinks: int = 5
    recent: int | str = 32
    quantized_share: float = 0.7
    bits: int = 2
    accounting: Accounting = "strict"
    ranker: str = "cumulative"
    decay: float = 0.99
    p: float = 3.0
    promotion: Promotion = "residency"
    first_eviction: FirstEviction = "prefill"
    fill_full_first: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.recent, str):
            recent_share(self.recent)
        if self.window < 1 or self.sinks < 0 or (isinstance(self.recent, int) and self.recent < 1):
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
        if not 0 < self.decay <= 1:
            raise ValueError(f"decay is above 0 and at most 1, not {self.decay}")
        if self.p < 1:
            raise ValueError(f"p is at least 1, not {self.p}")
        if self.promotion not in ("residency", "none", "exact"):
            raise ValueError(f"promotion is 'residency', 'none' or 'exact', not {self.promotion!r}")
        if self.first_eviction not in ("prefill", "first_step", "after_window"):
            raise ValueError(
                f"first_eviction is 'prefill', 'first_step' or 'after_window', not {self.first_eviction!r}"
            )
        ranking_method(self.ranker)

    @property
    def family(self) -> str:
        kinds = [f"window {self.window}", f"sinks {self.sinks}", f"{self.bits} bits"]
        kinds += [self._ranking] * (self._ranking != "attention") + ["originals"] * (self.promotion == "exact")
        return f"tiered ({', '.join(kinds)})"

    @property
    def _ranking(self) -> str:
        """What a decode step does to scores: the same for a ranker that only gives the first ones."""
        return self.ranker if self.ranker in ("p_norm", "key_norm") else "attention"

    @property
    def _table_bytes(self) -> int:
        return TABLE_BYTES + (NORM_BYTES if self.ranker == "p_norm" else 0)

    @property
    def eviction_delay(self) -> int:
        """Tokens that follow the prompt before anything is routed."""
        return {"prefill": 0, "first_step": 1, "after_window": self.window}[self.first_eviction]

    @property
    def stochastic(self) -> bool:
        ranker = ranking_method(self.ranker)
        return ranker is not None and ranker.stochastic

    @property
    def identity(self) -> list[Any]:
        ranker = ranking_method(self.ranker)
        return super().identity + ([] if ranker is None else [ranker.identity])

    def observes(self) -> Observations:
        ranker = ranking_method(self.ranker)
        if ranker is not None:
            return ranker.observes()
        return Observations(column_sums=self.ranker != "key_norm")

    def impossible(self, budget: ResolvedBudget, layout: CacheLayout) -> str | None:
        if budget.prompt_tokens <= self.sinks:
            return f"qevict needs a prompt longer than its {self.sinks} sinks, not {budget.prompt_tokens} tokens"
        if len({layout.layers[index] for index in layout.growing}) > 1:
            return "qevict needs growing layers of one shape"
        if self.capacities(budget, layout) is None:
            recent = recent_tokens(self.recent, budget, self.window)
            return (
                f"qevict must hold {self.sinks} sinks and {recent} recent tokens"
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
            recent=recent_tokens(self.recent, budget, self.window),
            share=Decimal(str(self.quantized_share)),
            accounting=self.accounting,
            promotion=self.promotion,
            table_bytes=self._table_bytes,
            fill_full_first=self.fill_full_first,
        )

    def slots(self, room: Capacities, prompt_tokens: int) -> tuple[int, int]:
        """Full-precision slots and ledger slots of a row, in every layer. Until a late first eviction there is a slot
        for every window."""
        full = room.protected_slots + room.full
        if self.eviction_delay:
            history = prompt_tokens - self.sinks + self.eviction_delay
            full = max(full, -(-self.sinks // self.window) + history // self.window + 1)
        return full, room.ledger_slots

    def peak_bytes(self, budget: ResolvedBudget, layout: CacheLayout) -> int:
        """The budget, or the whole prompt until a late first eviction. Paper accounting holds what its slots hold."""
        room, layer = self.capacities(budget, layout), layout.layers[layout.growing[0]]
        if room is None:
            return 0
        tables = sum(self.slots(room, budget.prompt_tokens)) * self._table_bytes * len(layout.growing)
        record = window_bytes(self.window, self.bits, layer, layout.element_bytes).quantized * len(layout.growing)
        held = layout.full_bytes(budget.prompt_tokens + budget.new_tokens) + room.ledger_slots * record + tables
        if self.accounting == "strict" and not budget.unlimited:
            held = min(budget.total_bytes, held)
        elif not budget.unlimited:
            window = self.window * layout.full_bytes(1)
            held = min(held, (room.protected_slots + room.full) * window + room.ledger_slots * record + tables)
        delay = min(self.eviction_delay, budget.new_tokens)
        return max(held, layout.full_bytes(budget.prompt_tokens + delay) + tables) if delay else held

    def workspace_bytes(self, budget: ResolvedBudget, layout: CacheLayout) -> int:
        """All records as attention on a CPU reads them, whole pages of slots; kernels on a GPU need none."""
        room = self.capacities(budget, layout)
        if room is None:
            return 0
        page = slots_per_page(self.window)
        slots = -(-room.ledger_slots // page) * page
        return slots * (self.window * layout.full_bytes(1) + len(layout.growing) * self._table_bytes)

    def examine(self, prefills: Sequence[Prefill], seeds: Sequence[str]) -> list[Any]:
        """What each prompt leaves its windows with: [L, W], windows counted from the end of the sinks."""
        from qevict import window_scores

        ranker = ranking_method(self.ranker)
        if ranker is not None:
            ends = getattr(ranker, "protected_ends", (0, 0))
            return [
                window_scores.utility_scores(prefill, of_tokens, ends, self.sinks, self.window)
                for prefill, of_tokens in zip(prefills, window_scores.utilities(ranker, prefills, seeds), strict=True)
            ]
        of = window_scores.key_norm_scores if self.ranker == "key_norm" else window_scores.attention_scores
        return [of(prefill, self.sinks, self.window) for prefill in prefills]

    def compress(self, prefill: Prefill, budget: ResolvedBudget, examined: Any) -> Compressed:
        from qevict.pool import TieredCompressed

        room = self.capacities(budget, prefill.layout)
        assert room is not None, "an impossible budget is refused before compression"
        return TieredCompressed(prefill, examined, budget, room, self)

    def new_pool(self, shape: PoolShape) -> FamilyPool:
        from qevict.pool import TieredPool

        exact = self.promotion == "exact"
        return TieredPool(shape, self.window, self.sinks, self.bits, self._ranking, exact)
