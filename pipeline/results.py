"""What a sweep came to, as typed results: boards of configurations, each with scores, memory and cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from pipeline.partition import Scores
from pipeline.stats import Comparison, Estimate, Macro

BASELINE = "full"
PROTOCOL = ("question", "budget_base", "growth", "chat_template", "answer_prefix")

State = Literal["complete", "partial", "incomplete", "mixed numerics", "impossible", "not planned"]
"""``partial``: all that the last run's ``--limit`` asked for, and less than the cell has."""


@dataclass(frozen=True, order=True)
class Condition:
    """What results must share to stand in one table."""

    model: str
    context: int
    question: str
    budget_base: str
    growth: str
    chat_template: str
    answer_prefix: str

    @property
    def protocol(self) -> dict[str, str]:
        return {name: getattr(self, name) for name in PROTOCOL}

    @property
    def length(self) -> str:
        return f"{self.context:,} tokens" if self.context else "the tasks' own lengths"


@dataclass(frozen=True)
class Configuration:
    """A method with its settings (JSON, keys sorted) at a budget, under a condition."""

    condition: Condition
    method: str
    settings: str
    budget: str

    @property
    def is_baseline(self) -> bool:
        return self.method == BASELINE


@dataclass(frozen=True)
class TaskResult:
    """One task of one configuration, all its seeds. ``estimate`` is None unless ``state`` is complete."""

    task: str
    state: State
    expected: int
    scored: int
    failed: int
    estimate: Estimate | None = None
    scores: Scores | None = field(default=None, repr=False)
    partial: float | None = None
    """Mean of what is scored so far: for the reader, never averaged; None where only some seeds are complete."""
    numerics: tuple[str, ...] = ()
    reason: str = ""


@dataclass(frozen=True)
class Memory:
    """Means over tasks of the samples' means. Shares are of the full cache for the same tokens."""

    share_prefill: float
    share_end: float
    share_peak: float
    bytes_prefill: float
    bytes_end: float
    bytes_peak: float
    largest_peak: int
    budget_bytes: float
    charged_bytes: float
    workspace_bytes: float
    host_bytes: float
    over_budget: int
    rows: int


@dataclass(frozen=True)
class Cost:
    """Medians over samples of one kind of run, ``shared`` or ``isolated``. Times are seconds."""

    timing: str
    rows: int
    prefill_s: float
    compress_s: float
    decode_s: float
    output_tokens: float
    batch_rows: float
    ttft_s: float | None
    tpot_s: float | None
    peak_device_bytes: int


@dataclass(frozen=True)
class Result:
    configuration: Configuration
    label: str
    """The method's name in tables: with the settings that tell it from its sisters, where there are any."""
    tasks: Mapping[str, TaskResult]
    macro: Macro
    memory: Memory | None
    costs: tuple[Cost, ...]
    numerics: tuple[str, ...]
    finished_at: float
    errors: Mapping[str, int]
    against_full: Comparison | None = None

    @property
    def scored(self) -> int:
        return sum(task.scored for task in self.tasks.values())

    @property
    def failed(self) -> int:
        return sum(task.failed for task in self.tasks.values())

    @property
    def expected(self) -> int:
        return sum(task.expected for task in self.tasks.values())

    @property
    def scores(self) -> dict[str, Scores | None]:
        return {name: task.scores for name, task in self.tasks.items()}

    @property
    def partial(self) -> bool:
        """Whether some task has no more than the first samples, as ``--limit`` asked."""
        return any(task.state == "partial" for task in self.tasks.values())

    @property
    def impossible(self) -> bool:
        return any(task.state == "impossible" for task in self.tasks.values())

    @property
    def macro_refused(self) -> str:
        """Why there is no macro-average, as tables put it; empty where there is one."""
        if self.macro.value is not None:
            return ""
        if len(self.numerics) > 1:
            return "mixed numerics"
        if all(task.state == "impossible" for task in self.tasks.values()):
            return "impossible"
        return f"partial, {self.macro.coverage}" if self.partial else self.macro.coverage


@dataclass(frozen=True)
class Board:
    condition: Condition
    tasks: tuple[str, ...]
    budgets: tuple[str, ...]
    results: tuple[Result, ...]

    @property
    def baseline(self) -> Result | None:
        return next((result for result in self.results if result.configuration.is_baseline), None)

    @property
    def compared(self) -> int:
        """Size of the family that Holm's correction is over."""
        return sum(1 for result in self.results if result.against_full and result.against_full.p is not None)

    @property
    def one_document(self) -> list[str]:
        """Tasks of which all prompts are about one document."""
        estimates = [(name, task.estimate) for result in self.results for name, task in result.tasks.items()]
        alone = {name for name, estimate in estimates if estimate and estimate.one_document}
        return [task for task in self.tasks if task in alone]


@dataclass(frozen=True)
class Summary:
    boards: tuple[Board, ...]
    cells: int
    cells_done: int
    cells_impossible: int
    rows: int
    rows_failed: int
    rows_expected: int
    rows_outside: int
    """Rows of cells, or of samples, that the plan does not hold: left out everywhere."""
    configurations: Mapping[str, Configuration]
    """By cell_id."""

    @property
    def partial(self) -> bool:
        return any(result.partial for result in self.results)

    @property
    def results(self) -> list[Result]:
        return [result for board in self.boards for result in board.results]
