"""The command line. Everything heavy is imported by the command that needs it: ``--help`` is quick.

Exit codes: 0 all done, 1 some rows failed or were left out, 2 bad input, 3 stopped by failures, 130 and 143
stopped by a signal.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any

import typer

app = typer.Typer(
    name="kvsweep",
    help="Which KV-cache compression method, at which memory budget, keeps the quality you need, and at what cost?",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

data = typer.Typer(help="Data sets: list, fetch, check.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(data, name="data")

File = Annotated[Path, typer.Argument(help="The sweep file.", metavar="FILE")]
OutputArgument = Annotated[str, typer.Argument(help="A sweep's output: a folder or URI.", metavar="OUT")]
OutputOption = Annotated[str | None, typer.Option("--output", help="A folder or URI in place of the file's output.")]
Limit = Annotated[int | None, typer.Option("--limit", min=1, help="The first N samples of each cell; same cells.")]
DataDir = Annotated[Path | None, typer.Option("--data-dir", help="Folder with the tasks' files.")]
OtherModel = Annotated[
    str | None, typer.Option("--model", help="In place of the file's: a Hub id, a folder, a .gguf or wheel:NAME.")
]
OtherContext = Annotated[int | None, typer.Option("--context", min=1, help="One length in place of the file's.")]
Retry = Annotated[bool, typer.Option("--retry-failed", help="Run failed rows again.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks.")]


@app.command()
def run(
    file: File,
    output: OutputOption = None,
    limit: Limit = None,
    data_dir: DataDir = None,
    address: Annotated[
        str | None, typer.Option("--address", help="A Ray cluster; default RAY_ADDRESS, or none.")
    ] = None,
    gpus_per_actor: Annotated[
        int | None,
        typer.Option("--gpus-per-actor", min=0, help="In place of the file's: needed where nodes come later."),
    ] = None,
    max_actors: Annotated[int | None, typer.Option("--max-actors", min=1, help="In place of the file's.")] = None,
    model: OtherModel = None,
    context: OtherContext = None,
    retry_failed: Retry = False,
    failures_ok: Annotated[bool, typer.Option("--failures-ok", help="Exit with 0 although some failed.")] = False,
    debug: Debug = False,
) -> None:
    """Run what is left of a sweep, then write its report. The same command goes on after any interruption."""
    from pipeline import commands
    from pipeline.run import RunOptions

    options = RunOptions(output, data_dir, address, limit, retry_failed, gpus_per_actor, max_actors, model, context)
    raise typer.Exit(commands.run(file, options, failures_ok))


@app.command()
def plan(
    file: File,
    output: OutputOption = None,
    limit: Limit = None,
    data_dir: DataDir = None,
    model: OtherModel = None,
    context: OtherContext = None,
    retry_failed: Retry = False,
    cells: Annotated[bool, typer.Option("--cells", help="List every cell.")] = False,
    debug: Debug = False,
) -> None:
    """Say what a sweep would run, what is done, what cannot run, and what it will take."""
    from pipeline import commands
    from pipeline.run import RunOptions

    options = RunOptions(output, data_dir, None, limit, retry_failed, model=model, context=context)
    commands.plan(file, options, cells)


@app.command()
def status(
    output: OutputArgument,
    watch: Annotated[bool, typer.Option("--watch", help="Again and again, until all rows are there.")] = False,
    every: Annotated[float, typer.Option("--every", min=0.1, help="Seconds between two looks.")] = 10.0,
    debug: Debug = False,
) -> None:
    """Say how far a sweep is, from its output alone."""
    from pipeline import commands

    commands.status(output, every if watch else None)


@app.command()
def report(
    output: OutputArgument,
    paper: Annotated[
        list[str] | None,
        typer.Option("--paper", help="Beside a paper's table, such as qevict:table3; may be repeated."),
    ] = None,
    debug: Debug = False,
) -> None:
    """Write the report of an output again."""
    from pipeline import commands

    commands.report(output, paper or [])


@app.command()
def compare(
    output: OutputArgument,
    first: Annotated[str, typer.Argument(help="METHOD, METHOD@BUDGET, or field=value with commas between.")],
    second: Annotated[str, typer.Argument(help="What to compare it with.")],
    allow_protocols: Annotated[bool, typer.Option("--allow-protocols", help="Across different protocols.")] = False,
    debug: Debug = False,
) -> None:
    """Compare two selections sample by sample: first minus second."""
    from pipeline import commands

    commands.compare(output, first, second, allow_protocols)


@app.command()
def replay(
    output: OutputArgument,
    tracking_uri: Annotated[str | None, typer.Option("--tracking-uri", help="In place of the sweep file's.")] = None,
    debug: Debug = False,
) -> None:
    """Fill MLflow from an output."""
    from pipeline import commands

    commands.replay(output, tracking_uri)


@app.command()
def diagnostics(
    file: Annotated[Path, typer.Argument(help="A diagnostics file, such as one of jobs/diagnostics/.", metavar="FILE")],
    text: Annotated[list[Path] | None, typer.Option("--text", help="A text to read, beside the file's.")] = None,
    model: Annotated[str | None, typer.Option("--model", help="A model's source in place of the file's.")] = None,
    conditions: Annotated[str | None, typer.Option("--conditions", help="Some of the file's, such as R0,R3.")] = None,
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="The first N traces or prompts.")] = None,
    output: Annotated[str | None, typer.Option("--output", help="A folder in place of the file's.")] = None,
    data_dir: DataDir = None,
    debug: Debug = False,
) -> None:
    """Look into caches beside the full one: QEvict's tiers on texts, what LORE-KV and evictors keep on tasks."""
    from pipeline import diagnose

    diagnose.diagnostics(file, diagnose.Asked(tuple(text or ()), model, conditions, limit, output, data_dir))


@app.command()
def calibrate(
    model: Annotated[str, typer.Argument(help="A Hub id, a folder, a .gguf file or wheel:NAME.", metavar="MODEL")],
    text: Annotated[Path, typer.Option("--text", help="What the model reads: a text file, never test data.")],
    method: Annotated[str, typer.Option("--method", help="The method that is calibrated.")] = "kvquant",
    bits: Annotated[int, typer.Option("--bits", help="Bits per code.")] = 3,
    outliers: Annotated[float, typer.Option("--outliers", help="Share of elements kept beside the codes.")] = 0.01,
    sinks: Annotated[int, typer.Option("--sinks", help="First tokens left out, and kept in full.")] = 1,
    tokens: Annotated[int, typer.Option("--tokens", min=1, help="Tokens of a sequence.")] = 2048,
    sequences: Annotated[int, typer.Option("--sequences", min=1, help="Sequences to read.")] = 16,
    gradients: Annotated[bool, typer.Option(help="Weigh by squared gradients, which takes a backward pass.")] = True,
    dtype: Annotated[str, typer.Option("--dtype", help="Of the weights.")] = "bfloat16",
    revision: Annotated[str | None, typer.Option("--revision", help="Of a Hub id.")] = None,
    debug: Debug = False,
) -> None:
    """Find what KVQuant needs to know of a model, once, from a text. Sweeps find the result in the cache."""
    from pipeline import calibrate as calibration

    settings = {"bits": bits, "outliers": outliers, "sinks": sinks}
    asked = calibration.Asked(model, text, method, settings, tokens, sequences, gradients, dtype, revision)
    calibration.calibrate(asked)


@app.command()
def methods(debug: Debug = False) -> None:
    """List the methods with their settings."""
    from pipeline import show

    show.show_methods()


@app.command()
def tasks(debug: Debug = False) -> None:
    """List the tasks and the groups of them."""
    from pipeline import show

    show.show_tasks()


@data.command("list")
def data_list(data_dir: DataDir = None, debug: Debug = False) -> None:
    """List the data sets: what each is for, its licence, where it comes from, where it is now."""
    from pipeline import data as commands

    commands.list_sets(data_dir)


@data.command("fetch")
def data_fetch(
    names: Annotated[list[str] | None, typer.Argument(help="Data sets, tasks or groups; all sets without.")] = None,
    debug: Debug = False,
) -> None:
    """Fetch data sets from their pinned sources into the cache, verified."""
    from pipeline import data as commands

    commands.fetch(names or [])


@data.command("check")
def data_check(
    file: Annotated[Path | None, typer.Argument(help="A sweep file; without one, all tasks that have data.")] = None,
    data_dir: DataDir = None,
    debug: Debug = False,
) -> None:
    """Check a sweep's data, record by record and against checksums. Exit code 2 where they are bad."""
    from pipeline import data as commands

    commands.check(file, data_dir)


@app.command()
def doctor(debug: Debug = False) -> None:
    """Say what this machine has: versions, devices, attention kernels."""
    from pipeline import doctor as examination
    from pipeline.show import console

    console().print(examination.examine())


def main(arguments: list[str] | None = None) -> int:
    """Run a command. A problem is told in one message, without a traceback unless ``--debug``."""
    from pipeline.errors import SweepProblem
    from tasks.task import TaskError

    words = sys.argv[1:] if arguments is None else arguments
    debug = "--debug" in words
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    logging.getLogger("kvsweep").setLevel(logging.INFO)
    if not debug:
        sys.excepthook = _one_message
    command: Any = typer.main.get_command(app)
    try:
        command.main(words, prog_name="kvsweep")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except SweepProblem as problem:
        if debug:
            raise
        print(problem, file=sys.stderr)
        return problem.exit_code
    except TaskError as problem:  # a task that another package registers, and that cannot be used
        if debug:
            raise
        print(problem, file=sys.stderr)
        return SweepProblem.exit_code
    return 0


def _one_message(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    text = " ".join(f"{kind.__name__}: {error}".split())
    print(f"kvsweep failed, which is a fault of its own: {text}; --debug shows where", file=sys.stderr)
