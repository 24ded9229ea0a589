"""Calibrations for tests: tables made up or found, written as ``kvsweep calibrate`` writes them, and what they mean."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from lowbit_cases import DIM, KV_HEADS, LAYERS, LAYOUT, ROWS, Tokens, admit
from models import prompt_ids, tiny_llama
from torch import Tensor

from kvcache.baselines.kvquant import KVQuant
from kvcache.calibration import CalibrationFacts, save_calibration
from kvcache.codebook import uniform_codebook
from kvcache.dense_sparse import LayerTables
from kvcache.pool import FamilyPool, PoolShape
from kvcache.rotary import rotate, unrotate
from workers.calibrate import calibrate
from workers.traces import Trace

FOLDER = TemporaryDirectory(prefix="kvquant-")
CHANNELS = KV_HEADS * DIM


def rotary(layer: int, positions: Tensor) -> tuple[Tensor, Tensor]:
    angles = positions[:, None] * 10_000 ** (-torch.arange(DIM // 2) / (DIM // 2))
    return angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)


def made_up(bits: int, uniform: bool = False) -> list[LayerTables]:
    """Thresholds that about every twentieth random key is beyond."""
    generator = torch.Generator().manual_seed(bits)
    tables = []
    for _ in range(LAYERS):
        low, high = (-3 + torch.rand(CHANNELS, generator=generator), 3 + torch.rand(CHANNELS, generator=generator))
        books = [torch.rand(2**bits, generator=generator).mul(2).sub(1).sort().values for _ in range(2)]
        if uniform:
            books = [uniform_codebook(2**bits) for _ in range(2)]
        tables.append(LayerTables(low, high, *books))
    return tables


def written(method: KVQuant, tables: list[LayerTables], model: str = "model", weighted: bool = False) -> KVQuant:
    """The method with these tables for its calibration."""
    named = {f"{layer}.{name}": one for layer, table in enumerate(tables) for name, one in table.named().items()}
    return written_named(method, named, model, weighted)


def written_named(method: KVQuant, named: dict[str, Tensor], model: str, weighted: bool) -> KVQuant:
    facts = CalibrationFacts(method.name, method.calibrated_settings, model, "text", 2, 64, weighted)
    path = Path(FOLDER.name) / str(len(list(Path(FOLDER.name).iterdir()))) / facts.file_name
    save_calibration(path, facts, named)
    return KVQuant(**method.calibrated_settings, calibration=str(path))


def of_bits(bits: int, outliers: float = 0.01, sinks: int = 1, uniform: bool = False) -> KVQuant:
    return written(KVQuant(bits, outliers, sinks), made_up(bits, uniform))


@cache
def of_tiny_llama(bits: int, outliers: float = 0.01) -> dict[str, Any]:
    """Settings with a calibration of the small random model."""
    method, model = KVQuant(bits, outliers), tiny_llama()
    traces = [Trace(str(seed), tuple(prompt_ids(100, seed)), 100) for seed in (1, 2)]
    found = calibrate(model, traces, method.grid, gradients=False)
    return written_named(method, found, "tiny", weighted=False).settings()


def new_pool(method: KVQuant) -> FamilyPool:
    return method.new_pool(PoolShape(LAYOUT, ROWS, torch.device("cpu"), torch.float32, rotary))


def admitted(method: KVQuant, tokens: Tokens, count: int, row: int = 1, pool: FamilyPool | None = None) -> FamilyPool:
    return admit(method, tokens, count, row, new_pool(method) if pool is None else pool)


def paper_cache(method: KVQuant, tokens: Tokens, count: int) -> tuple[Tensor, Tensor]:
    """What KVQuant's cache says of the first tokens, one number at a time. [L, H_kv, n, d] each"""
    keys, values = tokens.keys[:, :, :count].clone(), tokens.values[:, :, :count].clone()
    cos, sin = rotary(0, torch.arange(count))
    for layer, table in enumerate(method.tables(LAYOUT)):
        plain = unrotate(keys[layer], cos, sin)
        for token in range(method.sinks, count):
            key = coded_key(plain[:, token].flatten().tolist(), table, method)
            keys[layer, :, token] = rotate(key.unflatten(0, (KV_HEADS, DIM)), cos[token], sin[token])
            value = coded_value(values[layer, :, token].flatten().tolist(), table, method)
            values[layer, :, token] = value.unflatten(0, (KV_HEADS, DIM))
    return keys, values


def coded_key(key: list[float], table: LayerTables, method: KVQuant) -> Tensor:
    found, beyond = [], []
    for channel, x in enumerate(key):
        low, high = float(table.key_low[channel]), float(table.key_high[channel])
        mid, half = (low + high) / 2, (high - low) / 2
        found.append(mid + half * closest((x - mid) / half, table.key_codebook))
        if x < low or x > high:
            beyond.append((-abs(x - mid) / half, channel))
    for _, channel in sorted(beyond)[: 2 * method.grid.tail(CHANNELS)]:
        found[channel] = half_precision(key[channel])
    return torch.tensor(found)


def coded_value(value: list[float], table: LayerTables, method: KVQuant) -> Tensor:
    order, tail = sorted(range(CHANNELS), key=value.__getitem__), method.grid.tail(CHANNELS)
    extreme, others = {*order[:tail], *order[CHANNELS - tail :]}, order[tail : CHANNELS - tail]
    low, high = value[others[0]], value[others[-1]]
    mid, half = half_precision((low + high) / 2), half_precision((high - low) / 2)
    return torch.tensor(
        [
            half_precision(x) if channel in extreme else mid + half * closest((x - mid) / half, table.value_codebook)
            for channel, x in enumerate(value)
        ]
    )


def closest(x: float, codebook: Tensor) -> float:
    return min(codebook.tolist(), key=lambda point: abs(x - point))


def half_precision(x: float) -> float:
    return float(torch.tensor(x).half())
