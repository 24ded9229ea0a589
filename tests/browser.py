"""The browser that shows pages to tests."""

from __future__ import annotations

import shutil

import pytest


def chromium() -> str:
    """Where headless Chromium is; skips where there is none."""
    found = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if found is None:
        pytest.skip("no Chromium: apt-get install chromium")
    return found
