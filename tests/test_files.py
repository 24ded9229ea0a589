"""Files that appear whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pipeline.files import put


@pytest.mark.parametrize("ending", [OSError("no space left"), SystemExit(143), KeyboardInterrupt()], ids=repr)
def test_a_write_that_is_cut_short_leaves_the_old_file_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: BaseException
) -> None:
    put(tmp_path / "page.html", b"old")

    def cut_short(descriptor: int) -> None:
        raise ending

    monkeypatch.setattr(os, "fsync", cut_short)
    with pytest.raises(type(ending)):
        put(tmp_path / "page.html", b"new")
    assert [(file.name, file.read_bytes()) for file in tmp_path.iterdir()] == [("page.html", b"old")]
