# SPDX-License-Identifier: Apache-2.0
"""A policy's worker group without a model: responses come from a function of (prompt text, sampling seed)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from verl.protocol import DataProto

Policy = Callable[[str, int], str]


@dataclass
class Answer:
    """A generate call that was answered when it was made; `fetched` says whether anybody has taken the answer."""

    parts: list[DataProto]
    fetched: bool = False

    def result(self) -> list[DataProto]:
        self.fetched = True
        return self.parts


class FakeActorGroup:
    """Has `world_size` and `submit` like a real group; keeps what it was asked in `requests`, with `answers`.

    As a real engine, each rank returns a part of its rows when not all are waited for: the shortest responses first.
    """

    def __init__(self, tokenizer: Any, policy: Policy, *, response_length: int = 48, world_size: int = 1) -> None:
        self.world_size = world_size
        self.requests: list[DataProto] = []
        """Of every call the new rows, of all ranks."""
        self.answers: list[Answer] = []
        self.sampled: list[list[int]] = []
        self._under_way: list[dict[int, DataProto]] = [{} for _ in range(world_size)]
        self._tokenizer = tokenizer
        self._policy = policy
        self._length = response_length

    def submit(self, method_name: str, parts: list[DataProto]) -> Answer:
        assert method_name == "generate_some" and len(parts) == self.world_size
        assert max(map(len, parts)) - min(map(len, parts)) <= 1 or parts[0].meta_info["share"] < 1
        self.requests.append(DataProto.concat(parts))
        self.answers.append(Answer([self.generate_some(part, rank) for rank, part in enumerate(parts)]))
        return self.answers[-1]

    def generate_some(self, data: DataProto, rank: int = 0) -> DataProto:
        answered = self.generate_sequences(data)
        answered.batch["row"] = data.batch["row"]
        rows = self._under_way[rank]
        rows.update((key, answered[number : number + 1]) for number, key in enumerate(data.batch["row"].tolist()))

        def length(key: int) -> tuple[int, int]:
            return int(rows[key].batch["attention_mask"].sum()), key

        ended = sorted(rows, key=length)[: math.ceil(data.meta_info["share"] * len(rows))]
        return DataProto.concat([rows.pop(key) for key in ended]) if ended else answered[:0]

    def generate_sequences(self, data: DataProto) -> DataProto:
        prompts, mask = data.batch["input_ids"], data.batch["attention_mask"]
        texts = [
            self._tokenizer.decode(ids[keep.bool()], skip_special_tokens=False) for ids, keep in zip(prompts, mask)
        ]
        answers = [self._policy(text, seed) for text, seed in zip(texts, data.batch["sampling_seed"].tolist())]
        pad, eos = data.meta_info["pad_token_id"], data.meta_info["eos_token_id"]
        responses = torch.full((len(data), self._length), pad, dtype=torch.int64)
        answer_mask = torch.zeros_like(responses)
        for row, answer in enumerate(answers):
            ids = (self._tokenizer(answer, add_special_tokens=False)["input_ids"] + [eos])[: self._length]
            self.sampled.append(ids)
            responses[row, : len(ids)] = torch.tensor(ids)
            answer_mask[row, : len(ids)] = 1
        full_mask = torch.cat([mask, answer_mask], dim=1)
        log_probs = torch.where(answer_mask.bool(), -0.5, -1.0)
        return DataProto.from_dict(
            tensors={
                "prompts": prompts,
                "responses": responses,
                "input_ids": torch.cat([prompts, responses], dim=1),
                "attention_mask": full_mask,
                "position_ids": (full_mask.cumsum(dim=1) - 1).clamp(min=0),
                "rollout_log_probs": log_probs,
            },
            meta_info={"generate_s": 0.0},
        )


def choose_command(prompt: str, seed: int) -> str:
    """A well-formed response with one of the commands at the end of a TOY prompt, picked by the seed."""
    user = prompt.rsplit("<|im_end|>", 1)[0]
    commands = user.split("You are in the ")[-1].split("Nothing happens.")[-1].split("\n")[1:]
    return f"<think>{seed % 7}</think><action>{commands[seed % len(commands)]}</action>"
