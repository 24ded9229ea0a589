"""What lookahead and scoring hold beside the prompt's cache, from every tensor that lives while they run."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import pytest
import torch
from lorekv_cases import WINDOW, lorekv, prefilled
from models import tiny_llama
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kvcache.prefill import Prefill
from lorekv.kernels.deletion_scores import ALIGNED, ATTENDED
from lorekv.lookahead import Futures, sample_futures
from lorekv.scoring import score_prompt
from workers.models import LoadedModel

PARTICLES, STEPS = 4, 16
FP32 = 4


class LiveBytes(TorchDispatchMode):
    """Bytes of the storages that operators made and that still live, and the most there ever were."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {storage._cdata for storage in _storages((args, kwargs))}
        result = operator(*args, **(kwargs or {}))
        for storage in _storages(result):
            if storage._cdata not in given | self._sizes.keys():
                self._sizes[storage._cdata] = storage.nbytes()
                self.now += storage.nbytes()
                weakref.finalize(storage, self._free, storage._cdata)
        self.peak = max(self.peak, self.now)
        return result

    def _free(self, storage: int) -> None:
        self.now -= self._sizes.pop(storage)


def _storages(tree: Any) -> Iterator[Any]:
    return (leaf.untyped_storage() for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return tiny_llama(max_position_embeddings=4096)


def sampled(prefill: Prefill) -> tuple[Futures, LiveBytes]:
    with torch.no_grad(), LiveBytes() as live:
        return sample_futures([prefill], PARTICLES, STEPS, 1.0, ["0"])[0], live


def held(futures: Futures) -> int:
    storages = {one._cdata: one for one in _storages([getattr(futures, field.name) for field in fields(futures)])}
    return sum(one.nbytes() for one in storages.values())


def test_the_tracker_sees_what_lives_and_what_has_gone() -> None:
    with LiveBytes() as live:
        kept = torch.zeros(1000)
        view = kept[10:].view(2, -1)
        del kept
        assert (live.now, live.peak) == (4000, 4000)
        torch.ones(500)
        assert (live.now, live.peak) == (4000, 6000)
        del view
        assert live.now == 0


def test_after_sampling_only_the_futures_own_tokens_are_held(model: LoadedModel) -> None:
    """Their keys, values and queries; a few numbers per token besides."""
    futures, live = sampled(prefilled(model, 700))
    assert live.now == held(futures)
    keys_and_values = sum(one.nbytes() for one in _storages([futures.keys, futures.values]))
    queries = sum(one.nbytes() for one in _storages([futures.queries]))
    assert keys_and_values == model.layout.full_bytes(PARTICLES * STEPS)
    assert live.now - keys_and_values - queries < 4096


def test_sampling_copies_nothing_of_the_prompt(model: LoadedModel) -> None:
    """A longer prompt costs nothing more: attention reads it in place. What an operator has inside, a block of
    scores for each thread, is not seen here."""
    short, long = (sampled(prefilled(model, tokens))[1].peak for tokens in (600, 1800))
    assert long == short


def test_scoring_holds_the_scores_and_a_workspace_that_is_bounded(model: LoadedModel) -> None:
    tokens = 3000
    prefill = prefilled(model, tokens)
    futures, _ = sampled(prefill)
    layer = model.layout.layers[0]
    with torch.no_grad(), LiveBytes() as live:
        scored = score_prompt(lorekv(), prefill, futures)
    assert {tuple(scores.shape) for scores in scored.scores} == {(layer.kv_heads, tokens)}
    of_layers = 3 * layer.kv_heads * tokens * FP32
    queries = WINDOW + PARTICLES * STEPS
    attention = 2 * min(queries, ATTENDED // tokens) * (tokens + ALIGNED) * FP32
    one_head = 4 * (layer.key_dim + layer.value_dim) * tokens * FP32
    of_one_layer = 5 * layer.kv_heads * tokens * FP32
    of_queries = 8 * queries * layer.query_heads * (layer.key_dim + layer.value_dim) * FP32
    assert live.peak <= of_layers + of_one_layer + attention + one_head + of_queries
    assert live.now <= of_layers + 4096
