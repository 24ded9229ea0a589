"""The file of ``kvsweep diagnostics``: a model, and the conditions to look into.

kind: qevict   settings of QEvict, on texts (arXiv 2608.05326, App. I); files that do not say are of this kind
kind: lorekv   evictors by name, on the prompts of tasks (arXiv 2610.07643, App. F)
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    Field,
    PlainSerializer,
    PlainValidator,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_core import ErrorDetails, PydanticCustomError

from kvcache.budget import Base, Budget
from kvcache.evict import PromptEvictor
from lorekv.method import LoreKV
from pipeline.spec import (
    Count,
    MethodEntry,
    Section,
    Seed,
    SpecError,
    TaskEntry,
    load_file,
    nearest,
    require_contexts,
)
from qevict.method import QEvict
from workers.job import ModelSpec
from workers.lorekv_labels import ORACLE, REFERENCE

BudgetText = Annotated[Budget, PlainValidator(Budget.parse), PlainSerializer(str)]
Entry = TypeVar("Entry")
RESERVED = (ORACLE, REFERENCE)
"""Conditions of LORE-KV's diagnostics that no file names: they are always there."""


class ConditionEntry(Section):
    """QEvict's settings; ``budget`` replaces the file's."""

    budget: BudgetText | None = None
    settings: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _split(cls, entry: object) -> object:
        if not isinstance(entry, dict):
            raise PydanticCustomError("condition", "write settings of qevict, as in {window: 8}, or {}")
        return {
            **({"budget": entry["budget"]} if "budget" in entry else {}),
            "settings": {key: value for key, value in entry.items() if key != "budget"},
        }

    @model_validator(mode="after")
    def _known(self) -> ConditionEntry:
        self.method()
        return self

    def method(self) -> QEvict:
        method = MethodEntry.model_validate({**self.settings, "name": "qevict"}).method()
        assert isinstance(method, QEvict)
        return method


class EvictorEntry(Section):
    """An evictor: ``{name: snapkv, window: 16}``, or settings of lorekv alone, as in ``{particles: 1}``."""

    entry: MethodEntry

    @model_validator(mode="before")
    @classmethod
    def _named(cls, entry: object) -> object:
        if not isinstance(entry, dict):
            raise PydanticCustomError(
                "condition", "write settings of lorekv, as in {particles: 1}, or an evictor, as in {name: snapkv}"
            )
        return {"entry": {"name": "lorekv", **entry}}

    @model_validator(mode="after")
    def _known(self) -> EvictorEntry:
        self.method()
        return self

    def method(self) -> PromptEvictor:
        method = self.entry.method()
        if not isinstance(method, PromptEvictor):
            raise PydanticCustomError(
                "condition", "{name} evicts no prompt tokens: there is no kept set to compare", {"name": method.name}
            )
        return method


class DiagnosticsFile(Section):
    """``source``: the continuation is the text's own, or what the full cache generates greedily, as in the paper."""

    kind: Literal["qevict"] = "qevict"
    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    model: ModelSpec
    texts: list[str] = Field(default_factory=list)
    prefill: Count = 512
    continuation: Count = 256
    source: Literal["text", "generated"] = "text"
    horizon: Count = 32
    budget: BudgetText
    budget_base: Base = "prompt+max_new"
    conditions: dict[str, ConditionEntry] = Field(min_length=1)
    output: str = Field(min_length=1)

    @field_validator("conditions", mode="before")
    @classmethod
    def _texts(cls, conditions: object) -> object:
        return _with_text_labels(conditions)

    def chosen(self, labels: str) -> DiagnosticsFile:
        """With these conditions alone, in this order. ``labels`` have commas between them."""
        return self.model_copy(update={"conditions": _chosen(self.conditions, labels)})


def _in_tokens(budgets: list[Budget]) -> list[Budget]:
    """Ascending, each once."""
    for budget in budgets:
        if budget.unit != "tokens":
            words = f"a budget is a number of tokens per KV head, as in '128 tokens', not {budget}"
            raise PydanticCustomError("budget", "{words}", {"words": words})
    return sorted(set(budgets), key=lambda budget: budget.value)


class LoreDiagnosticsFile(Section):
    """The prompts are the first ``samples`` of every task at every context; the answer is what the full cache says
    greedily, ``new_tokens`` at most (the task's own limit where it is lower).

    ``control`` names the condition that the others are held against: lorekv that looks at the prompt alone. ``futures``
    are the numbers of sampled futures, of ``future_tokens`` each, whose coverage is measured.
    """

    kind: Literal["lorekv"]
    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    model: ModelSpec
    tasks: list[TaskEntry] = Field(min_length=1)
    contexts: list[Count] = Field(default_factory=list)
    samples: Count = 4
    new_tokens: Count = 32
    seed: Seed = 0
    data_dir: str | None = None
    budgets: Annotated[list[BudgetText], AfterValidator(_in_tokens)] = Field(min_length=1)
    futures: list[Count] = Field(default=[1, 2, 4, 8], min_length=1)
    future_tokens: Count = 16
    control: str
    conditions: dict[str, EvictorEntry] = Field(min_length=1)
    output: str = Field(min_length=1)

    @field_validator("conditions", mode="before")
    @classmethod
    def _texts(cls, conditions: object) -> object:
        return _with_text_labels(conditions)

    @field_validator("tasks")
    @classmethod
    def _members(cls, entries: list[TaskEntry]) -> list[TaskEntry]:
        return [task for place, entry in enumerate(entries) for task in entry.members(place)]

    @model_validator(mode="after")
    def _has_a_control(self) -> LoreDiagnosticsFile:
        for label in RESERVED:
            if label in self.conditions:
                raise PydanticCustomError(
                    "label", "is always there: give this condition another name", {"field": f"conditions.{label}"}
                )
        if self.control not in self.conditions:
            words = f"there is no condition {self.control!r}; {nearest(self.control, self.conditions)}"
            raise PydanticCustomError("control", "{words}", {"words": words, "field": "control"})
        method = self.conditions[self.control].method()
        if not isinstance(method, LoreKV) or method.stochastic:
            raise PydanticCustomError(
                "control", "must be lorekv without futures: {mix: 0}", {"field": f"conditions.{self.control}"}
            )
        return self

    @model_validator(mode="after")
    def _every_task_has_contexts(self) -> LoreDiagnosticsFile:
        require_contexts(self.tasks, self.contexts)
        return self

    def chosen(self, labels: str) -> LoreDiagnosticsFile:
        """With these conditions alone, in this order, and the control, which the others need."""
        found = _chosen(self.conditions, labels)
        return self.model_copy(update={"conditions": {self.control: self.conditions[self.control], **found}})


KINDS: dict[str, type[DiagnosticsFile] | type[LoreDiagnosticsFile]]
KINDS = {"qevict": DiagnosticsFile, "lorekv": LoreDiagnosticsFile}


def load_diagnostics(path: Path | str) -> DiagnosticsFile | LoreDiagnosticsFile:
    """Read and check a file; what it names is relative to its folder. Raises :class:`SpecError`."""
    file = Path(path)
    content = load_file(file)
    if "models" in content and "conditions" not in content:
        raise SpecError(file, [("", f"is a sweep, not a file of diagnostics: run `kvsweep run {file}`")])
    named = str(content.get("kind", "qevict"))
    if named not in KINDS:
        raise SpecError(file, [("kind", f"there are no diagnostics of {named!r}; {nearest(named, KINDS)}")])
    kind = KINDS[named]
    try:
        loaded = kind.model_validate(content, context={"folder": file.parent})
    except ValidationError as error:
        raise SpecError(file, [_problem(detail, kind) for detail in error.errors()]) from None
    if isinstance(loaded, LoreDiagnosticsFile):
        return loaded
    return loaded.model_copy(update={"texts": [str(file.parent / Path(one).expanduser()) for one in loaded.texts]})


def _with_text_labels(conditions: object) -> object:
    return {str(label): entry for label, entry in conditions.items()} if isinstance(conditions, dict) else conditions


def _chosen(conditions: dict[str, Entry], labels: str) -> dict[str, Entry]:
    asked = [label.strip() for label in labels.split(",") if label.strip()]
    for label in asked:
        if label not in conditions:
            raise SpecError("--conditions", [("", f"there is no condition {label!r}; {nearest(label, conditions)}")])
    return {label: conditions[label] for label in asked}


def _problem(detail: ErrorDetails, kind: type[DiagnosticsFile] | type[LoreDiagnosticsFile]) -> tuple[str, str]:
    loc = [part for part in detail["loc"] if part != "entry"]
    where = [*loc, *([field] if (field := detail.get("ctx", {}).get("field")) else [])]
    path = ".".join(str(part) for part in where)
    if detail["type"] == "extra_forbidden":
        return path, f"unknown key; {nearest(str(where[-1]), kind.model_fields)}"
    if detail["type"] == "missing":
        return path, "is missing"
    return path, " ".join(detail["msg"].removeprefix("Value error, ").split())
