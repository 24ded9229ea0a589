"""Runs the tests of the Triton kernels in Triton's interpreter: no GPU needed.

Triton decides at its first import whether it interprets, and others import it too, so these tests have processes of
their own. bf16 arithmetic is silently wrong in the interpreter; they use fp32 and fp16.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.usefixtures("wall_time")
GOAL_S = 120
FOLDER = Path(__file__).parent
FILES = sorted(path.name for path in FOLDER.glob("interpreted_*.py"))


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize("file", FILES)
def test_kernels_equal_the_plain_path_in_the_interpreter(file: str) -> None:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(FOLDER / file)]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(command, cwd=FOLDER.parent, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
