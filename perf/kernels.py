"""What the Triton kernels compile to, read from the machine code: no GPU and no driver is needed.

    python -m perf.kernels [--json] [--target sm_90] [--variants all]

Every kernel is compiled ahead of time for sm_80 and sm_90; registers, spills and shared memory come from the assembler,
instructions per (key, value) pair from the disassembled loop: one lane's instructions over the whole body, times lanes,
divided by the pairs that one iteration attends to. Exit code 1 if a gate is missed. The table ends with the bytes of a
step, counted from its launches, and with the speed that a roofline model makes of all this.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from perf.roofline import A100, H200, modelled
from perf.traffic import Setting, traffic
from perf.variants import Variant, variants

TARGETS = {"sm_80": 80, "sm_90": 90}
MOST_SHARED = 100 * 1024
MOST_INSTRUCTIONS = {("3.9", "sm_80"): 16.0, ("3.9", "sm_90"): 14.0, ("3.6", "sm_80"): 18.0, ("3.6", "sm_90"): 17.0}
"""Of the INT2 loop at head size 128 and a group of 4, by Triton's version."""
GATED, FULL_PRECISION = "attend_codes int2 d128 g4 w8", "attend_full bf16 d128 g4 w8"


@dataclass(frozen=True)
class Finding:
    """One kernel on one target."""

    kernel: str
    target: str
    registers: int
    spill_bytes: int
    shared_bytes: int
    instructions_per_pair: float | None
    instructions: dict[str, float] = field(default_factory=dict, repr=False)


def main() -> int:
    # Triton 3.10 will stop contracting multiplications and additions unless it is told to.
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
    options = _options()
    if importlib.util.find_spec("triton") is None:
        raise SystemExit("perf.kernels compiles with Triton, which is not installed: pip install 'kvsweep[dev]'")
    chosen = [one for one in variants() if options.variants == "all" or one.name == GATED]
    targets = [options.target] if options.target else list(TARGETS)
    findings = [examine(one, target) for one in chosen for target in targets]
    missed = list(missed_gates(findings, importlib.metadata.version("triton")))
    if options.json:
        for finding in findings:
            print(json.dumps({key: value for key, value in vars(finding).items() if key != "instructions"}))
    else:
        print(_table(findings))
        print(*_step(findings), sep="\n")
        if options.mix:
            print(
                *(f"{one.kernel}, {one.target}: {one.instructions}" for one in findings if one.instructions), sep="\n"
            )
    for miss in missed:
        print(f"gate missed: {miss}", file=sys.stderr)
    return 1 if missed else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m perf.kernels", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one object per kernel and target, one a line")
    parser.add_argument("--target", choices=TARGETS)
    parser.add_argument("--variants", choices=("all", "gated"), default="all")
    parser.add_argument("--mix", action="store_true", help="the commonest instructions of each counted loop, per pair")
    return parser.parse_args()


def examine(variant: Variant, target: str) -> Finding:
    """Compile one variant for one target and read its machine code."""
    cubin, shared = _compiled(variant, TARGETS[target])
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage, code = _disassembled(file.name, "-res-usage"), _disassembled(file.name, "-sass")
    registers, spilled = (int(found) for found in re.findall(r"(?:REG|STACK):(\d+)", usage)[:2])
    if not variant.looped:
        return Finding(variant.name, target, registers, spilled, shared, None)
    loops = innermost_loops(code)
    if len(loops) != 1:
        raise SystemExit(f"{variant.name}: {len(loops)} innermost loops in the machine code, not one")
    per_pair = 32 * variant.warps / variant.pairs
    mix = {what: round(count * per_pair, 2) for what, count in Counter(loops[0]).most_common(16)}
    return Finding(variant.name, target, registers, spilled, shared, round(len(loops[0]) * per_pair, 2), mix)


def missed_gates(findings: list[Finding], triton: str) -> Iterator[str]:
    """Spills or too much shared memory anywhere, and the length of the gated loop; with this version of Triton."""
    version = ".".join(triton.split(".")[:2])
    for one in findings:
        where = f"{one.kernel} on {one.target}"
        if one.spill_bytes:
            yield f"{where} spills {one.spill_bytes} bytes"
        if one.shared_bytes > MOST_SHARED:
            yield f"{where} takes {one.shared_bytes} bytes of shared memory, more than {MOST_SHARED}"
        most = MOST_INSTRUCTIONS.get((version, one.target))
        if one.kernel == GATED and most is not None and (one.instructions_per_pair or 0) > most:
            yield f"{where}: {one.instructions_per_pair} instructions per pair, more than {most}"


def innermost_loops(code: str) -> list[list[str]]:
    """Opcodes of every loop that contains no other, from a disassembly: the bodies of backward branches."""
    listing = re.findall(r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?(\S+)(.*?);", code, re.MULTILINE)
    at = [int(address, 16) for address, _, _ in listing]
    spans = []
    for address, (_, opcode, operands) in zip(at, listing, strict=True):
        if opcode.startswith("BRA") and (found := re.search(r"0x([0-9a-f]+)", operands)):
            spans.append((int(found[1], 16), address))
    loops = [span for span in spans if span[0] < span[1]]
    inner = [
        one for one in loops if not any(other != one and one[0] <= other[0] and other[1] <= one[1] for other in loops)
    ]
    return [
        [listing[index][1].split(".")[0] for index, address in enumerate(at) if first <= address <= last]
        for first, last in inner
    ]


def _compiled(variant: Variant, capability: int) -> tuple[bytes, int]:
    """The machine code and its shared memory. All pointers are taken to be aligned, as torch's allocations are."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = getattr(importlib.import_module(variant.module), variant.function)
    types = variant.arguments | dict.fromkeys(variant.constants, "constexpr")
    signature = {name: types[name] for name in kernel.arg_names}
    aligned = {
        (index,): [["tt.divisibility", 16]] for index, kind in enumerate(signature.values()) if kind.startswith("*")
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=variant.constants, attrs=aligned)
    options = {"num_warps": variant.warps, "num_stages": variant.stages, **variant.options}
    done = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    return done.asm["cubin"], done.metadata.shared


def _disassembled(path: str, option: str) -> str:
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    return subprocess.run([str(tool), option, path], capture_output=True, text=True, check=True).stdout


def _step(findings: list[Finding]) -> Iterator[str]:
    """Counted bytes and modelled speed of a step at 20 % of 32K tokens, batch 8."""
    setting = Setting(rows=8, context=32 * 1024, budget="20%")
    moved = traffic(setting)
    yield "attention of a step at 20 %, 32K, batch 8, one layer of an 8B model:"
    yield (
        f"  counted: {moved.counted / 1e6:.1f} MB; {moved.counted / moved.minimum:.3f} of the least possible,"
        f" {moved.counted / moved.reconstruction:.3f} of reconstructing, {moved.counted / moved.full:.3f} of full cache"
    )
    per_pair = {(one.kernel, one.target): one.instructions_per_pair for one in findings}
    for device in (H200, A100):
        loops = per_pair.get((GATED, device.target)), per_pair.get((FULL_PRECISION, device.target))
        figure = modelled(setting, device, (loops[0], loops[1]) if loops[0] and loops[1] else None)
        yield (
            f"  modelled, {device.name}: {figure.fused_s * 1e6:.0f} us, {figure.speedup:.1f} x full-cache bf16"
            f" attention, limited by {figure.limit}"
        )


def _table(findings: list[Finding]) -> str:
    lines = [
        f"triton {importlib.metadata.version('triton')}",
        f"{'kernel':44} {'target':7} {'registers':>9} {'spills':>7} {'shared':>7} {'per pair':>9}",
    ]
    for one in findings:
        per_pair = "" if one.instructions_per_pair is None else f"{one.instructions_per_pair:.2f}"
        numbers = f"{one.registers:9} {one.spill_bytes:7} {one.shared_bytes:7} {per_pair:>9}"
        lines.append(f"{one.kernel:44} {one.target:7} {numbers}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
