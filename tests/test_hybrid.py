"""Models whose layers differ: what the engine makes of them, against their own ``generate`` and forward pass."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from models import GEMMA_4, LINEAR, SHAPE, YARN, greedy, prompt_ids
from test_engine import EVICTORS, fork, run
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kvcache.baselines.full import Full
from kvcache.baselines.snapkv import SnapKV
from kvcache.baselines.streaming_llm import StreamingLLM
from kvcache.budget import Budget
from kvcache.prefill import BLOCKS, PARTICLES, Prefill
from kvcache.rotary import rotate, unrotate
from lorekv.deletion import Attended, deletion_cost
from lorekv.lookahead import sample_futures
from lorekv.method import LoreKV
from qevict.method import QEvict
from workers.architecture import ModelError, layout_of, parameters_of
from workers.attention import Step
from workers.description import ModelDescription
from workers.diagnose import Condition, diagnose, prefill_of, read_in_full
from workers.experts import token_by_token
from workers.fork import Prompt, PromptForks
from workers.job import CellSpec, EngineSpec, ModelSpec
from workers.linear import LinearCache, LinearRows
from workers.memory import FUTURES, predict_peak
from workers.models import LoadedModel, load_model
from workers.partial_rotary import half_split_order, widened
from workers.traces import Trace

Build = Callable[..., LoadedModel]
NEW = 12
LINEAR_MODELS = ("qwen_next", "qwen35", "qwen35_experts")
ALL = ("gemma4", "gemma4_experts", "gemma4_unified", *LINEAR_MODELS, "ministral", "phi", "olmo")


def build(name: str, dtype: torch.dtype = torch.float32, **changes: Any) -> LoadedModel:
    made: LoadedModel = getattr(models, f"tiny_{name}")(dtype, **changes)
    return made


def prompt(length: int, forks: list[Any], question: int = 0) -> Prompt:
    return Prompt(length, prompt_ids(length), prompt_ids(question, seed=7) if question else [], NEW, forks)


@pytest.mark.parametrize("name", ALL)
def test_the_full_cache_equals_generate(name: str) -> None:
    """Prompts of one token, below and above windows and chunks; several chunks, the last one of a single token."""
    model = build(name)
    for (length, _), found in run(model, [prompt(length, [fork(Full())]) for length in (1, 3, 24, 64, 129)]).items():
        assert not found.error
        assert found.tokens == greedy(model, prompt_ids(length), NEW), length


@pytest.mark.parametrize("name", ALL)
def test_an_unlimited_budget_reads_questions_like_the_whole_prompt(name: str) -> None:
    """All methods, questions of two lengths side by side: each row's tokens are those of ``generate``."""
    model = build(name)
    forks = [fork(Full()), *(fork(method) for method in EVICTORS if method != QEvict(recent=8))]
    for (length, _), found in run(model, [prompt(70, forks, 19), prompt(33, forks, 1), prompt(90, forks)]).items():
        question = {70: 19, 33: 1}.get(int(str(length)), 0)
        ids = prompt_ids(int(str(length))) + (prompt_ids(question, seed=7) if question else [])
        assert not found.error
        assert found.tokens == greedy(model, ids, NEW), (length, found.fork.method)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("gemma4_experts", torch.bfloat16),
        ("qwen35", torch.bfloat16),
        ("qwen_next", torch.bfloat16),
        ("qwen_next", torch.float32),
    ],
)
def test_tokens_do_not_depend_on_what_runs_beside(name: str, dtype: torch.dtype) -> None:
    model = build(name, dtype)
    methods = [Full(), QEvict(recent=8), LoreKV(window=8, particles=3, tokens=3)]
    forks = [fork(method, "unlimited" if method == Full() else "60%") for method in methods]
    prompts = [prompt(70, forks, 9), prompt(100, forks), prompt(90, forks, 30)]
    together = run(model, prompts)
    for one in prompts:
        for own in forks:
            alone = run(model, [Prompt(one.key, one.ids, one.appended, NEW, [own])])[one.key, own.key]
            assert not alone.error
            assert together[one.key, own.key].tokens == alone.tokens
            assert together[one.key, own.key].at_end == alone.at_end


@pytest.mark.parametrize("method", [StreamingLLM(), SnapKV(window=8), LoreKV(window=8, particles=2, tokens=3)], ids=str)
def test_budgets_hold_with_layers_of_different_sizes(method: Any) -> None:
    """Full layers have one KV head of 32, the sliding one between them two of 16: budgets are shares of the former."""
    model = build("gemma4", layer_types=["full_attention", "sliding_attention", "full_attention"])
    assert model.layout.full_bytes(150) == 150 * 2 * (32 + 32) * 4
    for budget in ("30%", "64 tokens"):
        found = run(model, [prompt(150, [fork(method, budget)])])[150, fork(method, budget).key]
        assert not found.error
        assert found.budget is not None
        assert 0.8 * found.budget.total_bytes < found.at_prefill.held <= found.budget.total_bytes


# -- the parts ---------------------------------------------------------------------------------------------------------


class Whole(Step):
    """An ordinary causal pass that remembers queries, gates and outputs."""

    def __init__(self) -> None:
        self.queries: dict[int, Tensor] = {}
        self.gates: dict[int, Tensor] = {}
        self.outputs: dict[int, Tensor] = {}

    def see_gates(self, layer: int, logits: Tensor) -> None:
        self.gates[layer] = logits[0].transpose(0, 1).sigmoid()

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        self.queries[layer] = queries[0]
        group = queries.shape[1] // keys.shape[1]
        keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
        output = scaled_dot_product_attention(queries, keys, values, is_causal=True, scale=scale)
        self.outputs[layer] = output[0]
        return output


def read_whole(model: LoadedModel, ids: list[int]) -> tuple[Whole, Tensor]:
    step = Whole()
    with torch.inference_mode():
        logits = model.forward(input_ids=torch.tensor([ids]), use_cache=False, kv_step=step).logits[0]
    return step, logits.float()


def prefilled(model: LoadedModel, tokens: int) -> Prefill:
    with torch.inference_mode():
        return PromptForks(model, 16).prefill(prompt(tokens, [fork(LoreKV(window=8))]))


@pytest.mark.parametrize("name", ["qwen_next", "qwen35", "phi"])
def test_futures_and_observations_equal_an_ordinary_forward_pass(name: str) -> None:
    """Two prompts continued in one batch: queries, gates and log-probabilities of a dense pass over prompt and future;
    so are the last queries of the prompts, read in chunks, and their gates."""
    model, lengths = build(name), (37, 50)
    prefills = [prefilled(model, tokens) for tokens in lengths]
    with torch.inference_mode():
        sampled = sample_futures(prefills, 3, 5, 1.0, ["0", "1"])
    for tokens, prefill, futures in zip(lengths, prefills, sampled, strict=True):
        for particle in range(3):
            length = int(futures.lengths[particle])
            ids = prompt_ids(tokens) + futures.tokens[particle, :length].tolist()
            whole, logits = read_whole(model, ids)
            log_p = torch.log_softmax(logits[tokens - 1 : -1], -1).gather(-1, torch.tensor(ids[tokens:])[:, None])[:, 0]
            torch.testing.assert_close(futures.log_probability[particle, :length], log_p, rtol=1e-3, atol=1e-4)
            for place, index in enumerate(model.layout.growing):
                found, expected = futures.queries[place][particle, :, :length], whole.queries[index]
                torch.testing.assert_close(found, expected[:, tokens:], rtol=1e-3, atol=1e-4)
                window = prefill.layers[place]
                torch.testing.assert_close(window.queries, expected[:, tokens - 8 : tokens], rtol=1e-3, atol=1e-4)
                if name == "phi":
                    assert window.gates is None
                    continue
                gates = whole.gates[index]
                torch.testing.assert_close(window.gates, gates[:, tokens - 8 : tokens], rtol=1e-3, atol=1e-4)
                own = futures.gates[place][particle, :, :length]
                torch.testing.assert_close(own, gates[:, tokens:], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", LINEAR_MODELS)
def test_gates_are_what_stands_between_attention_and_its_projection(name: str) -> None:
    model, projected = build(name), {}
    for index in model.layout.growing:
        attention = model.forward.get_decoder().layers[index].self_attn
        attention.o_proj.register_forward_pre_hook(lambda _, given, index=index: projected.update({index: given[0][0]}))
    whole, _ = read_whole(model, prompt_ids(20))
    for index in model.layout.growing:
        gated = (whole.outputs[index] * whole.gates[index]).transpose(0, 1).flatten(1)
        torch.testing.assert_close(projected[index], gated)


def test_cost_of_a_gated_deletion_equals_real_deletion() -> None:
    """Delete every token in turn, renormalise, gate, project: in fp64, to 1e-9."""
    group, count, tokens, dim, hidden = 3, 5, 12, 6, 20
    g = torch.Generator().manual_seed(0)
    scores = torch.randn(group, count, tokens, generator=g, dtype=torch.float64)
    values = torch.randn(tokens, dim, generator=g, dtype=torch.float64)
    gates = torch.rand(group, count, dim, generator=g, dtype=torch.float64)
    projection = torch.randn(hidden, group, dim, generator=g, dtype=torch.float64)
    probabilities = torch.softmax(scores, -1)
    gram = (projection.permute(1, 2, 0) @ projection.permute(1, 0, 2)).contiguous()
    found = deletion_cost(Attended(probabilities, probabilities @ values, gates=gates), values, gram)
    for deleted in range(tokens):
        left = torch.softmax(scores.index_fill(-1, torch.tensor([deleted]), -torch.inf), -1)
        change = torch.einsum("gqd,hgd->gqh", gates * (left @ values - probabilities @ values), projection)
        torch.testing.assert_close(found[..., deleted], change.norm(dim=-1), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["phi", "qwen_next", "qwen35", "gemma4"])
def test_partly_rotated_keys_are_unrotated_by_the_models_tables(name: str) -> None:
    """Keys as they were before rotation, in the order of the stored ones, and back."""
    model, tokens = build(name), 30
    plain: dict[int, Tensor] = {}
    place, index = 0, model.layout.growing[0]
    layout, attention = model.layout.layers[index], model.forward.get_decoder().layers[index].self_attn
    source = attention.qkv_proj if name == "phi" else attention.k_norm
    source.register_forward_hook(lambda _, given, made: plain.update({index: torch.cat([*plain.values(), made], 1)}))
    stored = prefilled(model, tokens).layers[place].keys
    keys = plain[index][0]
    if name == "phi":
        keys = keys[:, layout.query_heads * layout.key_dim :][:, : layout.kv_heads * layout.key_dim]
    keys = keys.reshape(tokens, layout.kv_heads, layout.key_dim).transpose(0, 1)
    rotated = model.rotary_tables(place, torch.zeros(1, dtype=torch.int64))[0].shape[-1]
    assert (rotated < layout.key_dim) == (name != "gemma4")
    keys = keys[..., half_split_order(layout.key_dim, rotated)]
    cos, sin = model.rotary(place, torch.arange(tokens))
    torch.testing.assert_close(unrotate(stored, cos, sin), keys, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(rotate(keys, cos, sin), stored, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(stored, keys, atol=1e-2)


def test_a_tokens_experts_give_the_same_bits_beside_any_other_tokens() -> None:
    model, width = build("qwen_next", hidden_size=512, moe_intermediate_size=256), 512
    experts = model.forward.get_decoder().layers[0].mlp.experts
    g = torch.Generator().manual_seed(0)
    own, chosen, weights = torch.randn(width, generator=g), torch.tensor([3, 1]), torch.rand(30, 2, generator=g)
    results = []
    for _ in range(12):
        hidden, index = torch.randn(30, width, generator=g), torch.rand(30, 4, generator=g).topk(2).indices
        hidden[5], index[5] = own, chosen
        with torch.inference_mode(), token_by_token(True):
            results.append(experts(hidden, index, weights)[5])
    assert all(torch.equal(results[0], other) for other in results[1:])


def test_half_split_order_pairs_what_was_rotated_together() -> None:
    order = half_split_order(12, 4).tolist()
    assert sorted(order) == list(range(12))
    assert (order[0], order[6], order[1], order[7]) == (0, 2, 1, 3)
    table = widened(torch.tensor([[0.1, 0.2, 0.1, 0.2]]), 12, 1.0)[0].tolist()
    assert table == pytest.approx([0.1, 0.2, 1, 1, 1, 1] * 2)


def test_a_row_that_reads_nothing_keeps_its_state() -> None:
    model = build("qwen35")
    rows = LinearRows(model.layout, 3, model.device, model.dtype)
    for held in (*rows.inputs.values(), *rows.matrices.values()):
        held.normal_()
    before = {index: [part.clone() for part in rows.row(1)[index]] for index in model.layout.linear}
    changed = rows.row(0)[0][1].clone()
    counts = torch.tensor([1, 0, 1])
    positions = torch.zeros(3, 1, dtype=torch.int64)
    with torch.inference_mode():
        model.read(torch.tensor([[5], [6], [7]]), positions, Whole(), LinearCache(rows, counts))
    assert all(torch.equal(a, b) for index in before for a, b in zip(before[index], rows.row(1)[index], strict=True))
    assert not torch.equal(rows.row(0)[0][1], changed)


@pytest.mark.parametrize("name", ["gemma4", "qwen_next", "ministral", "phi"])
def test_queries_projected_from_hidden_states_are_the_models(name: str) -> None:
    model, tokens = build(name), 90
    entered: dict[int, Tensor] = {}

    def keep(attention: Any, given: tuple[Any, ...], options: dict[str, Any]) -> None:
        entered.setdefault(attention.layer_idx, options["hidden_states"][0])

    for index in model.layout.growing:
        attention = model.forward.get_decoder().layers[index].self_attn
        attention.register_forward_pre_hook(keep, with_kwargs=True)
    whole, _ = read_whole(model, prompt_ids(tokens))
    project = prefilled(model, tokens).project_queries
    assert project is not None
    for place, index in enumerate(model.layout.growing):
        found = project(place, entered[index][60:], torch.arange(60, tokens))
        torch.testing.assert_close(found, whole.queries[index][:, 60:], rtol=1e-4, atol=1e-5)


def test_diagnostics_read_linear_layers_and_measure_full_ones() -> None:
    model, made = build("qwen35"), Trace("made", tuple(prompt_ids(120)), 90)
    condition = Condition("kept", QEvict(recent=8, quantized_share=0.0), Budget.parse("unlimited"))
    assert {one.layer for one in diagnose(model, made, [condition], 8, 64).measures} == {0, 1}
    seen: dict[int, Tensor] = {}
    with torch.inference_mode():
        read_in_full(model, prefill_of(model, made, [condition], 64), made, seen.__setitem__)
        model.forward.set_attn_implementation("eager")
        own = model.forward(torch.tensor([made.ids]), output_attentions=True).attentions
    for layer, weights in enumerate(given for given in own if given is not None):
        torch.testing.assert_close(seen[layer], weights[0, :, 90:], rtol=1e-4, atol=1e-5)


# -- configurations ----------------------------------------------------------------------------------------------------


def test_states_are_as_large_as_the_layout_says() -> None:
    layout = build("qwen_next", torch.bfloat16).layout
    rows = LinearRows(layout, 2, torch.device("cpu"), torch.bfloat16)
    assert 2 * layout.linear_bytes == sum(part.nbytes for part in (*rows.inputs.values(), *rows.matrices.values()))
    assert layout.full_bytes(10) == 10 * 2 * 2 * (32 + 32) * 2, "two full layers of two KV heads"


def test_plans_count_a_state_for_every_row_and_future() -> None:
    assert FUTURES == BLOCKS * PARTICLES
    config = build("qwen35").forward.config.to_dict()

    def peak(**changes: int) -> tuple[int, int]:
        own = config | changes
        layout = layout_of(own, 4)
        described = ModelDescription(own, "float32", layout, 1000, 1024, 128, "", "")
        cell = CellSpec("", "full", {}, "unlimited")
        return predict_peak(described, EngineSpec(8, 64), [cell], 512, 16, 1), layout.linear_bytes

    (small, one), (large, other) = peak(), peak(linear_value_head_dim=64)
    assert large - small >= (8 + FUTURES + 1) * (other - one)


@pytest.mark.parametrize("name", ["llama", "olmo", "qwen_next", "qwen35", "gemma4_experts"])
def test_parameters_are_counted_from_a_configuration(name: str) -> None:
    model = build(name)
    counted = sum(parameter.numel() for parameter in model.forward.parameters())
    assert parameters_of(model.forward.config.to_dict()) == pytest.approx(counted, rel=0.03)


def test_published_spellings_have_the_same_layout() -> None:
    published = {name: value for name, value in GEMMA_4.items() if name != "per_layer_config"}
    published |= {"model_type": "gemma4_text"}
    assert layout_of(published, 4) == build("gemma4").layout
    linear = {name: value for name, value in LINEAR.items() if name != "layer_types"} | {"linear_conv_kernel_dim": 4}
    made = layout_of(linear | {"model_type": "qwen3_next", "full_attention_interval": 2}, 4)
    assert made == build("qwen35").layout


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model_type": "mamba"}, "architecture 'mamba' is not supported"),
        (
            {"model_type": "gemma4_text", "num_kv_shared_layers": 2},
            "last 2 layers have no keys and values",
        ),
        ({"model_type": "gemma4_text", "use_bidirectional_attention": "all"}, "bidirectional"),
        ({"model_type": "llama", "layer_types": ["chunked_attention"] * 3}, "type 'chunked_attention'"),
        ({"model_type": "llama", "rope_parameters": {"partial_rotary_factor": 0.5}}, "partial rotary"),
        ({"model_type": "phi3", "rope_parameters": {"rope_type": "longrope"}}, "rotary variant"),
        ({"model_type": "phi3", "sliding_window": 128}, "no layer has full attention"),
    ],
)
def test_what_cannot_be_reproduced_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelError, match=said):
        layout_of(SHAPE | changes, 4)


@pytest.mark.parametrize("kind", ["gemma4", "qwen3_5", "mistral3"])
def test_the_text_part_of_a_model_that_sees_images(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoConfig, AutoModelForImageTextToText

    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = {"gemma4": GEMMA_4 | {"use_bidirectional_attention": "vision"}, "qwen3_5": LINEAR}.get(kind)
    more: dict[str, Any] = {"gemma4": {"audio_config": None, "image_token_id": 127}}.get(kind, {})
    if kind == "qwen3_5":
        vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 96}
    if kind == "mistral3":
        vision |= {"model_type": "pixtral", "head_dim": 8}  # type: ignore[dict-item]
        rope = YARN | {"llama_4_scaling_beta": 0.1}
        text = SHAPE | {"model_type": "ministral3", "sliding_window": None, "rope_parameters": rope}
    config = AutoConfig.for_model(kind, text_config=text, vision_config=vision, **more)
    AutoModelForImageTextToText.from_config(config).save_pretrained(tmp_path)
    monkeypatch.setattr("workers.models.load_tokenizer", lambda spec: None)
    model = load_model(ModelSpec("images too", str(tmp_path), "float32"), torch.device("cpu"))
    found = run(model, [prompt(90, [fork(Full())])])[90, fork(Full()).key]
    assert found.tokens == greedy(model, prompt_ids(90), NEW)
