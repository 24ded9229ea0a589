"""StreamingLLM (Xiao et al., arXiv 2309.17453), as the compared papers use it: the first and the most recent tokens.

The compression happens once, at the end of prefill, and keys keep their original positions; the published streaming
mode, which evicts at every step and counts positions inside the cache, is another setting of the paper.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from kvcache.evict import PromptEvictor

if TYPE_CHECKING:
    from torch import Tensor

    from kvcache.prefill import Prefill


@dataclass(frozen=True)
class StreamingLLM(PromptEvictor):
    """Keep ``sinks`` first tokens and fill the budget with the most recent ones."""

    name: ClassVar[str] = "streaming_llm"
    version: ClassVar[int] = 1

    sinks: int = 4

    def __post_init__(self) -> None:
        if self.sinks < 0:
            raise ValueError(f"sinks must be at least 0, not {self.sinks}")

    @property
    def protected_ends(self) -> tuple[int, int]:
        return self.sinks, 1

    def scores(self, prefill: Prefill, seed: str) -> list[Tensor]:
        """A token's score is its position. [H_kv, n]"""
        import torch

        recency = torch.arange(prefill.tokens, dtype=torch.float32, device=prefill.logits.device)
        return [recency.expand(len(layer.keys), -1) for layer in prefill.layers]
