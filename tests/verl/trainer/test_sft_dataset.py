# SPDX-License-Identifier: Apache-2.0
"""Fine-tuning rows: masks, truncation, weights, bad input, and the order of rows."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from transformers import AutoTokenizer

from verl.trainer.config.schema import CustomClsConfig, SFTDataConfig
from verl.trainer.sft.data import create_sft_dataset, token_rows
from verl.utils.dataset import MultiTurnSFTDataset, SFTDataset
from verl.utils.dataset.multiturn_sft_dataset import conversation_segments
from verl.utils.dataset.sft_batching import epoch_order, plan_global_batch, steps_per_epoch
from verl.utils.dataset.sft_dataset import tokenize_pairs
from verl.utils.dataset.token_rows import TokenRows, collate_rows
from verl.utils.errors import UserError

EOS, PAD = 9, 0


class LetterTokenizer:
    """One token a letter: a = 11, b = 12, ...; the chat template adds nothing to the last message's content."""

    eos_token_id: int | None = EOS
    pad_token_id: int | None = PAD

    def __init__(self) -> None:
        self.calls: list[int] = []

    def __call__(self, text: list[str], *, add_special_tokens: bool) -> Any:
        assert add_special_tokens is False
        self.calls.append(len(text))
        return {"input_ids": [[ord(letter) - ord("a") + 11 for letter in item] for item in text]}

    def apply_chat_template(self, conversation: Any, *, tokenize: bool, add_generation_prompt: bool) -> Any:
        assert tokenize is False
        return "".join(message["content"] for message in conversation)


def write(tmp_path: Path, **columns: Any) -> Path:
    path = tmp_path / "rows.parquet"
    pd.DataFrame(columns).to_parquet(path)
    return path


def test_five_token_row(tmp_path: Path) -> None:
    """Prompt a b c, response d, end: the first response token and the end token are predicted, nothing else."""
    data = SFTDataset(write(tmp_path, prompt=["abc"], response=["d"]), LetterTokenizer(), {"max_length": 7})
    item = {name: tensor.tolist() for name, tensor in data[0].items()}
    assert item == {
        "input_ids": [11, 12, 13, 14, EOS, PAD, PAD],
        "attention_mask": [1, 1, 1, 1, 1, 0, 0],
        "position_ids": [0, 1, 2, 3, 4, 0, 0],
        "loss_mask": [0, 0, 1, 1, 0, 0, 0],
    }
    batch = collate_rows(data.rows, [0], PAD)
    assert batch.token_weights.tolist() == [[0, 0, 0, 1, 1]]
    assert data.rows.num_targets.tolist() == [2]


def test_collate_trims_to_the_longest_row_and_fills() -> None:
    rows = TokenRows.from_ids([[1, 2, 3], [4]], [[5, 9], [6, 9]], [1.0, 0.25])
    batch = collate_rows(rows, [1, -1, 0], PAD)
    assert batch.input_ids.tolist() == [[4, 6, 9, 0, 0], [0, 0, 0, 0, 0], [1, 2, 3, 5, 9]]
    assert batch.attention_mask.tolist() == [[1, 1, 1, 0, 0], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1]]
    assert batch.token_weights.tolist() == [[0, 0.25, 0.25, 0, 0], [0] * 5, [0, 0, 0, 1, 1]]
    assert collate_rows(rows, [1], PAD).input_ids.shape == (1, 3)
    with_prompt = collate_rows(rows, [1, -1, 0], PAD, prompt_loss_weight=0.5)
    assert with_prompt.token_weights.tolist() == [[0, 0.25, 0.25, 0, 0], [0] * 5, [0, 0.5, 0.5, 1, 1]]


class TurnTokenizer(LetterTokenizer):
    """Template: a letter for the role, the content, and `z` as end marker; thoughts of old turns may be dropped."""

    def __init__(self, drops_thoughts: bool = False) -> None:
        super().__init__()
        self.drops_thoughts = drops_thoughts

    def apply_chat_template(
        self, conversation: Any, *, tokenize: bool, add_generation_prompt: bool, **kwargs: Any
    ) -> Any:
        last = len(conversation) - 1
        parts = []
        for i, message in enumerate(conversation):
            content = message["content"]
            if self.drops_thoughts and i != last:
                content = content.replace("t", "")
            parts.append(message["role"][0] + content + "z")
        return "".join(parts)


def conversation(*turns: str) -> list[dict[str, str]]:
    """`user:b` -> a message."""
    return [dict(zip(("role", "content"), turn.split(":"))) for turn in turns]


def letters(ids: Any) -> str:
    return "".join(chr(int(token) - 11 + ord("a")) for token in ids if int(token) not in (EOS, PAD))


def test_every_assistant_turn_is_a_target_with_its_markers(tmp_path: Path) -> None:
    """`s.z u.z a.z u.z a.z`: the two turns of the assistant are predicted whole, the rest is context."""
    rows = [
        conversation("system:g", "user:b", "assistant:cd", "user:e", "assistant:f"),
        conversation("user:b", "assistant:c", "user:d"),
    ]
    data = MultiTurnSFTDataset(write(tmp_path, messages=rows), TurnTokenizer(), {"max_length": 20})
    assert [letters(data.rows.row(i)) for i in range(2)] == ["sgzubzacdzuezafz", "ubzaczudz"]
    assert [letters(data.rows.row(i)[data.rows.row_targets(i)]) for i in range(2)] == ["acdzafz", "acz"]
    item = data[1]
    following = item["input_ids"][1:][item["loss_mask"][:-1] == 1]
    assert letters(following) == "acz"
    assert item["loss_mask"].tolist()[:9] == [0, 0, 1, 1, 1, 0, 0, 0, 0]
    assert data.rows.num_targets.tolist() == [7, 3]
    assert data.rows.num_prompt_targets.tolist() == [8, 5]


@pytest.mark.parametrize(("side", "kept", "trained"), [("left", "zuezafz", "zafz"), ("right", "ubzacdz", "acdz")])
def test_long_conversations_are_cut_with_their_targets(tmp_path: Path, side: str, kept: str, trained: str) -> None:
    path = write(tmp_path, chat=[conversation("user:b", "assistant:cd", "user:e", "assistant:f")], w=[0.5])
    config = {"max_length": 7, "truncation": side, "multiturn": {"messages_key": "chat"}, "weight_key": "w"}
    rows = MultiTurnSFTDataset(path, TurnTokenizer(), config).rows
    assert letters(rows.row(0)) == kept
    assert letters(rows.row(0)[rows.row_targets(0)]) == trained
    assert rows.weights.tolist() == [0.5]
    with pytest.raises(UserError, match=r"row 0 has 13 tokens, more than data.max_length=7"):
        MultiTurnSFTDataset(path, TurnTokenizer(), {**config, "truncation": "error"})


@pytest.mark.parametrize(
    ("cell", "message"),
    [
        (conversation("user:b"), r"row 0, column 'messages': there is no message of the role assistant"),
        ([{"role": "user"}], "must be a string or a list of chat messages"),
        ("abc", "a conversation must be a list"),
        (conversation("user:b", "assistant:tc", "user:d", "assistant:e"), "differently when more follow"),
    ],
)
def test_conversations_that_cannot_be_trained_are_named(tmp_path: Path, cell: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        MultiTurnSFTDataset(write(tmp_path, messages=[cell]), TurnTokenizer(drops_thoughts=True))


def test_segments_join_to_the_whole_of_a_real_template(tiny_model_dir: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    messages = conversation("system:be brief", "user:look", "assistant:a room", "user:again", "assistant:the room")
    segments = conversation_segments(messages, tokenizer)
    whole = tokenizer.apply_chat_template(messages, tokenize=False)
    assert "".join(text for text, _ in segments) == whole
    assert [text for text, trained in segments if trained] == [
        "<|im_start|>assistant\na room<|im_end|>\n",
        "<|im_start|>assistant\nthe room<|im_end|>\n",
    ]


def test_a_users_class_gives_the_same_rows(tmp_path: Path) -> None:
    path = write(tmp_path, prompt=["abc", "a"], response=["d", "bc"])
    code = tmp_path / "mine.py"
    code.write_text(
        "from verl.utils.dataset import SFTDataset\n"
        "class Mine:\n"
        "    def __init__(self, parquet_files, tokenizer, config):\n"
        "        assert config.get('max_length') == config.max_length == 9\n"
        "        self.inner = SFTDataset(parquet_files, tokenizer, {'max_length': 9})\n"
        "    def __len__(self): return len(self.inner)\n"
        "    def __getitem__(self, i): return self.inner[i]\n"
        "class Bare(Mine):\n"
        "    def __getitem__(self, i): return {'input_ids': self.inner[i]['input_ids']}\n"
    )
    plain = SFTDataConfig(prompt_key="prompt", response_key="response", max_length=9)
    want = token_rows(create_sft_dataset(str(path), plain, LetterTokenizer()), plain)
    custom = replace(plain, custom_cls=CustomClsConfig(str(code), "Mine"))
    got = token_rows(create_sft_dataset(str(path), custom, LetterTokenizer()), custom)
    for name in ("tokens", "targets", "offsets"):
        assert np.array_equal(getattr(got, name), getattr(want, name)), name
    for name, message in (("Bare", "item 0 must hold input_ids"), ("Absent", "defines no such name")):
        broken = replace(plain, custom_cls=CustomClsConfig(str(code), name))
        with pytest.raises(UserError, match=message):
            token_rows(create_sft_dataset(str(path), broken, LetterTokenizer()), broken)


@pytest.mark.parametrize(
    ("side", "tokens", "mask"),
    [
        ("left", [13, 14, 15, EOS], [1, 1, 1, 0]),
        ("right", [11, 12, 13, 14], [0, 1, 1, 0]),
    ],
)
def test_truncation_keeps_the_mask_on_the_response(
    tmp_path: Path, side: str, tokens: list[int], mask: list[int]
) -> None:
    path = write(tmp_path, prompt=["ab" if side == "right" else "abc"], response=["cde" if side == "right" else "de"])
    data = SFTDataset(path, LetterTokenizer(), {"max_length": 4, "truncation": side})
    assert data[0]["input_ids"].tolist() == tokens
    assert data[0]["loss_mask"].tolist() == mask


def test_truncation_extremes() -> None:
    tokenizer = LetterTokenizer()
    gone = tokenize_pairs(["abcdef"], ["g"], tokenizer, max_length=4, truncation="right")
    assert gone.num_targets.tolist() == [0]
    assert collate_rows(gone, [0], PAD).token_weights.sum() == 0
    no_prompt = tokenize_pairs(["abc"], ["defgh"], tokenizer, max_length=4, truncation="left")
    assert no_prompt.row(0).tolist() == [16, 17, 18, EOS]
    assert collate_rows(no_prompt, [0], PAD).token_weights.tolist() == [[0, 1, 1, 1]]


def test_too_long_row_is_named(tmp_path: Path) -> None:
    path = write(tmp_path, prompt=["a", "abc"], response=["d", "d"])
    with pytest.raises(UserError, match=r"row 1 has 5 tokens, more than data.max_length=4; .*truncation"):
        SFTDataset(path, LetterTokenizer(), {"max_length": 4})


def test_prompt_forms_nesting_weights_and_batched_calls(tmp_path: Path) -> None:
    chat = [{"role": "system", "content": "a"}, {"role": "user", "content": "bc"}]
    tokenizer = LetterTokenizer()
    plain = SFTDataset(write(tmp_path, prompt=["abc"] * 3, response=["d"] * 3), tokenizer)
    assert tokenizer.calls == [3, 3]
    path = write(tmp_path, prompt=[chat], response=["d"], w=[0.5])
    listed = SFTDataset(path, LetterTokenizer(), {"weight_key": "w", "prompt_dict_keys": ["question"]})
    assert listed.rows.row(0).tolist() == plain.rows.row(0).tolist()
    assert listed.rows.weights.tolist() == [0.5]
    nested = write(tmp_path, extra=[{"question": "abc", "answer": "d"}])
    data = SFTDataset(
        nested,
        LetterTokenizer(),
        {
            "prompt_key": "extra",
            "response_key": "extra",
            "prompt_dict_keys": ["question"],
            "response_dict_keys": ["answer"],
        },
    )
    assert data.rows.row(0).tolist() == plain.rows.row(0).tolist()


def test_bad_input_is_named(tmp_path: Path) -> None:
    def load(**config: Any) -> SFTDataset:
        return SFTDataset(path, LetterTokenizer(), config)

    path = tmp_path / "missing.parquet"
    with pytest.raises(UserError, match=r"data.train_files=.*missing.parquet does not exist"):
        load()
    path.write_text("no parquet")
    with pytest.raises(UserError, match="cannot be read as parquet"):
        load()
    path = write(tmp_path, prompt=["a"], response=["b"], number=[3], w=[-1.0])
    for kwargs, message in [
        ({"prompt_key": "question"}, "no column 'question' .*the columns are: prompt, response"),
        ({"response_key": "number"}, "row 0, column 'number' holds a int"),
        ({"prompt_key": "number"}, "row 0, column 'number': a prompt must be"),
        ({"weight_key": "w"}, "finite weights >= 0"),
        ({"truncation": "middle"}, "truncation=middle: expected one of error, left, right"),
        ({"promt_key": "prompt"}, "unknown config key promt_key; did you mean prompt_key"),
    ]:
        with pytest.raises(UserError, match=message):
            load(**kwargs)
    path = write(tmp_path, prompt=[{"x": "a"}], response=["b"])
    with pytest.raises(UserError, match=r"has no 'question' .*it has x"):
        load(prompt_dict_keys=["question"])


def test_plan_covers_the_batch_once_in_similar_lengths() -> None:
    lengths = np.random.default_rng(0).integers(1, 100, 50)
    batch = epoch_order(50, seed=1, epoch=0)[:21]
    plan = plan_global_batch(batch, lengths, micro_batch_size=4, world_size=2)
    assert plan.shape == (3, 2, 4)
    assert sorted(plan[plan >= 0]) == sorted(batch)
    flat = [lengths[micro[micro >= 0]] for micro in plan]
    assert all(before.min() >= after.max() for before, after in pairwise(flat))
    assert (epoch_order(50, 1, 0) == epoch_order(50, 1, 0)).all()
    assert (epoch_order(50, 1, 0) != epoch_order(50, 1, 1)).any()
    assert [steps_per_epoch(50, 21), steps_per_epoch(5, 21)] == [2, 1]
