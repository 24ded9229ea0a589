"""Where files are looked for, in which order; fetching them from a server that may misbehave."""

from __future__ import annotations

import hashlib
import io
import threading
import zipfile
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from pipeline import data as data_commands
from pipeline.cli import main
from tasks import catalogue, sources
from tasks.catalogue import DATA_SETS, Archive, DataFile, DataSet, fetchable
from tasks.download import Downloader, DownloadError
from tasks.groups import GROUPS
from tasks.registry import task_names
from tasks.sources import DataError, DataSources, MissingData, checksum_file

TEXT = b"one\ntwo\n"


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def zipped(**members: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in members.items():
            archive.writestr(f"data/{name}.jsonl", content)
    return buffer.getvalue()


class Server:
    """Serves ``files``; ``cut`` answers end half-way."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.cut = False
        self.asked: list[str] = []
        server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Handler, self))
        self.url = f"http://127.0.0.1:{server.server_address[1]}"
        self._server = server
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    def __init__(self, server: Server, *arguments: Any) -> None:
        self._files = server
        super().__init__(*arguments)

    def do_GET(self) -> None:
        self._files.asked.append(self.path)
        content = self._files.files.get(self.path)
        if content is None:
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content[: len(content) // 2] if self._files.cut else content)

    def log_message(self, *arguments: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    running = Server()
    yield running
    running.close()


@pytest.fixture
def plain(server: Server, monkeypatch: pytest.MonkeyPatch) -> DataSet:
    """A set of one file, in place of all that the catalogue has."""
    server.files["/text.jsonl"] = TEXT
    file = DataFile("plain/text.jsonl", sha256(TEXT), f"{server.url}/text.jsonl")
    return _only(DataSet("plain", "tests", "MIT", "a test server", (file,), ("gsm8k",)), monkeypatch)


@pytest.fixture
def archive(server: Server, monkeypatch: pytest.MonkeyPatch) -> DataSet:
    """A set of two members of a zip file that holds three."""
    content = zipped(a=TEXT, b=TEXT * 2, c=b"not wanted")
    server.files["/data.zip"] = content
    files = (DataFile("packed/data/a.jsonl"), DataFile("packed/data/b.jsonl"))
    packed = Archive(f"{server.url}/data.zip", sha256(content), "packed")
    return _only(DataSet("packed", "tests", "MIT", "a test server", files, (), packed), monkeypatch)


def _only(entry: DataSet, patch: pytest.MonkeyPatch) -> DataSet:
    for module in (catalogue, data_commands):
        patch.setattr(module, "DATA_SETS", (entry,))
    return entry


def leftovers(folder: Path) -> list[str]:
    return [path.name for path in folder.rglob(".fetching-*")]


# The order


def place(folder: Path, relative: str = "plain/text.jsonl", content: bytes = TEXT) -> Path:
    path = folder / relative
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def test_the_data_folder_goes_before_the_cache_and_the_cache_before_the_source(
    tmp_path: Path, plain: DataSet, server: Server
) -> None:
    data, cache = tmp_path / "data", tmp_path / "cache"
    data.mkdir()
    for where, expected in ((None, "Hub"), (cache, "cache"), (data, "data folder")):
        if where is not None:
            place(where)
        looked = DataSources(data, cache, Downloader(cache))
        looked.require("plain/text.jsonl", "a test")
        assert looked.resolution() == {
            "order": [f"data folder {data}", f"cache {cache}", "Hub"],
            "files": {
                "plain/text.jsonl": {
                    "from": expected,
                    "path": str((data if expected == "data folder" else cache) / "plain/text.jsonl"),
                    "sha256": sha256(TEXT),
                    "pinned": True,
                }
            },
        }
    assert server.asked == ["/text.jsonl"]


def test_what_a_task_may_have_is_not_fetched_for_it(tmp_path: Path, plain: DataSet, server: Server) -> None:
    looked = DataSources(None, tmp_path, Downloader(tmp_path))
    assert looked.find("plain/text.jsonl") is None
    assert looked.listing("plain", "*.jsonl") == []
    assert server.asked == []
    assert looked.resolution()["files"] == {}


def test_a_listing_is_all_from_one_place(tmp_path: Path) -> None:
    place(tmp_path / "cache", "texts/a.txt")
    place(tmp_path / "cache", "texts/b.txt")
    place(tmp_path / "data", "other.txt")
    looked = DataSources(tmp_path / "data", tmp_path / "cache")
    assert looked.listing("texts", "*.txt") == ["texts/a.txt", "texts/b.txt"]
    assert looked.found() == {}, "what is listed is not yet used"
    own = place(tmp_path / "data", "texts/b.txt")
    assert looked.every(looked.listing("texts", "*.txt")) == [own]
    assert looked.found()["texts/b.txt"].place == "data folder"


def test_a_missing_file_says_what_was_tried_and_what_would_help(tmp_path: Path, plain: DataSet, server: Server) -> None:
    server.files.clear()
    data, cache = tmp_path, tmp_path / "cache"
    with pytest.raises(MissingData) as caught:
        DataSources(data, cache, Downloader(cache)).require("plain/text.jsonl", "task gsm8k")
    text = str(caught.value)
    assert text.startswith(f"task gsm8k needs the file {data}/plain/text.jsonl, which is not there; tried the data ")
    assert f"the data folder {data}, the cache {cache}, the Hub ({server.url}/text.jsonl cannot be fetched" in text
    assert "HTTP Error 404" in text
    assert text.endswith("run `kvsweep data fetch plain`, or put it there")
    with pytest.raises(MissingData, match="needs the file x, and no data folder is given; give a data folder"):
        DataSources().require("x", "task y")


def test_a_source_that_failed_is_not_asked_again(tmp_path: Path, plain: DataSet, server: Server) -> None:
    server.files.clear()
    looked = DataSources(None, tmp_path, Downloader(tmp_path))
    for _ in range(3):
        with pytest.raises(MissingData):
            looked.require("plain/text.jsonl", "a test")
    assert len(server.asked) == 1


def test_another_file_in_the_data_folder_is_told_and_one_in_the_cache_refused(tmp_path: Path, plain: DataSet) -> None:
    place(tmp_path / "data", content=b"other")
    looked = DataSources(tmp_path / "data", tmp_path / "cache")
    looked.require("plain/text.jsonl", "a test")
    assert looked.resolution()["files"]["plain/text.jsonl"]["pinned"] is False
    place(tmp_path / "cache", content=b"other")
    looked = DataSources(None, tmp_path / "cache")
    looked.require("plain/text.jsonl", "a test")
    with pytest.raises(DataError, match=r"is not the file that was fetched .* run `kvsweep data fetch plain`"):
        looked.resolution()


# Fetching


def test_members_of_an_archive_are_fetched_once_and_verified_ever_after(
    tmp_path: Path, archive: DataSet, server: Server
) -> None:
    downloader = Downloader(tmp_path)
    a, b = downloader.fetch(archive)
    assert (a.read_bytes(), b.read_bytes()) == (TEXT, TEXT * 2)
    assert sorted(path.name for path in (tmp_path / "packed" / "data").iterdir()) == ["a.jsonl", "b.jsonl"]
    assert downloader.fetch(archive) == []
    assert server.asked == ["/data.zip"]
    a.write_bytes(b"damaged")
    looked = DataSources(None, tmp_path)
    looked.require("packed/data/a.jsonl", "a test")
    with pytest.raises(DataError, match="is not the file that was fetched"):
        looked.found()
    assert downloader.fetch(archive) == [a]
    assert a.read_bytes() == TEXT
    assert checksum_file(tmp_path, archive).read_text().splitlines()[0] == f"{sha256(TEXT)}  packed/data/a.jsonl"


@pytest.mark.parametrize("fault", ["missing", "other", "cut", "offline", "refused"])
def test_what_cannot_be_fetched_leaves_nothing_behind(
    fault: str, tmp_path: Path, plain: DataSet, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = {
        "missing": "HTTP Error 404",
        "other": "served something else: its sha256 is",
        "cut": "text.jsonl ",
        "offline": "HF_HUB_OFFLINE is set",
        "refused": "Connection refused",
    }[fault]
    if fault == "missing":
        server.files.clear()
    elif fault == "other":
        server.files["/text.jsonl"] = b"something else"
    elif fault == "cut":
        server.cut = True
    elif fault == "offline":
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    else:
        server.close()
    with pytest.raises(DownloadError, match=said):
        Downloader(tmp_path).fetch(plain)
    assert not (tmp_path / "plain" / "text.jsonl").exists()
    assert leftovers(tmp_path) == []


def test_an_archive_that_lacks_a_member_is_refused(tmp_path: Path, archive: DataSet, server: Server) -> None:
    more = DataSet("more", "", "", "", (*archive.files, DataFile("packed/data/z.jsonl")), (), archive.archive)
    with pytest.raises(DownloadError, match=r"does not hold packed/data/z\.jsonl"):
        Downloader(tmp_path).fetch(more)
    assert leftovers(tmp_path) == []
    assert not (tmp_path / "packed").exists()


def test_the_hubs_address_can_be_another(tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    server.files["/datasets/x/text.jsonl"] = TEXT
    file = DataFile("plain/text.jsonl", sha256(TEXT), f"{catalogue.HUB}/datasets/x/text.jsonl")
    monkeypatch.setenv("HF_ENDPOINT", f"{server.url}/")
    [path] = Downloader(tmp_path).fetch(DataSet("plain", "", "", "", (file,), ()))
    assert path.read_bytes() == TEXT


# The catalogue


def test_the_catalogue_is_pinned_and_complete() -> None:
    paths = [file.path for entry in DATA_SETS for file in entry.files]
    assert len(set(paths)) == len(paths)
    for entry in DATA_SETS:
        assert entry.licence
        assert entry.use
        assert fetchable(entry) != bool(entry.by_hand)
        assert set(entry.tasks) <= set(task_names())
        if entry.archive is not None:
            assert all(file.path.startswith(f"{entry.archive.folder}/") for file in entry.files)
        for address, digest in [(file.url, file.sha256) for file in entry.files if file.url]:
            assert digest
            assert address.startswith("https://")
            assert "/main/" not in address
            assert "/master/" not in address
    assert {task for members in GROUPS.values() for task in members} <= set(task_names())


def test_the_checksums_of_the_catalogue_are_those_of_real_files(shared_data: Path) -> None:
    looked = DataSources(shared_data)
    for path in ("gsm8k/test.jsonl", "longbench/config/dataset2prompt.json", "longbench/config/dataset2maxlen.json"):
        looked.require(path, "a test")
    assert [one.matches for one in looked.found().values()] == [True, True, True]


# The commands


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVSWEEP_CACHE", str(tmp_path / "kvsweep"))
    return tmp_path / "kvsweep" / "data"


@pytest.mark.parametrize("name", ["plain", "gsm8k"])
def test_a_set_is_fetched_by_its_name_or_its_tasks(
    name: str, cache: Path, plain: DataSet, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["data", "fetch", name]) == 0
    assert capsys.readouterr().out == f"plain: 1 of 1 files fetched, in {cache}\n"
    assert (cache / "plain" / "text.jsonl").read_bytes() == TEXT
    assert main(["data", "fetch"]) == 0
    assert capsys.readouterr().out == f"plain: is there already, in {cache}\n"
    assert main(["data", "list"]) == 0
    text = capsys.readouterr().out
    assert "here     cache: 1 of 1" in text
    assert f"sha256 {sha256(TEXT)}" in text


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["gsm9k"], "there is no data set, task or group 'gsm9k'; did you mean gsm8k"),
        (["ruler-11"], "ruler-11 needs no data"),
    ],
)
def test_a_name_without_data_is_bad_input(
    names: list[str], said: str, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["data", "fetch", *names]) == 2
    assert capsys.readouterr().err.startswith(said)


def test_no_network_is_one_message(
    cache: Path, plain: DataSet, server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    server.close()
    assert main(["data", "fetch", "plain"]) == 2
    told = capsys.readouterr().err
    assert told.startswith(f"plain: {server.url}/text.jsonl cannot be fetched: ")
    assert "Connection refused; check the network, or put the files into a data folder" in " ".join(told.split())
    assert len(told.splitlines()) == 1


def test_checksums_are_read_as_they_are_written(tmp_path: Path, plain: DataSet) -> None:
    assert sources.checksums(tmp_path, plain) == {}
    Downloader(tmp_path).fetch(plain)
    assert sources.checksums(tmp_path, plain) == {"plain/text.jsonl": sha256(TEXT)}
