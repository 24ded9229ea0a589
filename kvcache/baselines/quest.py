"""Quest (Tang et al., arXiv 2406.10774): the whole cache is kept; every query head reads the pages whose keys can be
closest to its query. What falls is the memory read, not the memory held."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from kvcache.budget import ResolvedBudget
from kvcache.fixed import FixedMethod
from kvcache.layout import LayerLayout

if TYPE_CHECKING:
    from kvcache.pool import Compressed, FamilyPool, PoolShape
    from kvcache.prefill import Prefill

FEWEST_PAGES = 3


@dataclass(frozen=True)
class Quest(FixedMethod):
    """``tokens`` to read per query head and step, in whole pages of ``page`` tokens, at least three of them; the first
    ``dense_layers`` read everything. Prefill is dense; a question that follows it is read as generated tokens are."""

    name: ClassVar[str] = "quest"
    version: ClassVar[int] = 1

    tokens: int = 1024
    page: int = 16
    dense_layers: int = 2

    def __post_init__(self) -> None:
        if self.tokens < 1 or self.page < 1 or self.dense_layers < 0:
            raise ValueError(
                f"tokens and page are at least 1, dense_layers at least 0, not tokens={self.tokens},"
                f" page={self.page}, dense_layers={self.dense_layers}"
            )

    @property
    def pages(self) -> int:
        """Pages that a query head reads."""
        return max(FEWEST_PAGES, self.tokens // self.page)

    @property
    def family(self) -> str:
        return f"page reads ({self.pages} of {self.page} tokens, {self.dense_layers} dense layers)"

    def layer_bytes(self, prompt_tokens: int, new_tokens: int, layer: LayerLayout, element_bytes: int) -> int:
        tokens = prompt_tokens + new_tokens
        bounds = -(-tokens // self.page) * layer.kv_heads * 2 * layer.key_dim * element_bytes
        return tokens * layer.token_bytes(element_bytes) + bounds

    def compress(self, prefill: Prefill, budget: ResolvedBudget, examined: Any) -> Compressed:
        from kvcache.pool import Compressed

        return Compressed(prefill)

    def new_pool(self, shape: PoolShape) -> FamilyPool:
        from kvcache.page_reads import PageReadPool

        return PageReadPool(shape, self.page, self.pages, self.dense_layers)
