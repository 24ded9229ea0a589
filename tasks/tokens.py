"""The little that tasks need of a tokenizer, and counting with it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol


class Tokenizer(Protocol):
    """The part of transformers' tokenizers that tasks call; text is one string or a list of strings."""

    def __call__(self, text: Any, *, add_special_tokens: bool = True) -> Any:
        """A mapping whose ``input_ids`` is a list of ids, or a list of such lists for a list of strings."""

    def decode(self, ids: Any, *, skip_special_tokens: bool = False) -> Any:
        """The text of a list of ids."""

    def apply_chat_template(self, conversation: Any, *, tokenize: bool, add_generation_prompt: bool) -> Any:
        """The rendered text, with ``tokenize=False``. Not called where ``chat_template`` is missing or None."""


class TokenCounter:
    """Counts tokens without special ones. Pieces are counted once and remembered."""

    remembered = 200_000  # pieces; forgotten all at once when there are more

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._pieces: dict[str, int] = {}

    def count(self, text: str) -> int:
        return len(self._tokenizer(text, add_special_tokens=False)["input_ids"]) if text else 0

    def pieces(self, texts: Sequence[str]) -> list[int]:
        """The length of each text."""
        unknown = sorted({text for text in texts if text not in self._pieces})
        if len(self._pieces) + len(unknown) > self.remembered:
            self._pieces.clear()
            unknown = sorted(set(texts))
        if unknown:
            for text, ids in zip(unknown, self._batch(unknown), strict=True):
                self._pieces[text] = len(ids)
        return [self._pieces[text] for text in texts]

    def _batch(self, texts: list[str]) -> Iterable[list[int]]:
        ids: list[list[int]] = self._tokenizer(texts, add_special_tokens=False)["input_ids"]
        return ids
