"""A tokenizer without a model: words and marks are tokens, and ids decode to the same text."""

from __future__ import annotations

import re
from typing import Any

BOS = "<bos>"
CHAT_TEMPLATE = "<bos><turn>user\n{content}<end>\n<turn>assistant\n"

_TOKEN = re.compile(r"<bos>|<turn>|<end>|\s*\w+|\s*[^\w\s]|\s+")


class WordTokenizer:
    """``adds_bos``: puts one before a text that is tokenised with special tokens, as Llama's tokenizers do."""

    def __init__(self, chat_template: str | None = CHAT_TEMPLATE, adds_bos: bool = True) -> None:
        self.chat_template = chat_template
        self.adds_bos = adds_bos
        self.vocabulary: dict[str, int] = {BOS: 0}

    def __call__(self, text: str | list[str], *, add_special_tokens: bool = True) -> dict[str, Any]:
        if isinstance(text, list):
            return {"input_ids": [self._ids(entry, add_special_tokens) for entry in text]}
        return {"input_ids": self._ids(text, add_special_tokens)}

    def apply_chat_template(self, conversation: Any, *, tokenize: bool, add_generation_prompt: bool) -> str:
        assert not tokenize
        assert add_generation_prompt
        assert self.chat_template is not None
        return self.chat_template.replace("{content}", conversation[0]["content"].strip())

    def decode(self, ids: list[int], *, skip_special_tokens: bool = False) -> str:
        texts = list(self.vocabulary)
        return "".join(texts[token] for token in ids if token or not skip_special_tokens)

    def _ids(self, text: str, add_special_tokens: bool) -> list[int]:
        ids = [self.vocabulary.setdefault(token, len(self.vocabulary)) for token in _TOKEN.findall(text)]
        return [0, *ids] if add_special_tokens and self.adds_bos else ids
