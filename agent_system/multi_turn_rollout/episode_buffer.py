# SPDX-License-Identifier: Apache-2.0
"""Collects the live rows of each turn and turns them into one batch and into episode records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from agent_system.trajectory import SCHEMA_VERSION, Step, Trajectory
from verl.protocol import DataProto

__all__ = ["DATA_SOURCE", "EpisodeBuffer", "Seat", "TurnRecord"]

Info = dict[str, Any]

DATA_SOURCE = "text"
"""Names the rows and the validation metrics, as published runs do; environments with several sources come later."""


@dataclass(frozen=True)
class Seat:
    """One episode to be played: which task, in which group, as which member."""

    task: dict[str, Any]
    uid: str
    traj_uid: str
    member: int
    """Enters the sampling seed; differs between all episodes of one task in one step."""


@dataclass(frozen=True)
class TurnRecord:
    """What the next turn of some live seats produced; every list has one entry per entry of `seats`."""

    seats: np.ndarray
    """(N,) seat numbers."""
    tensors: Mapping[str, torch.Tensor]
    """prompts, responses, input_ids, ... as the engine returned them, (N, ...); empty when rows are not kept."""
    observations: Sequence[str]
    """Before the action; the anchor."""
    admissible: Sequence[Sequence[str]]
    """Before the action."""
    state_keys: Sequence[str]
    """Before the action."""
    responses: Sequence[str]
    rewards: np.ndarray
    dones: np.ndarray
    infos: Sequence[Info]
    """After the action."""
    next_observations: Sequence[str]


def _objects(values: Sequence[Any]) -> np.ndarray:
    column = np.empty(len(values), dtype=object)
    column[:] = values
    return column


class EpisodeBuffer:
    """Blocks of live rows; finished episodes cost nothing. Seats need not take their turns together."""

    def __init__(self, seats: Sequence[Seat]) -> None:
        self.seats = list(seats)
        self._turns: list[TurnRecord] = []
        self._numbers: list[np.ndarray] = []
        count = len(seats)
        self.rewards = np.zeros(count, dtype=np.float32)
        self.lengths = np.zeros(count, dtype=np.int64)
        self.tool_callings = np.zeros(count, dtype=np.float32)
        self.done = np.zeros(count, dtype=bool)
        self.infos: list[list[Info]] = [[] for _ in seats]
        self._steps: list[list[Step]] = [[] for _ in seats]
        self._final: list[str] = [""] * count

    @property
    def won(self) -> np.ndarray:
        """(episodes,) bool: the environment has reported success at some turn."""
        return np.fromiter(
            (any(info["won"] for info in infos) for infos in self.infos), dtype=bool, count=len(self.seats)
        )

    def add(self, turn: TurnRecord) -> None:
        """Take the next turn of seats that were alive."""
        self._turns.append(turn)
        self._numbers.append(self.lengths[turn.seats])
        self.rewards[turn.seats] += turn.rewards
        self.lengths[turn.seats] += 1
        self.done[turn.seats] |= turn.dones
        for row, seat in enumerate(turn.seats.tolist()):
            info = turn.infos[row]
            self.tool_callings[seat] += float(info.get("tool_calling", 0))
            self.infos[seat].append(info)
            self._final[seat] = turn.next_observations[row]
            self._steps[seat].append(
                Step(
                    step_index=len(self._steps[seat]),
                    observation=turn.observations[row],
                    admissible_actions=tuple(turn.admissible[row]),
                    response=turn.responses[row],
                    action=info["action"],
                    is_action_valid=info["is_action_valid"],
                    reward=float(turn.rewards[row]),
                    done=bool(turn.dones[row]),
                    state_key=turn.state_keys[row],
                )
            )

    def trajectories(self, env_name: str, policy: dict[str, Any]) -> list[Trajectory]:
        """One record per seat, in seat order."""
        records = []
        won = self.won
        for index, seat in enumerate(self.seats):
            last = self.infos[index][-1]
            score = last.get("task_score")
            records.append(
                Trajectory(
                    schema_version=SCHEMA_VERSION,
                    traj_uid=seat.traj_uid,
                    uid=seat.uid,
                    env_name=env_name,
                    task=last["task"],
                    policy=policy,
                    success=bool(won[index]),
                    episode_reward=float(self.rewards[index]),
                    task_score=None if score is None else float(score),
                    truncated=not bool(self.done[index]),
                    steps=tuple(self._steps[index]),
                    final_observation=self._final[index],
                )
            )
        return records

    def to_batch(self, success: Mapping[str, np.ndarray], meta_info: Mapping[str, Any]) -> DataProto:
        """All rows as one DataProto, ordered by seat, then turn.

        Args:
            success: values per key; their means become constant columns.
            meta_info: copied into the batch.
        """
        seats = np.concatenate([turn.seats for turn in self._turns])
        turns = np.concatenate(self._numbers)
        order = np.lexsort((turns, seats))
        tensors = {key: self._joined(key, order) for key in self._turns[0].tensors}
        columns = self._columns(seats[order], turns[order], order)
        columns |= {key: _objects([float(values.mean())] * len(order)) for key, values in success.items()}
        return DataProto.from_dict(tensors=tensors, non_tensors=columns, meta_info=dict(meta_info))

    def _joined(self, key: str, order: np.ndarray) -> torch.Tensor:
        """One tensor column in row order, each block's rows copied once to where they belong."""
        place = np.empty_like(order)
        place[order] = np.arange(len(order))
        blocks = [turn.tensors[key] for turn in self._turns]
        joined = blocks[0].new_empty((len(order), *blocks[0].shape[1:]))
        ends = np.cumsum([len(block) for block in blocks])
        for block, rows in zip(blocks, np.split(place, ends[:-1]), strict=True):
            joined.index_copy_(0, torch.from_numpy(rows), block)
        return joined

    def _columns(self, seats: np.ndarray, turns: np.ndarray, order: np.ndarray) -> dict[str, np.ndarray]:
        """Non-tensor columns in final row order; `seats`, `turns` are in that order too."""

        def gather(values: list[Any]) -> np.ndarray:
            return _objects(values)[order]

        infos = [info for turn in self._turns for info in turn.infos]
        per_seat = {
            "uid": _objects([seat.uid for seat in self.seats]),
            "traj_uid": _objects([seat.traj_uid for seat in self.seats]),
            "index": _objects(list(range(len(self.seats)))),
            "episode_rewards": self.rewards.astype(object),
            "episode_lengths": self.lengths.astype(np.float32).astype(object),
            "tool_callings": self.tool_callings.astype(object),
            "episode_success": _objects([bool(flag) for flag in self.won]),
            "episode_truncated": _objects([not bool(flag) for flag in self.done]),
        }
        columns = {name: values[seats] for name, values in per_seat.items()}
        columns |= {
            "data_source": _objects([DATA_SOURCE] * len(order)),
            "step_index": _objects(turns.tolist()),
            "anchor_obs": gather([obs for turn in self._turns for obs in turn.observations]),
            "state_key": gather([key for turn in self._turns for key in turn.state_keys]),
            "num_admissible": gather([len(row) for turn in self._turns for row in turn.admissible]),
            "action": gather([info["action"] for info in infos]),
            "rewards": gather([float(reward) for turn in self._turns for reward in turn.rewards]),
            "active_masks": _objects([True] * len(order)),
            "is_action_valid": np.asarray([info["is_action_valid"] for info in infos], dtype=bool)[order],
        }
        return columns
