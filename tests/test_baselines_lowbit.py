"""KIVI and ZipCache: codes really packed, attention over what they say, and the bytes of the papers' formulas."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lowbit_cases import (
    DIM,
    KV_HEADS,
    LAYERS,
    LAYOUT,
    QUERY_HEADS,
    SCALE,
    Tokens,
    admit,
    assert_a_broken_row_ends_no_other,
    assert_rows_do_not_see_each_other,
    broken,
    dense,
    feed,
    one_by_one,
)
from torch import Tensor

from kvcache.baselines.kivi import KIVI
from kvcache.baselines.zipcache import ZipCache
from kvcache.budget import Budget
from kvcache.layout import CacheLayout, LayerLayout
from kvcache.lowbit import LowBitPool
from kvcache.method import Method
from kvcache.probes import probe_positions, probed_attention, witnesses
from kvcache.quant import dequantize, quantize

SMALL = KIVI(bits=2, group=4, residual=8)


def kivi_cache(method: KIVI, tokens: Tokens, count: int) -> tuple[Tensor, Tensor]:
    """What KIVI's cache says of the first tokens, as its paper has it, one group at a time. [L, H_kv, n, d] each"""
    keys, values = tokens.keys[:, :, :count].clone(), tokens.values[:, :, :count].clone()
    group, residual = method.group, method.residual
    for start in range(0, count // residual * residual, group):
        some = keys[:, :, start : start + group]
        keys[:, :, start : start + group] = coded(some.transpose(2, 3), method.bits).transpose(2, 3)
    for start in range(0, DIM, group):
        some = values[:, :, : max(0, count - residual), start : start + group]
        values[:, :, : max(0, count - residual), start : start + group] = coded(some, method.bits)
    return keys, values


def coded(x: Tensor, bits: int) -> Tensor:
    return dequantize(quantize(x, bits), bits)


@settings(max_examples=25)
@given(
    st.sampled_from((2, 4)),
    st.sampled_from(((4, 4), (4, 8), (4, 12), (8, 8), (8, 16))),
    st.integers(1, 45),
    st.integers(1, 30),
)
def test_kivi_attends_to_what_its_codes_say(bits: int, sizes: tuple[int, int], prompt: int, new: int) -> None:
    """Every step, in every layer; what is due at a token is done before it attends."""
    method, tokens = KIVI(bits, *sizes), Tokens.random(prompt + new, seed=prompt)
    pool = admit(method, tokens, prompt)
    found = one_by_one(pool, tokens, prompt, prompt + new)
    for step in range(new):
        expected = dense(tokens, *kivi_cache(method, tokens, prompt + step + 1), prompt + step)
        torch.testing.assert_close(found[:, :, step].double(), expected, rtol=1e-4, atol=1e-5)


@settings(max_examples=20)
@given(st.sampled_from((2, 4)), st.integers(1, 40), st.integers(1, 25))
def test_kivi_holds_the_bytes_of_its_formula_at_every_step(bits: int, prompt: int, new: int) -> None:
    method, tokens = KIVI(bits, 4, 8), Tokens.random(prompt + new)
    pool = admit(method, tokens, prompt)
    held = [pool.memory(1).held]
    for position in range(prompt, prompt + new):
        feed(pool, {1: (tokens, position, position + 1)})
        held.append(pool.memory(1).held)
    assert held == [method.held_bytes(prompt, step, LAYOUT) for step in range(new + 1)]
    assert pool.peak_held(1) >= max(held)
    assert pool.memory(1).held + pool.memory(1).slack <= pool.allocated_bytes()


def test_a_coded_element_takes_the_bits_of_the_paper() -> None:
    """Two tenths or so of the cache at two bits: 3 bits of 16; 5 at four bits."""
    layer = LayerLayout("growing", 32, 8, 128, 128)
    full = CacheLayout((layer,), 2)
    for bits, expected in ((2, 3), (4, 5)):
        method = KIVI(bits)
        more = method.held_bytes(128 * 200, 0, full) - method.held_bytes(128 * 100, 0, full)
        assert more * 8 / (128 * 100 * 8 * 256) == expected


def test_codes_are_packed() -> None:
    """[-1, 0, 0.5, 2] is one byte; a long row takes little more than its codes and scales."""
    tokens = Tokens.random(8)
    tokens.keys[:, :, :4] = torch.tensor([-1, 0, 0.5, 2])[:, None]
    pool = admit(SMALL, tokens, 8)
    assert isinstance(pool, LowBitPool)
    codes = pool.stores[0].codes
    page = int(codes.used.nonzero()[0])
    assert codes["key_codes"].dtype == torch.uint8
    assert codes["key_codes"][page, :, :, 0].tolist() == [[[228]] * DIM] * KV_HEADS
    assert codes["key_scale"][page, :, :, 0].unique().tolist() == [1]
    long = admit(KIVI(bits=2, group=8, residual=16), Tokens.random(2000), 2000)
    assert long.allocated_bytes() < 0.35 * LAYOUT.full_bytes(2000)


@pytest.mark.parametrize("prompt", [3, 8, 13, 16, 29])
def test_a_chunk_equals_single_tokens(prompt: int) -> None:
    """Pages close, and values are coded, at the token where it is due, also inside a step of many tokens."""
    tokens = Tokens.random(prompt + 21)
    at_once, single = admit(SMALL, tokens, prompt), admit(SMALL, tokens, prompt)
    together = feed(at_once, {1: (tokens, prompt, prompt + 21)})[1]
    assert torch.equal(together, one_by_one(single, tokens, prompt, prompt + 21))
    assert at_once.memory(1) == single.memory(1)
    assert at_once.peak_held(1) == single.peak_held(1)


@pytest.mark.parametrize("grown", [1, 7, 8, 20])
def test_decoding_leaves_the_cache_that_a_longer_prompt_leaves(grown: int) -> None:
    tokens = Tokens.random(40)
    decoded, prefilled = admit(SMALL, tokens, 13), admit(SMALL, tokens, 13 + grown)
    one_by_one(decoded, tokens, 13, 13 + grown)
    assert decoded.memory(1) == prefilled.memory(1)
    for ours, theirs in zip(decoded.stores, prefilled.stores, strict=True):
        for name in ("key_codes", "key_scale", "key_offset", "value_codes", "value_scale", "value_offset"):
            first, second = (store.codes[name][store._pages_of(1)] for store in (ours, theirs))
            assert torch.equal(first, second), name
    following = {1: (tokens, 13 + grown, 14 + grown)}
    assert torch.equal(feed(decoded, following)[1], feed(prefilled, following)[1])


def test_rows_do_not_see_each_other() -> None:
    streams = {row: Tokens.random(60, seed=10 * row) for row in range(4)}
    lengths = {0: 5, 1: 8, 2: 31, 3: 16}
    assert_rows_do_not_see_each_other(partial(admit, SMALL), streams, lengths, (broken(40), 40), 10)


def test_more_bits_and_a_longer_residual_err_less() -> None:
    errors = []
    for method in (KIVI(2, 8, 8), KIVI(4, 8, 8), KIVI(4, 8, 64), KIVI(2, 8, 200)):
        total = 0.0
        for seed in range(20):
            tokens = Tokens.random(101, seed=seed * 7)
            found = one_by_one(admit(method, tokens, 100), tokens, 100, 101)[:, :, 0]
            total += float((found - dense(tokens, tokens.keys, tokens.values, 100)).norm())
        errors.append(total)
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 1e-4, "with everything in the residual nothing is coded"


def test_a_budget_is_refused_that_the_operating_point_does_not_fit() -> None:
    method = KIVI(group=8)
    held = method.held_bytes(1000, 0, LAYOUT)
    share = held / LAYOUT.full_bytes(1000)
    for text, fits in (("unlimited", True), ("90%", True), (f"{100 * share - 0.5:.2f}%", False)):
        reason = method.impossible(Budget.parse(text).resolve(1000, 50, "prompt", LAYOUT), LAYOUT)
        assert (reason is None) == fits
        assert reason is None or f"hold {held} bytes" in reason
    unlimited = Budget.parse("unlimited").resolve(1000, 50, "prompt", LAYOUT)
    assert "do not divide the 8 of a value" in str(KIVI().impossible(unlimited, LAYOUT))
    most = max(method.held_bytes(1000, new, LAYOUT) for new in range(51))
    assert most <= method.peak_bytes(unlimited, LAYOUT) <= most + LAYOUT.full_bytes(1)


@pytest.mark.parametrize("wrong", [{"bits": 3}, {"group": 3}, {"group": 0}, {"residual": 100}, {"residual": 0}])
def test_kivi_refuses_settings_without_meaning(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"bits is|whole bytes|multiple of the group"):
        KIVI(**wrong)


ZIP = ZipCache(interval=10)


class PaperZipCache:
    """ZipCache one head and block at a time, in lists."""

    def __init__(self, method: ZipCache, tokens: Tokens, prompt: int) -> None:
        self.method, self.tokens, self.prompt = method, tokens, prompt
        self.keys, self.values = tokens.keys[:, :, :prompt].clone(), tokens.values[:, :, :prompt].clone()
        self.received = torch.zeros(LAYERS, KV_HEADS, 0)
        rows = probe_positions(prompt, method.probes).tolist()
        received = sum(self._attention(row) for row in rows)
        self._code(0, received / torch.tensor([sum(row >= token for row in rows) for token in range(prompt)]))

    def step(self, position: int) -> Tensor:
        tokens = self.tokens
        self.keys = torch.cat([self.keys, tokens.keys[:, :, position, None]], 2)
        self.values = torch.cat([self.values, tokens.values[:, :, position, None]], 2)
        output = dense(tokens, self.keys, self.values, position)
        start = self.prompt + (position - self.prompt) // self.method.interval * self.method.interval
        rows = [start + row for row in probe_positions(self.method.interval, self.method.probes).tolist()]
        self.received = torch.nn.functional.pad(self.received, (0, 1))
        if position in rows:
            self.received += self._attention(position)[..., start : position + 1]
        if position - start == self.method.interval - 1:
            seen = torch.tensor([sum(row >= token for row in rows) for token in range(start, position + 1)])
            self._code(start, self.received / seen)
            self.received = torch.zeros(LAYERS, KV_HEADS, 0)
        return output

    def _attention(self, position: int) -> Tensor:
        """What the query at a position gives to the tokens held, group summed. [L, H_kv, n]"""
        group = QUERY_HEADS // KV_HEADS
        scores = self.tokens.queries[:, :, position].unflatten(1, (KV_HEADS, group)) @ self.keys.transpose(2, 3) * SCALE
        scores[..., position + 1 :] = -torch.inf
        return torch.softmax(scores, -1).sum(2)

    def _code(self, start: int, saliency: Tensor) -> None:
        count = saliency.shape[-1]
        salient = count - int(count * (1 - self.method.salient) + 1e-9)
        for layer in range(LAYERS):
            for head in range(KV_HEADS):
                order = saliency[layer, head].sort(descending=True, stable=True).indices + start
                factor = self.values[layer, head, start:].abs().amax(0).sqrt().half().float()
                for some, bits in (
                    (order[:salient], self.method.salient_bits),
                    (order[salient:], self.method.other_bits),
                ):
                    if len(some):
                        keys, values = self.keys[layer, head], self.values[layer, head]
                        padded = torch.cat([keys[some], keys[some[-1:]].repeat(-len(some) % 8, 1)])
                        keys[some] = coded(padded.T, bits).T[: len(some)]
                        values[some] = coded(values[some] / factor, bits) * factor


@settings(max_examples=20)
@given(
    st.integers(1, 80),
    st.integers(1, 25),
    st.sampled_from((ZIP, ZipCache(interval=1), ZipCache(0.35, 8, 1, 1.0, 7), ZipCache(salient=1.0, interval=6))),
)
def test_zipcache_attends_to_what_its_codes_say(prompt: int, new: int, method: ZipCache) -> None:
    tokens = Tokens.random(prompt + new, seed=prompt)
    pool, paper = admit(method, tokens, prompt), PaperZipCache(method, tokens, prompt)
    found = one_by_one(pool, tokens, prompt, prompt + new)
    for step in range(new):
        expected = paper.step(prompt + step)
        torch.testing.assert_close(found[:, :, step].double(), expected, rtol=1e-4, atol=1e-5)


@settings(max_examples=15)
@given(st.integers(1, 100), st.integers(1, 25))
def test_zipcache_holds_the_bytes_of_its_formula_at_every_step(prompt: int, new: int) -> None:
    tokens = Tokens.random(prompt + new)
    pool, held = admit(ZIP, tokens, prompt), []
    for step in range(new + 1):
        held.append(pool.memory(1).held)
        assert held[-1] == ZIP.held_bytes(prompt, step, LAYOUT)
        feed(pool, {1: (tokens, prompt + step, prompt + step + 1)}) if step < new else None
    assert pool.peak_held(1) >= max(held)
    assert pool.memory(1).held + pool.memory(1).slack <= pool.allocated_bytes()


def test_a_zipcache_token_takes_the_bits_of_the_paper() -> None:
    """3.4 bits, and scale and offset of a value: 32 bits for the 256 elements of a key and its value."""
    layout = CacheLayout((LayerLayout("growing", 32, 8, 128, 128),), 2)
    more = ZipCache().held_bytes(20_000, 0, layout) - ZipCache().held_bytes(10_000, 0, layout)
    assert more * 8 / (10_000 * 8 * 256) == 0.7 * 4 + 0.3 * 2 + 32 / 256
    held = ZipCache().held_bytes(8000, 0, layout) / layout.full_bytes(8000)
    assert 0.22 < held < 0.23


def test_every_token_salient_is_one_width() -> None:
    """Keys per channel over the whole prompt, values per token after their channels' factors."""
    tokens = Tokens.random(33)
    pool = admit(ZipCache(salient=1.0), tokens, 32)
    factor = tokens.values[:, :, :32].abs().amax(2, keepdim=True).sqrt().half().float()
    keys = coded(tokens.keys[:, :, :32].transpose(2, 3), 4).transpose(2, 3)
    values = coded(tokens.values[:, :, :32] / factor, 4) * factor
    keys, values = (
        torch.cat([part, whole[:, :, 32:]], 2) for part, whole in ((keys, tokens.keys), (values, tokens.values))
    )
    found = feed(pool, {1: (tokens, 32, 33)})[1][:, :, 0]
    torch.testing.assert_close(found.double(), dense(tokens, keys, values, 32), rtol=1e-4, atol=1e-5)
    assert pool.stores[0].codes[1].nbytes == 0  # type: ignore[attr-defined]


@given(st.integers(1, 400), st.sampled_from((0.01, 0.1, 0.35, 1.0)))
def test_probes_are_the_latest_and_as_many_at_random(tokens: int, share: float) -> None:
    positions = probe_positions(tokens, share)
    assert positions.equal(positions.unique()), "ascending, none twice"
    latest = -(-round(share * 1000) * tokens // 2000)
    assert positions[len(positions) - latest :].tolist() == list(range(tokens - latest, tokens))
    assert latest - 1 <= len(positions) - latest <= latest
    assert positions.equal(probe_positions(tokens, share))
    seen = witnesses(tokens, share)
    assert seen.tolist() == [int((positions >= token).sum()) for token in range(tokens)]
    assert int(seen.min()) >= 1


def test_with_every_query_a_probe_saliency_is_the_mean_attention() -> None:
    tokens = Tokens.random(30)
    received = probed_attention(tokens.queries[0], torch.arange(30), tokens.keys[0], SCALE)
    scores = tokens.queries[0].unflatten(0, (KV_HEADS, -1)) @ tokens.keys[0].transpose(1, 2)[:, None] * SCALE
    scores = scores.masked_fill(torch.ones(30, 30).triu(1).bool(), -torch.inf)
    expected = torch.softmax(scores, -1).sum((1, 2)) / torch.arange(30, 0, -1)
    torch.testing.assert_close(received / witnesses(30, 1.0), expected)


@pytest.mark.parametrize("prompt", [3, 31, 32, 50])
def test_a_zipcache_chunk_equals_single_tokens(prompt: int) -> None:
    tokens = Tokens.random(prompt + 23)
    at_once, single = admit(ZIP, tokens, prompt), admit(ZIP, tokens, prompt)
    together = feed(at_once, {1: (tokens, prompt, prompt + 23)})[1]
    assert torch.equal(together, one_by_one(single, tokens, prompt, prompt + 23))
    assert at_once.memory(1) == single.memory(1)


def test_zipcache_rows_do_not_see_each_other() -> None:
    streams = {row: Tokens.random(90, seed=10 * row) for row in range(4)}
    lengths = {0: 5, 1: 40, 2: 64, 3: 33}
    assert_rows_do_not_see_each_other(partial(admit, ZIP), streams, lengths, (streams[3], 70), 25)


@pytest.mark.parametrize("method", [SMALL, ZIP], ids=str)
def test_a_broken_row_ends_no_other(method: Method) -> None:
    assert_a_broken_row_ends_no_other(partial(admit, method), broken(75), 25)


def test_more_salient_tokens_err_less() -> None:
    errors = []
    for salient in (0.1, 0.5, 0.9, 1.0):
        total = 0.0
        for seed in range(20):
            tokens = Tokens.random(101, seed=seed * 7)
            found = feed(admit(ZipCache(salient=salient), tokens, 100), {1: (tokens, 100, 101)})[1][:, :, 0]
            total += float((found - dense(tokens, tokens.keys, tokens.values, 100)).norm())
        errors.append(total)
    assert errors == sorted(errors, reverse=True)
