"""Fixtures that all rooms share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder with real benchmark data: ``KVSWEEP_TEST_DATA``, or ``shared/data`` beside the checkout."""
    root = Path(__file__).resolve().parents[1]
    folder = Path(os.environ.get("KVSWEEP_TEST_DATA", root.parent / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(f"no benchmark data at {folder}; set KVSWEEP_TEST_DATA to a folder that holds it")
    return folder
