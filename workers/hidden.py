"""Hidden states as they enter attention: their moments over a prompt, and the queries that others would make.

Both go through the model's own attention modules, so biases, query norms, rotation and the order of a head's dimensions
are the model's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from kvcache.moments import HiddenMoments
from workers.attention import Step
from workers.models import LoadedModel


@contextmanager
def hidden_moments(model: LoadedModel, wanted: bool) -> Iterator[dict[int, HiddenMoments]]:
    """Moments of what enters the growing layers' attention while this is open, by layer; nothing where not wanted."""
    seen: dict[int, HiddenMoments] = {}

    def observe(attention: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        hidden = options["hidden_states"] if "hidden_states" in options else arguments[0]
        moments = seen.setdefault(attention.layer_idx, HiddenMoments.empty(hidden.shape[-1], hidden.device))
        moments.add(hidden[0])

    with ExitStack() as hooks:
        for layer in model.layout.growing if wanted else ():
            attention = model.forward.get_decoder().layers[layer].self_attn
            hooks.callback(attention.register_forward_pre_hook(observe, with_kwargs=True).remove)
        yield seen


def query_projector(model: LoadedModel) -> Callable[[int, Tensor, Tensor], Tensor]:
    """``Prefill.project_queries`` of this model's prompts."""

    @torch.inference_mode()
    def project(growing_layer: int, hidden: Tensor, positions: Tensor) -> Tensor:
        attention = model.forward.get_decoder().layers[model.layout.growing[growing_layer]].self_attn
        cos, sin = model.rotary_tables(growing_layer, positions)
        step = _Capture()
        attention(
            hidden_states=hidden.to(model.dtype)[None],
            position_embeddings=(cos[None], sin[None]),
            attention_mask=None,
            position_ids=positions[None].to(model.device),  # Ministral 3 scales queries by their positions
            shared_kv_states={},  # Gemma 4's layers require one; others do not look at it
            kv_step=step,
        )
        return step.queries

    return project


class _Capture(Step):
    """Keeps the queries of one call; attends to nothing."""

    queries: Tensor

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        self.queries = queries[0]
        return values.new_zeros(*queries.shape[:3], values.shape[-1])
