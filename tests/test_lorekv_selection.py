"""What LORE-KV keeps: budgets of heads and layers, diversity, structural tokens."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lorekv_cases import ENDS, WINDOW, lorekv, prefilled, same
from models import tiny_gemma, tiny_llama
from torch import Tensor
from torch.nn.functional import cosine_similarity

from kvcache.budget import Budget, ResolvedBudget
from kvcache.prefill import Prefill
from kvcache.select import keep_counts, keep_top, protect_ends
from lorekv.diversity import keep_diverse
from lorekv.lookahead import Futures, sample_futures
from lorekv.scoring import Scored, score_prompt
from lorekv.selection import keep_tokens, protected_tokens, unrotated_keys
from workers.structure import Structure


@pytest.fixture(scope="module")
def prefill() -> Prefill:
    return prefilled(tiny_llama())


@pytest.fixture(scope="module")
def futures(prefill: Prefill) -> Futures:
    with torch.inference_mode():
        return sample_futures([prefill], 3, 5, 1.0, ["0"])[0]


def budget(prefill: Prefill, tokens: int) -> ResolvedBudget:
    return Budget.parse(f"{tokens} tokens").resolve(prefill.tokens, 4, "prompt", prefill.layout)


# -- budgets of heads and layers -------------------------------------------------------------------------------------


def scored(prefill: Prefill, seed: int = 0, spread: float = 2.0) -> Scored:
    """Random scores, heads and layers of unequal size."""
    g = torch.Generator().manual_seed(seed)
    scores = [
        torch.rand(2, prefill.tokens, generator=g) * torch.exp(spread * torch.randn(2, 1, generator=g))
        for _ in prefill.layers
    ]
    ends = protect_ends(prefill.tokens, 1, WINDOW)
    return Scored(scores, [of_layer[:, ~ends].sum(1) for of_layer in scores])


def test_default_budgets_keep_the_best_of_every_head(prefill: Prefill) -> None:
    one = scored(prefill)
    kept = keep_tokens(lorekv(), prefill, 20, one)
    ends = protect_ends(prefill.tokens, 1, WINDOW)
    for heads, scores in zip(kept, one.scores, strict=True):
        assert torch.equal(torch.stack(heads), keep_top(scores, 20, ends))


def test_heads_share_in_proportion_to_their_mass(prefill: Prefill) -> None:
    """Masses 3 and 1: of 22 free tokens 16.5 and 5.5, the half to the first head; with the root 13.94 and 8.05."""
    one = scored(prefill)
    one.masses = [torch.tensor([3.0, 1.0]) for _ in one.masses]
    for exponent, expected in ((0.0, [11, 11]), (0.5, [14, 8]), (1.0, [17, 5])):
        kept = keep_tokens(lorekv(head_exponent=exponent), prefill, ENDS + 11, one)
        assert [[len(head) - ENDS for head in heads] for heads in kept] == [expected] * 3


def test_masses_are_those_of_the_futures_outside_the_ends(prefill: Prefill, futures: Futures) -> None:
    with torch.inference_mode():
        ahead = score_prompt(lorekv(mix=1.0), prefill, futures)
        mixed = score_prompt(lorekv(mix=0.3), prefill, futures)
    for masses, scores, same_masses in zip(ahead.masses, ahead.scores, mixed.masses, strict=True):
        torch.testing.assert_close(masses, scores[:, 1:-WINDOW].sum(1))
        assert torch.equal(masses, same_masses)


@settings(max_examples=30)
@given(
    st.integers(ENDS, 70),
    st.sampled_from(["uniform", "global"]),
    st.sampled_from([0.0, 0.5, 1.0, 3.0]),
    st.sampled_from([0.0, 0.7]),
    st.integers(0, 50),
)
def test_any_split_of_the_budget_keeps_its_total(
    prefill: Prefill, tokens: int, layers: str, exponent: float, diversity: float, seed: int
) -> None:
    method = lorekv(layer_budgets=layers, head_exponent=exponent, value_diversity=diversity)
    kept = keep_tokens(method, prefill, min(tokens, prefill.tokens), scored(prefill, seed))
    assert sum(len(head) for heads in kept for head in heads) == 3 * 2 * min(tokens, prefill.tokens)
    protected = set(protect_ends(prefill.tokens, 1, WINDOW).nonzero().flatten().tolist())
    for heads in kept:
        assert exponent or len({len(head) for head in heads}) == 1
        for head in heads:
            assert protected <= set(head.tolist())
            assert torch.equal(head, head.unique())


def test_layers_compete_with_shares_of_their_own_total(prefill: Prefill) -> None:
    """Scaling a layer's costs moves nothing. A layer that needs few tokens leaves its room to those that need many."""
    one = scored(prefill, spread=0.0)
    method = lorekv(layer_budgets="global")
    before = keep_tokens(method, prefill, 20, one)
    one.scores[1] = one.scores[1] * 1000
    for heads, others in zip(before, keep_tokens(method, prefill, 20, one), strict=True):
        assert same(heads, others)
    one.scores[1] = one.scores[1] * torch.tensor([1e-6] * 20 + [1.0] * 2 + [1e-6] * 38)
    lengths = [len(heads[0]) for heads in keep_tokens(method, prefill, 20, one)]
    assert sum(lengths) == 60
    assert lengths[1] == min(lengths) < 20


def test_scores_that_are_all_zero_share_the_room_evenly(prefill: Prefill) -> None:
    nothing = Scored([torch.zeros(2, prefill.tokens)] * 3, [torch.zeros(2)] * 3)
    kept = keep_tokens(lorekv(layer_budgets="global", head_exponent=1.0), prefill, 21, nothing)
    assert {len(head) for heads in kept for head in heads} == {21}


def test_one_growing_layer_has_nobody_to_compete_with() -> None:
    prefill = prefilled(tiny_gemma())
    one = Scored([torch.rand(2, prefill.tokens)], [torch.ones(2)])
    uniform, together = (keep_tokens(lorekv(layer_budgets=kind), prefill, 20, one) for kind in ("uniform", "global"))
    assert same(uniform[0], together[0])


# -- diversity -------------------------------------------------------------------------------------------------------


def greedy_choice(
    scores: Tensor, keys: Tensor, values: Tensor, count: int, protected: Tensor, of_keys: float, of_values: float
) -> list[int]:
    """One head, token by token, in plain Python."""
    kept = protected.nonzero().flatten().tolist()
    free = [place for place in range(len(scores)) if place not in kept]
    room = count - len(kept)
    pool = sorted(free, key=lambda place: (-float(scores[place]), place))[: 2 * room]
    top = max((abs(float(scores[place])) for place in pool), default=1.0)

    def gain(place: int) -> float:
        like = [
            max((float(cosine_similarity(x[place], x[other], dim=0)) for other in kept), default=-1.0)
            for x in (keys, values)
        ]
        return float(scores[place]) / top - of_keys * like[0] - of_values * like[1]

    for _ in range(room):
        best = max(pool, key=gain)
        pool.remove(best)
        kept.append(best)
    return sorted(kept)


@pytest.mark.parametrize(("of_keys", "of_values"), [(0.5, 0.0), (0.0, 0.5), (0.3, 2.0)])
@pytest.mark.parametrize("fixed", [(0, 0), (1, 4)])
def test_diverse_selection_is_the_greedy_one(of_keys: float, of_values: float, fixed: tuple[int, int]) -> None:
    g = torch.Generator().manual_seed(2)
    scores, keys, values = torch.rand(2, 40, generator=g), *torch.randn(2, 2, 40, 6, generator=g).unbind()
    protected, counts = protect_ends(40, *fixed), [sum(fixed) + 7, sum(fixed) + 12]
    found = keep_diverse(scores, keys, values, counts, protected, of_keys, of_values)
    for head, count in enumerate(counts):
        alone = scores[head], keys[head], values[head], count, protected, of_keys, of_values
        assert found[head].tolist() == greedy_choice(*alone)


@given(st.integers(0, 1000), st.lists(st.integers(3, 30), min_size=2, max_size=2))
def test_without_penalties_the_best_stay(seed: int, counts: list[int]) -> None:
    """Ties among few levels of score, and negative scores, included."""
    g = torch.Generator().manual_seed(seed)
    scores = torch.randint(-2, 3, (2, 25), generator=g).float()
    keys, protected = torch.randn(2, 25, 4, generator=g), protect_ends(25, 1, 2)
    found = keep_diverse(scores, keys, keys, counts, protected, 0.0, 0.0)
    assert same(found, keep_counts(scores, counts, protected))


def test_a_copy_of_a_kept_token_goes_first() -> None:
    """The second best is the best one's copy: it gives way to the third."""
    scores = torch.tensor([[0.0, 1.0, 0.99, 0.9, 0.1]])
    values = torch.tensor([[[1.0, 0, 0], [0, 1, 0], [0, 1, 0], [0, 0, 1], [1, 0, 0]]])
    protected = protect_ends(5, 1, 0)
    assert keep_diverse(scores, values, values, [3], protected, 0.0, 0.5)[0].tolist() == [0, 1, 3]
    assert keep_diverse(scores, values, values, [3], protected, 0.0, 0.0)[0].tolist() == [0, 1, 2]


def test_likeness_of_keys_ignores_where_they_stand(prefill: Prefill) -> None:
    """Un-rotated, the same vector at two places has cosine 1."""
    layer, place = prefill.layers[0], torch.arange(prefill.tokens)
    same_key = torch.randn(16).expand(2, prefill.tokens, 16)
    cos, sin = prefill.rotary(0, place)
    first, second = same_key.chunk(2, -1)
    rotated = same_key * cos + torch.cat([-second, first], -1) * sin
    assert float(cosine_similarity(rotated[0, 0], rotated[0, 40], dim=0)) < 0.99
    keys = unrotated_keys(replace(prefill, layers=[replace(layer, keys=rotated)]), 0)
    torch.testing.assert_close(keys, same_key, rtol=1e-4, atol=1e-5)


# -- structural tokens -----------------------------------------------------------------------------------------------


class Chat:
    """A tokenizer of single characters whose newlines merge up to three, with markers."""

    unk_token_id = 300

    def get_added_vocab(self) -> dict[str, int]:
        return {"<turn>": 301, "<tool>": 302, "<unk>": 300, "\n\n": 202, "\n\n\n": 203}

    def __call__(self, text: str, *, add_special_tokens: bool = True) -> dict[str, list[int]]:
        assert not add_special_tokens
        return {"input_ids": [95] + [203] * (len(text) // 3) + [200 + len(text) % 3] * (len(text) % 3 > 0)}

    def decode(self, ids: list[int]) -> str:
        return "\n" * (ids[0] - 200) if ids[0] > 200 else "_"


def test_markers_and_runs_of_newlines_are_structural() -> None:
    structure = Structure.of(Chat())
    assert structure.markers == {301, 302}
    assert structure.newlines == {201: 1, 202: 2, 203: 3}
    ids = [301, 65, 201, 66, 202, 67, 201, 201, 300, 302, 203]
    assert structure.places(ids) == [True, False, False, False, True, False, True, True, False, True, True]


def test_structural_tokens_stay_while_there_is_room_the_latest_first(prefill: Prefill) -> None:
    places = torch.zeros(prefill.tokens, dtype=torch.bool)
    places[[0, 5, 20, 30, 58]] = True
    framed, method = replace(prefill, structural=places), lorekv(structural=True)
    ends = protect_ends(prefill.tokens, 1, WINDOW)
    for tokens, expected in ((ENDS, []), (ENDS + 1, [30]), (ENDS + 2, [20, 30]), (ENDS + 9, [5, 20, 30])):
        added = protected_tokens(method, framed, tokens) & ~ends
        assert added.nonzero().flatten().tolist() == expected
        kept = keep_tokens(method, framed, tokens, scored(prefill))
        assert all(len(head) == tokens and set(expected) <= set(head.tolist()) for heads in kept for head in heads)
    assert torch.equal(protected_tokens(lorekv(), framed, 20), ends)
    assert torch.equal(protected_tokens(method, prefill, 20), ends)


def test_many_structural_tokens_make_no_budget_impossible(prefill: Prefill) -> None:
    everything = replace(prefill, structural=torch.ones(prefill.tokens, dtype=torch.bool))
    method = lorekv(structural=True)
    tight = budget(prefill, ENDS)
    assert method.impossible(tight, prefill.layout) is None
    kept = method.keep(everything, tight, scored(prefill))
    assert all(head.tolist() == [0, *range(60 - WINDOW, 60)] for heads in kept for head in heads)
