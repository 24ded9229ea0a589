"""Levels, macro-averages and comparisons: against closed forms, against scipy, and where data are degenerate."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

import pipeline.partition
from pipeline import stats
from pipeline.partition import Scores, StatisticsError, partition, replicates

approx = pytest.approx
BINARY = [1.0, 0.0, 1.0, 1.0, 0.0, 1.0, 1.0, 0.0, 1.0, 1.0, 0.0, 0.0, 1.0, 1.0, 1.0, 0.0, 1.0, 1.0, 0.0, 1.0]
GRADED = np.random.default_rng(5).beta(2, 3, size=40).round(3).tolist()
scores_lists = st.lists(st.floats(0, 1, allow_nan=False), min_size=1, max_size=25)


def plain(values: list[float], task: str = "a") -> Scores:
    return Scores.of(values, [f"{task}{index}" for index in range(len(values))])


def crossed(grid: np.ndarray, method_seed: bool = True) -> Scores:
    """``grid [seeds, samples]``: every seed on the same prompts."""
    seeds, samples = np.indices(grid.shape)
    names = [f"p{index}" for index in samples.ravel()]
    which = {"method_seeds": seeds.ravel()} if method_seed else {"data_seeds": seeds.ravel()}
    return Scores.of(grid.ravel(), names, **which)


def nested(grid: np.ndarray) -> Scores:
    """``grid [seeds, samples]``: every seed on prompts of its own."""
    seeds, samples = np.indices(grid.shape)
    names = [f"p{seed}-{index}" for seed, index in zip(seeds.ravel(), samples.ravel(), strict=True)]
    return Scores.of(grid.ravel(), names, data_seeds=seeds.ravel())


def shuffled(scores: Scores, order: np.ndarray) -> Scores:
    return Scores.of(scores.values[order], scores.samples[order], scores.data_seeds[order], scores.method_seeds[order])


# ---- the partition


def test_seeds_that_share_prompts_are_one_block_and_fresh_prompts_are_blocks_of_their_own() -> None:
    grid = np.arange(6.0).reshape(2, 3)
    assert [block.values.shape for block in partition(plain(GRADED)).blocks] == [(1, 40)]
    assert [block.values.tolist() for block in partition(crossed(grid)).blocks] == [grid.tolist()]
    assert [block.values.tolist() for block in partition(nested(grid)).blocks] == [[[0, 1, 2]], [[3, 4, 5]]]


def test_method_seeds_within_data_seeds_make_one_block_per_data_seed() -> None:
    data_seeds, method_seeds, index = (axis.ravel() for axis in np.indices((2, 3, 4)))
    names = [f"{seed}-{place}" for seed, place in zip(data_seeds, index, strict=True)]
    parts = partition(Scores.of(np.linspace(0, 1, 24), names, data_seeds, method_seeds))
    assert [block.values.shape for block in parts.blocks] == [(3, 4), (3, 4)]
    assert (parts.samples, parts.seeds, parts.design) == (8, 6, "nested bootstrap")


def test_a_missing_sample_of_one_seed_leaves_a_gap_in_its_block() -> None:
    scores = Scores.of([1.0, 0.0, 0.5], ["p0", "p1", "p0"], method_seeds=[0, 0, 1])
    parts = partition(scores)
    assert np.isnan(parts.blocks[0].values[1, 1])
    assert parts.mean == approx(0.5)


def test_a_sample_scored_twice_under_one_seed_is_refused() -> None:
    with pytest.raises(StatisticsError, match="scored twice"):
        partition(Scores.of([1.0, 0.0], ["p0", "p0"]))


def test_scores_that_are_not_numbers_are_refused() -> None:
    with pytest.raises(StatisticsError, match="leave failed samples out"):
        plain([1.0, float("nan")])


# ---- levels


def test_a_task_score_is_the_mean_over_samples() -> None:
    assert stats.task_score(plain(BINARY), "a").value == approx(13 / 20)


@pytest.mark.parametrize("values", [BINARY, GRADED])
def test_the_bootstrap_agrees_with_scipy(values: list[float]) -> None:
    ours = stats.task_score(plain(values), "a").interval
    theirs = scipy.stats.bootstrap(
        (values,), np.mean, n_resamples=20_000, method="percentile", rng=np.random.default_rng(1)
    ).confidence_interval
    assert ours is not None
    assert (ours.low, ours.high) == approx((theirs.low, theirs.high), abs=0.012)
    assert ours.how == "bootstrap"


def test_the_spread_of_the_two_way_bootstrap_is_the_sum_of_its_parts() -> None:
    generator = np.random.default_rng(3)
    grid = generator.normal(0, 0.2, (6, 1)) + generator.normal(0, 0.5, (1, 60)) + generator.normal(0, 0.3, (6, 60))
    between_seeds, between_samples = grid.mean(axis=1).var() / 6, grid.mean(axis=0).var() / 60
    residual = grid - grid.mean(axis=1, keepdims=True) - grid.mean(axis=0, keepdims=True) + grid.mean()
    spread = replicates(partition(crossed(grid)), "a").var()
    assert spread == approx(between_seeds + between_samples + residual.var() / 360, rel=0.06)


def test_the_spread_of_the_nested_bootstrap_is_that_of_seeds_plus_that_within_them() -> None:
    grid = np.random.default_rng(4).normal(0, 1, (5, 40)) + np.arange(5)[:, None] / 2
    between, within = grid.mean(axis=1).var() / 5, grid.var(axis=1).mean() / 200
    parts = partition(nested(grid))
    assert replicates(parts, "a").var() == approx(between + within, rel=0.06)
    assert parts.design == "nested bootstrap"


@pytest.mark.parametrize("scores", [plain(GRADED), crossed(np.tile(GRADED, (3, 1))), nested(np.eye(4, 30))])
def test_replicates_are_the_same_by_whatever_steps_they_are_drawn(
    monkeypatch: pytest.MonkeyPatch, scores: Scores
) -> None:
    monkeypatch.setattr(pipeline.partition, "_kept", OrderedDict())
    whole = replicates(partition(scores), "a")
    assert np.array_equal(replicates(partition(scores), "a"), whole), "kept"
    monkeypatch.setattr(pipeline.partition, "_kept", OrderedDict())
    monkeypatch.setattr(pipeline.partition, "AT_ONCE", 999)
    assert np.array_equal(replicates(partition(scores), "a"), whole)


def test_resampling_counts_are_kept_up_to_a_limit_those_used_last(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: OrderedDict[Any, Any] = OrderedDict()
    monkeypatch.setattr(pipeline.partition, "_kept", kept)
    monkeypatch.setattr(pipeline.partition, "KEPT_BYTES", 2 * 41 * 1000)
    for task in "abac":
        replicates(partition(plain(GRADED)), task, draws=1000)
    assert [stream for _, stream, _ in kept] == ["a", "c"]
    replicates(partition(plain(GRADED * 10)), "large", draws=1000)
    assert [stream for _, stream, _ in kept] == ["a", "c"], "one that is too large by itself drives out no others"


def test_equal_seeds_of_a_deterministic_method_add_no_certainty() -> None:
    once = stats.task_score(plain(GRADED), "a").interval
    thrice = stats.task_score(crossed(np.tile(GRADED, (3, 1))), "a").interval
    assert once is not None
    assert thrice is not None
    assert thrice.high - thrice.low == approx(once.high - once.low, rel=0.05)


def about(documents: list[str], values: list[float]) -> Scores:
    return Scores.of(values, [f"p{index}" for index in range(len(values))], documents=documents)


def test_questions_about_one_document_are_one_observation() -> None:
    """Five questions that always agree tell as much as one."""
    documents = [f"d{index // 5}" for index in range(200)]
    clustered = stats.task_score(about(documents, np.repeat(GRADED, 5).tolist()), "a")
    alone = stats.task_score(plain(GRADED), "a")
    assert clustered.interval is not None
    assert alone.interval is not None
    assert (clustered.value, clustered.samples) == (approx(alone.value), 200)
    assert clustered.interval.how == "bootstrap of documents"
    assert clustered.interval.high - clustered.interval.low == approx(
        alone.interval.high - alone.interval.low, rel=0.05
    )


@pytest.mark.parametrize("seeds", [1, 2])
@pytest.mark.parametrize("low", [0.0, 0.25], ids=["answers", "graded"])
def test_documents_that_all_score_the_same_tell_nothing_of_their_spread(seeds: int, low: float) -> None:
    """Resampled, they would claim certainty, or nothing at all."""
    values, documents = np.array([low, low + 0.5] * 2 * seeds), ["d0", "d0", "d1", "d1"] * seeds
    names, data_seeds = [f"p{index}" for index in range(4)] * seeds, np.repeat(np.arange(seeds), 4)
    scores, zeros = (Scores.of(found, names, data_seeds, documents=documents) for found in (values, 0 * values))
    estimate = stats.task_score(scores, "a")
    assert (estimate.interval, estimate.value) == (None, pytest.approx(low + 0.25))
    assert stats.compare({"a": scores}, {"a": zeros}).verdict == "too few documents"


def test_documents_of_one_mean_that_are_fresh_in_each_seed_tell_nothing_either() -> None:
    scores = Scores.of([0, 1, 1, 0], ["a", "b", "c", "d"], [0, 0, 1, 1], documents=["x", "x", "y", "y"])
    assert stats.task_score(scores, "a").interval is None


def test_the_spread_over_documents_of_different_sizes_is_that_of_a_ratio() -> None:
    generator = np.random.default_rng(6)
    sizes = generator.integers(1, 8, 60)
    documents = np.repeat(np.arange(60), sizes)
    values = generator.normal(0, 1, 60)[documents] + generator.normal(0, 0.5, len(documents))
    totals = np.bincount(documents, values - values.mean())
    spread = replicates(partition(about([f"d{one}" for one in documents], values.tolist())), "a").var()
    assert spread == approx((totals**2).sum() / len(values) ** 2, rel=0.12)


def test_the_questions_of_a_document_flip_together() -> None:
    gaps = np.random.default_rng(0).normal(0.1, 0.3, 25)
    documents = [f"d{index // 3}" for index in range(75)]
    thrice, zero = about(documents, np.repeat(gaps, 3).tolist()), about(documents, [0.0] * 75)
    once = stats.compare({"a": plain(gaps.tolist())}, {"a": plain([0.0] * 25)})
    assert stats.compare({"a": thrice}, {"a": zero}).p == once.p


@pytest.mark.parametrize("values", [GRADED[:20], BINARY, [1.0] * 20, [0.0] * 19 + [1.0]])
def test_one_document_for_all_tells_nothing_of_others(values: list[float]) -> None:
    alone = stats.task_score(about(["d"] * 20, values), "a")
    assert (alone.value, alone.interval, alone.one_document) == (approx(np.mean(values)), None, True)
    assert stats.task_score(about(["d"] * 19 + ["e"], values), "a").interval is not None
    assert stats.macro_of({"a": about(["d"] * 20, values), "b": plain(BINARY)})[1].interval is None


def test_seeds_with_prompts_of_their_own_about_one_document_tell_no_more() -> None:
    grid = nested(np.random.default_rng(2).random((3, 10)))
    seeds = dataclasses.replace(grid, documents=np.full(30, "d"))
    assert stats.task_score(grid, "a").interval is not None
    assert stats.task_score(seeds, "a").interval is None


def test_one_document_decides_nothing() -> None:
    first, second = (about(["d"] * 20, values) for values in ([1.0] * 20, [0.0] * 20))
    compared = stats.compare({"a": first}, {"a": second})
    assert (compared.macro.value, compared.verdict, compared.p) == (1.0, "too few documents", None)
    both = stats.compare({"a": first, "b": plain([1.0] * 40)}, {"a": second, "b": plain([0.0] * 40)})
    assert (both.verdict, both.p) == ("too few documents", None)  # a p-value would count in Holm's family


def test_one_sample_of_one_document_is_a_sample_like_any_other() -> None:
    assert stats.task_score(about(["d"], [1.0]), "a").interval == stats.task_score(plain([1.0]), "a").interval


def test_seeds_on_shared_documents_are_two_way_over_documents() -> None:
    scores = Scores.of(
        np.tile(GRADED, 3), [f"p{index}" for index in range(40)] * 3, method_seeds=np.repeat([0, 1, 2], 40),
        documents=[f"d{index // 2}" for index in range(40)] * 3,
    )  # fmt: skip
    parts = partition(scores)
    assert (parts.units, parts.samples, parts.design) == (20, 40, "two-way bootstrap of documents")
    assert parts.standard_error() == approx(
        partition(about([f"d{i // 2}" for i in range(40)], GRADED)).standard_error()
    )


@settings(max_examples=25)
@given(scores_lists, st.randoms(use_true_random=False))
def test_the_order_of_rows_changes_nothing(values: list[float], random) -> None:
    scores = plain(values)
    order = np.array(random.sample(range(len(values)), len(values)))
    assert stats.task_score(shuffled(scores, order), "a") == stats.task_score(scores, "a")


@settings(max_examples=50)
@given(scores_lists)
def test_an_interval_stays_within_the_scores_or_within_what_a_score_can_be(values: list[float]) -> None:
    estimate = stats.task_score(plain(values), "a")
    if estimate.interval is not None:
        assert -1e-12 <= estimate.interval.low <= estimate.interval.high <= 1 + 1e-12
    else:
        assert len(values) == 1 or max(values) - min(values) < 1e-9


@pytest.mark.parametrize(("value", "count"), [(1.0, 20), (0.0, 20), (1.0, 1), (0.0, 1)])
def test_answers_that_are_all_right_or_all_wrong_get_wilsons_interval(value: float, count: int) -> None:
    interval = stats.task_score(plain([value] * count), "a").interval
    theirs = scipy.stats.binomtest(int(value * count), count).proportion_ci(method="wilson")
    assert interval is not None
    assert (interval.low, interval.high, interval.how) == (approx(theirs.low), approx(theirs.high), "Wilson")


def test_nothing_is_said_of_one_graded_sample_or_of_a_constant_in_between() -> None:
    assert stats.task_score(plain([0.37]), "a").interval is None
    assert stats.task_score(plain([0.5] * 10), "a").interval is None
    assert stats.task_score(crossed(np.array([[0.2], [0.6], [0.4]])), "a").interval is None


@pytest.mark.parametrize("right", [1, 4, 36, 39])
def test_answers_that_are_nearly_all_right_or_wrong_get_wilsons_interval(right: int) -> None:
    interval = stats.task_score(plain([1.0] * right + [0.0] * (40 - right)), "a").interval
    theirs = scipy.stats.binomtest(right, 40).proportion_ci(method="wilson")
    assert interval is not None
    assert (interval.low, interval.high, interval.how) == (approx(theirs.low), approx(theirs.high), "Wilson")


def test_answers_further_from_the_edge_are_resampled() -> None:
    interval = stats.task_score(plain([1.0] * 5 + [0.0] * 35), "a").interval
    assert interval is not None
    assert interval.how == "bootstrap"


def test_shared_prompts_count_once_in_wilsons_interval() -> None:
    assert (
        stats.task_score(crossed(np.ones((3, 20))), "a").interval == stats.task_score(plain([1.0] * 20), "a").interval
    )


@pytest.mark.parametrize("successes", [0, 3, 7, 10])
def test_wilson_agrees_with_scipy(successes: int) -> None:
    theirs = scipy.stats.binomtest(successes, 10).proportion_ci(method="wilson")
    ours = stats.wilson(successes, 10)
    assert (ours.low, ours.high) == (approx(theirs.low), approx(theirs.high))


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 5, 9, 30])
def test_the_t_quantile_agrees_with_scipy(freedom: int) -> None:
    assert stats.t_quantile(freedom) == approx(scipy.stats.t.ppf(0.975, freedom), rel=1e-9)


def test_the_interval_between_seeds_is_students_and_absent_for_one_seed() -> None:
    interval = stats.between_seeds([0.5, 0.6, 0.7])
    theirs = scipy.stats.t.interval(0.95, 2, loc=0.6, scale=0.1 / 3**0.5)
    assert interval is not None
    assert (interval.low, interval.high) == approx(theirs)
    assert stats.between_seeds([0.5]) is None
    assert stats.task_score(plain(BINARY), "a").between_seeds is None


# ---- macro-averages


def test_the_macro_average_of_two_tasks_is_the_mean_of_their_means_whatever_their_sizes() -> None:
    _, macro = stats.macro_of({"a": plain([1.0, 0.0]), "b": plain([1.0, 1.0, 1.0, 0.0, 1.0, 1.0, 1.0, 1.0], "b")})
    assert macro.value == approx((0.5 + 0.875) / 2)


def test_errors_of_tasks_add_as_independent_ones() -> None:
    estimates, macro = stats.macro_of({"a": plain(GRADED), "b": plain(GRADED[::-1], "b")})
    widths = [one.interval.high - one.interval.low for one in estimates.values() if one and one.interval]
    assert macro.interval is not None
    assert macro.interval.high - macro.interval.low == approx((sum(width**2 for width in widths)) ** 0.5 / 2, rel=0.02)


def test_the_macro_interval_is_that_of_independent_replicates_per_task() -> None:
    tasks = {"a": plain(GRADED), "b": plain(BINARY, "b"), "c": plain(GRADED[:15], "c")}
    drawn = np.mean([replicates(partition(scores), task) for task, scores in tasks.items()], axis=0)
    _, macro = stats.macro_of(tasks)
    assert macro.interval is not None
    assert (macro.interval.low, macro.interval.high) == approx(np.quantile(drawn, [0.025, 0.975]), abs=0.01)


def test_tasks_of_one_size_are_resampled_apart() -> None:
    parts = partition(plain(GRADED))
    assert abs(np.corrcoef(replicates(parts, "a"), replicates(parts, "b"))[0, 1]) < 0.05


def test_an_incomplete_grid_has_no_macro_average() -> None:
    estimates, macro = stats.macro_of({"a": plain(BINARY), "b": None})
    assert estimates["a"] is not None
    assert (macro.value, macro.interval, macro.coverage) == (None, None, "1 of 2")


def test_a_task_without_an_interval_leaves_the_macro_average_without_one() -> None:
    _, macro = stats.macro_of({"a": plain(BINARY), "b": plain([0.37], "b")})
    assert macro.value is not None
    assert macro.interval is None


def test_a_task_with_all_answers_right_still_adds_its_uncertainty() -> None:
    certain = stats.macro_of({"a": plain(BINARY), "b": plain([1.0] * 2000, "b")})[1].interval
    doubtful = stats.macro_of({"a": plain(BINARY), "b": plain([1.0] * 5, "b")})[1].interval
    assert certain is not None
    assert doubtful is not None
    assert doubtful.high == approx(certain.high)
    assert doubtful.low < certain.low - 0.05


def test_the_macro_average_has_an_interval_between_seeds_where_all_tasks_ran_the_same_seeds() -> None:
    grid = np.random.default_rng(1).random((3, 12))
    other = np.random.default_rng(2).random((3, 12))
    _, macro = stats.macro_of({"a": nested(grid), "b": nested(other)})
    assert macro.between_seeds == stats.between_seeds(((grid.mean(axis=1) + other.mean(axis=1)) / 2).tolist())
    assert stats.macro_of({"a": nested(grid), "b": plain(BINARY)})[1].between_seeds is None


# ---- comparisons


def test_a_comparison_is_first_minus_second_on_the_samples_both_have() -> None:
    first = Scores.of([1.0, 1.0, 0.0], ["p0", "p1", "p2"])
    second = Scores.of([0.0, 1.0, 0.0], ["p2", "p0", "p9"])
    compared = stats.compare({"a": first}, {"a": second})
    assert compared.tasks["a"].samples == 2
    assert compared.macro.value == approx(0.0)


def test_paired_differences_are_told_apart_where_levels_are_not() -> None:
    generator = np.random.default_rng(8)
    ease = generator.normal(0, 0.3, 60).clip(-0.4, 0.4)
    one, two = plain((0.55 + ease).tolist()), plain((0.45 + ease + generator.normal(0, 0.05, 60)).tolist())
    levels = [stats.task_score(scores, "a").interval for scores in (one, two)]
    compared = stats.compare({"a": one}, {"a": two})
    assert levels[0] is not None
    assert levels[1] is not None
    assert levels[0].low < levels[1].high
    assert compared.verdict == "better"
    assert compared.p is not None
    assert compared.p < 0.001


def test_an_interval_that_holds_zero_is_within_noise() -> None:
    compared = stats.compare({"a": plain(BINARY)}, {"a": plain(BINARY[::-1])})
    assert compared.macro.interval is not None
    assert compared.macro.interval.holds(0.0)
    assert compared.verdict == "within noise"


def test_a_verdict_needs_the_corrected_p_value_too() -> None:
    compared = stats.compare({"a": plain([1.0] * 12)}, {"a": plain([0.0] * 6 + [1.0] * 6)})
    assert compared.p is not None
    assert compared.p <= 0.05
    assert compared.verdict == "better"
    assert dataclasses.replace(compared, p_holm=0.05).verdict == "better"
    assert dataclasses.replace(compared, p_holm=0.06).verdict == "within noise"


def test_equal_scores_are_within_noise_with_p_one() -> None:
    compared = stats.compare({"a": plain(BINARY)}, {"a": plain(BINARY)})
    assert (compared.macro.value, compared.p, compared.verdict) == (0.0, 1.0, "within noise")
    assert compared.macro.interval is not None
    assert compared.macro.interval.low == approx(-stats.wilson(0, 20).high)


def test_one_graded_sample_decides_nothing() -> None:
    compared = stats.compare({"a": plain([0.9])}, {"a": plain([0.4])})
    assert (compared.verdict, compared.p) == ("too few samples", None)


def test_an_incomplete_grid_is_not_compared() -> None:
    compared = stats.compare({"a": plain(BINARY), "b": None}, {"a": plain(BINARY), "b": plain(BINARY, "b")})
    assert (compared.macro.value, compared.p, compared.verdict) == (None, None, "incomplete")


@pytest.mark.parametrize("count", [11, 40])
def test_the_sign_flip_p_value_agrees_with_scipy(count: int) -> None:
    gaps = np.random.default_rng(count).normal(0.12, 0.4, count)
    theirs = scipy.stats.permutation_test(
        (gaps, np.zeros(count)), lambda x, y, axis: np.mean(x - y, axis=axis), permutation_type="samples",
        n_resamples=20_000, vectorized=True, rng=np.random.default_rng(2),
    ).pvalue  # fmt: skip
    assert stats.sign_flip_p([gaps / count]) == approx(theirs, abs=0.02)


def test_the_smallest_p_value_is_one_over_the_draws() -> None:
    assert stats.sign_flip_p([np.full(60, 0.5)], draws=999) == approx(1 / 1000)


def test_the_seeds_of_one_prompt_flip_together() -> None:
    gaps = np.random.default_rng(0).normal(0.1, 0.3, 25)
    once, thrice = plain(gaps.tolist()), crossed(np.tile(gaps, (3, 1)))
    zero = {"a": plain([0.0] * 25), "b": crossed(np.zeros((3, 25)))}
    assert stats.compare({"a": once}, {"a": zero["a"]}).p == stats.compare({"a": thrice}, {"a": zero["b"]}).p


def test_a_deterministic_baseline_is_paired_with_every_seed_of_a_stochastic_method() -> None:
    grid = np.array([[1.0, 0.0, 1.0], [0.0, 0.0, 1.0]])
    base = Scores.of([1.0, 1.0, 0.0], ["p0", "p1", "p2"])
    paired = stats.differences(crossed(grid), base)
    assert partition(paired).blocks[0].values.tolist() == [[0, -1, 1], [-1, -1, 1]]
    assert stats.differences(base, crossed(grid)).values.tolist() == [0.5, 1.0, -1.0]


def test_method_seeds_are_paired_where_both_ran_them() -> None:
    first, second = crossed(np.array([[1.0, 0.0], [0.0, 1.0]])), crossed(np.array([[1.0, 1.0], [0.0, 0.0]]))
    assert partition(stats.differences(first, second)).blocks[0].values.tolist() == [[0, -1], [0, 1]]


def test_holm_steps_down_and_keeps_order() -> None:
    assert stats.holm([0.01, 0.04, None, 0.03]) == [approx(0.03), approx(0.06), None, approx(0.06)]
    assert stats.holm([0.9, 0.8]) == [1.0, 1.0]


@given(st.lists(st.floats(0, 1), max_size=12))
def test_holm_never_lowers_a_p_value_nor_swaps_two(p_values: list[float]) -> None:
    corrected = stats.holm(p_values)
    assert all(after >= before for before, after in zip(p_values, corrected, strict=True))
    ranks = sorted(range(len(p_values)), key=lambda index: p_values[index])
    assert [corrected[index] for index in ranks] == sorted(corrected)


def test_the_minimum_detectable_effect_has_its_closed_form() -> None:
    reach = scipy.stats.norm.ppf(0.975) + scipy.stats.norm.ppf(0.8)
    assert stats.minimum_detectable_effect([100], spread=0.5) == approx(reach * 0.05)
    assert stats.minimum_detectable_effect([100] * 4, spread=0.5) == approx(reach * 0.025)
    assert stats.minimum_detectable_effect([50, 200], spread=1.0) == approx(reach * (1 / 50 + 1 / 200) ** 0.5 / 2)


# ---- coverage


def simulated(repeats: int, seeds: int, samples: int, seed_spread: float, fresh: bool) -> tuple[float, float]:
    """How often the interval holds the true mean, for right-or-wrong answers of prompts of varying ease; and its mean
    width over that of an oracle, who knows the standard error of the mean."""
    generator = np.random.default_rng(42)
    ease = generator.normal(0, 1.5, 200_000)
    truth = np.mean(1 / (1 + np.exp(-(ease + generator.normal(0, seed_spread, ease.size)))))
    hits, widths, means = 0, [], []
    for repeat in range(10 * repeats):  # the oracle's standard error is to be better known than the intervals
        prompts = generator.normal(0, 1.5, (seeds if fresh else 1, samples))
        chance = 1 / (1 + np.exp(-(prompts + generator.normal(0, seed_spread, (seeds, 1)))))
        grid = (generator.random((seeds, samples)) < chance).astype(float)
        means.append(grid.mean())
        if repeat >= repeats:
            continue
        interval = stats.task_score(nested(grid) if fresh else crossed(grid), "a").interval
        assert interval is not None
        hits += interval.holds(float(truth))
        widths.append(interval.high - interval.low)
    return hits / repeats, float(np.mean(widths) / (2 * scipy.stats.norm.ppf(0.975) * np.std(means)))


@pytest.mark.slow
@pytest.mark.parametrize("samples", [50, 200])
@pytest.mark.parametrize(
    ("seeds", "fresh", "seed_spread"),
    [(1, False, 0.0), *((seeds, *design) for seeds in (3, 5) for design in ((False, 0.0), (False, 0.3)))]
    + [(seeds, True, spread) for seeds in (3, 5) for spread in (0.0, 0.15)],
)
def test_intervals_hold_the_truth_about_as_often_as_they_say_and_are_little_wider_than_need_be(
    seeds: int, samples: int, seed_spread: float, fresh: bool
) -> None:
    """Fresh prompts under three seeds whose own effect is most of the error, 0.3 at 200 prompts, are held in 89 %: no
    interval does better there that is as narrow where seeds do nothing."""
    held, wide = simulated(2000, seeds, samples, seed_spread, fresh)
    assert held >= 0.92
    assert wide <= 1.3
