"""LAQ and LAQ++ (Lookahead Q-Cache, arXiv 2505.20334): let a cheap draft of the answer say what the answer looks at.

    1  compress the prompt with SnapKV, decode up to eight tokens greedily from that cache, keep their queries
    2  go back to the whole prompt; score with those queries (LAQ), and the prompt's last eight (LAQ++):

    score(i) = mean over the group of  pool_i( sum over these queries of  softmax(q K^T / sqrt(d))_i )

The draft is discarded; the answer starts from the prompt's own logits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from kvcache.budget import ResolvedBudget
from kvcache.method import Observations
from kvcache.window_evictor import WindowEvictor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from kvcache.prefill import LayerPrefill, Prefill


@dataclass(frozen=True)
class LAQ(WindowEvictor):
    """``window``, ``kernel`` and ``pooling`` are SnapKV's, for the draft; the draft's cache has the sweep's budget.

    lookahead: the most tokens of the draft, which ends before a stop token. With none, ``stage2_window`` scores alone;
    without that too, SnapKV's scores stand.
    stage2_window: how many of the prompt's last queries score beside the draft's.
    recent: last tokens that are kept.
    repo_mask: the authors' code lays the causal mask of stage 2 as if the draft's queries sat at the end of the prompt,
    which hides part of it from them. Here they see all of it; the switch brings the published mask back.

    Kept as published: the draft comes from the compressed cache, so it depends on the budget and is made once for each;
    the draft's own tokens do not enter the softmax of stage 2. Different: KV heads, with the mean of a group, where the
    authors keep a cache per query head; LAQ keeps SnapKV's 32 recent tokens, where the authors' script protects none,
    so that all methods of a sweep keep the same prompt end. The whole prompt is held until stage 2: the peak is not
    reduced.
    """

    name: ClassVar[str] = "laq"
    version: ClassVar[int] = 2
    chooses_once: ClassVar[str] = "its draft continues the prompt"

    lookahead: int = 8
    stage2_window: int = 0
    recent: int = 32
    repo_mask: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if min(self.lookahead, self.stage2_window, self.recent) < 0:
            raise ValueError(
                "lookahead, stage2_window and recent must be at least 0, not "
                f"lookahead={self.lookahead}, stage2_window={self.stage2_window}, recent={self.recent}"
            )

    @property
    def protected_ends(self) -> tuple[int, int]:
        return 0, self.recent

    def observes(self) -> Observations:
        return Observations(queries=max(self.window, self.stage2_window))

    def examine(self, prefills: Sequence[Prefill], seeds: Sequence[str]) -> list[Any]:
        """SnapKV's scores: all that does not depend on the budget."""
        return [super(LAQ, self).scores(prefill, seed) for prefill, seed in zip(prefills, seeds, strict=True)]

    def scores(self, prefill: Prefill, seed: str) -> list[Tensor]:
        """Those of a draft from the whole prompt: what an unlimited budget ranks by. [H_kv, n] per growing layer"""
        first = super().scores(prefill, seed)
        return self._second(prefill, draft_queries(prefill, self.lookahead)) or first

    def keep(self, prefill: Prefill, budget: ResolvedBudget, examined: Any) -> list[list[Tensor]]:
        from kvcache.select import keep_top, protect_ends

        each = budget.prompt_budget
        if each >= prefill.tokens:  # nothing to choose, so nothing to draft
            return super().keep(prefill, budget, examined)
        window = protect_ends(prefill.tokens, 0, min(self.window, each), prefill.logits.device)
        cache = _compressed(prefill, [keep_top(scores, each, window) for scores in examined])
        second = self._second(prefill, draft_queries(cache, self.lookahead))
        return super().keep(prefill, budget, second or examined)

    def _second(self, prefill: Prefill, drafted: list[Tensor]) -> list[Tensor]:
        """Scores of stage 2; none without a query. ``drafted``: [H_q, t, d] per growing layer"""
        if not self.stage2_window and not drafted:
            return []
        nothing: list[Tensor | None] = [None] * len(prefill.layers)
        layers = zip(prefill.layers, drafted or nothing, strict=True)
        return [self._second_of_layer(layer, own, prefill.tokens) for layer, own in layers]

    def _second_of_layer(self, layer: LayerPrefill, drafted: Tensor | None, tokens: int) -> Tensor:
        """[H_kv, n], 0 for the recent tokens"""
        import torch
        from torch.nn.functional import avg_pool1d, max_pool1d

        from kvcache.window import window_attention

        assert layer.queries is not None
        pool = max_pool1d if self.pooling == "max" else avg_pool1d
        prefix = max(tokens - self.recent, 0)
        scored = torch.zeros(len(layer.keys), tokens, device=layer.keys.device)
        window = layer.queries[:, max(layer.queries.shape[1] - self.stage2_window, 0) :]
        drafted = window[:, :0] if drafted is None else drafted
        if self.repo_mask:
            window, drafted = torch.cat([window, drafted], 1)[:, -tokens:], drafted[:, :0]
        by_head = (queries.unflatten(0, (len(layer.keys), -1)) for queries in (window, drafted))
        for head, (of_prompt, of_draft) in enumerate(zip(*by_head, strict=True) if prefix else ()):
            keys = layer.keys[head]
            received = window_attention(of_prompt, keys, layer.scale)[..., :prefix].sum(1)
            received += torch.softmax(of_draft.float() @ keys.float().T * layer.scale, -1)[..., :prefix].sum(1)
            scored[head, :prefix] = pool(received, self.kernel, stride=1, padding=self.kernel // 2).mean(0)
        return scored


@dataclass(frozen=True)
class LAQPlusPlus(LAQ):
    """LAQ with the prompt's last eight queries beside the draft's, and those eight tokens kept, as in the authors'
    code. Without a draft and with 32 for both it is SnapKV."""

    name: ClassVar[str] = "laqpp"

    stage2_window: int = 8
    recent: int = 8


def draft_queries(prefill: Prefill, tokens: int) -> list[Tensor]:
    """Queries of up to ``tokens`` greedy tokens at the positions after the prompt: [H_q, t, d] per growing layer. The
    first token is the prompt's own; the draft ends before a stop token. Empty without a token."""
    import torch

    from kvcache.prefill import PARTICLES

    token, fed = int(prefill.logits.argmax()), 0
    continuation = prefill.continue_prompts([prefill]) if tokens else None
    while continuation is not None and fed < tokens and token not in prefill.stop_ids:
        logits = continuation.step(torch.full((1, PARTICLES), token, device=prefill.logits.device))
        token, fed = int(logits[0, 0].argmax()), fed + 1
    if continuation is None or not fed:
        return []
    return [continuation.queries(0, layer)[0] for layer in range(len(prefill.layers))]


def _compressed(prefill: Prefill, kept: list[Tensor]) -> Prefill:
    """The prompt as if only these tokens of it were cached; positions stay. [layers] of [H_kv, k]"""
    from dataclasses import replace

    layers = []
    for layer, own in zip(prefill.layers, kept, strict=True):
        heads = own.new_tensor(range(len(own)))[:, None]
        layers.append(replace(layer, keys=layer.keys[heads, own], values=layer.values[heads, own]))
    return replace(prefill, layers=layers)
