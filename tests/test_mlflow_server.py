"""The MLflow of the manifests, with PostgreSQL and a bucket behind it, written to as the driver writes."""

from __future__ import annotations

import json
import os
import subprocess
import urllib.error
import urllib.request
from base64 import b64encode
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from browser import chromium
from manifests import K8S
from row_factory import Output, make_output, make_sweep
from servers import KEYS, keys_in, mlflow_server, postgres, s3, signed_in

from pipeline.mlflow_calls import mlflow_client
from pipeline.mlflow_runs import KIND
from pipeline.mlflow_views import links
from pipeline.report import Report, build_report
from pipeline.tracking import Tracker, TrackingError, replay

pytestmark = pytest.mark.slow

USER, PASSWORD = "kvsweep", "of sixteen letters"
BUCKET = "mlflow-files"


@dataclass(frozen=True)
class Server:
    address: str
    bucket: str
    """Of the S3 endpoint."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The command and the settings of the Deployment; the address, the secrets and the bucket are this machine's."""
    pytest.importorskip("psycopg", reason="pip install 'psycopg[binary]'")
    pytest.importorskip("flask_wtf", reason="pip install 'mlflow[auth]'")
    folder = tmp_path_factory.mktemp("mlflow")
    deployment = next(yaml.safe_load_all((K8S / "base" / "mlflow.yaml").read_text(encoding="utf-8")))
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    settings = dict(line.split("=", 1) for line in (K8S / "base" / "mlflow.env").read_text().splitlines())
    with postgres() as database, s3(BUCKET) as bucket:
        login = folder / "basic_auth.ini"
        login.write_text(
            f"[mlflow]\ndefault_permission = READ\ndatabase_uri = {database}\n"
            "authorization_function = mlflow.server.auth:authenticate_request_basic_auth\n"
        )
        environment = {
            **settings,
            **KEYS,
            "AWS_ENDPOINT_URL": bucket,
            "MLFLOW_ARTIFACTS_DESTINATION": f"s3://{BUCKET}/mlflow",
            "MLFLOW_AUTH_CONFIG_PATH": str(login),
            "MLFLOW_BACKEND_STORE_URI": database,
            "MLFLOW_FLASK_SERVER_SECRET_KEY": "cookies",
            "MLFLOW_AUTH_ADMIN_USERNAME": USER,
            "MLFLOW_AUTH_ADMIN_PASSWORD": PASSWORD,
        }
        set_in_manifest = {variable["name"] for variable in container["env"]}
        assert set_in_manifest < environment.keys()
        words = [word for word in container["args"] if word not in ("--port", "5000")]
        with mlflow_server(words, environment, folder) as address:
            # the service's name, as a client in the cluster says it, is not this machine's
            yield Server(address.replace("127.0.0.1", "localhost"), bucket)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """The head's environment."""
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", USER)
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", PASSWORD)
    monkeypatch.delenv("RAY_JOB_CONFIG_JSON_ENV_VAR", raising=False)


@pytest.fixture(scope="module")
def output() -> Output:
    return make_output(tasks=("niah", "vt"), samples=6, data_seeds=(0, 1), budgets=("10%", "128 tokens"))


@pytest.fixture(scope="module")
def written(server: Server, output: Output, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Report]:
    """A sweep, tracked from start to close; a client that sees it, and its report."""
    folder = tmp_path_factory.mktemp("sweep")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_TRACKING_USERNAME", USER)
        patch.setenv("MLFLOW_TRACKING_PASSWORD", PASSWORD)
        sweep = make_sweep(output=str(folder))
        tracker = Tracker.start(server.address, sweep, output.cells)
        tracker.progress(30, 0, 120)
        report = build_report(output.rows, output.cells, sweep)
        tracker.finish(report, report.write(folder), "FINISHED")
        tracker.close(120)
        assert set(tracker.links) == {"Leaderboard", "Score against budget", "Failures"}
    return mlflow_client(server.address), report


def request(address: str, login: str = "", host: str = "", content: dict[str, str] | None = None) -> int:
    """The status of a GET, or of a POST with some content."""
    headers = {"Authorization": "Basic " + b64encode(login.encode()).decode()} if login else {}
    headers |= {"Host": host} if host else {}
    headers |= {"Content-Type": "application/json"} if content else {}
    body = json.dumps(content).encode() if content else None
    try:
        with urllib.request.urlopen(urllib.request.Request(address, body, headers), timeout=20) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def test_a_sweep_is_there_with_its_runs(written: tuple[Any, Report], driver: None) -> None:
    client, report = written
    experiment = client.get_experiment_by_name("unit")
    runs = client.search_runs([experiment.experiment_id])
    (parent,) = (run for run in runs if run.data.tags[KIND] == "sweep")
    children = [run for run in runs if run.data.tags[KIND] == "configuration"]
    assert parent.info.status == "FINISHED"
    assert len(children) == len(report.summary.results)
    full = report.summary.boards[0].baseline.macro
    assert parent.data.metrics["macro/full/100pct"] == pytest.approx(100 * full.value)


def test_its_files_are_in_the_bucket_and_came_through_the_server(
    written: tuple[Any, Report], server: Server, driver: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client has no key of the bucket."""
    for name in KEYS:
        monkeypatch.delenv(name, raising=False)
    client, report = written
    (parent,) = client.search_runs([client.get_experiment_by_name("unit").experiment_id], f"tags.`{KIND}` = 'sweep'")
    page = Path(client.download_artifacts(parent.info.run_id, "report.html", str(tmp_path)))
    assert page.read_text(encoding="utf-8") == report.html()
    kept = [key for key in keys_in(server.bucket, BUCKET) if parent.info.run_id in key]
    assert {Path(key).name for key in kept} >= {"report.html", "sweep.yaml", "table.csv"}
    assert all(key.startswith("mlflow/") for key in kept)


def test_replay_over_the_same_server_adds_no_twins(
    written: tuple[Any, Report], server: Server, output: Output, driver: None
) -> None:
    client, report = written
    experiment = client.get_experiment_by_name("unit").experiment_id
    before = len(client.search_runs([experiment]))
    replay(server.address, report.sweep, output.cells, report, [])
    assert len(client.search_runs([experiment])) == before


def test_who_has_no_login_is_refused(
    server: Server, output: Output, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = f"{server.address}/api/2.0/mlflow/experiments/search?max_results=1"
    assert request(page, f"{USER}:{PASSWORD}") == 200
    assert request(page) == 401
    assert request(page, f"{USER}:wrong") == 401
    monkeypatch.delenv("MLFLOW_TRACKING_USERNAME", raising=False)
    monkeypatch.delenv("MLFLOW_TRACKING_PASSWORD", raising=False)
    sweep = make_sweep(output=str(tmp_path))
    with pytest.raises(TrackingError, match="not authenticated"):
        replay(server.address, sweep, output.cells, build_report(output.rows, output.cells, sweep), [])


def test_a_reader_reads_and_does_not_write(written: tuple[Any, Report], server: Server, driver: None) -> None:
    """A user made with the documentation's request."""
    client, _ = written
    experiment = client.get_experiment_by_name("unit").experiment_id
    made = {"username": "ada", "password": "a password of ada's"}
    assert request(f"{server.address}/api/2.0/mlflow/users/create", f"{USER}:{PASSWORD}", content=made) == 200
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_TRACKING_USERNAME", "ada")
        patch.setenv("MLFLOW_TRACKING_PASSWORD", "a password of ada's")
        assert client.search_runs([experiment])
        with pytest.raises(Exception, match="Permission denied"):
            client.set_experiment_tag(experiment, "note", "hers")


def test_only_known_names_of_the_server_are_answered_but_its_health_is(server: Server) -> None:
    login = f"{USER}:{PASSWORD}"
    page = f"{server.address}/api/2.0/mlflow/experiments/search?max_results=1"
    for host in ("mlflow:5000", "mlflow.kvsweep.svc.cluster.local:5000"):
        assert request(page, login, host) == 200
    assert request(page, login, "evil.example") == 403
    assert request(f"{server.address}/health", host="10.1.2.3:5000") == 200


def test_a_browser_shows_the_views_and_the_report(
    written: tuple[Any, Report], server: Server, driver: None, tmp_path: Path
) -> None:
    """Pictures go to ``KVSWEEP_TEST_PICTURES``, where that is set."""
    client, _ = written
    experiment = client.get_experiment_by_name("unit").experiment_id
    (parent,) = client.search_runs([experiment], f"tags.`{KIND}` = 'sweep'")
    pictures = Path(os.environ.get("KVSWEEP_TEST_PICTURES", tmp_path))
    with signed_in(server.address, f"{USER}:{PASSWORD}") as door:
        pages = links(door, experiment)
        run = f"{door}/#/experiments/{experiment}/runs/{parent.info.run_id}"
        shown = {
            "leaderboard": (pages["Leaderboard"], "macro/full"),
            "budget": (pages["Score against budget"], "qevict at 10%"),
            "report": (f"{run}/artifacts/report.html?workflowType=machine_learning", "report.html"),
        }
        for name, (address, text) in shown.items():
            page = seen(address, pictures / f"{name}.png", tmp_path / "profile")
            assert text in page, name
            assert "Something went wrong" not in page
            assert "load error" not in page
            assert (pictures / f"{name}.png").stat().st_size > 10_000


def seen(address: str, picture: Path, profile: Path) -> str:
    """The page as headless Chromium has it once it is quiet, and a picture of it."""
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-sync"]
    options += ["--disable-component-update", "--disable-quic", "--no-first-run", "--window-size=1600,1000"]
    options += [f"--user-data-dir={profile}", "--virtual-time-budget=30000", "--dump-dom", f"--screenshot={picture}"]
    return subprocess.run(
        [chromium(), *options, address], capture_output=True, text=True, timeout=300, check=True
    ).stdout
