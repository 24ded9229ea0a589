"""Uncertainty of scores: levels, macro-averages, paired comparisons.

Tasks are fixed: nothing is claimed about tasks that were not run. A macro-average is the unweighted mean of the task
scores, and its squared error is the sum of the tasks' squared errors over T^2, taken on each side of the mean apart
so that lopsided intervals stay lopsided (Zou and Donner 2008). Answers that are all right or all wrong, or nearly so,
get Wilson's interval: the bootstrap would claim certainty. Prompts that are all about one document get none. Two
methods are compared on the same prompts only (Miller 2024, arXiv 2411.00640).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import NormalDist

import numpy as np

from pipeline.partition import DRAWS, RANDOM_SEED, SAME, Floats, Partition, Scores, partition, replicates

CONFIDENCE = 0.95
RARE = 5
"""Fewer right, or wrong, answers than this: a bootstrap of them ends too soon on the side where there is more."""


@dataclass(frozen=True)
class Interval:
    """A 95 % interval and the rule it came from."""

    low: float
    high: float
    how: str

    def holds(self, value: float) -> bool:
        return self.low <= value <= self.high


@dataclass(frozen=True)
class Estimate:
    """A mean with its interval; ``between_seeds`` is the t-interval over seed means, None for one seed."""

    value: float
    interval: Interval | None
    between_seeds: Interval | None
    samples: int
    """Distinct prompts."""
    seeds: int
    units: int
    """What is resampled: prompts, or documents that several prompts share."""
    one_document: bool = False
    """Several prompts, all about one document: there is no interval."""


@dataclass(frozen=True)
class Macro:
    """The unweighted mean over all ``tasks``, or no value where only some of them are complete."""

    value: float | None
    interval: Interval | None
    between_seeds: Interval | None
    complete: int
    tasks: int

    @property
    def coverage(self) -> str:
        return f"{self.complete} of {self.tasks}"


@dataclass(frozen=True)
class Comparison:
    """First minus second on the samples both have: per task, and their macro-average over a complete grid."""

    macro: Macro
    tasks: Mapping[str, Estimate]
    p: float | None
    p_holm: float | None = None
    refused: str = ""
    """Why nothing is compared, in words."""

    @property
    def verdict(self) -> str:
        """``better`` or ``worse`` only where interval and p-value, corrected where there is a family, both say so."""
        if self.refused:
            return "not comparable"
        if self.macro.value is None:
            return "incomplete"
        if self.macro.interval is None:
            unsure = [task for task in self.tasks.values() if task.interval is None]
            return "too few documents" if any(task.units < task.samples for task in unsure) else "too few samples"
        p = self.p if self.p_holm is None else self.p_holm
        if self.macro.interval.holds(0.0) or (p is not None and p > 1 - CONFIDENCE):
            return "within noise"
        return "better" if self.macro.value > 0 else "worse"


def task_score(scores: Scores, task: str) -> Estimate:
    """Mean score of one task. Tasks are resampled independently: ``task`` names the random stream."""
    return _estimate(partition(scores), task, bounds=(0.0, 1.0))


def macro_average(tasks: Mapping[str, Estimate | None]) -> Macro:
    """Unweighted mean over tasks; refused where a task has no score."""
    scored = [estimate for estimate in tasks.values() if estimate is not None]
    if not scored or len(scored) < len(tasks):
        return Macro(None, None, None, len(scored), len(tasks))
    value = float(np.mean([estimate.value for estimate in scored]))
    return Macro(value, _combined(value, scored), None, len(scored), len(tasks))


def macro_of(tasks: Mapping[str, Scores | None]) -> tuple[dict[str, Estimate | None], Macro]:
    """Task scores and their macro-average, with the t-interval over seeds where all tasks ran the same seeds."""
    estimates = {task: None if scores is None else task_score(scores, task) for task, scores in tasks.items()}
    macro = macro_average(estimates)
    if macro.value is None:
        return estimates, macro
    by_task = [partition(scores).seed_means() for scores in tasks.values() if scores is not None]
    return estimates, _with_seeds(macro, by_task)


def compare(first: Mapping[str, Scores | None], second: Mapping[str, Scores | None]) -> Comparison:
    """First minus second, paired on common samples, over the tasks of both."""
    names = sorted(set(first) | set(second))
    parts: dict[str, Partition] = {}
    for task in names:
        ours, theirs = first.get(task), second.get(task)
        if ours is not None and theirs is not None and len(paired := differences(ours, theirs)):
            parts[task] = partition(paired)
    estimates = {task: _estimate(part, task, bounds=(-1.0, 1.0)) for task, part in parts.items()}
    macro = macro_average({task: estimates.get(task) for task in names})
    if macro.value is None:
        return Comparison(macro, estimates, None)
    macro = _with_seeds(macro, [part.seed_means() for part in parts.values()])
    if macro.interval is None:  # no verdict will come of it, so it is none of those that Holm corrects for
        return Comparison(macro, estimates, None)
    return Comparison(macro, estimates, sign_flip_p([part.shares() / len(names) for part in parts.values()]))


def differences(first: Scores, second: Scores) -> Scores:
    """First minus second on the samples both have, under the same data seed.

    Method seeds are paired too where both sides ran the same ones. Otherwise one side is deterministic and ran once:
    the second side's seeds are averaged within each sample.
    """
    same_seeds = np.array_equal(np.unique(first.method_seeds), np.unique(second.method_seeds))
    gathered: dict[tuple[int, str, int | None], list[float]] = {}
    for value, sample, data_seed, method_seed, _ in _each(second):
        gathered.setdefault((data_seed, sample, method_seed if same_seeds else None), []).append(value)
    rows = []
    for value, sample, data_seed, method_seed, document in _each(first):
        other = gathered.get((data_seed, sample, method_seed if same_seeds else None))
        if other:
            rows.append((value - sum(other) / len(other), sample, data_seed, method_seed, document))
    return Scores.of(*zip(*rows, strict=True)) if rows else Scores.of((), ())


def _each(scores: Scores) -> Iterator[tuple[float, str, int, int, str]]:
    return zip(
        scores.values.tolist(),
        scores.samples.tolist(),
        scores.data_seeds.tolist(),
        scores.method_seeds.tolist(),
        scores.documents.tolist(),
        strict=True,
    )


def sign_flip_p(shares: Sequence[Floats], draws: int = DRAWS) -> float:
    """Two-sided permutation p-value of a mean difference: ``(b + 1) / (B + 1)``.

    ``shares``, one array per task, are what each prompt adds to the mean. Under the null either method could have had
    either score, so each prompt's sign is a coin toss; a prompt's seeds flip together, so do the prompts of a document,
    and ties change nothing.
    """
    moved = np.concatenate([*shares, np.zeros(0)])
    moved = moved[np.abs(moved) > SAME / max(len(moved), 1)]
    if not len(moved):
        return 1.0
    reached = abs(moved.sum()) - 1e-9 * np.abs(moved).sum()
    generator = np.random.default_rng([RANDOM_SEED, len(moved)])
    total = np.zeros(draws)
    for sums in _sums_of_eight(moved):
        total += sums[generator.integers(0, 256, draws, dtype=np.uint8)]
    return (int((np.abs(total) >= reached).sum()) + 1) / (draws + 1)


def _sums_of_eight(values: Floats) -> Floats:
    """Values by eights: what each of the 256 ways to choose the signs of eight sums to ``[n / 8, 256]``."""
    eights = np.zeros((-(-len(values) // 8), 8))
    eights.ravel()[: len(values)] = values
    signs = 2.0 * np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1) - 1
    return np.einsum("en,sn->es", eights, signs)


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """Holm's step-down correction over the family of all p-values given; None stays None and is not counted."""
    order = sorted((p, index) for index, p in enumerate(p_values) if p is not None)
    corrected: list[float | None] = [None] * len(p_values)
    running = 0.0
    for rank, (p, index) in enumerate(order):
        running = max(running, min(1.0, p * (len(order) - rank)))
        corrected[index] = running
    return corrected


def wilson(successes: float, samples: int) -> Interval:
    """Wilson's score interval of a proportion."""
    z2 = NormalDist().inv_cdf(0.5 + CONFIDENCE / 2) ** 2
    share = successes / samples
    centre = (share + z2 / (2 * samples)) / (1 + z2 / samples)
    half = sqrt(z2 * (share * (1 - share) / samples + z2 / (4 * samples**2))) / (1 + z2 / samples)
    return Interval(max(0.0, centre - half), min(1.0, centre + half), "Wilson")


def between_seeds(means: Sequence[float]) -> Interval | None:
    """t-interval over seed means, S - 1 degrees of freedom; None for one seed."""
    if len(means) < 2:
        return None
    centre = float(np.mean(means))
    half = t_quantile(len(means) - 1) * float(np.std(means, ddof=1)) / sqrt(len(means))
    return Interval(centre - half, centre + half, "t over seeds")


def t_quantile(freedom: int) -> float:
    """The two-sided 95 % point of Student's t."""
    from scipy.special import stdtrit  # takes a while to import, and one seed needs none of it

    return float(stdtrit(freedom, 0.5 + CONFIDENCE / 2))


def minimum_detectable_effect(samples: Sequence[int], spread: float = 0.4, power: float = 0.8) -> float:
    """The smallest true macro difference that a paired comparison finds with the given ``power``.

    ``samples`` per task; ``spread`` is the standard deviation of one sample's difference. 0.4 is a method that changes
    16 % of the answers between right and wrong.
    """
    reach = NormalDist().inv_cdf(0.5 + CONFIDENCE / 2) + NormalDist().inv_cdf(power)
    return reach * spread * sqrt(sum(1 / count for count in samples)) / len(samples)


def _estimate(parts: Partition, stream: str, bounds: tuple[float, float]) -> Estimate:
    interval: Interval | None
    if parts.one_document:
        interval = None
    elif parts.constant or parts.units == 1:
        interval = _unvaried(parts, bounds)
    elif parts.level:
        interval = None
    elif parts.seeds == 1 and _near_an_edge(parts, bounds):
        interval = wilson(parts.mean * parts.units, parts.units)
    else:
        interval = _bootstrap(parts, stream, bounds)
    seeds = between_seeds(list(parts.seed_means().values()))
    return Estimate(parts.mean, interval, seeds, parts.samples, parts.seeds, parts.units, parts.one_document)


def _near_an_edge(parts: Partition, bounds: tuple[float, float]) -> bool:
    """Answers, right or wrong, of which fewer than ``RARE`` are right, or wrong."""
    values = parts.blocks[0].values
    if bounds != (0.0, 1.0) or not np.isin(values, bounds).all():
        return False
    right = round(parts.mean * parts.samples)
    return min(right, parts.samples - right) < RARE


def _bootstrap(parts: Partition, stream: str, bounds: tuple[float, float]) -> Interval:
    """The bootstrap's percentiles; over several seeds, its shape with the spread of ``Partition.standard_error``."""
    drawn = replicates(parts, stream)
    low, high = np.quantile(drawn, [0.5 - CONFIDENCE / 2, 0.5 + CONFIDENCE / 2])
    if parts.seeds > 1:
        scale = parts.standard_error() / float(np.std(drawn))
        low, high = parts.mean + scale * (low - parts.mean), parts.mean + scale * (high - parts.mean)
    return Interval(max(float(low), bounds[0]), min(float(high), bounds[1]), parts.design)


def _unvaried(parts: Partition, bounds: tuple[float, float]) -> Interval | None:
    """Samples that all say the same: Wilson's bound on the share of prompts that would not, None of n having done so.

    Only for 0, 1 and -1: of other constants it cannot be said which way the rest would go.
    """
    value = parts.mean
    if not parts.constant or not any(abs(value - known) < SAME for known in (*bounds, 0.0)):
        return None
    others = wilson(0, parts.units).high
    low, high = bounds
    return Interval(value - others * (value - low), value + others * (high - value), "Wilson")


def _combined(value: float, tasks: Sequence[Estimate]) -> Interval | None:
    intervals = [task.interval for task in tasks if task.interval is not None]
    if len(intervals) < len(tasks):
        return None
    if len(tasks) == 1:
        return intervals[0]
    below = sum((task.value - interval.low) ** 2 for task, interval in zip(tasks, intervals, strict=True))
    above = sum((interval.high - task.value) ** 2 for task, interval in zip(tasks, intervals, strict=True))
    rules = sorted({interval.how for interval in intervals})
    return Interval(value - sqrt(below) / len(tasks), value + sqrt(above) / len(tasks), " + ".join(rules))


def _with_seeds(macro: Macro, by_task: Sequence[Mapping[tuple[int, int], float]]) -> Macro:
    seeds = set(by_task[0])
    if any(set(means) != seeds for means in by_task):
        return macro
    over_tasks = [float(np.mean([means[seed] for means in by_task])) for seed in sorted(seeds)]
    return Macro(macro.value, macro.interval, between_seeds(over_tasks), macro.complete, macro.tasks)
