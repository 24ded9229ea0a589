"""QEvict as the paper tells it: one layer of one prompt, a dictionary of windows, Algorithm 1 line by line.

Nothing is batched, paged or fused, and nothing is ever freed: a tier is a word. Promoted windows are read through their
codes, unless promotion is exact.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvcache.quant import Quantized, dequantize, quantize
from kvcache.rotary import rotate, unrotate


@dataclass
class PaperCache:
    """keys [H_kv, n, d] rotated, values [H_kv, n, d_v], column_sums [H_q, n] of a prompt; cos, sin [N, d] tables.

    ``first`` are scores that a named ranker gives the windows; ``delay`` tokens pass before anything is routed.
    """

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
    ranker: str = "cumulative"
    decay: float = 0.99
    p: float = 3.0
    promotion: str = "residency"
    delay: int = 0
    first: list[float] | None = None
    tier: dict[int, str] = field(default_factory=dict)
    ledger: dict[int, tuple[Quantized, Quantized]] = field(default_factory=dict)
    score: dict[int, float] = field(default_factory=dict)
    """S at the last event."""
    received: dict[int, float] = field(default_factory=dict)
    """u (Eq. 20): attention since the last event, that of the prompt before the first."""
    events: int = 0
    promotions: int = 0
    evicted: int = 0

    def __post_init__(self) -> None:
        self.prompt = self.keys.shape[1]
        for number in range(-(-(self.prompt - self.sinks) // self.window)):
            self.tier[number] = "recent"
            self.score[number] = 0.0
            self.received[number] = self.from_prompt(number)
        if not self.delay:
            self.route()

    def from_prompt(self, number: int) -> float:
        if self.first is not None:
            return self.first[number]
        if self.ranker == "key_norm":
            return 0.0
        return float(self.column_sums.double().mean(0)[self.positions(number)].sum())

    @property
    def tokens(self) -> int:
        return self.keys.shape[1]

    def positions(self, number: int) -> list[int]:
        first = self.sinks + number * self.window
        return [position for position in range(first, first + self.window) if position < self.tokens]

    def rank(self, number: int) -> float:
        """S_t of Eq. 21 to 24."""
        before, received = self.score[number], self.received[number]
        if self.ranker == "decay":
            return self.decay * before + received
        if self.ranker == "p_norm":
            return float((before**self.p + received**self.p) ** (1 / self.p))
        if self.ranker == "key_norm":
            norms = self.keys[:, self.positions(number)].double().norm(dim=-1)
            return -float(norms.mean(0).sum()) / self.window
        return before + received

    def route(self) -> None:
        self.score = {number: self.rank(number) for number in self.tier}
        self.received = dict.fromkeys(self.tier, 0.0)
        candidates = [
            number
            for number, tier in self.tier.items()
            if tier != "E" and self.sinks + (number + 1) * self.window <= self.tokens - self.recent
        ]
        ranked = sorted(candidates, key=lambda number: (-self.score[number], number))
        eligible = [number for number in ranked if self.promotion != "none" or number not in self.ledger]
        full, quantized = self.full, self.quantized
        if self.strict and self.promotion == "residency":
            while sum(number in self.ledger for number in eligible[:full]) > quantized:
                full -= 1
            quantized -= sum(number in self.ledger for number in eligible[:full])
        chosen = eligible[:full]
        for number in chosen:
            self.promotions += self.tier[number] == "Q"
            self.tier[number] = "F"
            if self.promotion == "exact":
                self.ledger.pop(number, None)
        for place, number in enumerate(number for number in ranked if number not in chosen):
            if place < quantized:
                self.tier[number] = "Q"
                if number not in self.ledger:
                    self.ledger[number] = self.encode(number)
            else:
                self.tier[number] = "E"
                self.evicted += 1
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

    def attention(self, queries: Tensor, scale: float) -> tuple[list[int], Tensor, Tensor]:
        """The last k tokens' queries [H_q, k, d] over what is accessible now, causally: positions, probabilities
        [H_q, k, n] and values [H_q, n, d_v]."""
        at, keys, values = self.accessible()
        group = len(queries) // len(keys)
        keys, values = keys.repeat_interleave(group, 0), values.repeat_interleave(group, 0)
        scores = queries.float() @ keys.transpose(1, 2) * scale
        asked = torch.arange(self.tokens - queries.shape[1], self.tokens)
        future = torch.tensor(at) > asked[:, None]
        return at, torch.softmax(scores.masked_fill(future, -torch.inf), -1), values

    def step(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float, before_event: Callable[[], None] = lambda: None
    ) -> Tensor:
        """One generated token: [H_q, d], [H_kv, d], [H_kv, d_v] -> [H_q, d_v]"""
        self.keys = torch.cat([self.keys, key[:, None]], 1)
        self.values = torch.cat([self.values, value[:, None]], 1)
        newest = (self.tokens - 1 - self.sinks) // self.window
        self.tier.setdefault(newest, "recent")
        self.score.setdefault(newest, 0.0)
        self.received.setdefault(newest, 0.0)
        at, attention, values = self.attention(query[:, None], scale)
        received = dict(zip(at, attention[:, 0].mean(0).tolist(), strict=True))
        for number, tier in self.tier.items():
            if tier != "E" and self.ranker != "key_norm":
                self.received[number] += sum(received[position] for position in self.positions(number))
        grown = self.tokens - self.prompt - self.delay
        if grown >= 0 and grown % self.window == 0:
            before_event()
            self.route()
        return (attention @ values)[:, 0]
