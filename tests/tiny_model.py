"""A small random model in a folder, with a tokenizer that knows a few words: quick to load, and it answers nonsense."""

from __future__ import annotations

from pathlib import Path

WORDS = 124


def save_tiny_model(folder: Path) -> Path:
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    special = ["<pad>", "<s>", "</s>", "<unk>"]
    vocabulary = {word: index for index, word in enumerate([*special, *(f"w{index}" for index in range(WORDS))])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()  # type: ignore[assignment]
    names = dict(zip(("pad_token", "bos_token", "eos_token", "unk_token"), special, strict=True))
    template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, chat_template=template, **names)
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=4096,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    LlamaForCausalLM(shape).save_pretrained(folder)
    return folder
