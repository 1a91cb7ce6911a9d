# SPDX-License-Identifier: Apache-2.0
"""A rollout as it is without shrinking: every slot is built into a prompt and generated at every turn to the end.

An independent, plain loop to compare the collector with; what finished episodes "say" is thrown away.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from agent_system.environments.base import EnvironmentManagerBase
from agent_system.multi_turn_rollout.episode_buffer import Seat
from agent_system.multi_turn_rollout.rollout_loop import TrajectoryCollector
from agent_system.multi_turn_rollout.seats import sampling_seed
from agent_system.multi_turn_rollout.tokenize import PromptEncoder
from agent_system.trajectory import task_key
from verl.protocol import DataProto


@dataclass
class AllSlots:
    """What the loop produced."""

    columns: dict[str, torch.Tensor]
    """Of the rows that count, ordered by episode, then turn."""
    rewards: list[float]
    """Of the same rows."""
    tokens: int
    """Generated in all."""
    finished_tokens: int
    """Of those, for episodes that had ended."""


def play_all_slots(
    collector: TrajectoryCollector,
    tokenizer: Any,
    envs: EnvironmentManagerBase,
    actor: Any,
    seats: Sequence[Seat],
    *,
    step: int,
) -> AllSlots:
    """Play one episode per seat with the collector's settings; truncation is not covered."""
    settings = collector.settings
    encoder = PromptEncoder(tokenizer, settings.max_prompt_length, "error", settings.chat_template_kwargs)
    meta = {
        **settings.train_sampling.as_dict(),
        "validate": False,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    done = [False] * len(seats)
    rows: list[tuple[int, int, dict[str, torch.Tensor], float]] = []
    tokens = finished_tokens = 0
    obs, _ = envs.reset({"tasks": [seat.task for seat in seats]})
    prompts = list(obs["text"])
    for turn in range(settings.max_steps):
        encoded = encoder.encode(prompts, [0] * len(seats), lambda rows, turns: [])
        seeds = [sampling_seed(settings.seed, f"step{step}", task_key(seat.task), seat.member, turn) for seat in seats]
        request = DataProto.from_dict(
            {
                "input_ids": encoded.input_ids,
                "attention_mask": encoded.attention_mask,
                "position_ids": encoded.position_ids,
                "sampling_seed": torch.tensor(seeds, dtype=torch.int64),
            },
            meta_info=dict(meta),
        )
        out = actor.generate_sequences(request).batch
        lengths = out["attention_mask"][:, -out["responses"].shape[1] :].sum(dim=1).tolist()
        tokens += sum(lengths)
        finished_tokens += sum(length for length, over in zip(lengths, done) if over)
        texts = [
            tokenizer.decode(ids[:length], skip_special_tokens=True, clean_up_tokenization_spaces=False)
            for ids, length in zip(out["responses"].tolist(), lengths)
        ]
        for slot in [slot for slot in range(len(seats)) if not done[slot]]:
            after, reward, over, _ = envs.step([texts[slot]], [slot])
            rows.append((slot, turn, {name: column[slot] for name, column in out.items()}, float(reward[0])))
            prompts[slot] = after["text"][0]
            done[slot] = bool(over[0])
    rows.sort(key=lambda row: row[:2])
    columns = {name: torch.stack([row[2][name] for row in rows]) for name in rows[0][2]}
    return AllSlots(columns, [row[3] for row in rows], tokens, finished_tokens)
