"""How MLflow is called: with which client, several calls at a time, and what is let through when it fails."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from multiprocessing.pool import ThreadPool
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mlflow import MlflowClient

WRITERS = 8
"""Calls to a server at a time. Most of a call is waiting, and MLflow's client keeps ten connections."""


class Stopped(Exception):
    """Writing was told to stop before it was done."""


def mlflow_client(uri: str) -> MlflowClient:
    """A client that prints nothing, phones nowhere and gives up on a dead server within seconds."""
    os.environ["MLFLOW_DISABLE_TELEMETRY"] = os.environ["DO_NOT_TRACK"] = "true"
    os.environ["MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT"] = "1"
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR", "1")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")
    from mlflow import MlflowClient

    for noisy in ("alembic", "sqlalchemy", "mlflow", "urllib3.connectionpool"):
        logging.getLogger(noisy).setLevel(logging.ERROR)
    if uri.startswith("sqlite:///"):
        Path(uri.removeprefix("sqlite:///")).parent.mkdir(parents=True, exist_ok=True)
    return MlflowClient(tracking_uri=uri)


def failures() -> tuple[type[Exception], ...]:
    """What MLflow lets through when its server, its database, its files or its own requirements fail."""
    from alembic.util.exc import CommandError
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import SQLAlchemyError

    return MlflowException, SQLAlchemyError, CommandError, OSError, ImportError, ValueError


def is_refusal(error: Exception) -> bool:
    """Whether MLflow has read what it was asked and refuses it: asking again is no use."""
    from mlflow.exceptions import MlflowException

    return isinstance(error, MlflowException) and error.error_code == "INVALID_PARAMETER_VALUE"


def writers(uri: str) -> int:
    """How many threads may write: a database in a file has one writer at a time."""
    return WRITERS if uri.startswith("http") else 1


def in_parallel(calls: Sequence[Callable[[], None]], threads: int, stop: Event) -> None:
    """Make all calls. The first that raises ends the rest and is raised here; ``stop`` raises :class:`Stopped`.

    The threads are daemons, which an executor's are not: a server that hangs must not keep the process from ending.
    """
    failing = Event()

    def make(call: Callable[[], None]) -> None:
        if failing.is_set() or stop.is_set():
            return
        with ExitStack() as ended:
            ended.callback(failing.set)
            call()
            ended.pop_all()

    if calls:
        with ThreadPool(min(threads, len(calls))) as pool:
            for _ in pool.imap_unordered(make, calls):  # raises here what a call raises there
                pass
    if stop.is_set():
        raise Stopped
