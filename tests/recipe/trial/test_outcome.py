# SPDX-License-Identifier: Apache-2.0
"""What a turn led to, as a text, and where it stands in the prompt."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from agent_system.trajectory import Step, Trajectory
from recipe.trial import outcome
from recipe.trial.hindsight import HindsightPrompts
from recipe.trial.outcome import Wording, outcome_views, register_wording
from tests.helpers.tiny import make_tiny_tokenizer
from verl.protocol import DataProto
from verl.trainer.ppo.columns import MODEL_COLUMNS

RESPONSE = 3
QWEN3_LIKE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
    "{% endif %}"
)
"""A chat template that writes an empty thought where thinking is switched off."""


def episode(env_name: str = "alfworld", **changes: Any) -> Trajectory:
    steps = tuple(
        Step(index, seen, (), None, "go", True, 0.0, False, "k") for index, seen in enumerate(["hall", "room", "pit"])
    )
    built = Trajectory(1, "t", "u", env_name, {}, {}, False, 0.0, None, False, steps, "vault")
    return replace(built, **changes)


def test_a_view_is_the_next_observation_and_the_last_one_the_end() -> None:
    views = outcome_views(episode(success=True))
    assert views[:2] == ["\n\nThis turn leads to:\nroom", "\n\nThis turn leads to:\npit"]
    assert views[2] == "\n\nThis turn leads to: the task is solved.\nvault"
    assert "solved" not in "".join(views[:2]) and "hall" not in "".join(views)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "the task is not solved.\nvault"),
        ({"truncated": True}, "the task is not solved, and no turns are left.\nvault"),
        ({"env_name": "webshop", "task_score": 2 / 3}, "not exactly what was asked for (score 0.67 of 1).\nvault"),
        (
            {"env_name": "Webshop/x", "success": True, "task_score": 1.0},
            "the purchase is exactly what was asked for.\n",
        ),
        ({"env_name": "webshop", "truncated": True, "task_score": 0.0}, "nothing was bought, and no turns are left.\n"),
    ],
)
def test_every_kind_of_end(changes: Mapping[str, Any], words: str) -> None:
    assert words in outcome_views(episode(**changes))[-1]


def step_after(seen: str, key: str, action: str = "click[red]") -> Step:
    return Step(0, seen, (), None, action, True, 0.0, False, key)


def test_an_effect_that_the_observation_hides_is_told() -> None:
    steps = tuple(
        step_after(seen, key) for seen, key in [("shirt", "1"), ("shirt", "2"), ("shirt", "2"), ("cart", "3")]
    )
    told = "the option is selected (click[red]), and the page stays the same"
    assert outcome_views(episode("webshop", steps=steps))[:3] == [
        f"\n\nThis turn leads to: {told}.\nshirt",
        "\n\nThis turn leads to:\nshirt",  # nothing has changed
        "\n\nThis turn leads to:\ncart",  # what has changed is seen
    ]
    general = outcome_views(episode("maze", steps=steps))[0]
    assert general == "\n\nThis turn leads to: what is seen stays the same, but click[red] had an effect.\nshirt"


def test_wording_plugs_in_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outcome, "_WORDINGS", dict(outcome._WORDINGS))
    register_wording("Maze", Wording(success="the exit is found", unseen="{action} turns {the} lamp on"))
    assert "leads to: the exit is found.\n" in outcome_views(episode("maze/large", success=True))[-1]
    steps = (step_after("dark", "1", "press {x}"), step_after("dark", "2"))
    assert "leads to: press {x} turns {the} lamp on.\n" in outcome_views(episode("maze", steps=steps))[0]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return make_tiny_tokenizer()


def rows(tokenizer: Any, messages: list[str], width: int, cut: int = 0) -> DataProto:
    """Left-padded prompts, as the rollout makes them, each with another number of response tokens.

    cut: so many tokens of the first prompt's end are missing.
    """
    texts = [
        tokenizer.apply_chat_template([{"role": "user", "content": m}], add_generation_prompt=True, tokenize=False)
        for m in messages
    ]
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    ids[0] = ids[0][: len(ids[0]) - cut]
    prompts = torch.tensor([[0] * (width - len(row)) + row for row in ids])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in ids])
    responses = torch.arange(len(ids) * RESPONSE).reshape(-1, RESPONSE) + 20
    said = (torch.arange(RESPONSE) < torch.arange(1, len(ids) + 1)[:, None]).long()
    attention = torch.cat([mask, said], dim=1)
    columns = {
        "input_ids": torch.cat([prompts, responses], dim=1), "attention_mask": attention,
        "position_ids": (attention.cumsum(-1) - 1).clamp(min=0), "responses": responses,
    }  # fmt: skip
    return DataProto.from_dict(columns)


def real_tokens(batch: DataProto, row: int) -> list[int]:
    """The row's prompt without padding; checks where the padding is and how positions count."""
    prompt_mask = batch.batch["attention_mask"][row, :-RESPONSE]
    assert (prompt_mask.diff() >= 0).all()
    positions = batch.batch["position_ids"][row][batch.batch["attention_mask"][row].bool()]
    assert positions.tolist() == list(range(len(positions)))
    tokens: list[int] = batch.batch["input_ids"][row, :-RESPONSE][prompt_mask.bool()].tolist()
    return tokens


def test_the_outcome_stands_at_the_end_of_the_user_message(tokenizer: Any) -> None:
    messages, outcomes = ["go to cabinet 1.", "look"], ["\n\nThis turn leads to:\na mug 1", "\nnothing"]
    batch = rows(tokenizer, messages, 40)
    built, counts = HindsightPrompts(tokenizer, 100).build(batch, outcomes)
    for row, (message, seen) in enumerate(zip(messages, outcomes, strict=True)):
        text = tokenizer.decode(real_tokens(built, row), skip_special_tokens=False)
        assert text == f"<|im_start|>user\n{message}{seen}<|im_end|>\n<|im_start|>assistant\n"
    assert counts == {"outcomes_shortened": 0, "outcomes_misplaced": 0}
    assert torch.equal(built.batch["responses"], batch.batch["responses"])
    for name in ("input_ids", "attention_mask"):
        assert torch.equal(built.batch[name][:, -RESPONSE:], batch.batch[name][:, -RESPONSE:])
    # Only as wide as the longest row.
    assert built.batch["attention_mask"][:, 0].any()


def test_a_long_outcome_loses_its_end(tokenizer: Any) -> None:
    batch = rows(tokenizer, ["look", "look"], 30)
    long = tokenizer("\n".join("abcdefgh" for _ in range(5)), add_special_tokens=False)["input_ids"]
    prompts = HindsightPrompts(tokenizer, 6)
    built, counts = prompts.build(batch, [tokenizer.decode(long), "a"])
    tail = prompts.tail.tolist()
    plain = real_tokens(batch, 0)
    assert counts == {"outcomes_shortened": 1, "outcomes_misplaced": 0} and plain[-len(tail) :] == tail
    assert real_tokens(built, 0) == [*plain[: -len(tail)], *long[:6], *tail]
    assert len(real_tokens(built, 1)) == len(plain) + 1


def test_a_prompt_whose_end_was_cut_off_gets_the_outcome_there(tokenizer: Any) -> None:
    batch = rows(tokenizer, ["go to cabinet 1.", "look"], 40, cut=2)
    built, counts = HindsightPrompts(tokenizer, 100).build(batch, ["\na", "\nb"])
    assert counts == {"outcomes_shortened": 0, "outcomes_misplaced": 1}
    added = tokenizer("\na", add_special_tokens=False)["input_ids"]
    assert real_tokens(built, 0) == [*real_tokens(batch, 0), *added]
    assert tokenizer.decode(real_tokens(built, 1)).endswith("look\nb<|im_end|>\n<|im_start|>assistant\n")


def test_without_an_outcome_the_rows_are_the_same(tokenizer: Any) -> None:
    batch = rows(tokenizer, ["go to cabinet 1.", "look"], 40)
    built, _ = HindsightPrompts(tokenizer, 5).build(batch, ["", ""])
    for row in range(2):
        assert real_tokens(built, row) == real_tokens(batch, row)


def test_a_prompt_shorter_than_the_tail_and_a_template_without_one(tokenizer: Any) -> None:
    prompts = HindsightPrompts(tokenizer, 5)
    tiny = rows(tokenizer, ["a"], 20)
    narrow = DataProto.from_dict({name: tiny.batch[name][:, -RESPONSE - 1 :] for name in MODEL_COLUMNS})
    narrow.batch["position_ids"] = (narrow.batch["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    built, _ = prompts.build(narrow, ["b"])
    assert real_tokens(built, 0) == [*real_tokens(narrow, 0), *tokenizer("b", add_special_tokens=False)["input_ids"]]
    plain = make_tiny_tokenizer()
    plain.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    bare = HindsightPrompts(plain, 5)
    assert bare.tail.tolist() == []
    built, _ = bare.build(narrow, ["b"])
    assert len(real_tokens(built, 0)) == 2


def test_thinking_switched_off_is_part_of_the_tail() -> None:
    qwen3_like = make_tiny_tokenizer()
    qwen3_like.chat_template = QWEN3_LIKE
    thinking, silent = (
        HindsightPrompts(qwen3_like, 5, {"enable_thinking": flag}).tail.tolist() for flag in (True, False)
    )
    assert qwen3_like.decode(silent) == "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    assert silent[: len(thinking)] == thinking
