# SPDX-License-Identifier: Apache-2.0
"""A random two-layer Qwen2 with its own byte-level tokenizer, saved as a Hugging Face folder.

The fixture `tiny_model_dir` (tests/conftest.py) shares one such folder with all tests of a session.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

__all__ = ["CHAT_TEMPLATE", "SENTENCES", "make_tiny_model", "make_tiny_tokenizer"]

EOS, BOS, PAD = "<|im_end|>", "<|im_start|>", "<|endoftext|>"

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

SENTENCES: tuple[str, ...] = (
    "Your task is to: put a clean apple in the fridge.",
    "You are in the middle of a room. Looking quickly around you, you see a cabinet 1, a drawer 2 and a fridge 1.",
    "<think>look inside</think> <action>open fridge 1</action>",
    "<think>take it</think> <action>take apple 1 from countertop 2</action>",
    "go to cabinet 1, go to drawer 2, go to countertop 3, inventory, look, examine mug 1",
    "Nothing happens. The cabinet 1 is closed. On the countertop 2, you see a mug 1, and a knife 3.",
)


def make_tiny_tokenizer(vocab_size: int = 300, texts: Sequence[str] = SENTENCES) -> PreTrainedTokenizerFast:
    """Byte-level BPE: the 256 bytes, the three special tokens and the most frequent merges of `texts`."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD, BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(list(texts), trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token=EOS, pad_token=PAD, additional_special_tokens=[BOS], padding_side="left"
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def make_tiny_model(
    path: str | Path,
    *,
    seed: int = 0,
    hidden_size: int = 64,
    num_layers: int = 2,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    intermediate_size: int = 128,
    vocab_size: int = 300,
    init_std: float = 0.08,
    tie_word_embeddings: bool = True,
    texts: Sequence[str] = SENTENCES,
) -> Path:
    """Writes model, generation config and tokenizer to `path` and returns it; equal arguments give equal weights."""
    path = Path(path)
    tokenizer = make_tiny_tokenizer(vocab_size, texts)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        max_position_embeddings=1024,
        initializer_range=init_std,
        tie_word_embeddings=tie_word_embeddings,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(config)
        # Zero biases would hide mistakes in sharding and export.
        generator = torch.Generator().manual_seed(seed + 1)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("bias"):
                    parameter.normal_(0.0, init_std, generator=generator)
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, do_sample=True
    )
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path
