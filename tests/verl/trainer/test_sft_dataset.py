# SPDX-License-Identifier: Apache-2.0
"""Fine-tuning rows: masks, truncation, weights, bad input, and the order of rows."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from verl.utils.dataset import SFTDataset
from verl.utils.dataset.sft_batching import epoch_order, plan_global_batch, steps_per_epoch
from verl.utils.dataset.sft_dataset import TokenRows, collate_rows, tokenize_pairs
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
        assert tokenize is False and add_generation_prompt is True
        return "".join(message["content"] for message in conversation)


def write(tmp_path: Path, **columns: Any) -> Path:
    path = tmp_path / "rows.parquet"
    pd.DataFrame(columns).to_parquet(path)
    return path


def test_five_token_row(tmp_path: Path) -> None:
    """Prompt a b c, response d, end: the first response token and the end token are predicted, nothing else."""
    data = SFTDataset(write(tmp_path, prompt=["abc"], response=["d"]), LetterTokenizer(), max_length=7)
    item = {name: tensor.tolist() for name, tensor in data[0].items()}
    assert item == {
        "input_ids": [11, 12, 13, 14, EOS, PAD, PAD],
        "attention_mask": [1, 1, 1, 1, 1, 0, 0],
        "position_ids": [0, 1, 2, 3, 4, 0, 0],
        "loss_mask": [0, 0, 1, 1, 0, 0, 0],
    }
    batch = collate_rows(data.rows, [0], PAD)
    assert batch.loss_weights.tolist() == [[0, 0, 1, 1, 0]]
    assert data.rows.num_targets.tolist() == [2]


def test_collate_trims_to_the_longest_row_and_fills() -> None:
    rows = TokenRows.from_ids([[1, 2, 3], [4]], [[5, 9], [6, 9]], [1.0, 0.25])
    batch = collate_rows(rows, [1, -1, 0], PAD)
    assert batch.input_ids.tolist() == [[4, 6, 9, 0, 0], [0, 0, 0, 0, 0], [1, 2, 3, 5, 9]]
    assert batch.attention_mask.tolist() == [[1, 1, 1, 0, 0], [1, 0, 0, 0, 0], [1, 1, 1, 1, 1]]
    assert batch.loss_weights.tolist() == [[0.25, 0.25, 0, 0, 0], [0] * 5, [0, 0, 1, 1, 0]]
    assert collate_rows(rows, [1], PAD).input_ids.shape == (1, 3)


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
    data = SFTDataset(path, LetterTokenizer(), max_length=4, truncation=side)
    assert data[0]["input_ids"].tolist() == tokens
    assert data[0]["loss_mask"].tolist() == mask


def test_truncation_extremes() -> None:
    tokenizer = LetterTokenizer()
    gone = tokenize_pairs(["abcdef"], ["g"], tokenizer, max_length=4, truncation="right")
    assert gone.num_targets.tolist() == [0]
    assert collate_rows(gone, [0], PAD).loss_weights.sum() == 0
    no_prompt = tokenize_pairs(["abc"], ["defgh"], tokenizer, max_length=4, truncation="left")
    assert no_prompt.row(0).tolist() == [16, 17, 18, EOS]
    assert collate_rows(no_prompt, [0], PAD).loss_weights.tolist() == [[1, 1, 1, 0]]


def test_too_long_row_is_named(tmp_path: Path) -> None:
    path = write(tmp_path, prompt=["a", "abc"], response=["d", "d"])
    with pytest.raises(UserError, match=r"row 1 has 5 tokens, more than data.max_length=4; .*truncation"):
        SFTDataset(path, LetterTokenizer(), max_length=4)


def test_prompt_forms_nesting_weights_and_batched_calls(tmp_path: Path) -> None:
    chat = [{"role": "system", "content": "a"}, {"role": "user", "content": "bc"}]
    tokenizer = LetterTokenizer()
    plain = SFTDataset(write(tmp_path, prompt=["abc"] * 3, response=["d"] * 3), tokenizer)
    assert tokenizer.calls == [3, 3]
    path = write(tmp_path, prompt=[chat], response=["d"], w=[0.5])
    listed = SFTDataset(path, LetterTokenizer(), weight_key="w", prompt_dict_keys=["question"])
    assert listed.rows.row(0).tolist() == plain.rows.row(0).tolist()
    assert listed.rows.weights.tolist() == [0.5]
    nested = write(tmp_path, extra=[{"question": "abc", "answer": "d"}])
    data = SFTDataset(
        nested,
        LetterTokenizer(),
        prompt_key="extra",
        response_key="extra",
        prompt_dict_keys=["question"],
        response_dict_keys=["answer"],
    )
    assert data.rows.row(0).tolist() == plain.rows.row(0).tolist()


def test_bad_input_is_named(tmp_path: Path) -> None:
    def load(**kwargs: Any) -> SFTDataset:
        return SFTDataset(path, LetterTokenizer(), **kwargs)

    path = tmp_path / "missing.parquet"
    with pytest.raises(UserError, match=r"data.train_files=.*missing.parquet is not a file"):
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
        ({"truncation": "middle"}, "data.truncation='middle'"),
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
