"""Kept tokens are those of kvpress, set by set: one set per prompt, layer and KV head, in fp32.

``make parity`` lets kvpress write what it keeps (``parity_export.py``) and runs this. Where the two define a method
differently, settings of ours meet theirs, or the comparison says what it adds; the last tests show each difference.
Sets that a tie decides are left out and counted.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from attention_prompts import prompt as random_prompt
from safetensors import safe_open
from torch import Tensor

from kvcache.baselines.adakv import AdaKV
from kvcache.baselines.criticalkv import CriticalAdaKV, CriticalKV
from kvcache.baselines.expected_attention import ExpectedAttention
from kvcache.baselines.h2o import H2O
from kvcache.baselines.key_norm import KeyNorm
from kvcache.baselines.pyramidkv import PyramidKV
from kvcache.baselines.snapkv import SnapKV
from kvcache.baselines.streaming_llm import StreamingLLM
from kvcache.budget import Budget, ResolvedBudget
from kvcache.evict import PromptEvictor
from kvcache.kernels.column_sums import add_column_sums
from kvcache.layout import CacheLayout, LayerLayout
from kvcache.moments import QueryMoments
from kvcache.prefill import LayerPrefill, Prefill
from kvcache.rotary import unrotate
from kvcache.select import keep_top

FILE = Path(__file__).resolve().parents[1] / ".parity" / "kvpress.safetensors"
ROUNDING = 2e-6
"""Of a score, relative: some 17 times the spacing of fp32."""
DRAWS = 12

Scores = list[Tensor]
Kept = list[list[Tensor]]
"""[layers][H_kv] of [k]"""


def as_it_is(case: Case, prefill: Prefill, scores: Scores, theirs: Tensor) -> Kept:
    return case.method.keep(prefill, case.budget(prefill), scores)


def at_their_counts(case: Case, prefill: Prefill, scores: Scores, theirs: Tensor) -> Kept:
    """Which tokens, when it is given how many in each layer."""
    counts, protected = theirs.sum(-1)[:, 0].tolist(), case.method.protected(prefill)
    return [list(keep_top(own, count, protected)) for own, count in zip(scores, counts, strict=True)]


def at_their_quotas(case: Case, prefill: Prefill, scores: Scores, theirs: Tensor) -> Kept:
    """CriticalAdaKV's first stage takes its share of a head's whole budget there, window included, and no fewer tokens
    than the safeguard forces: the setting of ours that means the same differs from head to head."""
    method = case.method
    assert isinstance(method, CriticalAdaKV)
    found = as_it_is(case, prefill, scores, theirs)
    forced = int(method.alpha * case.kept)
    for layer, heads in enumerate(found):
        for head, tokens in enumerate(heads):
            first = max(forced, int(method.first_stage * len(tokens)), method.window) - method.window
            same = replace(method, first_stage=quota(first, len(tokens) - method.window))
            found[layer][head] = as_it_is(replace(case, method=same), prefill, scores, theirs)[layer][head]
    return found


def quota(first: int, beside_window: int) -> float:
    """A ``first_stage`` that comes to ``first`` tokens."""
    return min((first + 0.5) / beside_window, 1.0) if beside_window else 0.0


def by_mean_attention(case: Case, prefill: Prefill, scores: Scores, theirs: Tensor) -> Kept:
    """H2O's column sums, each divided by the queries that see the token, and no recent tokens."""
    seen_by = torch.arange(prefill.tokens, 0, -1)
    return [list(keep_top(own / seen_by, case.kept)) for own in scores]


@dataclass(frozen=True)
class Case:
    press: str
    kept: int
    method: PromptEvictor
    keep: Callable[[Case, Prefill, Scores, Tensor], Kept] = as_it_is
    attention: str = "sdpa"

    def budget(self, prefill: Prefill) -> ResolvedBudget:
        return Budget.parse(f"{self.kept} tokens").resolve(prefill.tokens, 8, "prompt", prefill.layout)


AVERAGE = {"pooling": "avg", "kernel": 5}
THEIR_WINDOW = {"window": 64, **AVERAGE}
SHORT_WINDOW = {"window": 8, **AVERAGE}
FORCED = {"safeguard": "force", **SHORT_WINDOW}

CASES = (
    Case("streaming_llm", 72, StreamingLLM()),
    Case("streaming_llm, 12 sinks", 24, StreamingLLM(sinks=12)),
    Case("key_norm", 72, KeyNorm()),
    Case("key_norm, half", 192, KeyNorm()),
    Case("snapkv", 72, SnapKV(**SHORT_WINDOW)),
    Case("snapkv, kvpress's defaults", 72, SnapKV(**THEIR_WINDOW)),
    Case("snapkv, half, kernel 1", 192, SnapKV(window=32, kernel=1, pooling="avg")),
    # A line over all tokens from 120 to 72 / 3: beside a window of 8, from 112 to 64 / 4.
    Case("pyramidkv", 72, PyramidKV(beta=4, **SHORT_WINDOW)),
    Case("pyramidkv, uneven steps", 96, PyramidKV(beta=3, **SHORT_WINDOW), at_their_counts),
    Case("pyramidkv, most of the prompt", 288, PyramidKV(beta=3, **SHORT_WINDOW), at_their_counts),
    # 72 / 20 is less than a window of 64: no pyramid.
    Case("pyramidkv, kvpress's defaults", 72, SnapKV(**THEIR_WINDOW)),
    Case("adakv", 72, AdaKV(**FORCED)),
    Case("adakv, no safeguard", 72, AdaKV(alpha=0.0, **FORCED)),
    Case("adakv, half, large safeguard", 192, AdaKV(alpha=0.5, **FORCED)),
    # The window is inside the first stage's quota: half of 72 tokens is 28 beside it, a quarter of 192 is 40.
    Case("criticalkv", 72, CriticalKV(first_stage=quota(28, 64), **SHORT_WINDOW)),
    Case("criticalkv, half, large epsilon", 192, CriticalKV(first_stage=quota(40, 184), epsilon=0.01, **SHORT_WINDOW)),
    # A window of 64 takes all 36 tokens of the first stage, and what is left of it ranks above the rest.
    Case("criticalkv, kvpress's defaults", 72, CriticalKV(first_stage=0.0, **THEIR_WINDOW)),
    Case("critical_adakv", 72, CriticalAdaKV(**FORCED), at_their_quotas),
    Case("critical_adakv, half", 192, CriticalAdaKV(alpha=0.1, **FORCED), at_their_quotas),
    Case("expected_attention", 72, ExpectedAttention()),
    Case("expected_attention, half, epsilon", 192, ExpectedAttention(epsilon=0.01)),
    Case("expected_attention, means alone", 72, ExpectedAttention(future=64, covariance=False, value_norm=False)),
    Case("observed_attention", 72, H2O(), by_mean_attention, "eager"),
    Case("observed_attention, half", 192, H2O(), by_mean_attention, "eager"),
)


class Peer:
    """The file that kvpress's side wrote."""

    def __init__(self, path: Path) -> None:
        self._file = safe_open(path, framework="pt")
        kept = [name.split("/") for name in self._file.keys() if name.endswith("/kept")]  # noqa: SIM118
        self.prompts = sorted({int(prompt) for prompt, _, _ in kept})
        self.presses = {press for _, press, _ in kept}

    def kept(self, prompt: int, press: str) -> Tensor:
        """[L, H_kv, n] bool"""
        return self._file.get_tensor(f"{prompt}/{press}/kept")

    def prefill(self, prompt: int, attention: str = "sdpa") -> Prefill:
        """What our engine would observe of the same queries, keys and values."""
        parts = [self._file.get_tensor(f"{prompt}/{attention}/{part}") for part in ("queries", "keys", "values")]
        projections = self._file.get_tensor("output_projection")
        cos, sin = (self._file.get_tensor(name) for name in ("cos", "sin"))
        layers = []
        for queries, keys, values, projection in zip(*parts, projections, strict=True):
            heads, tokens, dim = queries.shape
            sums = torch.zeros(heads, tokens)
            add_column_sums(sums, queries, keys, 0, dim**-0.5)
            moments = QueryMoments.empty(heads, dim, queries.device)
            moments.add(unrotate(queries, cos[:tokens], sin[:tokens])[:, 4:])
            by_head = projection.unflatten(1, (heads, dim))
            layers.append(LayerPrefill(keys, values, queries, sums, by_head, dim**-0.5, {4: moments}))
        layout = CacheLayout((LayerLayout("growing", heads, len(keys), dim, dim),) * len(layers), 4)

        def rotary(layer: int, positions: Tensor) -> tuple[Tensor, Tensor]:
            return cos[positions], sin[positions]

        return Prefill(layers, layout, tokens, torch.zeros(1), rotary, lambda _: None)  # type: ignore[arg-type,return-value]


@pytest.fixture(scope="module")
def peer() -> Peer:
    if not FILE.is_file():
        pytest.skip(f"there is nothing of kvpress to compare with at {FILE}: `make parity` writes it")
    return Peer(FILE)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.press)
def test_the_same_tokens_are_kept(peer: Peer, case: Case) -> None:
    equal, ties, others = 0, 0, []
    for prompt in peer.prompts:
        prefill, theirs = peer.prefill(prompt, case.attention), peer.kept(prompt, case.press)
        ours, settled = kept(case, prefill, theirs)
        same = (ours == theirs).all(-1)
        equal, ties = equal + int((same & settled).sum()), ties + int((~settled).sum())
        others += [(prompt, *place) for place in (settled & ~same).nonzero().tolist()]
    print(f"{case.press}: {equal + ties + len(others)} sets, {equal} equal, {ties} left out for ties")
    assert not others, f"other tokens are kept for (prompt, layer, head) {others}"
    assert equal >= 3 * ties


def kept(case: Case, prefill: Prefill, theirs: Tensor) -> tuple[Tensor, Tensor]:
    """Our masks [L, H_kv, n], and which of them [L, H_kv] stay what they are when every score is some roundings off:
    the others are decided by a tie."""
    scores = case.method.scores(prefill, "0")
    ours = as_masks(case.keep(case, prefill, scores, theirs), prefill.tokens)
    settled = torch.ones(ours.shape[:2], dtype=torch.bool)
    generator = torch.Generator().manual_seed(0)
    for _ in range(DRAWS):
        shifted = [own * (1 + ROUNDING * (2 * torch.rand(own.shape, generator=generator) - 1)) for own in scores]
        settled &= (as_masks(case.keep(case, prefill, shifted, theirs), prefill.tokens) == ours).all(-1)
    return ours, settled


def as_masks(found: Kept, tokens: int) -> Tensor:
    """[L, H_kv, n] bool"""
    masks = torch.zeros(len(found), len(found[0]), tokens, dtype=torch.bool)
    for layer, heads in enumerate(found):
        for head, positions in enumerate(heads):
            masks[layer, head, positions] = True
    return masks


def test_sets_that_a_tie_decides_are_found() -> None:
    """Two keys of one length at the end of what is kept, in one head; the other heads have clear ends."""
    prefill = random_prompt(40)
    keys = prefill.layers[1].keys
    order = keys[0].norm(dim=-1).argsort()
    keys[0, order[10]] = -keys[0, order[9]]
    _, settled = kept(Case("key_norm", 10, KeyNorm()), prefill, torch.empty(0))
    assert settled.tolist() == [[True, True], [False, True], [True, True]]


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_make_parity_writes_the_file_and_runs_these_tests() -> None:
    told = ["make", "--dry-run", "--always-make", "parity"]
    found = subprocess.run(told, cwd=FILE.parents[1], capture_output=True, text=True, check=True).stdout
    written = found.index("tests/parity_export.py .parity/kvpress.safetensors")
    assert written < found.index("-m slow -s tests/test_parity.py")


@pytest.mark.slow
def test_every_press_of_the_file_is_compared(peer: Peer) -> None:
    assert peer.presses == {case.press for case in CASES}
    assert len(CASES) == len(peer.presses)


# -- what differs, and why the comparisons above need other settings ---------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("press", "method"),
    [
        pytest.param("snapkv", SnapKV(window=8, kernel=5), id="maximum pooling, not average"),
        pytest.param("adakv", AdaKV(**SHORT_WINDOW), id="the authors' safeguard, not kvpress's"),
        pytest.param("criticalkv", CriticalKV(**SHORT_WINDOW), id="a first stage beside the window"),
        pytest.param("critical_adakv", CriticalAdaKV(**FORCED), id="the safeguard in the first stage"),
        pytest.param("observed_attention", H2O(), id="sums and recent tokens, not means"),
    ],
)
def test_our_own_definitions_keep_other_tokens(peer: Peer, press: str, method: PromptEvictor) -> None:
    ours, settled = kept(Case(press, 72, method), peer.prefill(0), peer.kept(0, press))
    assert ours.sum() == peer.kept(0, press).sum()
    assert bool((settled & (ours != peer.kept(0, press)).any(-1)).any())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("press", "budget", "method", "theirs", "ours"),
    [
        pytest.param(
            "pyramidkv, uneven steps",
            96,
            PyramidKV(beta=3, **SHORT_WINDOW),
            [160, 117, 75, 32],
            [155, 116, 76, 37],
            id="their line counts the window, ours lies on top of it",
        ),
        pytest.param(
            "pyramidkv, most of the prompt",
            288,
            PyramidKV(beta=3, **SHORT_WINDOW),
            [376, 317, 259, 200],
            [288, 288, 288, 288],
            id="theirs flattens where ours, as the authors', is SnapKV",
        ),
        pytest.param(
            "pyramidkv, kvpress's defaults",
            72,
            PyramidKV(beta=20, **THEIR_WINDOW),
            [72, 72, 72, 72],
            [80, 75, 69, 64],
            id="theirs is SnapKV where the last layer would keep less than a window",
        ),
    ],
)
def test_pyramids_differ(
    peer: Peer, press: str, budget: int, method: PyramidKV, theirs: list[int], ours: list[int]
) -> None:
    prefill = peer.prefill(0)
    assert peer.kept(0, press).sum(-1)[:, 0].tolist() == theirs
    assert method.layer_budgets(prefill, Case(press, budget, method).budget(prefill)) == ours
