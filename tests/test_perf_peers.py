"""What the comparison with kvpress checks before it reports a ratio."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from perf import peers
from perf.peers import FULL, TWINS, Answer, Peer, cells_of, differences, token_agreement

SAME = {
    (0, FULL): Answer([1, 2], 400),
    (0, "snapkv 10%"): Answer([1, 2], 40),
    (1, FULL): Answer([3, 4], 440),
    (1, "snapkv 10%"): Answer([3, 5], 44),
}


def test_both_do_the_same_where_counts_and_the_full_caches_tokens_are_equal() -> None:
    others = SAME | {(0, "snapkv 10%"): Answer([1, 9], 40)}
    assert differences(SAME, SAME) == differences(SAME, others) == []
    assert token_agreement(SAME, SAME) == 1.0
    assert token_agreement(SAME, others) == 0.5


def test_other_counts_and_other_tokens_of_the_full_cache_are_faults() -> None:
    (fault,) = differences(SAME, SAME | {(1, "snapkv 10%"): Answer([3, 5], 43)})
    assert fault == "prompt 1, snapkv 10%: 44 tokens are kept here, 43 in kvpress"
    (fault,) = differences(SAME, SAME | {(0, FULL): Answer([1, 3], 400)})
    assert "full cache says other tokens" in fault


def test_a_fault_leaves_no_ratio_in_the_table() -> None:
    table = peers._table({"ratio": None, "faults": ["prompt 0: ..."]})
    assert table.splitlines() == ["prompt 0: ...", "kvpress and this package do not do the same: no ratio is reported"]


def test_cells_are_the_full_cache_and_every_method_at_every_budget() -> None:
    cells = cells_of("snapkv,key_norm", "10%,20%")
    assert [cell.key for cell in cells] == [FULL, "snapkv 10%", "snapkv 20%", "key_norm 10%", "key_norm 20%"]
    assert [cell.method for cell in cells[1::2]] == [TWINS["snapkv"][0], TWINS["key_norm"][0]]
    with pytest.raises(SystemExit, match="qevict is not compared"):
        cells_of("snapkv,qevict", "10%")


def test_requests_are_lines_and_a_peer_that_ends_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "peers_kvpress.py").write_text("print(input().replace('7', '8'), flush=True)")
    monkeypatch.setattr(peers, "__file__", str(tmp_path / "peers.py"))
    peer = Peer(sys.executable)
    try:
        assert peer.ask(folder="x", threads=7) == json.loads('{"folder": "x", "threads": 8}')
        with pytest.raises(SystemExit, match="kvpress's process ended"):
            peer.ask(prompts=[])
    finally:
        peer.close()
