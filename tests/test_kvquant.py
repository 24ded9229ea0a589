"""KVQuant: codebooks that are the best ones, codes really packed, outliers exact, the bytes of the paper's formula."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import combinations, pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kvquant_cases import (
    CHANNELS,
    admitted,
    made_up,
    new_pool,
    of_bits,
    of_tiny_llama,
    paper_cache,
    rotary,
    written,
)
from lowbit_cases import (
    DIM,
    KV_HEADS,
    LAYOUT,
    Tokens,
    assert_rows_do_not_see_each_other,
    broken,
    dense,
    feed,
    one_by_one,
    tensor,
)
from models import tiny_gemma, tiny_llama
from test_engine import fork, prompts_of, run
from torch import Tensor

from kvcache.baselines.full import Full
from kvcache.baselines.kvquant import KVQuant
from kvcache.codebook import BINS, Histogram, best_codebook, nearest, uniform_codebook
from kvcache.dense_sparse import code_values, look_up, pack_codes, points_of_words, read_values
from kvcache.layout import CacheLayout, LayerLayout
from kvcache.method import NotCalibrated
from kvcache.nonuniform import PAGE, NonUniformPool
from kvcache.quant import dequantize, pack, quantize
from kvcache.rotary import unrotate

BITS = (2, 3, 4)


# -- codebooks -------------------------------------------------------------------------------------------------------


def loss(points: list[float], weights: list[float], codebook: list[float]) -> float:
    return sum(w * min((x - c) ** 2 for c in codebook) for x, w in zip(points, weights, strict=True))


def best_of_all(points: list[float], weights: list[float], size: int) -> float:
    """The least loss of all ways to cut the points into intervals."""
    found = []
    for cuts in combinations(range(1, len(points)), size - 1):
        edges = [0, *cuts, len(points)]
        pieces = [range(*pair) for pair in pairwise(edges)]
        means = [sum(weights[i] * points[i] for i in one) / sum(weights[i] for i in one) for one in pieces]
        found.append(loss(points, weights, means))
    return min(found)


@given(
    st.lists(st.integers(-1000, 1000), min_size=2, max_size=9, unique=True),
    st.lists(st.floats(1e-6, 10), min_size=9, max_size=9),
    st.integers(2, 4),
)
def test_a_codebook_loses_as_little_as_any_could(places: list[int], weights: list[float], size: int) -> None:
    points, weights = [place / 1000 for place in sorted(places)], weights[: len(places)]
    exact = torch.float64
    found = best_codebook(torch.tensor(points, dtype=exact), torch.tensor(weights, dtype=exact), size).tolist()
    least = best_of_all(points, weights, min(size, len(points)))
    assert found == sorted(found)
    assert loss(points, weights, found) == pytest.approx(least, rel=1e-4, abs=1e-6)


def test_as_many_values_as_codes_are_exact() -> None:
    histogram = Histogram()
    histogram.add(torch.tensor([-1.0, 0.25, 0.25, -0.5, 1.0, 0.25]))
    assert histogram.codebook(4).tolist() == [-1, -0.5, 0.25, 1]
    assert histogram.codebook(8).tolist() == [-1, -0.5, 0.25, 1, 1, 1, 1, 1]
    assert Histogram().codebook(4).tolist() == uniform_codebook(4).tolist()


def test_a_heavier_value_is_met_more_closely() -> None:
    points = torch.tensor([-0.9, -0.8, 0.7, 0.9], dtype=torch.float64)
    light, heavy = (best_codebook(points, torch.tensor([1.0, 1.0, 1.0, w]), 2)[1] for w in (1.0, 9.0))
    assert float(light) == pytest.approx(0.8)
    assert float(heavy) == pytest.approx(0.88)


@pytest.mark.parametrize("bits", BITS)
def test_a_fitted_codebook_loses_less_than_equal_steps(bits: int) -> None:
    x = (tensor(bits, 20_000) / 6).clamp(-1, 1)
    histogram = Histogram()
    histogram.add(x[:7000])
    histogram.add(x[7000:])
    losses = []
    for codebook in (histogram.codebook(2**bits), uniform_codebook(2**bits)):
        losses.append(float((x - codebook[nearest(x, codebook).long()]).square().mean()))
    assert losses[0] < 0.75 * losses[1]


def test_bins_keep_means_and_weights() -> None:
    histogram = Histogram()
    histogram.add(torch.tensor([0.1, 0.1 + 0.2 / BINS, -1.0, 1.0]), torch.tensor([3.0, 1.0, 2.0, 0.0]))
    assert sorted(histogram.weight[histogram.weight > 0].tolist()) == [2, 4]
    assert histogram.codebook(2).tolist() == pytest.approx([-1, 0.1 + 0.05 / BINS])


def test_the_nearest_code_half_way_is_the_lower() -> None:
    codebook = torch.tensor([-1.0, 0.0, 0.5, 1.0])
    x = torch.tensor([-9, -0.6, -0.5, -0.4, 0.25, 0.3, 0.75, 0.76, 9])
    assert nearest(x, codebook).tolist() == [0, 0, 0, 1, 1, 2, 2, 3, 3]


# -- codes -----------------------------------------------------------------------------------------------------------


def numbers(bits: int) -> Tensor:
    """Points by which a code stands for itself."""
    return points_of_words(torch.arange(2.0**bits))


@given(st.sampled_from(BITS), st.integers(1, 5), st.integers(0, 99))
def test_packed_codes_come_back(bits: int, eights: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(2**bits, (3, 8 * eights), generator=generator, dtype=torch.uint8)
    packed = pack_codes(codes, bits)
    assert packed.shape == (3, eights * bits)
    assert packed.dtype == torch.uint8
    assert torch.equal(look_up(packed, numbers(bits), bits), codes.float())
    if bits != 3:
        assert torch.equal(packed, pack(codes, bits))


def test_eight_codes_of_three_bits_are_three_bytes() -> None:
    codes = torch.tensor([1, 2, 3, 4, 5, 6, 7, 0], dtype=torch.uint8)
    word = sum(int(code) << 3 * place for place, code in enumerate(codes))
    assert pack_codes(codes, 3).tolist() == list(word.to_bytes(3, "little"))


@pytest.mark.parametrize("bits", BITS)
def test_equal_steps_without_outliers_are_uniform_quantisation(bits: int) -> None:
    """Every token's range is ``steps`` times 16, so that both ways to say it are exact in fp16."""
    steps = 2**bits - 1
    x = torch.randint(-8 * steps, 8 * steps + 1, (200, 16), generator=torch.Generator().manual_seed(bits)).float()
    x[:, 0], x[:, 9] = -8 * steps, 8 * steps
    code = (x + 8 * steps) / 16
    x = torch.where(code % 1 == 0.5, x + 1, x)  # half-way between two codes the rules differ
    codes, span, outliers = code_values(x, uniform_codebook(2**bits), 0, bits)
    expected = ((x + 8 * steps) / 16).round()
    assert torch.equal(look_up(codes, numbers(bits), bits), expected)
    read = read_values(codes, points_of_words(uniform_codebook(2**bits)), span, outliers, bits)
    torch.testing.assert_close(read, expected * 16 - 8 * steps, rtol=1e-6, atol=1e-4)
    if bits != 3:
        uniform = quantize(x, bits)
        assert torch.equal(codes, uniform.codes)
        torch.testing.assert_close(read, dequantize(uniform, bits), rtol=1e-6, atol=1e-4)


# -- the cache -------------------------------------------------------------------------------------------------------


@settings(max_examples=12)
@given(
    st.sampled_from(BITS),
    st.sampled_from((0.0, 0.01, 0.25)),
    st.sampled_from((0, 1, 5)),
    st.sampled_from((1, 3, 60, 63, 64, 70, 127)),
    st.integers(1, 6),
)
def test_attention_is_over_what_codes_and_outliers_say(
    bits: int, outliers: float, sinks: int, prompt: int, new: int
) -> None:
    """Every step, in every layer; a token is coded before it attends."""
    method, tokens = of_bits(bits, outliers, sinks), Tokens.random(prompt + new, seed=prompt)
    found = one_by_one(admitted(method, tokens, prompt), tokens, prompt, prompt + new)
    keys, values = paper_cache(method, tokens, prompt + new)
    for step in range(new):
        end = prompt + step + 1
        expected = dense(tokens, keys[:, :, :end], values[:, :, :end], end - 1)
        torch.testing.assert_close(found[:, :, step].double(), expected, rtol=1e-4, atol=1e-5)


def test_with_every_channel_an_outlier_the_cache_is_the_full_one() -> None:
    """Thresholds that no key is between; what is left is the rounding to fp16."""
    nothing = [replace(table, key_low=table.key_low * 0, key_high=table.key_high * 0) for table in made_up(2)]
    method, tokens = written(KVQuant(2, outliers=1.0, sinks=0), nothing), Tokens.random(75)
    found = one_by_one(admitted(method, tokens, 70), tokens, 70, 75)
    for step in range(5):
        expected = dense(tokens, tokens.keys[:, :, : 71 + step], tokens.values[:, :, : 71 + step], 70 + step)
        torch.testing.assert_close(found[:, :, step].double(), expected, rtol=1e-2, atol=1e-2)


@settings(max_examples=12)
@given(st.sampled_from(BITS), st.sampled_from((0, 1, 5)), st.integers(1, 140), st.integers(1, 20))
def test_a_row_holds_the_bytes_of_the_formula_at_every_step(bits: int, sinks: int, prompt: int, new: int) -> None:
    method, tokens = of_bits(bits, sinks=sinks), Tokens.random(prompt + new)
    pool = admitted(method, tokens, prompt)
    held = [pool.memory(1).held]
    for position in range(prompt, prompt + new):
        feed(pool, {1: (tokens, position, position + 1)})
        held.append(pool.memory(1).held)
    assert held == [method.held_bytes(prompt, step, LAYOUT) for step in range(new + 1)]
    assert pool.memory(1).held + pool.memory(1).slack <= pool.allocated_bytes()


@pytest.mark.parametrize(("bits", "expected"), [(2, 2.32), (3, 3.32)])
def test_an_element_takes_the_bits_of_the_paper(bits: int, expected: float) -> None:
    """One per cent of outliers at 32 bits each, rounded up to whole slots, and 32 bits per value for its range."""
    layer = LayerLayout("growing", 32, 32, 128, 128)
    layout = CacheLayout((layer,), 2)
    more = KVQuant(bits).held_bytes(20_000, 0, layout) - KVQuant(bits).held_bytes(10_000, 0, layout)
    found = more * 8 / (10_000 * 2 * 4096)
    assert found == bits + 42 * 32 / 4096 + 32 / (2 * 4096)
    assert expected < found < expected + 0.02
    grouped = KVQuant(bits).grid.tail(8 * 128)
    assert 0.01 <= 2 * grouped / 1024 <= 0.012


def test_codes_are_packed() -> None:
    long = admitted(of_bits(3), Tokens.random(2000), 2000)
    assert isinstance(long, NonUniformPool)
    codes = long.stores[0].codes
    assert codes["key_codes"].dtype == torch.uint8
    assert codes["key_codes"].shape[1:] == (PAGE, CHANNELS * 3 // 8)
    assert codes["key_channel"].shape[-1] == 2, "one at either end of 16 channels"
    assert long.allocated_bytes() < 0.42 * LAYOUT.full_bytes(2000)


def test_outliers_are_read_as_they_were() -> None:
    """Up to fp16: keys beyond their thresholds, as many as there are slots for, and a token's extreme values."""
    method, tokens = of_bits(2, outliers=0.25, sinks=0), Tokens.random(40)
    tokens.keys, tokens.values = tokens.keys.half().float(), tokens.values.half().float()
    pool = admitted(method, tokens, 40)
    assert isinstance(pool, NonUniformPool)
    for layer, (store, table) in enumerate(zip(pool.stores, method.tables(LAYOUT), strict=True)):
        keys, values = (part[0, :, :40] for part in store._read(slice(0, 1), *store._points()))
        cos, sin = rotary(layer, torch.arange(40))
        plain, read = (unrotate(x, cos, sin).transpose(0, 1).flatten(1) for x in (tokens.keys[layer], keys))
        outside = (plain < table.key_low) | (plain > table.key_high)
        few = outside.sum(1) <= 4
        assert int(outside.sum()) > 5
        assert bool(few.any())
        assert bool((read - plain).abs()[outside & few[:, None]].le(4e-3).all())
        assert float((read - plain)[~outside].abs().mean()) > 0.05
        order = tokens.values[layer].transpose(0, 1).flatten(1).sort(-1).indices
        extreme = torch.cat([order[:, :2], order[:, -2:]], -1)
        was, now = (x.transpose(0, 1).flatten(1).gather(1, extreme) for x in (tokens.values[layer], values))
        assert torch.equal(was, now)


def test_first_tokens_are_exact() -> None:
    method, tokens = of_bits(2, sinks=5), Tokens.random(6)
    found = one_by_one(admitted(method, tokens, 2), tokens, 2, 5)
    for step in range(3):
        exact = dense(tokens, tokens.keys[:, :, : 3 + step], tokens.values[:, :, : 3 + step], 2 + step)
        torch.testing.assert_close(found[:, :, step].double(), exact, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("prompt", [1, 3, 50, 64, 100])
def test_a_chunk_equals_single_tokens(prompt: int) -> None:
    method, tokens = of_bits(3, 0.1), Tokens.random(prompt + 21)
    at_once, single = admitted(method, tokens, prompt), admitted(method, tokens, prompt)
    together = feed(at_once, {1: (tokens, prompt, prompt + 21)})[1]
    assert torch.equal(together, one_by_one(single, tokens, prompt, prompt + 21))
    assert at_once.memory(1) == single.memory(1)


@pytest.mark.parametrize("grown", [1, 7, 20, 64])
def test_decoding_leaves_the_cache_that_a_longer_prompt_leaves(grown: int) -> None:
    method, tokens = of_bits(3, 0.1), Tokens.random(140)
    decoded, prefilled = admitted(method, tokens, 58), admitted(method, tokens, 58 + grown)
    one_by_one(decoded, tokens, 58, 58 + grown)
    assert decoded.memory(1) == prefilled.memory(1)
    following = {1: (tokens, 58 + grown, 59 + grown)}
    assert torch.equal(feed(decoded, following)[1], feed(prefilled, following)[1])


def test_rows_do_not_see_each_other() -> None:
    method, streams = of_bits(3, 0.1, sinks=2), {row: Tokens.random(160, seed=10 * row) for row in range(4)}
    lengths, empty = {0: 5, 1: 64, 2: 131, 3: 60}, new_pool(method).allocated_bytes()
    assert_rows_do_not_see_each_other(partial(admitted, method), streams, lengths, (broken(80), 80), 13, empty)


def test_more_bits_and_more_outliers_err_less() -> None:
    errors = []
    for bits, outliers in ((2, 0.0), (2, 0.25), (3, 0.25), (4, 0.25)):
        method, total = of_bits(bits, outliers, uniform=True), 0.0
        for seed in range(20):
            tokens = Tokens.random(101, seed=seed * 7)
            found = one_by_one(admitted(method, tokens, 100), tokens, 100, 101)[:, :, 0]
            total += float((found - dense(tokens, tokens.keys, tokens.values, 100)).norm())
        errors.append(total)
    assert errors == sorted(errors, reverse=True)


# -- through the engine, and what is refused ---------------------------------------------------------------------------


def test_a_row_says_what_its_codebooks_rest_on() -> None:
    method = KVQuant(**of_tiny_llama(3))
    weighted = written(KVQuant(3), made_up(3), weighted=True)
    model, one = tiny_llama(), fork(method)
    found = run(model, prompts_of((90,), [one, fork(Full()), fork(weighted)], appended=21))
    generation = found[90, one.key]
    assert not generation.error
    assert generation.method_facts["codebooks"] == "unweighted"
    assert generation.method_facts["calibration_tokens"] == 128
    assert generation.at_end.held == method.held_bytes(90, generation.held_tokens - 90, model.layout)
    assert "is of another model" in found[90, fork(weighted).key].error
    assert not found[90, fork(Full()).key].error


def test_what_is_not_calibrated_says_so() -> None:
    found = run(tiny_gemma(), prompts_of((20,), [fork(KVQuant()), fork(KVQuant(**of_tiny_llama(3)))]))
    errors = sorted(one.error for one in found.values())
    assert all(error.startswith("NotCalibrated: ") for error in errors)
    assert "is of another model" in errors[0]
    assert "needs a calibration: a file that `kvsweep calibrate` wrote" in errors[1]


def test_channels_that_do_not_fill_bytes_are_refused() -> None:
    odd = LayerLayout("growing", 3, 3, 20, 20)
    assert "60 do not fit" in str(KVQuant().unsuited(odd))
    assert KVQuant().unsuited(LayerLayout("growing", 2, 2, 20, 20)) is None


@pytest.mark.parametrize(
    "wrong", [{"bits": 5}, {"outliers": 1.5}, {"outliers": -0.1}, {"sinks": 65}, {"calibration": "wikitext"}]
)
def test_settings_without_meaning_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"is among|is between|is a file"):
        KVQuant(**wrong)  # type: ignore[arg-type]


def test_two_calibrations_are_two_identities_wherever_they_lie() -> None:
    first, again, other = (written(KVQuant(2), made_up(2, uniform)) for uniform in (False, False, True))
    assert first.calibration != again.calibration
    assert first.identity == again.identity != other.identity
    assert first.family == again.family != other.family
    with pytest.raises(NotCalibrated, match="No such file"):
        KVQuant(2, calibration="/nowhere/x.safetensors").tables(LAYOUT)


def test_heads_are_coded_together() -> None:
    """The range of a value is that of all heads, and a channel's thresholds are its own."""
    assert made_up(2)[0].key_low.shape == (KV_HEADS * DIM,)
    _, span, _ = code_values(torch.tensor([[0.0] * DIM + [4.0] * DIM]), uniform_codebook(4), 0, 2)
    assert (float(span.mid), float(span.half)) == (2, 2)
