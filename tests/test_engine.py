"""The engine: the same tokens as the model's own generation, and the same tokens whatever runs beside them."""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
from models import YARN, greedy, prompt_ids, tiny_gemma, tiny_llama, tiny_qwen

from kvcache.baselines.full import Full
from kvcache.baselines.snapkv import SnapKV
from kvcache.baselines.streaming_llm import StreamingLLM
from kvcache.budget import Budget
from kvcache.method import Method
from kvcache.prefill import BLOCKS, Prefill
from lorekv.method import LoreKV
from qevict.method import QEvict
from workers.engine import Engine
from workers.fork import Fork, Generation, Prompt, PromptForks
from workers.job import PROMPTS_AT_ONCE, EngineSpec
from workers.models import LoadedModel

NEW = 20
LENGTHS = (*range(5, 60, 6), 70, 97, 128, 150, 200, 231, 256, 300, 333, 400)
MODELS = {"llama": tiny_llama, "qwen": tiny_qwen, "gemma": tiny_gemma}
EVICTORS: list[Method] = [
    StreamingLLM(),
    SnapKV(window=8),
    QEvict(recent=8),
    QEvict(recent=8, quantized_share=0.0),
    LoreKV(window=8, particles=2, tokens=4),
]


@pytest.fixture(scope="module", params=MODELS)
def exact_model(request: pytest.FixtureRequest) -> LoadedModel:
    return MODELS[request.param]()


def fork(method: Method, budget: str = "unlimited", seed: str = "0") -> Fork:
    return Fork((method, budget, seed), method, Budget.parse(budget), seed)


def run(
    model: LoadedModel, prompts: list[Prompt], rows: int = 8, chunk: int = 64
) -> dict[tuple[object, object], Generation]:
    finished = Engine(model, EngineSpec(rows, chunk)).run(prompts)
    return {(generation.prompt.key, generation.fork.key): generation for generation in finished}


def prompts_of(lengths: tuple[int, ...], forks: list[Fork], appended: int = 0) -> list[Prompt]:
    return [
        Prompt(length, prompt_ids(length), prompt_ids(appended, seed=7) if appended else [], NEW, forks)
        for length in lengths
    ]


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (lambda: QEvict(window=256), "at most 255 tokens"),
        (lambda: QEvict(quantized_share=1.5), "between 0 and 1"),
        (lambda: StreamingLLM(sinks=-7), "at least 0"),
        (lambda: LoreKV(temperature=0), "above 0"),
    ],
)
def test_settings_without_meaning_are_refused(build: Callable[[], Method], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        build()


@pytest.mark.parametrize(("forks", "waiting", "taken"), [(3, 9, 4), (1, 9, 8), (3, 2, 2), (20, 9, 4)])
def test_prompts_are_prefilled_in_groups(forks: int, waiting: int, taken: int) -> None:
    """As many as fill the eight rows, up to the next whole group, or as there are."""
    assert PROMPTS_AT_ONCE == BLOCKS, "a group is what one continuation carries"
    prompts = iter(prompts_of((20,) * waiting, [fork(StreamingLLM(), seed=str(seed)) for seed in range(forks)]))
    assert len(Engine(tiny_llama(), EngineSpec(8, 64))._enough(prompts)) == taken
    assert len(list(prompts)) == waiting - taken


def test_full_cache_equals_generate(exact_model: LoadedModel) -> None:
    found = run(exact_model, prompts_of(LENGTHS, [fork(Full())]))
    assert len(found) == len(LENGTHS) >= 20
    for (length, _), generation in found.items():
        assert generation.tokens == greedy(exact_model, prompt_ids(length), NEW), length


def test_yarn_positions_equal_generate() -> None:
    model = tiny_llama(rope_parameters=YARN)
    for (length, _), generation in run(model, prompts_of((40, 300, 500), [fork(Full())])).items():
        assert generation.tokens == greedy(model, prompt_ids(length), NEW)


def test_an_appended_question_reads_like_the_whole_prompt(exact_model: LoadedModel) -> None:
    found = run(exact_model, prompts_of((30, 90, 200), [fork(Full())], appended=37))
    for (length, _), generation in found.items():
        assert generation.tokens == greedy(exact_model, prompt_ids(length) + prompt_ids(37, seed=7), NEW)


@pytest.mark.parametrize("method", [method for method in EVICTORS if method != QEvict(recent=8)], ids=str)
@pytest.mark.parametrize("appended", [0, 19, 130])
def test_an_unlimited_budget_is_the_full_cache(exact_model: LoadedModel, method: Method, appended: int) -> None:
    forks = [fork(Full()), fork(method)]
    found = run(exact_model, prompts_of((20, 77, 160), forks, appended))
    for length in (20, 77, 160):
        full, evicting = (found[length, one.key] for one in forks)
        assert not evicting.error
        assert evicting.tokens == full.tokens


@pytest.mark.parametrize("build", [tiny_llama, tiny_gemma], ids=["llama", "gemma"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_tokens_do_not_depend_on_what_runs_beside(build: type, dtype: torch.dtype) -> None:
    """Alone, beside other cells, beside other prompts, in another order: the same tokens, over several chunks."""
    model: LoadedModel = build(dtype)
    lengths = (11, 40, 90, 140, 200, 333)
    methods = [Full(), SnapKV(window=8), QEvict(recent=8), QEvict(recent=8, quantized_share=0.0), LoreKV(window=8)]
    forks = [fork(method, "unlimited" if method == Full() else "50%") for method in methods]
    together = run(model, prompts_of(lengths, forks))
    shuffled = prompts_of(lengths, random.Random(1).sample(forks, len(forks)))
    random.Random(2).shuffle(shuffled)
    again = run(model, shuffled)
    for prompt in prompts_of(lengths, forks):
        for one in forks:
            alone = run(model, [Prompt(prompt.key, prompt.ids, [], NEW, [one])])[prompt.key, one.key]
            key = prompt.key, one.key
            assert together[key].error == again[key].error == alone.error
            assert together[key].tokens == again[key].tokens == alone.tokens


def test_questions_do_not_depend_on_what_runs_beside() -> None:
    model = tiny_llama(torch.bfloat16)
    forks = [fork(Full()), fork(QEvict(recent=8), "50%"), fork(SnapKV(window=8), "50%")]
    prompts = [
        Prompt(length, prompt_ids(length), prompt_ids(question, seed=7), NEW, forks)
        for length, question in ((64, 5), (100, 33), (150, 50), (60, 120))
    ]
    together = run(model, prompts)
    for prompt in prompts:
        for one in forks:
            alone = Prompt(prompt.key, prompt.ids, prompt.appended, NEW, [one])
            found = run(model, [alone])[prompt.key, one.key]
            assert not found.error
            assert found.tokens == together[prompt.key, one.key].tokens
            assert found.at_end == together[prompt.key, one.key].at_end


def test_a_prompt_that_does_not_fit_fails_and_the_rest_goes_on() -> None:
    model = tiny_llama()
    prompts = [
        Prompt("long", prompt_ids(1020), [], NEW, [fork(Full())]),
        Prompt("empty", [], [], NEW, [fork(Full())]),
        Prompt("good", prompt_ids(30), [], NEW, [fork(Full()), fork(SnapKV(window=8), "10%")]),
    ]
    found = run(model, prompts)
    assert "1040 tokens exceed the model's 1024" in found["long", fork(Full()).key].error
    assert "at least one token" in found["empty", fork(Full()).key].error
    assert "must keep 8 protected tokens" in found["good", fork(SnapKV(window=8), "10%").key].error
    assert found["good", fork(Full()).key].tokens == greedy(model, prompt_ids(30), NEW)


def test_rows_and_memory_are_given_back() -> None:
    model = tiny_llama()
    engine = Engine(model, EngineSpec(4, 64))
    forks = [fork(Full()), fork(QEvict(recent=8), "60%"), fork(SnapKV(window=8), "60%")]
    assert len(list(engine.run(prompts_of((50, 120, 200, 80), forks)))) == 12
    assert not any(engine._rows)
    for pool in engine._pools.values():
        assert len(pool.rows) == 0
        assert pool.allocated_bytes() == 0


def test_a_prefill_is_gone_once_its_forks_are_admitted(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the whole cache in full precision: what evicts would save nothing beside it."""
    made: list[weakref.ref[Prefill]] = []
    real_prefill, real_step = PromptForks.prefill, Engine._step
    alive: list[int] = []

    def prefill(self: PromptForks, prompt: Prompt) -> Prefill:
        found = real_prefill(self, prompt)
        made.append(weakref.ref(found))
        return found

    def step(self: Engine) -> Iterator[Generation]:
        alive.append(sum(one() is not None for one in made))
        return real_step(self)

    monkeypatch.setattr(PromptForks, "prefill", prefill)
    monkeypatch.setattr(Engine, "_step", step)
    run(tiny_llama(), prompts_of((100, 120), [fork(Full()), fork(SnapKV(window=8), "50%")]))
    assert len(made) == 2
    assert len(alive) >= NEW - 1
    assert set(alive) == {0}


def test_generation_stops_at_a_stop_token_and_at_a_stop_text() -> None:
    model = tiny_llama()
    ids = prompt_ids(50)
    tokens = greedy(model, ids, NEW)

    model.tokenizer = Letters()
    stop = Letters().decode(tokens[3:5])
    found = run(model, [Prompt("text", ids, [], NEW, [fork(Full())], (stop,))])["text", fork(Full()).key]
    assert found.tokens == tokens[:5]
    assert found.finish_reason == "stop"
    model.stop_ids = frozenset({tokens[6]})
    found = run(model, [Prompt("token", ids, [], NEW, [fork(Full())])])["token", fork(Full()).key]
    assert found.tokens == tokens[: tokens.index(tokens[6])]
    assert found.finish_reason == "stop"


@pytest.mark.parametrize("question", [0, 5], ids=["first token from the prompt", "first token after a question"])
def test_nothing_ends_the_first_new_tokens(question: int) -> None:
    model = tiny_llama()
    ids, appended = prompt_ids(50), prompt_ids(question, seed=7) if question else []
    best, *_ = greedy(model, ids + appended, NEW)
    model.tokenizer = Letters()

    def first(stop: tuple[str, ...], least: int) -> Generation:
        prompt = Prompt("", ids, appended, NEW, [fork(Full())], stop, least)
        return run(model, [prompt])["", fork(Full()).key]

    text = Letters().decode([best])
    assert first((text,), 0).text(model.tokenizer) == ""
    spared = first((text,), 1)
    assert spared.tokens[0] != best
    model.stop_ids = frozenset({best})
    assert first((), 0).tokens == []
    assert first((), 1).tokens[0] == spared.tokens[0]


class Letters:
    """A tokenizer with one letter per token."""

    def __call__(self, text: str, add_special_tokens: bool) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) - ord("A") for letter in text]}

    def decode(self, decoded: list[int], skip_special_tokens: bool = True) -> str:
        return "".join(chr(ord("A") + token) for token in decoded)


def test_a_prompt_whose_logits_are_not_finite_has_no_answer_with_any_method() -> None:
    model = tiny_llama()
    model.forward.get_decoder().norm.weight.data[0] = torch.inf
    forks = [fork(Full()), fork(SnapKV(window=8), "50%")]
    found = run(model, prompts_of((40,), forks))
    assert {one.error for one in found.values()} == {"ValueError: the model's logits are not finite in float32"}
