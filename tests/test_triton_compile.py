"""Gates on the machine code of the Triton kernels, compiled ahead of time: no GPU needed."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from perf.kernels import GATED, MOST_SHARED, TARGETS, Finding, innermost_loops, missed_gates

pytestmark = pytest.mark.usefixtures("wall_time")
GOAL_S = 60

LISTING = """
        /*0000*/                   MOV R1, c[0x0][0x28] ;                    /* 0x0 */
                                                                             /* 0x1 */
        /*0010*/                   HFMA2.MMA R2, -RZ, RZ, 0, 0 ;             /* 0x0 */
        /*0020*/                   LOP3.LUT R3, R3, 0x3, RZ, 0xc0, !PT ;     /* 0x0 */
        /*0030*/              @!P0 LDS R4, [R3] ;                            /* 0x0 */
        /*0040*/               @P1 BRA 0x20 ;                                /* 0x0 */
        /*0050*/               @P2 BRA 0x10 ;                                /* 0x0 */
        /*0060*/                   EXIT ;                                    /* 0x0 */
        /*0070*/                   BRA 0x70 ;                                /* 0x0 */
"""


def test_a_loop_is_the_body_of_a_backward_branch_that_holds_no_other() -> None:
    assert innermost_loops(LISTING) == [["LOP3", "LDS", "BRA"]]


def test_gates_name_what_missed_them() -> None:
    found = [
        Finding(GATED, "sm_90", 255, 0, 0, 14.5),
        Finding(GATED, "sm_80", 255, 0, 0, 14.5),
        Finding("other", "sm_80", 255, 8, 0, None),
        Finding("other", "sm_90", 255, 0, MOST_SHARED + 1, 99.0),
    ]
    missed = list(missed_gates(found, "3.9.0"))
    assert [text.split(":")[0].split(" takes")[0] for text in missed] == [
        f"{GATED} on sm_90",
        "other on sm_80 spills 8 bytes",
        "other on sm_90",
    ]


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_every_kernel_compiles_for_both_targets_within_its_gates() -> None:
    """Length of the INT2 loop, spills and shared memory; the command's exit code says whether a gate was missed."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "perf.kernels", "--json"]
    root = Path(__file__).resolve().parents[1]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert {one["target"] for one in found} == set(TARGETS)
    kernels = {one["kernel"].split()[0] for one in found}
    scoring = {"column_sums", "attend_prompt", "value_norms", "deletion_costs"}
    assert {"attend_codes", "attend_owned", "join_splits"} | scoring <= kernels
    assert all(one["spill_bytes"] == 0 and one["shared_bytes"] <= MOST_SHARED for one in found)
    assert all(one["instructions_per_pair"] > 0 for one in found if one["kernel"] == GATED)
