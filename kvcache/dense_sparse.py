"""Dense-and-sparse codes of whole tokens (KVQuant, arXiv 2401.18079, §3.2 to §3.4), and their packing.

    key      per channel: (x - mid) / half of thresholds that were calibrated         -> nearest point of a codebook
    value    per token: (x - mid) / half of the range without its outliers            -> nearest point of a codebook
    outlier  (channel, fp16) beside the codes: keys beyond their channel's thresholds, the extreme values of a token

A token is all KV heads together: C = H_kv * d channels.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from kvcache.codebook import nearest

SMALLEST = 1e-12
"""Divides where a range is empty: all its elements then have the same code, and the range times it is nothing."""


@dataclass(frozen=True)
class LayerTables:
    """What calibration finds for one layer: ``key_low`` and ``key_high`` [C], thresholds of its key channels, and
    codebooks [2^bits] of keys and values, ascending, within [-1, 1]; all fp32."""

    key_low: Tensor
    key_high: Tensor
    key_codebook: Tensor
    value_codebook: Tensor

    def to(self, device: torch.device) -> LayerTables:
        return LayerTables(**{name: table.to(device) for name, table in self.named().items()})

    def named(self) -> dict[str, Tensor]:
        return {one.name: getattr(self, one.name) for one in fields(self)}

    @property
    def key_mid(self) -> Tensor:
        return (self.key_high + self.key_low) / 2

    @property
    def key_half(self) -> Tensor:
        return (self.key_high - self.key_low) / 2

    @property
    def nbytes(self) -> int:
        return sum(table.nbytes for table in self.named().values())


@dataclass(frozen=True)
class Outliers:
    """``channel`` [..., s] int16, C where a slot is free; ``value`` [..., s] fp16."""

    channel: Tensor
    value: Tensor


@dataclass(frozen=True)
class Span:
    """``mid`` and ``half`` [...] fp16: the range of a token's values without its outliers."""

    mid: Tensor
    half: Tensor


def code_keys(keys: Tensor, tables: LayerTables, tail: int, bits: int) -> tuple[Tensor, Outliers]:
    """Keys before rotation, [..., C] fp32. -> codes [..., C * bits / 8], outliers [..., 2 * tail]

    A token with more keys beyond their thresholds than slots keeps those that are furthest beyond, by the width of
    their channels; the others get the outermost codes.
    """
    scaled = (keys - tables.key_mid) / tables.key_half.clamp_min(SMALLEST)
    outside = (keys < tables.key_low) | (keys > tables.key_high)
    distance = torch.where(outside, scaled.abs(), -1.0)
    chosen = distance.sort(dim=-1, descending=True, stable=True).indices[..., : 2 * tail]
    channel = torch.where(outside.gather(-1, chosen), chosen, keys.shape[-1])
    codes = pack_codes(nearest(scaled, tables.key_codebook), bits)
    return codes, Outliers(channel.to(torch.int16), keys.gather(-1, chosen).half())


def code_values(values: Tensor, codebook: Tensor, tail: int, bits: int) -> tuple[Tensor, Span, Outliers]:
    """Values, [..., C] fp32. -> codes [..., C * bits / 8], span [...], outliers [..., 2 * tail]"""
    span, channel = value_span(values, tail)
    scaled = (values - span.mid.float()[..., None]) / span.half.float().clamp_min(SMALLEST)[..., None]
    outliers = Outliers(channel.to(torch.int16), values.gather(-1, channel).half())
    return pack_codes(nearest(scaled, codebook), bits), span, outliers


def value_span(values: Tensor, tail: int) -> tuple[Span, Tensor]:
    """The range of each token without the ``tail`` smallest and largest, and these channels, [..., 2 * tail]."""
    last = values.shape[-1] - 1 - tail
    ordered, order = values.sort(dim=-1, stable=True)
    low, high = ordered[..., tail], ordered[..., last]
    channel = torch.cat([order[..., :tail], order[..., last + 1 :]], -1)
    return Span(((low + high) / 2).half(), ((high - low) / 2).clamp_min(0).half()), channel


def read_keys(codes: Tensor, points: Tensor, tables: LayerTables, outliers: Outliers, bits: int) -> Tensor:
    """[..., C] fp32, before rotation. ``points``: of :func:`points_of_words`, as for values"""
    return _read(codes, points, bits, tables.key_mid, tables.key_half, outliers)


def read_values(codes: Tensor, points: Tensor, span: Span, outliers: Outliers, bits: int) -> Tensor:
    """[..., C] fp32"""
    return _read(codes, points, bits, span.mid.float()[..., None], span.half.float()[..., None], outliers)


def _read(codes: Tensor, points: Tensor, bits: int, mid: Tensor, half: Tensor, outliers: Outliers) -> Tensor:
    """mid + point * half, and outliers in their places. A channel more takes what free slots hold."""
    scaled = look_up(codes, points, bits)
    wider = scaled.new_empty(*scaled.shape[:-1], scaled.shape[-1] + 1)
    dense = wider[..., :-1]
    torch.addcmul(mid, scaled, half, out=dense)
    wider.scatter_(-1, outliers.channel.long(), outliers.value.float())
    return dense


def look_up(packed: Tensor, points: Tensor, bits: int) -> Tensor:
    """What packed codes stand for: [..., n * bits / 8] -> [..., n]"""
    return torch.embedding(points, _words(packed, bits)).flatten(-3)


def points_of_words(codebook: Tensor) -> Tensor:
    """What codes that lie together stand for, so that one look-up reads all of them. [2^bits] -> [2^(k bits), k]"""
    bits = len(codebook).bit_length() - 1
    together = _together(bits)
    words = torch.arange(2 ** (together * bits), device=codebook.device)
    shifts = torch.arange(together, device=codebook.device) * bits
    return codebook[words[:, None] >> shifts & 2**bits - 1]


def _words(packed: Tensor, bits: int) -> Tensor:
    """[..., n * bits / 8] uint8 -> [..., n / 8, 8 / k] int32, k codes each"""
    eight = packed.unflatten(-1, (-1, bits)).int()
    joined = eight[..., 0]
    for byte in range(1, bits):
        joined = joined | eight[..., byte] << 8 * byte
    together = _together(bits)
    shifts = torch.arange(0, 8, together, device=packed.device, dtype=torch.int32) * bits
    return joined[..., None] >> shifts & 2 ** (together * bits) - 1


def _together(bits: int) -> int:
    """Codes of one look-up: as many as leave the table small enough for a processor's cache."""
    return 2 if bits > 3 else 4


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """Eight codes in as many bytes as one has bits, the first in the lowest. [..., n] -> [..., n * bits / 8] uint8"""
    shifts = torch.arange(8, device=codes.device)
    words = (codes.unflatten(-1, (-1, 8)).long() << shifts * bits).sum(-1)
    return (words[..., None] >> shifts[:bits] * 8 & 255).flatten(-2).to(torch.uint8)
