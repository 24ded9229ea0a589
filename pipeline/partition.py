"""The scored samples of one task, in blocks, and their bootstrap: the one partition behind every interval.

Seeds that share prompts stand in one block, seeds with fresh prompts in blocks of their own.

                 prompts
              a  b  c  d  e  f
    seed 0    x  x  x               one block of one seed      resample the prompts
    seed 1    x  x  x               one block of several       resample seeds and prompts (two-way)
    seed 2             x  x  x      several blocks             resample blocks, then inside each (nested)

Prompts that ask about one document are resampled together, as one unit: their scores are no independent ones (Miller
2024, arXiv 2411.00640).
"""

from __future__ import annotations

import zlib
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import sqrt

import numpy as np
from numpy.typing import ArrayLike, NDArray

DRAWS = 10_000
RANDOM_SEED = 20_260_711
SAME = 1e-12
"""Scores closer than this are equal: it absorbs the rounding of differences, no metric is that fine."""

KEPT_BYTES = 2**28
"""Of resampling counts that are kept for the next method."""
AT_ONCE = 2**22
"""Numbers that one step of the resampling holds."""

Floats = NDArray[np.float64]
Counts = NDArray[np.uint8]
"""No item comes up 256 times among its like in any draw that will ever be made."""


class StatisticsError(ValueError):
    """Scores that do not form one result: what is wrong with them."""


@dataclass(frozen=True)
class Scores:
    """The scored samples of one task under one configuration: aligned arrays, in any order.

    ``documents`` names what a sample asks about; samples of one document are one unit.
    """

    values: Floats
    samples: NDArray[np.str_]
    data_seeds: NDArray[np.int64]
    method_seeds: NDArray[np.int64]
    documents: NDArray[np.str_]

    @classmethod
    def of(
        cls,
        values: ArrayLike,
        samples: ArrayLike,
        data_seeds: ArrayLike = 0,
        method_seeds: ArrayLike = 0,
        documents: ArrayLike | None = None,
    ) -> Scores:
        """Without ``documents`` each sample stands for itself."""
        scores = np.asarray(values, dtype=np.float64)
        if scores.ndim != 1 or not np.isfinite(scores).all():
            raise StatisticsError("scores must be a list of finite numbers; leave failed samples out")
        names = np.asarray(samples).astype(str)
        return cls(
            scores,
            names,
            np.broadcast_to(np.asarray(data_seeds, dtype=np.int64), scores.shape),
            np.broadcast_to(np.asarray(method_seeds, dtype=np.int64), scores.shape),
            names if documents is None else np.asarray(documents).astype(str),
        )

    def __len__(self) -> int:
        return len(self.values)


@dataclass(frozen=True)
class Block:
    """Seeds that share prompts: ``values [seeds, samples]``, NaN where a seed lacks a sample.

    ``documents [samples]`` numbers the units that are resampled: 0 to n - 1, each sample's own where none are shared.
    """

    seeds: tuple[tuple[int, int], ...]
    values: Floats
    documents: NDArray[np.int64]

    @property
    def units(self) -> int:
        return int(self.documents.max()) + 1

    def totals(self) -> Floats:
        """Sums of scores ``[seeds, units]``."""
        return self._by_unit(np.nan_to_num(self.values))

    def counts(self) -> Floats:
        """Numbers of scores ``[seeds, units]``."""
        return self._by_unit(np.isfinite(self.values).astype(np.float64))

    def _by_unit(self, values: Floats) -> Floats:
        if self.units == values.shape[1]:
            return values[:, np.argsort(self.documents)]
        return np.stack([np.bincount(self.documents, row, self.units) for row in values])


@dataclass(frozen=True)
class Partition:
    blocks: tuple[Block, ...]
    one_document: bool = False
    """Whether several prompts are all about one document: nothing tells how scores vary from one to the next."""

    @property
    def samples(self) -> int:
        return sum(block.values.shape[1] for block in self.blocks)

    @property
    def units(self) -> int:
        """What is resampled: prompts, or documents that several prompts share."""
        return sum(block.units for block in self.blocks)

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
    def level(self) -> bool:
        """Whether all units have the same mean under every seed: however they are drawn, nothing moves."""
        apart = [block.totals() - self.mean * block.counts() for block in self.blocks]
        return all(
            bool((np.abs(part) < SAME * (1 + block.counts())).all())
            for part, block in zip(apart, self.blocks, strict=True)
        )

    @property
    def design(self) -> str:
        kind = "nested bootstrap" if len(self.blocks) > 1 else "two-way bootstrap" if self.seeds > 1 else "bootstrap"
        return kind if self.units == self.samples else f"{kind} of documents"

    def seed_means(self) -> dict[tuple[int, int], float]:
        means = (zip(block.seeds, np.nanmean(block.values, axis=1), strict=True) for block in self.blocks)
        return {seed: float(mean) for block in means for seed, mean in block}

    def shares(self) -> Floats:
        """What each unit adds to the mean, its seeds together ``[units]``."""
        return np.concatenate([block.totals().sum(axis=0) for block in self.blocks]) / self.scored

    def standard_error(self) -> float:
        """Of the mean over several seeds, from one-way errors.

        Resampling seeds and prompts counts what belongs to neither three times (Owen 2007), which makes intervals over
        three seeds 1.4 times as wide as need be. Shared prompts: the prompts' error and the seeds', squared and summed
        (Cameron, Gelbach and Miller 2011, who subtract what is in both; it is left in, to err on the wide side). Fresh
        prompts: the error between seeds has the prompts' in it, but three seeds tell it badly; so it is the error
        within seeds and two thirds of that between them, and never less than that between. Both are at least what the
        error would be if all scores were independent.
        """
        deviations = [block.totals() - self.mean * block.counts() for block in self.blocks]
        apart = _error(np.concatenate([part.ravel() for part in deviations]))
        if len(self.blocks) == 1:
            squared = _error(deviations[0].sum(axis=0)) + _error(deviations[0].sum(axis=1))
        else:
            within = sum(_error(part.sum(axis=0)) for part in deviations)
            between = _error(np.array([part.sum() for part in deviations]))
            squared = max(within + 2 / 3 * between, between)
        return sqrt(max(squared, apart)) / self.scored


def _error(sums: Floats) -> float:
    """The squared standard error of a total of independent ``sums``."""
    return len(sums) * float(np.var(sums, ddof=1)) if len(sums) > 1 else 0.0


def partition(scores: Scores) -> Partition:
    """Blocks of seeds linked by common prompts, in an order that does not depend on the order of the rows."""
    if not len(scores):
        raise StatisticsError("there are no scores")
    seeds, row = np.unique(np.stack([scores.data_seeds, scores.method_seeds], axis=1), axis=0, return_inverse=True)
    names, first, column = np.unique(scores.samples, return_index=True, return_inverse=True)
    grid = np.full((len(seeds), len(names)), np.nan)
    grid[row.ravel(), column] = scores.values
    if int(np.isfinite(grid).sum()) != len(scores):
        raise StatisticsError("a sample is scored twice under one seed: remove duplicates by (cell_id, sample_id)")
    blocks = []
    for members in _linked(np.isfinite(grid)):
        held = grid[members]
        present = np.isfinite(held).any(axis=0)
        blocks.append(
            Block(
                seeds=tuple((int(seeds[index, 0]), int(seeds[index, 1])) for index in members),
                values=held[:, present],
                documents=np.unique(scores.documents[first][present], return_inverse=True)[1].ravel(),
            )
        )
    return Partition(tuple(blocks), len(names) > 1 and len(np.unique(scores.documents)) == 1)


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
    shapes = tuple((len(block.seeds), block.units) for block in parts.blocks)
    for pick in _picks(shapes, stream, draws):
        block = parts.blocks[pick.block]
        counts = block.counts()
        total[pick.draws] += pick.weigh(block.totals())
        count[pick.draws] += counts.size if (counts == 1).all() else pick.weigh(counts)
    return total[count > 0] / count[count > 0]


@dataclass(frozen=True)
class _Pick:
    """The draws in which a block was taken, with how often each of its seeds and units was."""

    block: int
    draws: slice | NDArray[np.int64]
    seeds: Counts
    units: Counts = field(repr=False)

    @property
    def nbytes(self) -> int:
        return self.seeds.nbytes + self.units.nbytes + (0 if isinstance(self.draws, slice) else self.draws.nbytes)

    def weigh(self, values: Floats) -> Floats:
        """Sums of ``values [seeds, units]``, each as often as its seed and its unit were taken ``[draws]``."""
        weighed, by_seed = values.astype(np.float32), np.empty((len(self.units), len(values)))
        for rows in _steps(*self.units.shape):
            # einsum, not @: BLAS would wake its threads for products this small. Single precision is twice as fast, and
            # exact enough for what is rounded to a tenth of a point.
            by_seed[rows] = np.einsum("dn,sn->ds", self.units[rows].astype(np.float32), weighed)
        return by_seed[:, 0] if len(values) == 1 else np.einsum("ds,ds->d", by_seed, self.seeds.astype(np.float32))


_Drawn = tuple[tuple[tuple[int, int], ...], str, int]
_kept: OrderedDict[_Drawn, tuple[_Pick, ...]] = OrderedDict()


def _picks(shapes: tuple[tuple[int, int], ...], stream: str, draws: int) -> tuple[_Pick, ...]:
    """The resampling of a partition. Kept, since all methods of a task share its shape and so their replicates; those
    used last, up to ``KEPT_BYTES``."""
    drawn = shapes, stream, draws
    picks = _kept.pop(drawn) if drawn in _kept else _draw(shapes, stream, draws)
    if _bytes(picks) <= KEPT_BYTES:
        _kept[drawn] = picks
    while sum(map(_bytes, _kept.values())) > KEPT_BYTES:
        _kept.popitem(last=False)
    return picks


def _bytes(picks: tuple[_Pick, ...]) -> int:
    return sum(pick.nbytes for pick in picks)


def _draw(shapes: tuple[tuple[int, int], ...], stream: str, draws: int) -> tuple[_Pick, ...]:
    generator = np.random.default_rng([RANDOM_SEED, zlib.crc32(stream.encode())])
    if len(shapes) == 1:
        seeds, units = shapes[0]
        return (_Pick(0, slice(None), _counts(generator, draws, seeds), _counts(generator, draws, units)),)
    picks = []
    for taken in generator.integers(0, len(shapes), size=(len(shapes), draws)):
        for block, (seeds, units) in enumerate(shapes):
            where = np.flatnonzero(taken == block)
            counts = _counts(generator, len(where), seeds), _counts(generator, len(where), units)
            picks.append(_Pick(block, where, *counts))
    return tuple(picks)


def _counts(generator: np.random.Generator, draws: int, size: int) -> Counts:
    """How often each of ``size`` items comes up in ``size`` draws with replacement ``[draws, size]``."""
    counts = np.ones((draws, size), dtype=np.uint8)
    if size > 1:
        for rows in _steps(draws, size):
            some = rows.stop - rows.start
            taken = generator.integers(0, size, size=(some, size)) + np.arange(some)[:, None] * size
            counts[rows] = np.bincount(taken.ravel(), minlength=some * size).reshape(some, size)
    return counts


def _steps(rows: int, columns: int) -> Iterator[slice]:
    """Rows of a table by as many as are worked on at once."""
    many = max(AT_ONCE // max(columns, 1), 1)
    return (slice(start, min(start + many, rows)) for start in range(0, rows, many))
