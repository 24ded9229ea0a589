"""Expected Attention (Devoto et al., arXiv 2510.00636): keep what future queries would attend to, taken as a Gaussian.

Queries before rotation have mean μ and covariance Σ over the prompt. R̄ is the mean rotation of the next positions:

    z_i = k_i · R̄μ / √d  +  k_iᵀ R̄ΣR̄ᵀ k_i / (2 d)         log of the mean of exp(k_i · q / √d), up to a constant
    score(i) = (mean over the group of softmax(z)_i  +  ε) || v_i ||_2

No query of the prompt is taken as special, so the choice does not depend on where the question stands.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from kvcache.evict import PromptEvictor
from kvcache.method import Observations

if TYPE_CHECKING:
    from torch import Tensor

    from kvcache.prefill import LayerPrefill, Prefill


@dataclass(frozen=True)
class ExpectedAttention(PromptEvictor):
    """``future`` positions from the prompt's end are averaged over. The first ``sinks`` tokens are kept; neither do
    their queries enter μ and Σ, nor their keys the softmax. ``covariance`` and ``value_norm`` switch Σ and ||v|| off;
    ``epsilon`` is ε.

    Where this differs from kvpress, the authors' code: queries are the model's own, un-rotated in fp32, where it
    projects the hidden states once more and takes all moments in the model's type. As there, Σ is divided by the number
    of queries, cached keys are rotated, and the last tokens are not protected.
    """

    name: ClassVar[str] = "expected_attention"
    version: ClassVar[int] = 2

    future: int = 512
    sinks: int = 4
    covariance: bool = True
    value_norm: bool = True
    epsilon: float = 0.0

    def __post_init__(self) -> None:
        if self.future < 1 or self.sinks < 0:
            raise ValueError(
                f"future must be at least 1 and sinks at least 0, not future={self.future}, sinks={self.sinks}"
            )
        if self.epsilon < 0:
            raise ValueError(f"epsilon must be at least 0, not {self.epsilon}")

    @property
    def protected_ends(self) -> tuple[int, int]:
        return self.sinks, 0

    def observes(self) -> Observations:
        return Observations(query_moments=frozenset({self.sinks}))

    def scores(self, prefill: Prefill, seed: str) -> list[Tensor]:
        """[H_kv, n] per layer, 0 for the sinks"""
        import torch
        from torch.nn.functional import pad

        positions = prefill.tokens + torch.arange(self.future, device=prefill.logits.device)
        sinks = min(self.sinks, prefill.tokens)
        scores = []
        for index, layer in enumerate(prefill.layers):
            cos, sin = (table.float().mean(0) for table in prefill.rotary(index, positions))
            expected = self.expected(layer, cos, sin)
            if self.value_norm:
                expected = (expected + self.epsilon) * layer.values[:, sinks:].float().norm(dim=-1)
            scores.append(pad(expected, (sinks, 0)))
        return scores

    def expected(self, layer: LayerPrefill, cos: Tensor, sin: Tensor) -> Tensor:
        """Attention that a future query is expected to pay, mean over the group. cos and sin [d] of R̄ -> [H_kv, m]"""
        import torch

        from kvcache.rotary import rotate

        moments = layer.query_moments[self.sinks]
        mean = rotate(moments.mean, cos, sin).unflatten(0, (len(layer.keys), -1))
        half_rotated = rotate(moments.covariance, cos, sin).transpose(1, 2)
        covariance = rotate(half_rotated, cos, sin).unflatten(0, (len(layer.keys), -1))
        expected = []
        for head, keys in enumerate(layer.keys[:, self.sinks :].float()):
            logits = mean[head] @ keys.T * layer.scale
            if self.covariance:
                logits = logits + ((keys @ covariance[head]) * keys).sum(-1) * (layer.scale**2 / 2)
            expected.append(torch.softmax(logits, -1).mean(0))
        return torch.stack(expected)
