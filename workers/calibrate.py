"""What KVQuant needs to know of a model, from a text that it reads (arXiv 2401.18079, §3.1 to §3.4).

    first pass    thresholds of every key channel: percentiles of the keys before rotation
    second pass   codebooks of keys and values, weighted by squared gradients of the loss (Fisher) or not at all

Only the keys of the first pass are kept, in half precision; the second pass keeps histograms. The first tokens of a
sequence are left out, as the cache keeps them in full.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from kvcache.codebook import Histogram
from kvcache.dense_sparse import SMALLEST, LayerTables, value_span
from kvcache.layout import CacheLayout
from kvcache.rotary import rotate, unrotate
from kvcache.sparse_grid import SparseGrid
from workers.attention import Step
from workers.linear import LinearCache, LinearRows
from workers.models import LoadedModel
from workers.softmax import causal_attention
from workers.traces import Trace


class NoGradients(ValueError):
    """Why a model gives no gradients here, and what to do."""


@dataclass
class Seen:
    """One layer of one sequence: keys before rotation and values, without the first tokens, [m, C] fp32; their squared
    gradients, where they were asked for."""

    keys: Tensor
    values: Tensor
    key_weights: Tensor | None = None
    value_weights: Tensor | None = None


def calibrate(model: LoadedModel, traces: Sequence[Trace], grid: SparseGrid, gradients: bool) -> dict[str, Tensor]:
    """The tables of every growing layer, named ``<layer>.<table>``. Raises :class:`NoGradients`."""
    if gradients and model.layout.linear:
        raise NoGradients("linear layers give no gradients here: calibrate with --no-gradients")
    thresholds = _thresholds(model, traces, grid)
    keys = {layer: Histogram() for layer in model.layout.growing}
    values = {layer: Histogram() for layer in model.layout.growing}
    for trace in traces:
        for layer, seen in _read(model, trace, grid.sinks, gradients):
            _add_keys(keys[layer], seen, *thresholds[layer])
            _add_values(values[layer], seen, grid.tail(seen.values.shape[-1]))
    size = 2**grid.bits
    tables: dict[str, Tensor] = {}
    for layer, (low, high) in thresholds.items():
        one = LayerTables(low, high, keys[layer].codebook(size), values[layer].codebook(size))
        tables |= {f"{layer}.{name}": table for name, table in one.named().items()}
    return tables


def _thresholds(model: LoadedModel, traces: Sequence[Trace], grid: SparseGrid) -> dict[int, tuple[Tensor, Tensor]]:
    kept: dict[int, list[Tensor]] = {layer: [] for layer in model.layout.growing}
    for trace in traces:
        for layer, seen in _read(model, trace, grid.sinks, gradients=False):
            kept[layer].append(seen.keys.half().cpu())
    tail, found = grid.outliers / 2, {}
    for layer in list(kept):
        found[layer] = _percentiles(torch.cat(kept.pop(layer)), tail, 1 - tail)
    return found


def _percentiles(samples: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """Of every column, between neighbours in proportion. samples [n, C] -> [C] fp32 each"""
    ordered = samples.float().sort(0).values

    def at(share: float) -> Tensor:
        place = share * (len(ordered) - 1)
        below = int(place)
        return torch.lerp(ordered[below], ordered[min(below + 1, len(ordered) - 1)], place - below)

    return at(low), at(high)


def _add_keys(histogram: Histogram, seen: Seen, low: Tensor, high: Tensor) -> None:
    low, high = low.to(seen.keys.device), high.to(seen.keys.device)
    scaled = (seen.keys - (low + high) / 2) / ((high - low) / 2).clamp_min(SMALLEST)
    within = (seen.keys >= low) & (seen.keys <= high)
    histogram.add(scaled[within], None if seen.key_weights is None else seen.key_weights[within])


def _add_values(histogram: Histogram, seen: Seen, tail: int) -> None:
    span, outliers = value_span(seen.values, tail)
    scaled = (seen.values - span.mid.float()[:, None]) / span.half.float().clamp_min(SMALLEST)[:, None]
    within = torch.ones_like(scaled, dtype=torch.bool).scatter_(1, outliers, False)
    histogram.add(scaled[within], None if seen.value_weights is None else seen.value_weights[within])


# -- reading a sequence ----------------------------------------------------------------------------------------------


class _Observe(Step):
    """Full attention; keys and values of growing layers are kept, with their gradients where there are any."""

    def __init__(self, layout: CacheLayout) -> None:
        self.layout = layout
        self.kept: dict[int, tuple[Tensor, Tensor]] = {}

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        if layer in self.layout.growing:
            self.kept[layer] = keys, values
            if keys.requires_grad:
                keys.retain_grad()
                values.retain_grad()
        return causal_attention(queries, keys, values, scale, self.layout.layers[layer].window)[0]


def _read(model: LoadedModel, trace: Trace, sinks: int, gradients: bool) -> Iterator[tuple[int, Seen]]:
    """What each growing layer makes of a sequence."""
    step = _Observe(model.layout)
    ids = torch.tensor([trace.ids], device=model.device)
    positions = torch.arange(len(trace.ids), device=model.device)
    if gradients:
        with _differentiable(model), torch.enable_grad():
            output = model.forward(input_ids=ids, position_ids=positions[None], kv_step=step, use_cache=False)
            cross_entropy(output.logits[0, :-1].float(), ids[0, 1:]).backward()
    else:
        with torch.inference_mode():
            states = LinearRows(model.layout, 1, model.device, model.dtype)
            model.read(ids, positions[None], step, LinearCache(states))
    for place, layer in enumerate(model.layout.growing):
        yield layer, _seen(*step.kept.pop(layer), *model.rotary(place, positions), sinks)


def _seen(keys: Tensor, values: Tensor, cos: Tensor, sin: Tensor, sinks: int) -> Seen:
    seen = Seen(_by_token(unrotate(keys[0].detach(), cos, sin), sinks), _by_token(values[0], sinks))
    if keys.grad is not None and values.grad is not None:
        of_keys = rotate(keys.grad[0].float(), cos.float(), -sin.float())  # the gradient of a rotation turns back
        seen.key_weights = _by_token(of_keys, sinks).square()
        seen.value_weights = _by_token(values.grad[0], sinks).square()
    return seen


def _by_token(x: Tensor, sinks: int) -> Tensor:
    """[H_kv, n, d] -> [n - sinks, H_kv * d] fp32"""
    return x.detach().float().transpose(0, 1)[sinks:].flatten(1)


@contextmanager
def _differentiable(model: LoadedModel) -> Iterator[None]:
    """Weights are frozen: the graph begins at the embeddings."""
    embeddings = model.forward.get_input_embeddings()
    hook = embeddings.register_forward_hook(lambda module, arguments, output: output.requires_grad_())
    try:
        yield
    finally:
        hook.remove()
