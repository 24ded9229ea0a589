"""A memory budget: a value, a unit, and what it is a share of. Resolved to bytes and tokens without torch.

Two families of papers mean two things: QEvict a share of the full cache's bytes, LORE-KV a number of tokens per KV
head. Both are exact here: shares are decimals, never floats, so that ``floor(ratio * n)`` loses no token.
"""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from math import floor
from typing import Literal

from kvcache.layout import CacheLayout

Base = Literal["prompt", "prompt+max_new"]

MOST_TOKENS = 10**9
"""Of a budget: more would not fit the integers that results are kept in."""


class BudgetError(ValueError):
    """A budget that means nothing, with what would."""


@dataclass(frozen=True)
class Budget:
    """``10%`` of the full cache's bytes, ``128 tokens`` per KV head, or ``unlimited``."""

    unit: Literal["share", "tokens", "unlimited"]
    value: Decimal = Decimal(0)

    @classmethod
    def parse(cls, text: object) -> Budget:
        """From what a sweep file holds: ``10%``, ``0.1``, ``"128 tokens"`` or ``unlimited``.

        Raises :class:`BudgetError` for anything else, zero, and shares above 100 %.
        """
        how = "write a share such as 10%, a number of tokens per KV head such as '128 tokens', or 'unlimited'"
        words = str(text).strip().lower()
        if words == "unlimited":
            return cls("unlimited")
        number, unit, factor = words, "share", Decimal(1)
        if words.endswith("%"):
            number, factor = words[:-1], Decimal("0.01")
        elif words.endswith(("tokens", "token")):
            number, unit = words.rsplit("token", 1)[0], "tokens"
        try:
            value = Decimal(number.strip()) * factor
        except InvalidOperation:
            raise BudgetError(f"{text!r} is not a budget: {how}") from None
        if not value.is_finite() or value <= 0:
            raise BudgetError(f"a budget must be above 0, not {text}: {how}")
        if unit == "tokens":
            if value > MOST_TOKENS:
                raise BudgetError(
                    f"a budget has at most {MOST_TOKENS} tokens, not {text}: for all of them, 'unlimited'"
                )
            if value != value.to_integral_value():
                raise BudgetError(f"{text!r}: tokens come whole")
            return cls("tokens", value)
        if value > 1:
            raise BudgetError(f"a budget is at most 100 % of the full cache, not {text}: {how}")
        return cls("share", value)

    def __str__(self) -> str:
        if self.unit == "unlimited":
            return "unlimited"
        if self.unit == "tokens":
            return f"{int(self.value)} tokens"
        return f"{(self.value * 100).normalize():f}%"

    def resolve(self, prompt_tokens: int, new_tokens: int, base: Base, layout: CacheLayout) -> ResolvedBudget:
        """What the budget allows for one prompt, per growing layer. See :class:`ResolvedBudget` for ``new_tokens``."""
        base_tokens = prompt_tokens + (new_tokens if base == "prompt+max_new" else 0)
        tokens = {
            "unlimited": lambda: prompt_tokens + new_tokens,
            "tokens": lambda: int(self.value),
            "share": lambda: floor(self.value * base_tokens),
        }[self.unit]()
        token_bytes = [layout.layers[index].token_bytes(layout.element_bytes) for index in layout.growing]
        if self.unit == "share":
            layer_bytes = tuple(floor(self.value * base_tokens * size) for size in token_bytes)
        else:
            layer_bytes = tuple(tokens * size for size in token_bytes)
        return ResolvedBudget(self, base, prompt_tokens, new_tokens, tokens, layer_bytes)


@dataclass(frozen=True)
class ResolvedBudget:
    """A budget for one prompt.

    ``tokens`` per KV head and ``layer_bytes`` per growing layer, both on the budget's base. ``new_tokens`` are the most
    that may follow what is compressed: an appended question, then the answer. Under the base ``prompt+max_new`` they
    must fit too.
    """

    asked: Budget
    base: Base
    prompt_tokens: int
    new_tokens: int
    tokens: int
    layer_bytes: tuple[int, ...]

    @property
    def unlimited(self) -> bool:
        return self.asked.unit == "unlimited"

    @property
    def total_bytes(self) -> int:
        return sum(self.layer_bytes)

    @property
    def prompt_budget(self) -> int:
        """Tokens per KV head that a method may keep at the end of prefill when all new tokens are added later.

        Negative or tiny values make a cell impossible; nothing is shrunk silently.
        """
        if self.unlimited:
            return self.prompt_tokens
        kept = self.tokens - (self.new_tokens if self.base == "prompt+max_new" else 0)
        return min(kept, self.prompt_tokens)
