"""The scored samples of one task, in blocks, and their bootstrap: the one partition behind every interval.

Seeds that share prompts stand in one block, seeds with fresh prompts in blocks of their own.

                 prompts
              a  b  c  d  e  f
    seed 0    x  x  x               one block of one seed      resample the prompts
    seed 1    x  x  x               one block of several       resample seeds and prompts (two-way)
    seed 2             x  x  x      several blocks             resample blocks, then inside each (nested)
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike, NDArray

DRAWS = 10_000
RANDOM_SEED = 20_260_711
SAME = 1e-12
"""Scores closer than this are equal: it absorbs the rounding of differences, no metric is that fine."""

Floats = NDArray[np.float64]


class StatisticsError(ValueError):
    """Scores that do not form one result: what is wrong with them."""


@dataclass(frozen=True)
class Scores:
    """The scored samples of one task under one configuration: aligned arrays, in any order."""

    values: Floats
    samples: NDArray[np.str_]
    data_seeds: NDArray[np.int64]
    method_seeds: NDArray[np.int64]

    @classmethod
    def of(
        cls, values: ArrayLike, samples: ArrayLike, data_seeds: ArrayLike = 0, method_seeds: ArrayLike = 0
    ) -> Scores:
        scores = np.asarray(values, dtype=np.float64)
        if scores.ndim != 1 or not np.isfinite(scores).all():
            raise StatisticsError("scores must be a list of finite numbers; leave failed samples out")
        return cls(
            scores,
            np.asarray(samples).astype(str),
            np.broadcast_to(np.asarray(data_seeds, dtype=np.int64), scores.shape),
            np.broadcast_to(np.asarray(method_seeds, dtype=np.int64), scores.shape),
        )

    def __len__(self) -> int:
        return len(self.values)


@dataclass(frozen=True)
class Block:
    """Seeds that share prompts: ``values [seeds, samples]``, NaN where a seed lacks a sample."""

    seeds: tuple[tuple[int, int], ...]
    values: Floats


@dataclass(frozen=True)
class Partition:
    blocks: tuple[Block, ...]

    @property
    def samples(self) -> int:
        return sum(block.values.shape[1] for block in self.blocks)

    @property
    def seeds(self) -> int:
        return sum(len(block.seeds) for block in self.blocks)

    @property
    def scored(self) -> int:
        return sum(int(np.isfinite(block.values).sum()) for block in self.blocks)

    @property
    def mean(self) -> float:
        return float(sum(np.nansum(block.values) for block in self.blocks) / self.scored)

    @property
    def constant(self) -> bool:
        lowest = min(np.nanmin(block.values) for block in self.blocks)
        return bool(max(np.nanmax(block.values) for block in self.blocks) - lowest < SAME)

    @property
    def design(self) -> str:
        if len(self.blocks) > 1:
            return "nested bootstrap"
        return "two-way bootstrap" if self.seeds > 1 else "bootstrap"

    def seed_means(self) -> dict[tuple[int, int], float]:
        means = (zip(block.seeds, np.nanmean(block.values, axis=1), strict=True) for block in self.blocks)
        return {seed: float(mean) for block in means for seed, mean in block}

    def shares(self) -> Floats:
        """What each prompt adds to the mean, its seeds together ``[samples]``."""
        return np.concatenate([np.nansum(block.values, axis=0) for block in self.blocks]) / self.scored


def partition(scores: Scores) -> Partition:
    """Blocks of seeds linked by common prompts, in an order that does not depend on the order of the rows."""
    if not len(scores):
        raise StatisticsError("there are no scores")
    seeds, row = np.unique(np.stack([scores.data_seeds, scores.method_seeds], axis=1), axis=0, return_inverse=True)
    names, column = np.unique(scores.samples, return_inverse=True)
    grid = np.full((len(seeds), len(names)), np.nan)
    grid[row.ravel(), column] = scores.values
    if int(np.isfinite(grid).sum()) != len(scores):
        raise StatisticsError("a sample is scored twice under one seed: remove duplicates by (cell_id, sample_id)")
    blocks = []
    for members in _linked(np.isfinite(grid)):
        held = grid[members]
        blocks.append(
            Block(
                seeds=tuple((int(seeds[index, 0]), int(seeds[index, 1])) for index in members),
                values=held[:, np.isfinite(held).any(axis=0)],
            )
        )
    return Partition(tuple(blocks))


def _linked(present: NDArray[np.bool_]) -> Iterator[list[int]]:
    """Groups of rows of ``present [seeds, samples]`` that are connected through common columns."""
    left = list(range(len(present)))
    while left:
        group, covered = [left.pop(0)], present[0] & False
        for member in group:
            covered = covered | present[member]
            joining = [seed for seed in left if (present[seed] & covered).any()]
            left = [seed for seed in left if seed not in joining]
            group.extend(joining)
        yield sorted(group)


def replicates(parts: Partition, stream: str, draws: int = DRAWS) -> Floats:
    """Bootstrap means ``[draws]`` by the partition's design."""
    total, count = np.zeros(draws), np.zeros(draws)
    shapes = tuple(block.values.shape for block in parts.blocks)
    for pick in _picks(shapes, stream, draws):
        values = parts.blocks[pick.block].values
        present = np.isfinite(values)
        total[pick.draws] += pick.weigh(np.nan_to_num(values))
        count[pick.draws] += values.size if present.all() else pick.weigh(present.astype(np.float64))
    return total[count > 0] / count[count > 0]


@dataclass(frozen=True)
class _Pick:
    """The draws in which a block was taken, with how often each of its seeds and samples was."""

    block: int
    draws: slice | NDArray[np.int64]
    seeds: NDArray[np.uint8]
    samples: NDArray[np.uint8] = field(repr=False)

    def weigh(self, values: Floats) -> Floats:
        """Sums of ``values [seeds, samples]``, each as often as its seed and its sample were taken ``[draws]``."""
        # einsum, not @: BLAS would wake its threads for products this small, at ten times the cost
        by_seed = np.einsum("dn,sn->ds", self.samples, values)
        return by_seed[:, 0] if len(values) == 1 else np.einsum("ds,ds->d", by_seed, self.seeds)


@lru_cache(maxsize=32)
def _picks(shapes: tuple[tuple[int, int], ...], stream: str, draws: int) -> tuple[_Pick, ...]:
    """The resampling of a partition. Kept, since all methods of a task share its shape and so their replicates.

    Counts are bytes: that one item of many comes up 256 times has a probability below 1e-500.
    """
    generator = np.random.default_rng([RANDOM_SEED, zlib.crc32(stream.encode())])
    if len(shapes) == 1:
        seeds, samples = shapes[0]
        return (_Pick(0, slice(None), _counts(generator, draws, seeds), _counts(generator, draws, samples)),)
    picks = []
    for taken in generator.integers(0, len(shapes), size=(len(shapes), draws)):
        for block, (seeds, samples) in enumerate(shapes):
            where = np.flatnonzero(taken == block)
            counts = _counts(generator, len(where), seeds), _counts(generator, len(where), samples)
            picks.append(_Pick(block, where, *counts))
    return tuple(picks)


def _counts(generator: np.random.Generator, draws: int, size: int) -> NDArray[np.uint8]:
    """How often each of ``size`` items comes up in ``size`` draws with replacement ``[draws, size]``."""
    if size == 1:
        return np.ones((draws, 1), dtype=np.uint8)
    taken = generator.integers(0, size, size=(draws, size)) + np.arange(draws)[:, None] * size
    return np.bincount(taken.ravel(), minlength=draws * size).reshape(draws, size).astype(np.uint8)
