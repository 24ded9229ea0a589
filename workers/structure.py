"""Structural tokens of a prompt: what frames a chat, a tool call or a document, told from the tokenizer alone.

Markers are the tokens that were added to the vocabulary (``<|im_start|>``, ``<tool_call>``, ``[INST]``), the one for
unknown text aside. Document separators are runs of tokens that are nothing but newlines, with two of them or more: one
newline ends a line, not a document. Newlines that a tokenizer merges with a sentence's end are not seen.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

LONGEST_RUN = 8
"""Newlines in a row that are looked up as one text; longer runs fall apart into these."""


@dataclass(frozen=True)
class Structure:
    """``markers``: token ids; ``newlines``: how many newlines each token of newlines has."""

    markers: frozenset[int] = frozenset()
    newlines: Mapping[int, int] = field(default_factory=dict)

    @classmethod
    def of(cls, tokenizer: Any) -> Structure:
        added = {token: text for text, token in tokenizer.get_added_vocab().items()}
        markers = {token for token, text in added.items() if text.strip() and token != tokenizer.unk_token_id}
        newlines: dict[int, int] = {}
        for length in range(1, LONGEST_RUN + 1):
            for token in tokenizer("\n" * length, add_special_tokens=False)["input_ids"]:
                text = tokenizer.decode([token])
                if text and not text.strip("\n"):
                    newlines[token] = len(text)
        return cls(frozenset(markers), newlines)

    def places(self, ids: Sequence[int]) -> list[bool]:
        """Which tokens of a prompt are structural."""
        found: list[bool] = []
        for blank, run in groupby(ids, key=self.newlines.__contains__):
            tokens = list(run)
            separates = blank and sum(self.newlines[token] for token in tokens) > 1
            found += [separates or token in self.markers for token in tokens]
        return found
