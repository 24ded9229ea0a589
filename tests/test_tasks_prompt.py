"""Prompts: template, answer prefix, one beginning-of-sequence token, and the split for an appended question."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from word_tokenizer import BOS, CHAT_TEMPLATE, WordTokenizer

from tasks.prompt import PromptError, prompt_overhead, render
from tasks.sample import Sample

SAMPLE = Sample(
    task="toy",
    index=0,
    context="The sky is blue.",
    question="\nWhich colour?",
    answer_prefix=" It is",
    references=("blue",),
    max_new_tokens=4,
    metric="string_match_all",
)
CHAT = f"{BOS}<turn>user\nThe sky is blue.\nWhich colour?<end>\n<turn>assistant\nIt is"
PLAIN = f"{BOS}The sky is blue.\nWhich colour? It is"


def text(sample: Sample = SAMPLE, tokenizer: WordTokenizer | None = None, **protocol: Any) -> str:
    tokenizer = tokenizer or WordTokenizer()
    prompt = render(sample, tokenizer, **protocol)
    return tokenizer.decode(prompt.ids + prompt.appended)


def test_the_answer_prefix_follows_the_assistants_header_without_its_blank() -> None:
    assert text() == CHAT


def test_the_answer_prefix_may_keep_its_blank() -> None:
    assert text(answer_prefix="verbatim") == CHAT.replace("It is", " It is")


def test_without_a_template_the_parts_follow_each_other() -> None:
    assert text(chat_template="never") == PLAIN


def test_auto_does_as_the_tasks_protocol_says() -> None:
    assert text(replace(SAMPLE, chat=False)) == PLAIN
    assert text(replace(SAMPLE, chat=False), chat_template="always") == CHAT


@pytest.mark.parametrize("template", [CHAT_TEMPLATE, CHAT_TEMPLATE.removeprefix(BOS)])
@pytest.mark.parametrize("adds_bos", [True, False])
@pytest.mark.parametrize("chat_template", ["always", "never"])
def test_there_is_one_bos_at_most(template: str, adds_bos: bool, chat_template: str) -> None:
    rendered = text(tokenizer=WordTokenizer(template, adds_bos), chat_template=chat_template)
    has_one = adds_bos or (chat_template == "always" and template.startswith(BOS))
    assert rendered.count(BOS) == has_one
    assert rendered.startswith(BOS) == has_one


def test_an_end_token_that_the_tokenizer_adds_never_ends_a_prompt() -> None:
    class WithEnd(WordTokenizer):
        def _ids(self, text: str, add_special_tokens: bool) -> list[int]:
            ids = super()._ids(text, add_special_tokens)
            return [*ids, *super()._ids("<end>", False)] if add_special_tokens else ids

    assert text(tokenizer=WithEnd(), chat_template="never") == PLAIN


@pytest.mark.parametrize("chat_template", ["always", "never"])
def test_an_appended_question_begins_where_the_context_ends(chat_template: Any) -> None:
    tokenizer = WordTokenizer()
    prompt = render(SAMPLE, tokenizer, "appended", chat_template)
    assert tokenizer.decode(prompt.ids).endswith("The sky is blue.")
    assert tokenizer.decode(prompt.appended).startswith("\nWhich colour?")
    assert tokenizer.decode(prompt.ids + prompt.appended) == (CHAT if chat_template == "always" else PLAIN)
    assert render(SAMPLE, tokenizer, "compressed", chat_template).appended == []


@given(
    context=st.text("ab.\n ", min_size=1).filter(str.strip),
    question=st.text("ab?\n ", max_size=12),
    prefix=st.text(" ab", max_size=4),
    chat=st.booleans(),
)
def test_the_parts_of_an_appended_prompt_make_the_whole(context: str, question: str, prefix: str, chat: bool) -> None:
    tokenizer = WordTokenizer()
    sample = replace(SAMPLE, context=context, question=question, answer_prefix=prefix, chat=chat)
    whole, apart = render(sample, tokenizer), render(sample, tokenizer, "appended")
    assert tokenizer.decode(apart.ids + apart.appended) == tokenizer.decode(whole.ids)
    # The template strips the turn: at its ends blanks may be missing.
    kept = context.lstrip() if question.strip() else context.strip()
    assert tokenizer.decode(apart.ids).endswith(kept if chat else context)


def test_a_context_that_the_template_says_first_is_not_mistaken_for_the_users() -> None:
    tokenizer = WordTokenizer("<turn>system\nThe sky is blue.<end>\n<turn>user\n{content}<end>\n<turn>assistant\n")
    prompt = render(SAMPLE, tokenizer, "appended")
    assert tokenizer.decode(prompt.ids).endswith("<turn>user\nThe sky is blue.")


def test_no_context_cannot_be_compressed_apart() -> None:
    with pytest.raises(PromptError, match="toy, sample 0: it has no context"):
        render(replace(SAMPLE, context=" "), WordTokenizer(), "appended")


def test_a_missing_template_is_an_error_where_one_is_needed() -> None:
    base_model = WordTokenizer(chat_template=None)
    for ask in (
        lambda: render(SAMPLE, base_model),
        lambda: render(SAMPLE, base_model, chat_template="always"),
        lambda: prompt_overhead(base_model, True),
    ):
        with pytest.raises(PromptError, match=r"has no chat template.*chat_template: never"):
            ask()
    assert text(tokenizer=base_model, chat_template="never") == PLAIN


def test_a_template_that_changes_the_text_is_an_error() -> None:
    class Shouting(WordTokenizer):
        def apply_chat_template(self, conversation: Any, **more: Any) -> str:
            return super().apply_chat_template(conversation, **more).upper()

    with pytest.raises(PromptError, match="the chat template changes the text of toy, sample 0"):
        render(SAMPLE, Shouting())


@pytest.mark.parametrize("adds_bos", [True, False])
def test_the_overhead_is_what_a_prompt_has_besides_its_parts(adds_bos: bool) -> None:
    tokenizer = WordTokenizer("<bos><turn>{content}<end><turn>", adds_bos)
    parts = sum(
        len(tokenizer(part, add_special_tokens=False)["input_ids"])
        for part in (SAMPLE.context, SAMPLE.question, SAMPLE.answer_prefix)
    )
    assert len(render(SAMPLE, tokenizer).ids) == parts + prompt_overhead(tokenizer, chat=True)
    plain = render(SAMPLE, tokenizer, chat_template="never")
    assert len(plain.ids) == parts + prompt_overhead(tokenizer, chat=False)
