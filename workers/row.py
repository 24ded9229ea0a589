"""One result: a (cell, sample), as the actor yields it and the store keeps it. The order here is the order on disk."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Row:
    """A finished (cell, sample). Bytes are whole bytes of the growing layers, times are seconds.

    ``score`` is None for a failed row, never 0, and for an isolated run, whose bytes and times are its whole batch's.
    ``kv_bytes_*`` are measured on the tensors held; ``charged_bytes`` is what the method's own accounting rule says;
    ``workspace_bytes`` are copies that outlive a step; ``host_bytes`` is what a method keeps in host memory to restore
    from. ``method_facts``: what the method resolved for this prompt, and did, as JSON.
    """

    # identity
    cell_id: str
    sample_id: str
    job_id: str = ""
    attempt: int = 0
    status: str = "ok"  # ok | failed
    error: str = ""

    # the cell's coordinates, in clear
    model: str = ""
    method: str = ""
    settings: str = "{}"
    budget: str = ""  # as in the sweep file: "10%", "128 tokens", "unlimited"; "100%" for the full cache
    budget_base: str = "prompt"
    context: int = 0  # 0: the task's own lengths
    task: str = ""
    data_seed: int = 0
    method_seed: int = 0
    question: str = "compressed"
    growth: str = "grow"
    chat_template: str = "auto"
    answer_prefix: str = "stripped"
    dtype: str = ""
    attention: str = ""
    row_width: int = 0

    # the result
    prediction: str = ""
    references: list[str] = field(default_factory=list)
    score: float | None = None
    metric: str = ""
    details: str = "{}"  # further figures on the prediction: tasks.metrics.details
    sample_index: int = 0
    sample_limit: int = 0  # of the run that made the row (--limit); 0: none. A cell's completeness counts its rows
    prompt_tokens: int = 0
    output_tokens: int = 0
    finish_reason: str = ""  # stop | length
    sample_meta: str = "{}"

    # memory
    budget_bytes: int = 0
    charged_bytes: int = 0
    kv_bytes_prefill: int = 0
    kv_bytes_end: int = 0
    kv_bytes_peak: int = 0
    slack_bytes: int = 0
    workspace_bytes: int = 0
    host_bytes: int = 0
    kv_bytes_full_prefill: int = 0
    kv_bytes_full: int = 0
    kv_share: float = 0.0
    over_budget: bool = False
    method_facts: str = "{}"

    # time
    prefill_s: float = 0.0
    compress_s: float = 0.0
    decode_s: float = 0.0
    batch_rows: int = 0
    timing: str = "shared"  # shared | isolated
    ttft_s: float | None = None  # isolated: prefill_s + compress_s + admit_s
    tpot_s: float | None = None
    admit_s: float = 0.0  # isolated: from the last compression to the first tokens
    peak_device_bytes: int = 0

    # provenance
    device: str = ""
    node: str = ""
    numerics: str = ""
    versions: str = "{}"
    finished_at: float = 0.0
