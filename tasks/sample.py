"""One evaluation sample, its parts kept apart, so that a protocol decides what is compressed.

context | question | answer_prefix
^ what a compression method may drop
          ^ compressed with the context, or appended after it: the protocol's choice
                     ^ always follows the assistant header of the chat template
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from functools import cached_property


@dataclass(frozen=True)
class Sample:
    """One prompt with its references.

    ``metric`` names a function of :mod:`tasks.metrics`, and ``classes`` are the labels that a classification chooses
    from; ``stop`` holds strings that end generation (cut off the prediction), but never within the first
    ``min_new_tokens``; ``repeat`` is how many samples before this one ask the same; ``meta`` holds facts about this
    sample for the result row (needle depths, haystack kind ...), values that JSON can carry.
    """

    task: str
    index: int
    context: str
    question: str
    answer_prefix: str
    references: tuple[str, ...]
    max_new_tokens: int
    metric: str
    stop: tuple[str, ...] = ()
    chat: bool = True
    classes: tuple[str, ...] = ()
    min_new_tokens: int = 0
    repeat: int = 0
    meta: dict[str, object] = field(default_factory=dict)

    @cached_property
    def sample_id(self) -> str:
        """Hash of everything that reaches the model or the metric, and of ``repeat``; not of ``index`` and ``meta``."""
        content = asdict(self)
        del content["index"], content["meta"]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def document_name(text: str) -> str:
    """For ``meta["document"]``: samples about one text share it, and reports take them as one observation."""
    return hashlib.sha256(text.encode()).hexdigest()[:12]
