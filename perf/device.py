"""The Triton kernels on a real GPU: first that they are right, then how fast they are. At most six minutes.

    python -m perf.device [--seconds 330] [--json]

Needs torch >= 2.11, triton >= 3.6 and this repository, nothing else: no model, no download. Layers have the shape of
Llama-3.1-8B's and random content. Every phase prints what it found as it goes; the whole is one JSON object at the end.
A timing is reported only for kernels that passed. Without a GPU it prints what the roofline model says, and exits 2.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from kvcache.kernels import column_sums, owned_attention
from kvcache.kernels.paged_attention import PagePartials, attend_pages, merge_pages
from lorekv.deletion import Attended, deletion_cost
from lorekv.kernels import deletion_scores
from lorekv.scoring_queries import ScoringQueries
from qevict.kernels import window_codes
from qevict.kernels.code_attention import CodePages, attend_code_pages
from qevict.kernels.tiered_attention import PAGE, FullPages, PageTables, attend_tiers, rotary_rows

HEADS, GROUP, DIM, WINDOW, BITS = 8, 4, 128, 8, 2
SLOTS = PAGE // WINDOW
SCALE = DIM**-0.5
DEVICE = torch.device("cuda")
BATCHES, CONTEXTS, BUDGETS = (8, 1, 32), (32 * 1024, 128 * 1024), ("20%", "10%", "5%")
FASTEST_BASELINES = (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION)


def main() -> int:
    options = _options()
    if not torch.cuda.is_available() or importlib.util.find_spec("triton") is None:
        lacking = "triton is not installed" if torch.cuda.is_available() else "torch sees no CUDA device"
        print(f"perf.device times kernels on a GPU, and {lacking}.", *_model_lines(), sep="\n", file=sys.stderr)
        return 2
    until = time.monotonic() + options.seconds
    found: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "checks": {}}
    found["triton"] = __import__("triton").__version__
    found["copy_bytes_s"] = _copy_bandwidth()
    for name, check in CHECKS.items():
        found["checks"][name] = check()
        _say(options, f"{name}: {found['checks'][name]}")
    right = all(one["passed"] for one in found["checks"].values())
    found["timings"] = list(_timings(until, options)) if right else []
    print(json.dumps(found))
    return 0 if right else 1


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m perf.device", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=330, help="start no further timing after so long")
    parser.add_argument("--json", action="store_true", help="print the JSON object alone")
    return parser.parse_args()


def _say(options: argparse.Namespace, line: str) -> None:
    if not options.json:
        print(line, flush=True)


def _model_lines() -> Iterator[str]:
    from perf.roofline import H200, modelled
    from perf.traffic import Setting

    for rows, context, budget in ((8, 32 * 1024, "20%"), (8, 32 * 1024, "5%"), (32, 128 * 1024, "20%")):
        figure = modelled(Setting(rows, context, budget), H200)
        yield (
            f"modelled, {H200.name}, {budget} of {context // 1024}K, batch {rows}: {figure.fused_s * 1e6:.0f} us"
            f" a layer, {figure.speedup:.1f} x full-cache bf16 attention, limited by {figure.limit}"
        )


# -- a batch on the device ---------------------------------------------------------------------------------------------


@dataclass
class Batch:
    """Rows of equal length in one layer: their pages lie anywhere in the arena, as after many admissions."""

    queries: Tensor
    rows: Tensor
    tables: PageTables
    full: FullPages
    codes: CodePages
    windows: Tensor
    scores: tuple[Tensor, Tensor]
    rotary: Tensor
    rotary_rows: Tensor

    def attend(self) -> Tensor:
        given = self.queries, self.rows, self.tables, self.full, self.codes, self.windows, self.scores
        return attend_tiers(*given, self.rotary_rows, BITS, SCALE)

    def attend_plainly(self) -> tuple[Tensor, Tensor, Tensor]:
        """Output, and what the windows of both tiers receive."""
        split, count = len(self.full.fill), len(self.rows)
        row_of_page = torch.empty(split + len(self.windows), dtype=torch.int64, device=DEVICE)
        every = torch.arange(count, device=DEVICE)[:, None]
        row_of_page[self.tables.full.long()] = every
        row_of_page[self.tables.codes.long() + split] = every
        queries = self.queries.unflatten(1, (HEADS, GROUP))[row_of_page]
        held = torch.arange(WINDOW, device=DEVICE) < self.full.fill[..., None]
        keys, values = (part.flatten(2, 3).flatten(0, 1) for part in (self.full.keys, self.full.values))
        valid = held.flatten(1).repeat_interleave(HEADS, 0)
        of_full = attend_pages(queries[:split].flatten(0, 1), keys, values, valid, SCALE, SLOTS)
        of_codes = attend_code_pages(queries[split:], self.codes, self.windows - 1, self.rotary, BITS, SCALE)
        parts = PagePartials(*(torch.cat([getattr(of_full, name), getattr(of_codes, name)]) for name in vars(of_full)))
        owners = (row_of_page[:, None] * HEADS + torch.arange(HEADS, device=DEVICE)).flatten()
        merged = merge_pages(parts, owners, owners.argsort(stable=True), count * HEADS)
        mass = (merged.share[..., None] * parts.mass).unflatten(0, (-1, HEADS)).sum((1, 2)) / (HEADS * GROUP)
        return merged.output.view(count, HEADS * GROUP, DIM), mass[:split], mass[split:]


def batch_of(rows: int, full_pages: int, code_pages: int, dtype: torch.dtype = torch.bfloat16) -> Batch:
    """Rows with so many pages each, every slot taken."""
    full, coded = rows * full_pages, rows * code_pages

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, device=DEVICE, dtype=dtype)

    def table(pages: int) -> tuple[Tensor, Tensor]:
        order = torch.randperm(rows * pages, device=DEVICE, dtype=torch.int32).view(rows, pages)
        return order, torch.full((rows,), pages, dtype=torch.int32, device=DEVICE)

    keys, values = random(full, HEADS, SLOTS, WINDOW, DIM), random(full, HEADS, SLOTS, WINDOW, DIM)
    codes = [torch.randint(256, (coded, HEADS, SLOTS, *tail), dtype=torch.uint8, device=DEVICE) for tail in _TAILS]
    scales = [torch.rand(coded, HEADS, SLOTS, length, device=DEVICE).half() for length in (DIM, DIM, WINDOW, WINDOW)]
    tables = PageTables(*table(full_pages), *table(code_pages))
    windows = torch.zeros(coded, SLOTS, dtype=torch.int32, device=DEVICE)
    for of_row in tables.codes.long():
        windows[of_row] = torch.randperm(code_pages * SLOTS, device=DEVICE).view(code_pages, SLOTS).int() + 1
    positions = torch.arange(max(1, code_pages) * PAGE, device=DEVICE)
    angles = positions[:, None] / 500_000 ** (torch.arange(0, DIM, 2, device=DEVICE) / DIM)
    rotary = torch.stack([angles.cos(), angles.sin()]).unflatten(1, (-1, WINDOW)).transpose(2, 3).contiguous()
    return Batch(
        random(rows, HEADS * GROUP, DIM),
        torch.arange(rows, device=DEVICE),
        tables,
        FullPages(keys, values, torch.full((full, SLOTS), WINDOW, dtype=torch.uint8, device=DEVICE)),
        CodePages(codes[0], scales[0], scales[1] - 1.5, codes[1], scales[2], scales[3] - 1.5),
        windows,
        (torch.zeros(full, SLOTS, device=DEVICE), torch.zeros(coded, SLOTS, device=DEVICE)),
        rotary,
        rotary_rows(rotary, dtype),
    )


_TAILS = ((DIM, WINDOW * BITS // 8), (WINDOW, DIM * BITS // 8))


# -- right? ------------------------------------------------------------------------------------------------------------


def check_attention(dtype: torch.dtype) -> dict[str, Any]:
    """Output, and mass per window: close to the plain path, which dequantises in fp32, and summing to one."""
    given = batch_of(3, 5, 21, dtype)
    output = given.attend()
    expected = given.attend_plainly()
    errors = [
        float((found - right).norm() / right.norm())
        for found, right in zip((output, *given.scores), expected, strict=True)
    ]
    total = float(sum(scores.sum() for scores in given.scores)) / 3
    passed = max(errors) < {torch.float32: 1e-4}.get(dtype, 1e-2) and abs(total - 1) < 1e-3
    return {"passed": passed, "errors": errors, "mass": total}


def check_owned(dtype: torch.dtype) -> dict[str, Any]:
    """Heads of very different lengths, close to the plain path."""
    lengths = [1, 64, 65, 700, 3000, 511, 512, 513, *range(100, 116)]
    given = _owned(lengths, dtype)
    found, (queries, owners, tables, _, keys, values) = _attend_owned(given), given
    expected = torch.empty_like(found, dtype=torch.float32)
    for place, (owner, length) in enumerate(zip(owners.tolist(), lengths, strict=True)):
        pages = tables[owner, : -(-length // PAGE)].long()
        own_keys, own_values = (part[pages].flatten(0, 1)[:length].float() for part in (keys, values))
        weights = torch.softmax(queries[place].float() @ own_keys.T * SCALE, -1)
        expected[place] = weights @ own_values
    error = float((found.float() - expected).norm() / expected.norm())
    return {"passed": error < {torch.float32: 1e-4}.get(dtype, 1e-2), "error": error}


Owned = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def _owned(lengths: list[int], dtype: torch.dtype) -> Owned:
    """Queries, owners, tables, lengths, keys and values: an owner per length, in no order, their pages anywhere."""
    counts = [-(-length // PAGE) for length in lengths]
    owners = torch.randperm(len(lengths), device=DEVICE, dtype=torch.int32)
    shuffled = torch.randperm(sum(counts), device=DEVICE, dtype=torch.int32).split(counts)
    tables = torch.zeros(len(lengths), max(counts), dtype=torch.int32, device=DEVICE)
    tokens = torch.zeros(len(lengths), dtype=torch.int32, device=DEVICE)
    for owner, pages, length in zip(owners.tolist(), shuffled, lengths, strict=True):
        tables[owner, : len(pages)], tokens[owner] = pages, length
    keys, values = (torch.randn(sum(counts), PAGE, DIM, device=DEVICE, dtype=dtype) for _ in range(2))
    queries = torch.randn(len(lengths), GROUP, DIM, device=DEVICE, dtype=dtype)
    return queries, owners, tables, tokens, keys, values


def _attend_owned(given: Owned) -> Tensor:
    queries, owners, tables, lengths, keys, values = given
    split = owned_attention.pages_per_split(len(owners) // HEADS)
    arguments = queries, owners, tables, lengths, keys, values, SCALE
    return owned_attention.attend_owned(*arguments, longest=tables.shape[1], split=split)


def check_codes() -> dict[str, Any]:
    """The same bits as the plain path."""
    count, pages = 40, 6
    keys, values = (torch.randn(count, HEADS, WINDOW, DIM, device=DEVICE).bfloat16() * 3 for _ in range(2))
    given = batch_of(1, 1, pages)
    windows = torch.arange(count, device=DEVICE)
    where = torch.zeros_like(windows), windows // SLOTS, windows % SLOTS
    ledgers = [{name: torch.zeros_like(part)[None] for name, part in vars(given.codes).items()} for _ in range(2)]
    for ledger, write in zip(ledgers, (window_codes._write_plain, window_codes._write_fused), strict=True):
        write(ledger, where, keys, values, windows, given.rotary, BITS)
    different = [name for name in ledgers[0] if not torch.equal(ledgers[0][name], ledgers[1][name])]
    return {"passed": not different, "different": different}


def check_column_sums() -> dict[str, Any]:
    """Two chunks, against the plain path."""
    queries, keys = _prompt(1500)
    expected, found = torch.zeros(2, HEADS * GROUP, 1500, device=DEVICE).unbind()
    for start, end in ((0, 900), (900, 1500)):
        column_sums._add_plain(expected, queries[:, start:end], keys[:, :end], start, SCALE)
        column_sums._add_fused(found, queries[:, start:end], keys[:, :end], start, SCALE, None)
    error = float((found - expected).norm() / expected.norm())
    return {"passed": error < 1e-3, "error": error}


def check_deletion(dtype: torch.dtype) -> dict[str, Any]:
    """Scores close to the plain path's, which is in fp32 throughout, and the same tokens on top."""
    given = _scored_prompt(3000, dtype)
    pairs = list(zip(deletion_scores._score_fused(*given), deletion_scores._score_plain(*given), strict=True))
    errors = [float((found - right).norm() / right.norm()) for found, right in pairs]
    kept = [[torch.zeros_like(one).scatter(1, one.topk(300).indices, 1.0) for one in pair] for pair in pairs]
    common = [float((found * right).sum() / right.sum()) for found, right in kept]
    return {"passed": max(errors) < 1e-4 and min(common) >= 0.999, "errors": errors, "same_top": common}


CHECKS: dict[str, Callable[[], dict[str, Any]]] = {
    "attention, bf16": lambda: check_attention(torch.bfloat16),
    "attention, fp16": lambda: check_attention(torch.float16),
    "attention, fp32": lambda: check_attention(torch.float32),
    "evicted cache, bf16": lambda: check_owned(torch.bfloat16),
    "evicted cache, fp16": lambda: check_owned(torch.float16),
    "evicted cache, fp32": lambda: check_owned(torch.float32),
    "codes": check_codes,
    "column sums": check_column_sums,
    "deletion costs, bf16": lambda: check_deletion(torch.bfloat16),
    "deletion costs, fp16": lambda: check_deletion(torch.float16),
}


def _prompt(tokens: int) -> tuple[Tensor, Tensor]:
    sizes = (HEADS * GROUP, tokens, DIM), (HEADS, tokens, DIM)
    return torch.randn(sizes[0], device=DEVICE).bfloat16(), torch.randn(sizes[1], device=DEVICE).bfloat16()


def _scored_prompt(tokens: int, dtype: torch.dtype) -> tuple[ScoringQueries, Tensor, Tensor, Tensor, float]:
    """What one layer of LORE-KV scores with by default: 32 queries of the prompt, four futures of 16 tokens."""
    window, count = 32, 96
    heads, early = HEADS * GROUP, torch.arange(count, device=DEVICE) < window

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, device=DEVICE)

    asked = ScoringQueries(
        random(heads, count, DIM).to(dtype),
        torch.where(early, tokens - window + 1 + torch.arange(count, device=DEVICE), tokens),
        torch.rand(count, device=DEVICE),
        random(heads, count).masked_fill(early, -torch.inf),
        random(heads, count, DIM).masked_fill(early[:, None], 0),
        window,
    )
    projection = random(HEADS, GROUP, DIM, 4096) / 64
    keys, values = (random(HEADS, tokens, DIM).to(dtype) for _ in range(2))
    return asked, keys, values, projection @ projection.transpose(2, 3), SCALE


# -- fast? -------------------------------------------------------------------------------------------------------------


def _timings(until: float, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for time_one in (_time_deletion, *_decode_timings(), _time_column_sums):
        if time.monotonic() > until:
            return
        one = time_one()
        _say(options, json.dumps(one))
        yield one
        torch.cuda.empty_cache()


def _decode_timings() -> Iterator[Callable[[], dict[str, Any]]]:
    for context in CONTEXTS:
        for rows in BATCHES:
            yield partial(_time_full_cache, rows, context)
            yield partial(_time_owned, rows, context // 5)
            for budget in BUDGETS:
                yield partial(_time_tiers, rows, context, budget)


def _time_full_cache(rows: int, context: int) -> dict[str, Any]:
    """The best that torch has for a full bf16 cache, and our own full-precision loop over the same tokens."""
    seconds = _time_baselines(rows, context)
    torch.cuda.empty_cache()
    seconds["attend_full"] = _seconds(batch_of(rows, context // PAGE, 0).attend)
    moved, best = rows * HEADS * context * 2 * DIM * 2, min(seconds.values())
    return {"what": "full cache", "rows": rows, "context": context, "seconds": seconds, "bytes_s": moved / best}


def _time_baselines(rows: int, context: int) -> dict[str, float]:
    queries = torch.randn(rows, HEADS * GROUP, 1, DIM, device=DEVICE, dtype=torch.bfloat16)
    keys, values = (torch.randn(rows, HEADS, context, DIM, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    seconds = {}
    for backend in FASTEST_BASELINES:
        run = partial(scaled_dot_product_attention, queries, keys, values, scale=SCALE, enable_gqa=True)
        with sdpa_kernel(backend):
            try:
                seconds[backend.name] = _seconds(run)
            except RuntimeError as error:  # this backend does not take these inputs
                print(f"{backend.name}: {str(error).splitlines()[0]}", file=sys.stderr)
    return seconds


def _time_owned(rows: int, tokens: int) -> dict[str, Any]:
    """What methods that evict leave, every head as long as the others."""
    given = _owned([tokens] * (rows * HEADS), torch.bfloat16)
    seconds = _seconds(partial(_attend_owned, given))
    moved = rows * HEADS * tokens * 2 * DIM * 2
    return {"what": "evicted cache", "rows": rows, "tokens": tokens, "seconds": seconds, "bytes_s": moved / seconds}


def _time_tiers(rows: int, context: int, budget: str) -> dict[str, Any]:
    from perf.roofline import H200, modelled
    from perf.traffic import Setting, traffic

    setting = Setting(rows, context, budget)
    launch, moved = setting.launch(), traffic(setting)
    given = batch_of(rows, launch.full_width, launch.code_width)
    seconds = _seconds(given.attend)
    return {
        "what": "tiers",
        "rows": rows,
        "context": context,
        "budget": budget,
        "seconds": seconds,
        "counted_bytes_s": moved.counted / seconds,
        "modelled_seconds": modelled(setting, H200).fused_s,
    }


def _time_column_sums() -> dict[str, Any]:
    """One layer of a 32K prompt, beside its causal attention."""
    tokens = 32 * 1024
    queries, keys = _prompt(tokens)
    sums = torch.zeros(HEADS * GROUP, tokens, device=DEVICE)
    log_sums = torch.zeros_like(sums)
    add = partial(column_sums._add_fused, sums, queries, keys, 0, SCALE)
    whole, saved = (_seconds(partial(add, of_rows), 5) for of_rows in (None, log_sums))
    prompt = queries[None], keys[None], keys[None]
    causal = partial(scaled_dot_product_attention, *prompt, is_causal=True, scale=SCALE, enable_gqa=True)
    attention = _seconds(causal, 5)
    return {
        "what": "column sums, 32K",
        "seconds": whole,
        "seconds_with_saved_log_sums": saved,
        "causal_attention_seconds": attention,
    }


def _time_deletion() -> dict[str, Any]:
    """One layer of a 32K prompt, beside the reference, which holds every query's costs, and the layer's attention."""
    tokens = 32 * 1024
    given = _scored_prompt(tokens, torch.bfloat16)
    asked, keys, values, grams, _ = given
    seconds = _seconds(partial(deletion_scores._score_fused, *given))
    of_group = asked.queries.unflatten(0, (HEADS, GROUP)).float()

    def query_by_query() -> None:
        for queries, of_keys, of_values, gram in zip(of_group, keys, values.float(), grams, strict=True):
            attention = torch.softmax(queries @ of_keys.float().T * SCALE, -1)
            deletion_cost(Attended(attention, attention @ of_values), of_values, gram).mean((0, 1))

    prompt = (_prompt(tokens)[0][None], keys[None], values[None])
    causal = partial(scaled_dot_product_attention, *prompt, is_causal=True, scale=SCALE, enable_gqa=True)
    return {
        "what": "deletion costs, 32K",
        "seconds": seconds,
        "query_by_query_seconds": _seconds(query_by_query, 5),
        "causal_attention_seconds": _seconds(causal, 5),
    }


def _seconds(run: Callable[[], Any], repeats: int = 20) -> float:
    """Median of single runs with a cold L2 cache."""
    flushed = torch.empty(256 * 1024**2, dtype=torch.int8, device=DEVICE)
    for _ in range(3):
        run()
    times = []
    for _ in range(repeats):
        flushed.zero_()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(times)


def _copy_bandwidth() -> float:
    source = torch.empty(2 * 1024**3, dtype=torch.int8, device=DEVICE)
    target = torch.empty_like(source)
    return 2 * source.nbytes / _seconds(lambda: target.copy_(source))


if __name__ == "__main__":
    sys.exit(main())
