"""QEvict as the paper tells it: one layer of one prompt, a dictionary of windows, Algorithm 1 line by line.

Nothing is batched, paged or fused. Promoted windows get a full-precision copy of their reconstruction, as written.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvcache.quant import Quantized, dequantize, quantize
from kvcache.rotary import rotate, unrotate


@dataclass
class PaperCache:
    """keys [H_kv, n, d] rotated, values [H_kv, n, d_v], column_sums [H_q, n] of a prompt; cos, sin [N, d] tables."""

    keys: Tensor
    values: Tensor
    column_sums: Tensor
    cos: Tensor
    sin: Tensor
    window: int
    sinks: int
    recent: int
    bits: int
    full: int
    quantized: int
    strict: bool
    tier: dict[int, str] = field(default_factory=dict)
    ledger: dict[int, tuple[Quantized, Quantized]] = field(default_factory=dict)
    score: dict[int, float] = field(default_factory=dict)
    events: int = 0

    def __post_init__(self) -> None:
        self.prompt = self.keys.shape[1]
        by_token = self.column_sums.double().mean(0)
        for number in range(-(-(self.prompt - self.sinks) // self.window)):
            self.score[number] = float(by_token[self.positions(number)].sum())
            self.tier[number] = "recent"
        self.route()

    @property
    def tokens(self) -> int:
        return self.keys.shape[1]

    def positions(self, number: int) -> list[int]:
        first = self.sinks + number * self.window
        return [position for position in range(first, first + self.window) if position < self.tokens]

    def route(self) -> None:
        candidates = [
            number
            for number, tier in self.tier.items()
            if tier != "E" and self.sinks + (number + 1) * self.window <= self.tokens - self.recent
        ]
        ranked = sorted(candidates, key=lambda number: (-self.score[number], number))
        full, quantized = self.full, self.quantized
        if self.strict:
            while sum(number in self.ledger for number in ranked[:full]) > quantized:
                full -= 1
            quantized -= sum(number in self.ledger for number in ranked[:full])
        for place, number in enumerate(ranked):
            if place < full:
                self.tier[number] = "F"
            elif place < full + quantized:
                self.tier[number] = "Q"
                if number not in self.ledger:
                    self.ledger[number] = self.encode(number)
            else:
                self.tier[number] = "E"
                self.ledger.pop(number, None)
        self.events += 1

    def encode(self, number: int) -> tuple[Quantized, Quantized]:
        at = self.positions(number)
        plain = unrotate(self.keys[:, at], self.cos[at], self.sin[at])
        return quantize(plain.transpose(1, 2), self.bits), quantize(self.values[:, at], self.bits)

    def accessible(self) -> tuple[list[int], Tensor, Tensor]:
        """Positions in chronological order, and what attention reads there."""
        at, keys, values = list(range(self.sinks)), [self.keys[:, : self.sinks]], [self.values[:, : self.sinks]]
        for number, tier in sorted(self.tier.items()):
            if tier == "E":
                continue
            here = self.positions(number)
            at += here
            if number in self.ledger:
                coded_keys, coded_values = self.ledger[number]
                plain = dequantize(coded_keys, self.bits).transpose(1, 2)
                keys.append(rotate(plain, self.cos[here].float(), self.sin[here].float()))
                values.append(dequantize(coded_values, self.bits))
            else:
                keys.append(self.keys[:, here].float())
                values.append(self.values[:, here].float())
        return at, torch.cat(keys, 1), torch.cat(values, 1)

    def step(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """One generated token: [H_q, d], [H_kv, d], [H_kv, d_v] -> [H_q, d_v]"""
        self.keys = torch.cat([self.keys, key[:, None]], 1)
        self.values = torch.cat([self.values, value[:, None]], 1)
        newest = (self.tokens - 1 - self.sinks) // self.window
        self.tier.setdefault(newest, "recent")
        self.score.setdefault(newest, 0.0)
        at, keys, values = self.accessible()
        group = len(query) // len(keys)
        keys, values = keys.repeat_interleave(group, 0), values.repeat_interleave(group, 0)
        attention = torch.softmax((query[:, None].float() @ keys.transpose(1, 2))[:, 0] * scale, -1)
        received = dict(zip(at, attention.mean(0).tolist(), strict=True))
        for number, tier in self.tier.items():
            if tier != "E":
                self.score[number] += sum(received[position] for position in self.positions(number))
        if (self.tokens - self.prompt) % self.window == 0:
            self.route()
        return (attention[:, None] @ values)[:, 0]
