"""Traces of texts: consecutive pieces of a prompt and what follows it, for measures that read rather than generate."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, zip_longest
from typing import Any


@dataclass(frozen=True)
class Trace:
    """Token ids of a text: the first ``prefill`` are the prompt, the rest is read token by token."""

    name: str
    ids: tuple[int, ...]
    prefill: int


def traces_of(texts: Mapping[str, str], tokenizer: Any, prefill: int, continuation: int) -> list[Trace]:
    """Pieces of ``prefill + continuation`` tokens of every text, none of them overlapping, what is left over unused.

    Each begins with the tokens that the tokenizer puts before a text: models attend to them more than to any other. The
    texts take turns, so that the first few traces are of different ones.
    """
    pieces = [_pieces(name, text, tokenizer, prefill, continuation) for name, text in texts.items()]
    return [trace for trace in chain.from_iterable(zip_longest(*pieces)) if trace is not None]


def _pieces(name: str, text: str, tokenizer: Any, prefill: int, continuation: int) -> Iterator[Trace]:
    plain = tokenizer(text, add_special_tokens=False)["input_ids"]
    opening = _opening(tokenizer)
    own = prefill + continuation - len(opening)
    for number, start in enumerate(range(0, len(plain) - own + 1, own)):
        yield Trace(f"{name}:{number}", (*opening, *plain[start : start + own]), prefill)


def _opening(tokenizer: Any) -> list[int]:
    """The special tokens before a text."""
    plain = tokenizer("a", add_special_tokens=False)["input_ids"]
    whole: list[int] = tokenizer("a", add_special_tokens=True)["input_ids"]
    return whole[: whole.index(plain[0])]
