"""Random numbers of one sample: a stream of its own for every purpose, so that no draw shifts another."""

from __future__ import annotations

import hashlib
from random import Random


class Draws:
    """``Draws(seed, task, context, index, recipe).stream("depths")`` is the same generator whenever it is asked for."""

    def __init__(self, *identity: object) -> None:
        self._identity = "\x1f".join(map(str, identity))

    def stream(self, purpose: str) -> Random:
        digest = hashlib.sha256(f"{self._identity}\x1f{purpose}".encode()).digest()
        return Random(int.from_bytes(digest))
