"""kvpress's side of :mod:`perf.peers`: runs in kvpress's own environment, and knows nothing of this package.

It reads requests from stdin, one JSON object a line, and answers each with one on stdout. A request with ``folder``
loads a model; one with ``prompts`` runs every cell on every prompt the way kvpress does it, a prefill for each.
"""

from __future__ import annotations

import json
import sys
import time
from importlib.metadata import version
from typing import Any

import kvpress
import torch
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.utils.logging import disable_progress_bar


class NumbersAsText:
    """Stands where kvpress's pipeline has a tokenizer: token ids come back as they are."""

    model_max_length = sys.maxsize
    pad_token_id = None

    def decode(self, ids: torch.Tensor, skip_special_tokens: bool = True) -> str:
        return json.dumps(ids.tolist())


def main() -> None:
    answers, sys.stdout = sys.stdout, sys.stderr  # what libraries print is no answer
    disable_progress_bar()
    pipeline: Any = None
    for line in sys.stdin:
        request = json.loads(line)
        if "folder" in request:
            torch.set_num_threads(request["threads"])
            pipeline = load(request["folder"], request["dtype"])
            answer: dict[str, Any] = {name: version(name) for name in ("kvpress", "transformers", "torch")}
        else:
            answer = run(pipeline, request["cells"], request["prompts"], request["new_tokens"])
        print(json.dumps(answer), file=answers, flush=True)


def load(folder: str, dtype: str) -> Any:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    model.generation_config.eos_token_id = -1  # every cell generates all its tokens
    return kvpress.KVPressTextGenerationPipeline(model, NumbersAsText(), device=model.device)


def run(pipeline: Any, cells: list[dict[str, Any]], prompts: list[list[int]], new_tokens: int) -> dict[str, Any]:
    """Seconds for all of it; the tokens and the number of kept ones, for every prompt and then cell."""
    began, found = time.perf_counter(), []
    for ids in prompts:
        asked = {"context_ids": torch.tensor([ids[:-1]]), "questions_ids": [torch.tensor([ids[-1:]])]}
        for cell in cells:
            cache, press = DynamicCache(), press_of(cell["press"], len(ids) - 1, cell["kept"])
            (answer,) = pipeline.forward(asked, max_new_tokens=new_tokens, press=press, cache=cache)
            found.append({"tokens": json.loads(answer), "kept": kept(pipeline.model, cache)})
            for layer in pipeline.model.model.layers:
                layer.self_attn.masked_key_indices = None
    return {"seconds": time.perf_counter() - began, "found": found}


def press_of(described: dict[str, Any] | None, tokens: int, keep: int) -> Any:
    """The press that keeps ``keep`` of ``tokens``: its ratio lies between two whole numbers, where no rounding of
    ``int(tokens * (1 - ratio))`` can lose a token."""
    if described is None:
        return None
    options = dict(described)
    kind = getattr(kvpress, options.pop("kind"))
    if "press" in options:
        return kind(**options | {"press": press_of(options["press"], tokens, keep)})
    return kind(compression_ratio=max(1 - (keep + 0.5) / tokens, 0.0), **options)


def kept(model: Any, cache: Any) -> int:
    """Tokens of all layers and KV heads. Presses with a budget per head leave all in the cache and mask some."""
    total = 0
    for decoder, layer in zip(model.model.layers, cache.layers, strict=True):
        masked = getattr(decoder.self_attn, "masked_key_indices", None)
        total += layer.keys[..., 0].numel() - (0 if masked is None else len(masked[0]))
    return total


if __name__ == "__main__":
    main()
