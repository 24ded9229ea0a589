"""Diagnostics of LORE-KV on a model (arXiv 2610.07643, §4.5, App. F): which tokens conditions keep, beside the future.

    prefill n tokens ─┬─ greedy answer over the full cache: the true future queries ──> the oracle's scores and sets
                      ├─ M futures sampled once, their first 1, 2, 4 ... ────────────> coverage of the true queries
                      └─ scores of every condition, what each keeps at every budget ──> recall, error, overlap ...

Nothing is decoded from a compressed cache: all conditions are held against the same full-cache answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvcache.budget import Budget
from kvcache.evict import PromptEvictor
from kvcache.prefill import PARTICLES, Continuation, Prefill
from lorekv import diagnostics
from lorekv.lookahead import Futures, sample_futures
from lorekv.method import LoreKV
from lorekv.scoring import Scored, score_prompt
from workers.fork import Fork, Generation, Prompt, PromptForks
from workers.layer_measures import Measure
from workers.lorekv_labels import ORACLE, REFERENCE, WINDOW
from workers.models import LoadedModel


class DiagnosisError(ValueError):
    """A condition that cannot be run on this prompt, and why."""


@dataclass(frozen=True)
class Question:
    """A prompt and what is known of its answer: the references' token ids, in all their spellings."""

    name: str
    ids: list[int]
    answers: list[list[int]]
    max_new_tokens: int
    stop: tuple[str, ...] = ()


@dataclass(frozen=True)
class Comparison:
    """What to compare: evictors by label, among them the ``control``, which looks at the prompt alone; at budgets in
    tokens per KV head; ``futures``, the numbers of sampled futures whose coverage is measured."""

    conditions: dict[str, PromptEvictor]
    control: str
    budgets: tuple[int, ...]
    futures: tuple[int, ...] = (1, 2, 4, 8)
    future_tokens: int = 16

    @property
    def prompt_only(self) -> LoreKV:
        method = self.conditions[self.control]
        assert isinstance(method, LoreKV)
        return method


@dataclass
class _Condition:
    """scores [L] of [H_kv, n]; kept [K, H_kv, n] bool by layer, one set for each budget."""

    label: str
    scores: list[Tensor]
    kept: list[Tensor]
    has_energy: bool


@torch.inference_mode()
def diagnose_question(
    model: LoadedModel, question: Question, compared: Comparison, seed: str, chunk: int = 2048
) -> list[Measure]:
    """All measures of all conditions on one prompt."""
    forks = [Fork(label, one, Budget.parse("unlimited"), seed) for label, one in compared.conditions.items()]
    prompt = Prompt(question.name, question.ids, [], question.max_new_tokens, forks, question.stop)
    prefill = PromptForks(model, chunk).prefill(prompt)
    truth = answered(model, prefill, prompt)
    conditions = [_condition(label, one, prefill, compared, seed) for label, one in compared.conditions.items()]
    conditions.append(_oracle(prefill, compared, truth))
    counted = ~compared.prompt_only.protected(prefill)
    answer = diagnostics.answer_places(question.ids, question.answers).to(counted.device) & counted
    sampled = sample_futures([prefill], max(compared.futures), compared.future_tokens, 1.0, [seed])[0]
    coverages = [coverage_by_futures(index, prefill, compared, truth, sampled) for index in range(len(prefill.layers))]
    errors = [layer_errors(index, prefill, conditions, truth) for index in range(len(prefill.layers))]
    found = list(_coverage_measures(coverages))
    for place, one in enumerate(conditions):
        own = [of_layer[place] for of_layer in errors]
        found += _condition_measures(one, conditions, compared, own, answer, counted)
    found += _mismatch_measures(compared, conditions, coverages, errors, counted)
    return found


# -- the future --------------------------------------------------------------------------------------------------------


def answered(model: LoadedModel, prefill: Prefill, prompt: Prompt) -> Futures:
    """The greedy answer over the prompt's full cache, as a single future: its tokens, their queries, keys and values.

    At least one token; it ends before a stop token, with a stop text, or at the limit. The last one is fed too.
    """
    continuation, logits = prefill.continue_prompts([prefill]), prefill.logits.clone()
    logits[sorted(prefill.stop_ids)] = -torch.inf
    answer = Generation(prompt, prompt.forks[0])
    while (token := int(logits.argmax())) not in prefill.stop_ids:
        answer.tokens.append(token)
        logits = continuation.step(torch.full((1, PARTICLES), token, device=logits.device))[0, 0]
        if len(answer.tokens) == prompt.max_new_tokens or answer.stopped(model.tokenizer):
            break
    return _single_future(answer.tokens, continuation, len(prefill.layers))


def _single_future(tokens: list[int], continuation: Continuation, layers: int) -> Futures:
    """Of a continuation of one prompt, whose particles are all the same. Nothing was drawn: nothing is surprising."""
    queries = [continuation.queries(0, layer)[:1] for layer in range(layers)]
    suffixes = [continuation.suffix(0, layer) for layer in range(layers)]
    gates = [own[:1] for layer in range(layers) if (own := continuation.gates(0, layer)) is not None]
    fed = torch.tensor([tokens], device=queries[0].device)
    certain = torch.zeros_like(fed, dtype=torch.float32)
    lengths = fed.new_tensor([len(tokens)])
    keys, values = [keys[:1] for keys, _ in suffixes], [values[:1] for _, values in suffixes]
    return Futures(fed, lengths, certain, certain, certain, queries, keys, values, gates)


def coverage_by_futures(
    index: int, prefill: Prefill, compared: Comparison, truth: Futures, sampled: Futures
) -> dict[tuple[str, int], Tensor]:
    """Coverage of the true futures in one layer by the window, by the first M futures, and by both. -> [H_q] each"""
    queries = prefill.layers[index].queries
    assert queries is not None
    window, future = queries[:, -compared.prompt_only.window :], truth.queries[index][0]
    found = {("coverage", WINDOW): diagnostics.query_coverage(future, window)}
    for count in compared.futures:
        by_head = sampled.queries[index][:count].transpose(0, 1)  # [H_q, M, T, d]
        reference = by_head[:, sampled.steps()[:count]]
        found["coverage", count] = diagnostics.query_coverage(future, reference)
        both = torch.cat([window, reference], 1)
        found["coverage_with_window", count] = diagnostics.query_coverage(future, both)
    return found


# -- the conditions ----------------------------------------------------------------------------------------------------


def _condition(label: str, method: PromptEvictor, prefill: Prefill, compared: Comparison, seed: str) -> _Condition:
    examined = method.examine([prefill], [seed])[0]
    scored = examined.scores if isinstance(examined, Scored) else method.utilities([prefill], [seed])[0]
    sets = [_kept(label, method, prefill, budget, examined) for budget in compared.budgets]
    kept = [torch.stack(of_layer) for of_layer in zip(*sets, strict=True)]
    return _Condition(label, scored, kept, isinstance(method, LoreKV))


def _oracle(prefill: Prefill, compared: Comparison, truth: Futures) -> _Condition:
    """The control's own cost and selection, at the true future queries alone."""
    method = replace(compared.prompt_only, mix=1.0, particles=1)
    scored = score_prompt(method, prefill, truth)
    sets = [_kept(ORACLE, method, prefill, budget, scored) for budget in compared.budgets]
    return _Condition(ORACLE, scored.scores, [torch.stack(of_layer) for of_layer in zip(*sets, strict=True)], True)


def _kept(label: str, method: PromptEvictor, prefill: Prefill, budget: int, examined: object) -> list[Tensor]:
    """[L] of [H_kv, n] bool"""
    resolved = Budget.parse(f"{budget} tokens").resolve(prefill.tokens, 1, "prompt", prefill.layout)
    if reason := method.impossible(resolved, prefill.layout):
        raise DiagnosisError(f"condition {label}: {reason}")
    return [diagnostics.kept_mask(heads, prefill.tokens) for heads in method.keep(prefill, resolved, examined)]


def layer_errors(index: int, prefill: Prefill, conditions: Sequence[_Condition], truth: Futures) -> Tensor:
    """Relative output error of every set in one layer, mean over each group. [conditions, K, H_kv]"""
    layer = prefill.layers[index]
    queries = truth.queries[index][0].unflatten(0, (len(layer.keys), -1))
    own_keys, own_values = truth.keys[index][0], truth.values[index][0]
    kept = torch.stack([one.kept[index] for one in conditions])  # [C, K, H_kv, n]
    by_head = [
        diagnostics.output_error(
            queries[head],
            keys,
            layer.values[head],
            own_keys[head],
            own_values[head],
            kept[:, :, head].flatten(0, 1),
            layer.scale,
        ).mean(-1)
        for head, keys in enumerate(layer.keys)
    ]
    return torch.stack(by_head, -1).unflatten(0, kept.shape[:2])


# -- measures ----------------------------------------------------------------------------------------------------------


def _coverage_measures(coverages: Sequence[dict[tuple[str, int], Tensor]]) -> Iterator[Measure]:
    for index, of_layer in enumerate(coverages):
        for (name, count), values in of_layer.items():
            yield from _by_head(REFERENCE, name, index, values, count)


def _condition_measures(
    one: _Condition,
    conditions: Sequence[_Condition],
    compared: Comparison,
    errors: Sequence[Tensor],
    answer: Tensor,
    counted: Tensor,
) -> Iterator[Measure]:
    """Of all layers; errors [L] of [K, H_kv]. The oracle is the last of ``conditions``."""
    control = next(other for other in conditions if other.label == compared.control)
    for index, kept in enumerate(one.kept):
        sets = kept, conditions[-1].kept[index], control.kept[index]
        yield from _set_measures(one.label, index, compared.budgets, *sets, counted)
        yield from _answer_measures(one.label, index, compared.budgets, kept, answer, counted)
        yield from _by_budget(one.label, "error", index, compared.budgets, errors[index])
        correlation = diagnostics.spearman(one.scores[index][:, counted], control.scores[index][:, counted])
        yield from _by_head(one.label, "rank_correlation", index, correlation)
    if one.has_energy:
        yield from _energy_measures(one, counted)


def _set_measures(
    label: str, index: int, budgets: Sequence[int], kept: Tensor, oracle: Tensor, control: Tensor, counted: Tensor
) -> Iterator[Measure]:
    """Sets [K, H_kv, n] of one layer; ``_all``: protected tokens counted, which are in every set."""
    pairs = {
        "recall": diagnostics.recall(kept & counted, oracle & counted),
        "recall_all": diagnostics.recall(kept, oracle),
        "overlap": diagnostics.recall(kept & counted, control & counted),
        "overlap_all": diagnostics.recall(kept, control),
        "jaccard": diagnostics.jaccard(kept & counted, control & counted),
    }
    for name, values in pairs.items():
        yield from _by_budget(label, name, index, budgets, values)


def _answer_measures(
    label: str, index: int, budgets: Sequence[int], kept: Tensor, answer: Tensor, counted: Tensor
) -> Iterator[Measure]:
    """Where the answer is in the prompt, outside of what is protected."""
    if not bool(answer.any()):
        return
    for budget, masks in zip(budgets, kept, strict=True):
        shares = zip(*(part.tolist() for part in diagnostics.answer_enrichment(masks, answer, counted)), strict=True)
        for head, (of_answer, of_all) in enumerate(shares):
            yield Measure(label, "answer_kept", index, of_answer, 1, head, budget)
            if of_all:
                yield Measure(label, "enrichment", index, of_answer, of_all, head, budget)


def _energy_measures(one: _Condition, counted: Tensor) -> Iterator[Measure]:
    for index, scores in enumerate(one.scores):
        yield from _by_bin(one.label, "energy_by_position", index, diagnostics.energy_by_position(scores, counted))
    masses = torch.stack([scores[:, counted].double().mean() for scores in one.scores])
    yield from _by_bin(one.label, "energy_by_depth", None, diagnostics.energy_by_depth(masses))


def _mismatch_measures(
    compared: Comparison,
    conditions: Sequence[_Condition],
    coverages: Sequence[dict[tuple[str, int], Tensor]],
    errors: Sequence[Tensor],
    counted: Tensor,
) -> Iterator[Measure]:
    """Do the heads gain most whose window covers the future least? Rank correlation over all layers and KV heads."""
    oracle = conditions[-1]
    recalls = torch.cat(
        [
            diagnostics.recall(torch.stack([one.kept[index] for one in conditions]) & counted, wanted & counted)
            for index, wanted in enumerate(oracle.kept)
        ],
        -1,
    )  # [C, K, heads of all layers]
    missed = torch.cat(list(errors), -1)
    by_group = [
        of_layer["coverage", WINDOW].unflatten(0, (wrong.shape[-1], -1)).mean(-1)
        for of_layer, wrong in zip(coverages, errors, strict=True)
    ]
    mismatch = 1 - torch.cat(by_group)
    control = list(compared.conditions).index(compared.control)
    for place, one in enumerate(conditions[:-1]):
        if place == control:
            continue
        gains = {"recall": recalls[place] - recalls[control], "error": missed[control] - missed[place]}
        for name, by_budget in gains.items():
            for budget, gain in zip(compared.budgets, by_budget, strict=True):
                value = float(diagnostics.spearman(gain, mismatch))
                if value == value:
                    yield Measure(one.label, f"mismatch_{name}_gain", None, value, 1, parameter=budget)


def _by_budget(label: str, name: str, index: int, budgets: Iterable[int], values: Tensor) -> Iterator[Measure]:
    """[K, H_kv]"""
    for budget, of_heads in zip(budgets, values, strict=True):
        yield from _by_head(label, name, index, of_heads, budget)


def _by_head(label: str, name: str, index: int, values: Tensor, parameter: int | None = None) -> Iterator[Measure]:
    """One value per head, each counting once; NaN has none. [H]"""
    for head, value in enumerate(values.tolist()):
        if value == value:
            yield Measure(label, name, index, value, 1, head, parameter)


def _by_bin(label: str, name: str, index: int | None, shares: Tensor) -> Iterator[Measure]:
    for part, value in enumerate(shares.tolist()):
        if value == value:
            yield Measure(label, name, index, value, 1, parameter=part)
