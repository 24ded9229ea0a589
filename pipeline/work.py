"""The driver's book-keeping, free of Ray: what is still to do, what a failure costs, when to give up.

loss of a node, pre-emption   costs nothing: the work goes back to the front of the queue
a crash of the process        costs one of two tries; after the second, the work is split in halves
two crashes of a lone sample  make it poison: a failed row for each cell it was missing in
of isolated runs              a repeat that was cut short runs as a whole, since its cells are compared with each other;
                              after two crashes each cell is tried by itself, and after two more it is poison
an exception of a whole job   counts as a crash (a sample's own exception comes back as a failed row, and is final)
out of memory                 costs nothing as long as less can be tried: half of the samples, then half of the cells of
                              a lone sample; a cell that is alone on its device is recorded, once a process that has
                              not run out of memory before has had the last word
a model that does not load    is tried twice, then its cells are left out; they run when the sweep is run again
failures in a row             stop the sweep when there are ``max_failures`` with no success between them
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from itertools import islice
from typing import TypeVar

from pipeline.plan import Group, Shard
from workers.job import ModelSpec

TRIES = 2
T = TypeVar("T")


@dataclass
class Work:
    """A shard on its way: ``missing`` shrinks as rows come in, and survives the actor that yielded them."""

    group: Group
    missing: dict[int, set[str]]
    attempt: int = 0
    crashes: int = 0
    alone: bool = False
    """Whether it was sent out with a single sample, or a single cell of isolated runs."""
    sent: int = 0
    """Pairs that it was sent out with."""
    whole: dict[int, set[str]] = field(default_factory=dict)
    """What it was before anything came in."""

    def __post_init__(self) -> None:
        self.whole = {index: set(cells) for index, cells in self.missing.items()}

    @classmethod
    def of(cls, shard: Shard) -> Work:
        return cls(shard.group, {index: set(cells) for index, cells in shard.pending.items()})

    @property
    def single(self) -> bool:
        """Whether nothing smaller can be tried."""
        if self.group.timing:
            return len(set().union(*self.whole.values())) == 1
        return len(self.missing) == 1

    @property
    def pairs(self) -> int:
        return sum(len(cells) for cells in self.missing.values())

    def received(self, cell_id: str, index: int) -> bool:
        """Strike a pair off; False if it was not missing."""
        cells = self.missing.get(index, set())
        if cell_id not in cells:
            return False
        cells.remove(cell_id)
        if not cells:
            del self.missing[index]
        return True

    def restore(self) -> None:
        """Whole repeats again, of isolated runs."""
        if self.group.timing:
            self.missing = {index: set(self.whole[index]) for index in self.missing}

    def parts(self) -> list[Work]:
        """Halves, of a lone sample's cells where there is but one sample; of isolated runs, each cell by itself."""
        missing: list[dict[int, set[str]]]
        if self.group.timing:
            cells = sorted(set().union(*self.missing.values()))
            missing = [{index: {cell} for index, own in self.missing.items() if cell in own} for cell in cells]
        elif len(self.missing) == 1:
            ((index, own),) = self.missing.items()
            missing = [{index: set(half)} for half in _halves(sorted(own))]
        else:
            missing = [{index: self.missing[index] for index in half} for half in _halves(sorted(self.missing))]
        return [Work(self.group, part, attempt=self.attempt) for part in missing]


def _halves(items: list[T]) -> tuple[list[T], list[T]]:
    middle = len(items) // 2
    return items[:middle], items[middle:]


@dataclass(frozen=True)
class LeftOut:
    """Pairs that were not run, and why. They have no rows: the next run tries them again."""

    what: str
    pairs: int
    reason: str


@dataclass(frozen=True)
class Outcome:
    """How a run ended. ``stopped`` says why it ended early; ``signal`` is the one that ended it; ``unwritten`` counts
    the finished rows that storage did not take."""

    left_out: tuple[LeftOut, ...]
    stopped: str = ""
    signal: int | None = None
    unwritten: int = 0


class Agenda:
    """Work in order, and the policy on failures."""

    def __init__(self, shards: Iterable[Shard], max_failures: int) -> None:
        self.left_out: list[LeftOut] = []
        self._waiting = deque(Work.of(shard) for shard in shards)
        self._open = Counter(work.group.key for work in self._waiting)
        self._stages: dict[tuple[str, int], dict[Hashable, Group]] = {}
        """Open groups by model and context, in order."""
        for work in self._waiting:
            stage = work.group.model.label, work.group.context
            self._stages.setdefault(stage, {})[work.group.key] = work.group
        self._max_failures = max_failures
        self._in_a_row: set[Hashable] = set()
        self._load_failures: Counter[str] = Counter()

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def next_model(self) -> ModelSpec | None:
        """The model that the next work needs."""
        return self._waiting[0].group.model if self._waiting else None

    @property
    def tripped(self) -> bool:
        return len(self._in_a_row) >= self._max_failures

    def needs(self, model: str) -> bool:
        """Whether any waiting work is for this model."""
        return any(work.group.model.label == model for work in self._waiting)

    def is_open(self, group: Group) -> bool:
        """Whether any work of this group is left, waiting or taken."""
        return self._open[group.key] > 0

    def upcoming(self) -> list[Group]:
        """Groups whose samples will be needed soon: of the present model and context, and of the next."""
        return [group for stage in islice(self._stages.values(), 2) for group in stage.values()]

    def take(self, model: str, ready: Callable[[Group], bool]) -> Work | None:
        """The next work for a loaded model whose samples are there."""
        for position, work in enumerate(self._waiting):
            if work.group.model.label == model and ready(work.group):
                del self._waiting[position]
                work.attempt += 1
                work.sent = work.pairs
                alone = work.single
                if alone and not work.alone:
                    work.crashes = 0  # they were another sample's, or not: this one is to be judged by itself
                work.alone = alone
                return work
        return None

    def finished(self, work: Work) -> None:
        group = work.group
        self._open[group.key] -= 1
        if not self.is_open(group):
            stage = group.model.label, group.context
            del self._stages[stage][group.key]
            if not self._stages[stage]:
                del self._stages[stage]

    def succeeded(self) -> None:
        self._in_a_row.clear()

    def failed(self, event: Hashable) -> None:
        """Count a failure once: all rows of a failed sample are one event."""
        self._in_a_row.add(event)

    def lost(self, work: Work) -> None:
        """It was not to blame: the node went away under it, or it is to be judged by another process."""
        work.restore()
        self._waiting.appendleft(work)

    def crashed(self, work: Work) -> bool:
        """The process died on a living node. True if the work is poison: nothing smaller, and this was its last try."""
        work.crashes += 1
        self.failed((work.group.key, tuple(work.missing), work.attempt))
        work.restore()
        if work.crashes < TRIES or (work.single and not work.alone):
            self._waiting.appendleft(work)
            return False
        if work.single:
            return True
        self._split(work)
        return False

    def out_of_memory(self, work: Work) -> bool:
        """It needed more than there is. True if it was a single pair, which had the device to itself."""
        if work.sent == 1:
            return True
        if work.pairs == 1:
            self._waiting.appendleft(work)
        else:
            self._split(work)
        return False

    def _split(self, work: Work) -> None:
        parts = work.parts()
        self._waiting.extendleft(reversed(parts))
        self._open[work.group.key] += len(parts) - 1

    def load_failures(self, model: str) -> int:
        return self._load_failures[model]

    def load_failed(self, model: str, reason: str) -> bool:
        """Count a failed load; True if it was the last try, and the model's work is now left out."""
        self._load_failures[model] += 1
        self.failed(("load", model, self._load_failures[model]))
        if self._load_failures[model] < TRIES:
            return False
        self._leave_out(f"model {model}", reason, lambda work: work.group.model.label == model)
        return True

    def no_samples(self, group: Group, reason: str) -> None:
        """The samples of a group cannot be made."""
        self.failed(("samples", group.key))
        self._leave_out(str(group), reason, lambda work: work.group.key == group.key)

    def _leave_out(self, what: str, reason: str, concerns: Callable[[Work], bool]) -> None:
        gone = [work for work in self._waiting if concerns(work)]
        self._waiting = deque(work for work in self._waiting if not concerns(work))
        for work in gone:
            self.finished(work)
        self.left_out.append(LeftOut(what, sum(work.pairs for work in gone), reason))
