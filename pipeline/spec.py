"""The sweep file: models, tasks, methods, budgets, protocol, seeds, cluster and output, checked before anything starts.

Every name and setting is resolved here, without torch: a misspelt method is told apart from a good one while the
sweep is still a text file. Problems are reported as ``file: field: what is wrong; how to fix it``, one per line.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Hashable, Iterable, Iterator, Mapping
from math import isfinite
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar
from urllib.parse import urlsplit

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    PlainValidator,
    Strict,
    TypeAdapter,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import ErrorDetails, PydanticCustomError

from kvcache.budget import Budget
from kvcache.method import Method, method_class
from pipeline.errors import SweepProblem
from tasks.groups import GROUPS
from tasks.registry import get_task, group_settings
from workers.job import EngineSpec, ModelSpec, Protocol

Item = TypeVar("Item", bound=Hashable)
Count = Annotated[int, Strict(), Field(ge=1)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Seed = Annotated[int, Strict(), Field(ge=0, lt=2**63)]


class SpecError(SweepProblem):
    """What is wrong with a sweep file: one line per problem, each naming the file and the field."""

    def __init__(self, file: Path | str, problems: Iterable[tuple[str, str]]) -> None:
        self.problems = list(problems)
        super().__init__("\n".join(f"{file}: {f'{field}: ' if field else ''}{text}" for field, text in self.problems))


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class TaskEntry(Section):
    """``name``, or a mapping: ``samples`` and ``contexts`` replace the sweep's, other keys are settings of the task.

    The name of a group stands for its members. A ``file`` among the settings is relative to the sweep file's folder.
    """

    name: str
    samples: Count | None = None
    contexts: list[Count] | None = None
    settings: dict[str, Any] = {}
    group: str = ""
    """The group that this task was listed by."""
    place: int = 0
    """Which entry of the sweep file it comes from."""

    @model_validator(mode="before")
    @classmethod
    def _named(cls, entry: object, info: ValidationInfo) -> object:
        split = _split_settings(entry, known=("name", "samples", "contexts"), what="task")
        file = split["settings"].get("file")
        if isinstance(file, str) and file:
            folder = info.context["folder"] if info.context else Path()
            split["settings"]["file"] = str((folder / Path(file).expanduser()).absolute())
        return split

    @model_validator(mode="after")
    def _known(self) -> TaskEntry:
        for entry in self.members(0):
            try:
                task = get_task(entry.name, entry.settings)
            except ValueError as error:
                raise ValueError(f"{self.name}: {error}" if entry.group else str(error)) from None
            if self.contexts is not None and not task.contextual:
                raise PydanticCustomError(
                    "task",
                    "{name} has lengths of its own: it takes no contexts",
                    {"name": entry.name, "field": "contexts"},
                )
        return self

    def members(self, place: int) -> list[TaskEntry]:
        """The tasks that this entry stands for: the members of a group, each with the settings that it has."""
        if self.name not in GROUPS or "file" in self.settings:
            return [self.model_copy(update={"place": place})]
        return [
            self.model_copy(update={"name": name, "settings": settings, "group": self.name, "place": place})
            for name, settings in group_settings(self.name, self.settings).items()
        ]


class MethodEntry(Section):
    """``name``, or a mapping: ``label`` tells two entries of a method apart, other keys are settings of the method."""

    name: str
    label: str = Field(default="", min_length=1)
    settings: dict[str, Any] = {}

    @model_validator(mode="before")
    @classmethod
    def _named(cls, entry: object) -> object:
        return _split_settings(entry, known=("name", "label"), what="method")

    @model_validator(mode="after")
    def _known(self) -> MethodEntry:
        self.method()
        return self

    @property
    def shown(self) -> str:
        """What tables call it."""
        return self.label or self.name

    def method(self) -> Method:
        """The method with these settings; raises a validation error that names the setting at fault."""
        cls = method_class(self.name)
        for key, value in self.settings.items():
            if isinstance(value, float) and not isfinite(value):
                raise PydanticCustomError("setting", "must be a finite number", {"field": key})
            if key not in {field.name for field in dataclasses.fields(cls)}:
                raise _unknown_key(key, [field.name for field in dataclasses.fields(cls)], f"setting of {self.name}")
        try:
            return TypeAdapter(cls).validate_python(self.settings)
        except ValidationError as error:
            first = error.errors()[0]
            field = ".".join(str(part) for part in first["loc"])
            raise PydanticCustomError("setting", "{text}", {"text": _plain_text(first), "field": field}) from None


class Cluster(Section):
    """Where and how actors run. Nothing here changes a number, so nothing here is part of a cell."""

    address: str | None = None
    """A Ray cluster; None starts Ray on this machine (unless RAY_ADDRESS names one)."""
    cpus_per_actor: Positive | None = None
    """None: all cores of a node, or a GPU's share of them."""
    gpus_per_actor: Count | Literal[0, "auto"] = "auto"
    max_actors: Count | None = None
    """None: as many as the cluster holds. On a cluster that grows by demand this is the demand."""
    resources: dict[str, float] = {}
    labels: dict[str, str] = {}
    """Ray node labels that an actor's node must carry."""
    samples_per_job: Count = 8
    ready_timeout_s: Positive = 600
    stall_timeout_s: Positive | None = None
    """An actor that yields no row for this long is killed; that counts as a crash."""
    job_timeout_s: Positive | None = None
    """So long may a job take in all, or the loading of a model; then the same happens. Rows that came are kept."""
    max_failures: Count = 20
    """Failures in a row, with no success between them, that stop the sweep."""

    @field_validator("gpus_per_actor", mode="before")
    @classmethod
    def _whole_gpus(cls, gpus: object) -> object:
        if gpus == "auto" or (type(gpus) is int and gpus >= 0):
            return gpus
        raise PydanticCustomError(
            "gpus",
            "must be a whole number of GPUs, 0 for none, or auto, not {gpus}: an actor has its GPUs to itself, for "
            "on a shared one its time and memory cannot be measured alone",
            {"gpus": repr(gpus)},
        )


def _without_password(uri: str) -> str:
    """The file is kept beside the results and shown in the report."""
    if urlsplit(uri).password is not None:
        raise PydanticCustomError(
            "password", "holds a password or a secret key: give it in the environment (AWS_*, MLFLOW_TRACKING_PASSWORD)"
        )
    return uri


PublicUri = Annotated[str, AfterValidator(_without_password)]


class MLflow(Section):
    tracking_uri: PublicUri | None = None
    enabled: bool = True


def _distinct(items: list[Item]) -> list[Item]:
    for item in items:
        if items.count(item) > 1:
            raise PydanticCustomError("duplicate", "{item} is listed twice", {"item": str(item)})
    return items


class Timing(Section):
    """Isolated runs in place of tasks: prompts of made-up tokens, ``batch`` of them at once, one method at a time."""

    prompt_tokens: list[Count] = Field(min_length=1)
    new_tokens: Annotated[int, Strict(), Field(ge=2)]
    """What every row generates, whatever the model says; the first comes with the prompt, the others are timed."""
    batch: list[Count] = Field(default=[1], min_length=1)
    repeats: Count = 5
    warmup: Count = 1
    """Runs of every method and budget before the first that counts."""

    _no_repeats = field_validator("prompt_tokens", "batch")(_distinct)


class SweepFile(Section):
    """A sweep as its file describes it: of ``tasks``, or, with ``timing``, of isolated runs."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    models: list[ModelSpec] = Field(min_length=1)
    contexts: list[Count] = []
    samples: Count = 50
    seeds: list[Seed] = Field(default=[0], min_length=1)
    tasks: list[TaskEntry] = Field(default=[], min_length=1)
    timing: Timing | None = None
    methods: list[MethodEntry] = Field(min_length=1)
    budgets: list[Annotated[Budget, PlainValidator(Budget.parse)]] = Field(min_length=1)
    protocol: Protocol = Protocol()
    engine: EngineSpec = EngineSpec()
    cluster: Cluster = Cluster()
    output: PublicUri = Field(min_length=1)
    mlflow: MLflow = MLflow()
    data_dir: str | None = None

    _no_repeats = field_validator("contexts", "seeds", "budgets")(_distinct)

    @field_validator("models")
    @classmethod
    def _model_labels(cls, models: list[ModelSpec]) -> list[ModelSpec]:
        _distinct([model.label for model in models])
        return models

    @field_validator("tasks")
    @classmethod
    def _task_names(cls, entries: list[TaskEntry]) -> list[TaskEntry]:
        """Plain tasks, groups replaced by their members."""
        tasks = [task for place, entry in enumerate(entries) for task in entry.members(place)]
        first: dict[str, TaskEntry] = {}
        for task in tasks:
            other = first.setdefault(task.name, task)
            if other is not task:
                ways = [f"in {one.group}" if one.group else "by itself" for one in (other, task)]
                how = f", {' and '.join(ways)}" if other.group or task.group else ""
                raise PydanticCustomError("duplicate", "{name} is listed twice{how}", {"name": task.name, "how": how})
        return tasks

    @field_validator("methods")
    @classmethod
    def _method_labels(cls, methods: list[MethodEntry]) -> list[MethodEntry]:
        labels = [entry.shown for entry in methods]
        for label in labels:
            if labels.count(label) > 1:
                raise PydanticCustomError(
                    "duplicate", "{label} is listed twice: give each setting a label of its own", {"label": label}
                )
        return methods

    @field_validator("engine", mode="before")
    @classmethod
    def _row_width_of_tasks(cls, engine: object, info: ValidationInfo) -> object:
        """Looked for here, where one that is written out still differs from the default."""
        if info.data.get("timing") is not None and isinstance(engine, Mapping) and "row_width" in engine:
            raise PydanticCustomError(
                "timing",
                "has no meaning in a timing sweep, whose runs are as wide as timing.batch says: leave it out",
                {"field": "row_width"},
            )
        return engine

    @field_validator("engine")
    @classmethod
    def _engine_shapes(cls, engine: EngineSpec) -> EngineSpec:
        for field in dataclasses.fields(engine):
            if getattr(engine, field.name) < 1:
                raise PydanticCustomError("engine", "must be at least 1", {"field": field.name})
        return engine

    @model_validator(mode="after")
    def _tasks_or_timing(self) -> SweepFile:
        if self.timing is None and not self.tasks:
            raise PydanticCustomError(
                "tasks", "is missing: list some, or measure time with a timing section", {"field": "tasks"}
            )
        if self.timing is not None and (field := next(_without_meaning(self), "")):
            raise PydanticCustomError(
                "timing",
                "has no meaning in a timing sweep, whose runs are made up, isolated and as timing says: leave it out",
                {"field": field},
            )
        return self

    @model_validator(mode="after")
    def _every_task_has_contexts(self) -> SweepFile:
        require_contexts(self.tasks, self.contexts)
        return self


def require_contexts(tasks: Iterable[TaskEntry], contexts: list[int]) -> None:
    """Raises a validation error for a task that needs lengths where neither it nor the file has any."""
    for entry in tasks:
        if get_task(entry.name, entry.settings).contextual and not (entry.contexts or contexts):
            raise PydanticCustomError(
                "contexts", "{task} needs context lengths: list some", {"task": entry.name, "field": "contexts"}
            )


def _without_meaning(sweep: SweepFile) -> Iterator[str]:
    """Fields of a timing sweep that speak of samples, of shared runs, or of several actors at once."""
    of_samples = ("tasks", "contexts", "samples", "seeds", "data_dir")
    yield from (name for name in of_samples if name in sweep.model_fields_set)
    for field in dataclasses.fields(Protocol):
        if field.name not in ("budget_base", "growth") and getattr(sweep.protocol, field.name) != field.default:
            yield f"protocol.{field.name}"
    if sweep.cluster.max_actors not in (None, 1):
        yield "cluster.max_actors"
    if "samples_per_job" in sweep.cluster.model_fields_set:
        yield "cluster.samples_per_job"
    if sweep.mlflow.tracking_uri is not None:
        yield "mlflow.tracking_uri"


def load_sweep(path: Path | str) -> SweepFile:
    """Read and check a sweep file. Raises :class:`SpecError`."""
    file = Path(path)
    content = load_file(file)
    if "conditions" in content and "models" not in content:
        raise SpecError(file, [("", f"is a file of diagnostics, not a sweep: run `kvsweep diagnostics {file}`")])
    try:
        return SweepFile.model_validate(content, context={"folder": file.parent})
    except ValidationError as error:
        raise SpecError(file, [_problem(detail) for detail in error.errors()]) from None


def load_file(file: Path) -> dict[str, Any]:
    """The YAML of a file, not checked further."""
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise SpecError(file, [("", f"cannot be read: {error.strerror}")]) from None
    except UnicodeDecodeError:
        raise SpecError(file, [("", "is not UTF-8 text")]) from None
    return load_text(text, file)


def load_text(text: str, file: Path | str) -> dict[str, Any]:
    """The YAML of a sweep, not checked further."""
    try:
        content = yaml.load(text, Loader=_UniqueKeys)
    except yaml.YAMLError as error:
        raise SpecError(file, [("", f"is not valid YAML: {_yaml_text(error)}")]) from None
    except ValueError as error:  # a date or number that YAML's own tags cannot build
        raise SpecError(file, [("", f"holds a value that is none: {_one_line(str(error))}; quote it")]) from None
    if not isinstance(content, dict):
        raise SpecError(file, [("", "is not a sweep: it must be a mapping with name, models, tasks, methods ...")])
    return content


class _UniqueKeys(yaml.SafeLoader):
    """YAML keeps the last of two equal keys; in a sweep that would silently drop half of a setting."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key_node, _ in node.value:
            key = str(key_node.value)
            if key in seen:
                problem = f"the key {key!r} occurs twice"
                raise yaml.constructor.ConstructorError(None, None, problem, key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


def _yaml_text(error: yaml.YAMLError) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        return f"line {error.problem_mark.line + 1}: {error.problem}"
    return _one_line(str(error))


def _split_settings(entry: object, known: tuple[str, ...], what: str) -> dict[str, Any]:
    """``name`` or ``{name: ..., setting: ...}`` to the fields of an entry."""
    if isinstance(entry, str):
        return {"name": entry, "settings": {}}
    if not isinstance(entry, Mapping) or "name" not in entry:
        raise PydanticCustomError("entry", "write a {what}'s name, or a mapping with a name in it", {"what": what})
    return {
        **{key: entry[key] for key in known if key in entry},
        "settings": {key: entry[key] for key in entry if key not in known},
    }


def _unknown_key(key: str, names: Iterable[str], what: str = "key") -> PydanticCustomError:
    return PydanticCustomError(
        "unknown_key",
        "unknown {what}; {hint}",
        {"what": what, "hint": nearest(str(key), names), "field": str(key)},
    )


def nearest(name: str, names: Iterable[str]) -> str:
    """``did you mean ...?``, or all of ``names`` where nothing is near."""
    known = sorted(names)
    near = difflib.get_close_matches(name, known, n=3)
    return f"did you mean {', '.join(near)}?" if near else f"known: {', '.join(known) or 'none'}"


SECTIONS: dict[str, type] = {
    "models": ModelSpec,
    "timing": Timing,
    "protocol": Protocol,
    "engine": EngineSpec,
    "cluster": Cluster,
    "mlflow": MLflow,
}


def _problem(detail: ErrorDetails) -> tuple[str, str]:
    """One pydantic error as (field path, text)."""
    loc = list(detail["loc"])
    extra = detail.get("ctx", {}).get("field")
    if extra:
        loc.append(extra)
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc).lstrip(".")
    if detail["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        section = SweepFile if len(loc) == 1 else SECTIONS[str(loc[0])]
        return path, f"unknown key; {nearest(str(loc[-1]), _field_names(section))}"
    if detail["type"] in ("model_type", "dataclass_type"):
        names = ", ".join(_field_names(SECTIONS[str(loc[0])]))
        return path, f"must be a mapping, not {detail['input']!r}; its keys: {names}"
    return path, _plain_text(detail)


def _plain_text(detail: ErrorDetails) -> str:
    """Pydantic's message without its prefix, with what was found where that helps."""
    text = detail["msg"].removeprefix("Value error, ")
    if detail["type"] == "missing":
        return "is missing"
    if detail["type"] in ("string_type", "int_type", "float_type", "bool_type", "literal_error"):
        quote = "; quote it if it is a name" if detail["type"] == "string_type" else ""
        return f"{text}, not {detail['input']!r}{quote}"
    return _one_line(text)


def _field_names(section: type[Any]) -> list[str]:
    if issubclass(section, BaseModel):
        return list(section.model_fields)
    return [field.name for field in dataclasses.fields(section)]


def _one_line(text: str) -> str:
    return " ".join(text.split())
