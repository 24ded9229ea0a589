"""``kvsweep data``: which data sets there are and where they are found, fetching them, checking them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from pipeline.errors import SweepProblem
from pipeline.run import data_sources
from pipeline.show import console
from pipeline.spec import SweepFile, load_sweep, nearest
from tasks.catalogue import DATA_SETS, DataSet, fetchable, sets_for
from tasks.download import Downloader
from tasks.groups import GROUPS
from tasks.registry import example_task, get_task, task_names
from tasks.sources import DataError, DataSources, MissingData
from tasks.task import Task, TaskError
from workers.description import cache_folder

MANY = 4
"""More files than this are counted, not listed."""
ANY_CONTEXT = 4096


class BadData(SweepProblem):
    """Data that are missing or not what they should be: one line per problem."""


@dataclass(frozen=True)
class Checked:
    """One task's data, or one file: ``problem`` is empty where it is sound."""

    what: str
    told: str
    problem: str = ""


def list_sets(data_dir: Path | None) -> None:
    """Each set: what it is for, its licence, its pinned source, its files, and where they are now."""
    sources = _sources(data_dir)
    for entry in DATA_SETS:
        print(f"{entry.name}: {entry.use}")
        for name, text in _facts(entry, sources):
            print(f"    {name:8} {text}")
    print(f"\nlooked in: {', then '.join(sources.order())}")
    print("`kvsweep data fetch NAME` gets a set, or all that a task or group reads")


def fetch(names: Sequence[str]) -> None:
    """Fetch sets by their names, or by those of tasks and groups that read them; all that can be, without names."""
    folder = cache_folder() / "data"
    downloader = Downloader(folder)
    for entry in _chosen(names):
        try:
            new = downloader.fetch(entry)
        except DataError as error:
            raise BadData(f"{entry.name}: {error}") from None
        done = f"{len(new)} of {len(entry.files)} files fetched" if new else "is there already"
        print(f"{entry.name}: {done}, in {folder}")


def check(file: Path | None, data_dir: Path | None) -> None:
    """Check the data of a sweep's tasks; without a sweep, of all whose files are there. Raises :class:`BadData`."""
    sweep = load_sweep(file) if file is not None else None
    folder = data_dir or (Path(sweep.data_dir) if sweep and sweep.data_dir else None)
    sources = _sources(folder)
    if sweep is None:
        checked = [_checked(example_task(name), sources, ANY_CONTEXT, needed=False) for name in task_names()]
    else:
        checked = list(_tasks_of(sweep, sources))
    checked += _found(sources)
    table = Table("what", "is")
    for one in checked:
        table.add_row(one.what, "bad, see below" if one.problem else one.told)
    out = console()
    out.print(table)
    out.print(f"looked in: {', then '.join(sources.order())}", markup=False, highlight=False, soft_wrap=True)
    problems = dict.fromkeys(one.problem for one in checked if one.problem)
    if problems:
        raise BadData("\n".join(problems))


def _sources(data_dir: Path | None) -> DataSources:
    try:
        return data_sources(data_dir, fetch=False)
    except DataError as error:
        raise SweepProblem(f"--data-dir: {error}") from None


def _facts(entry: DataSet, sources: DataSources) -> Iterator[tuple[str, str]]:
    yield "licence", entry.licence
    yield "source", entry.source
    if not fetchable(entry):
        yield "by hand", entry.by_hand
    if entry.archive is not None:
        yield "archive", f"sha256 {entry.archive.sha256}"
    if len(entry.files) > MANY:
        yield "files", f"{len(entry.files)}, such as {entry.files[0].path}"
    else:
        for file in entry.files:
            yield "file", f"{file.path}, {f'sha256 {file.sha256}' if file.sha256 else 'no checksum'}"
    yield "here", _here(entry, sources)


def _here(entry: DataSet, sources: DataSources) -> str:
    if not entry.files:
        found = sources.listing(entry.name, "*.txt")
        return f"{len(found)} files" if found else "no"
    places: dict[str, int] = {}
    for file in entry.files:
        if sources.find(file.path):
            try:
                one = sources.found()[file.path]
            except DataError:
                place = "cache, damaged"
            else:
                place = f"{one.place}, another version" if one.matches is False else one.place
            places[place] = places.get(place, 0) + 1
    return ", ".join(f"{place}: {count} of {len(entry.files)}" for place, count in places.items()) or "no"


def _chosen(names: Sequence[str]) -> list[DataSet]:
    if not names:
        return [entry for entry in DATA_SETS if fetchable(entry)]
    chosen: dict[str, DataSet] = {}
    for name in names:
        found = [entry for entry in DATA_SETS if set(GROUPS[name]) & set(entry.tasks)] if name in GROUPS else []
        found = found or list(sets_for(name))
        if not found:
            if name in GROUPS or name in task_names():
                raise SweepProblem(f"{name} needs no data")
            known = {*(entry.name for entry in DATA_SETS), *GROUPS, *task_names()}
            raise SweepProblem(f"there is no data set, task or group {name!r}; {nearest(name, known)}")
        chosen |= {entry.name: entry for entry in found}
    return list(chosen.values())


def _tasks_of(sweep: SweepFile, sources: DataSources) -> Iterator[Checked]:
    for entry in sweep.tasks:
        task = get_task(entry.name, entry.settings)
        yield _checked(task, sources, (entry.contexts or sweep.contexts or [ANY_CONTEXT])[0])


def _checked(task: Task, sources: DataSources, context: int, needed: bool = True) -> Checked:
    what = f"task {task.name}"
    try:
        task.check(sources, context if task.contextual else None)
        available = task.available(sources)
    except TaskError as error:
        missing = isinstance(error, MissingData) or isinstance(error.__cause__, MissingData)
        return Checked(what, "files are not there", "" if missing and not needed else str(error))
    return Checked(what, "any number of samples" if available is None else f"{available:,} samples")


def _found(sources: DataSources) -> Iterator[Checked]:
    """The files that the tasks asked for, against the pinned checksums."""
    try:
        found = sources.found()
    except DataError as error:
        yield Checked("checksums", "", str(error))
        return
    for path, one in found.items():
        told = "as pinned" if one.matches else "no checksum is known"
        problem = ""
        if one.matches is False:
            problem = f"{one.path} is not the pinned file: its sha256 is {one.sha256}"
        yield Checked(f"{path} ({one.place})", told, problem)
