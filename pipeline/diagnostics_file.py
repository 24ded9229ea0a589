"""The file of ``kvsweep diagnostics``: a model, texts, and the conditions of QEvict to look into (App. I)."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, PlainSerializer, PlainValidator, ValidationError, field_validator, model_validator
from pydantic_core import ErrorDetails, PydanticCustomError

from kvcache.budget import Base, Budget
from pipeline.spec import Count, MethodEntry, Section, SpecError, load_file, nearest
from qevict.method import QEvict
from workers.job import ModelSpec

BudgetText = Annotated[Budget, PlainValidator(Budget.parse), PlainSerializer(str)]


class ConditionEntry(Section):
    """QEvict's settings; ``budget`` replaces the file's."""

    budget: BudgetText | None = None
    settings: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _split(cls, entry: object) -> object:
        if not isinstance(entry, dict):
            raise PydanticCustomError("condition", "write settings of qevict, as in {{window: 8}}, or {{}}")
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


class DiagnosticsFile(Section):
    """``source``: the continuation is the text's own, or what the full cache generates greedily, as in the paper."""

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
        return (
            {str(label): entry for label, entry in conditions.items()} if isinstance(conditions, dict) else conditions
        )

    def chosen(self, labels: str) -> DiagnosticsFile:
        """With these conditions alone, in this order. ``labels`` have commas between them."""
        asked = [label.strip() for label in labels.split(",") if label.strip()]
        for label in asked:
            if label not in self.conditions:
                hint = nearest(label, self.conditions)
                raise SpecError("--conditions", [("", f"there is no condition {label!r}; {hint}")])
        return self.model_copy(update={"conditions": {label: self.conditions[label] for label in asked}})


def load_diagnostics(path: Path | str) -> DiagnosticsFile:
    """Read and check a file; its ``texts`` are relative to its folder. Raises :class:`SpecError`."""
    file = Path(path)
    content = load_file(file)
    try:
        loaded = DiagnosticsFile.model_validate(content)
    except ValidationError as error:
        raise SpecError(file, [_problem(detail) for detail in error.errors()]) from None
    return loaded.model_copy(update={"texts": [str(file.parent / Path(one).expanduser()) for one in loaded.texts]})


def _problem(detail: ErrorDetails) -> tuple[str, str]:
    where = [*detail["loc"], *([field] if (field := detail.get("ctx", {}).get("field")) else [])]
    path = ".".join(str(part) for part in where)
    if detail["type"] == "extra_forbidden":
        return path, f"unknown key; {nearest(str(where[-1]), DiagnosticsFile.model_fields)}"
    if detail["type"] == "missing":
        return path, "is missing"
    return path, " ".join(detail["msg"].removeprefix("Value error, ").split())
