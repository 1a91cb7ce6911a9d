# SPDX-License-Identifier: Apache-2.0
"""Episodes against a chat endpoint: many at once, each turn in the environment manager that training uses.

Every episode under way has a one-slot manager of its own (a *lane*), so that nobody waits for the slowest answer of a
turn. All of them live in one thread: environments and files need no locks, only requests overlap.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from agent_system.environments import EnvironmentManagerBase
from agent_system.multi_turn_rollout.episode_buffer import EpisodeBuffer, Seat, TurnRecord
from agent_system.multi_turn_rollout.seats import make_seats, sampling_seed
from agent_system.trajectory import Trajectory, task_key
from examples.prompt_agent.answers import ODDITIES, Answer
from examples.prompt_agent.client import ChatClient, backoff_generator

__all__ = ["Run", "Usage", "plan_seats", "play", "play_episode", "run_name"]

_SCOPE = "prompt_agent"
# Endpoints differ in how large a seed may be; all take a positive 32-bit one.
_SEED_BITS = 0x7FFFFFFF


@dataclass
class Usage:
    """What one episode took; part of its record as `policy.usage`."""

    requests: int = 0
    """Answers received."""
    retries: int = 0
    """Tries that failed before them; the endpoint may have counted tokens for those too."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    without_usage: int = 0
    """Answers that did not say both token counts: the sums are too small."""
    at_token_limit: int = 0
    """Answers that the endpoint stopped at `max_tokens`."""
    oddities: dict[str, int] = field(default_factory=dict)
    """Answers without an ordinary text, by kind (`answers.ODDITIES`)."""

    def count(self, answer: Answer, retries: int) -> None:
        """Take one answer."""
        self.requests += 1
        self.retries += retries
        self.prompt_tokens += answer.prompt_tokens or 0
        self.completion_tokens += answer.completion_tokens or 0
        self.without_usage += answer.prompt_tokens is None or answer.completion_tokens is None
        self.at_token_limit += answer.at_token_limit
        if answer.oddity is not None:
            self.oddities[answer.oddity] = self.oddities.get(answer.oddity, 0) + 1

    @classmethod
    def total(cls, parts: Iterable[Usage]) -> Usage:
        """The sum."""
        rows = list(parts)
        names = ("requests", "retries", "prompt_tokens", "completion_tokens", "without_usage", "at_token_limit")
        kinds = {kind: sum(row.oddities.get(kind, 0) for row in rows) for kind in ODDITIES}
        return cls(
            **{name: sum(getattr(row, name) for row in rows) for name in names},
            oddities={kind: count for kind, count in kinds.items() if count},
        )


@dataclass(frozen=True)
class Run:
    """What all episodes of a run share."""

    policy: Mapping[str, Any]
    """kind, model, sampling, seed, as in the records."""
    seed: int
    max_steps: int


def run_name(settings: Mapping[str, Any]) -> str:
    """Prefix of the episodes' ids: a function of everything that decides what is played and how (JSON types)."""
    text = json.dumps(settings, sort_keys=True)
    return f"prompt-{hashlib.sha256(text.encode('utf-8')).hexdigest()[:12]}"


def plan_seats(manager: EnvironmentManagerBase, episodes: int, group_size: int, prefix: str) -> list[Seat]:
    """`episodes` seats in groups of one task each, tasks in the manager's order.

    One task at a time is drawn, so that a longer plan starts with the shorter one.
    """
    tasks = [manager.draw_tasks(1)[0] for _ in range(episodes // group_size)]
    return make_seats(tasks, group_size, prefix)


async def play_episode(manager: EnvironmentManagerBase, seat: Seat, client: ChatClient, run: Run) -> Trajectory:
    """Play one episode in slot 0 of `manager`.

    Raises:
        UserError: the endpoint refuses a request or keeps failing.
    """
    buffer, usage = EpisodeBuffer([seat]), Usage()
    task = task_key(seat.task)
    obs, infos = manager.reset({"tasks": [seat.task]})
    for turn in range(run.max_steps):
        seed = sampling_seed(run.seed, _SCOPE, task, seat.member, turn) & _SEED_BITS
        jitter = backoff_generator(run.seed, seat.traj_uid, turn)
        answer, retries = await client.complete(obs["text"][0], seed, jitter)
        usage.count(answer, retries)
        next_obs, rewards, dones, next_infos = manager.step([answer.text])
        buffer.add(
            TurnRecord(
                seats=np.zeros(1, dtype=np.int64),
                tensors={},
                observations=obs["anchor"],
                admissible=[info["admissible_actions"] for info in infos],
                state_keys=[info["state_key"] for info in infos],
                responses=[answer.text],
                rewards=rewards,
                dones=dones,
                infos=next_infos,
                next_observations=next_obs["anchor"],
            )
        )
        if dones[0]:
            break
        obs, infos = next_obs, next_infos
    return buffer.trajectories(manager.env_name, {**run.policy, "usage": asdict(usage)})[0]


async def play(
    seats: Sequence[Seat],
    lanes: Sequence[EnvironmentManagerBase],
    client: ChatClient,
    run: Run,
    finished: Callable[[Trajectory], object],
) -> None:
    """Play every seat once, as many at a time as there are lanes; `finished` gets each episode as it ends.

    Raises:
        UserError: see `play_episode`; the episodes under way are given up.
    """
    waiting = iter(seats)
    try:
        async with asyncio.TaskGroup() as group:
            for lane in lanes:
                group.create_task(_serve(lane, waiting, client, run, finished))
    except ExceptionGroup as errors:
        # Lanes fail for the same reason: the first one says it.
        raise errors.exceptions[0] from None


async def _serve(
    lane: EnvironmentManagerBase,
    waiting: Iterator[Seat],
    client: ChatClient,
    run: Run,
    finished: Callable[[Trajectory], object],
) -> None:
    for seat in waiting:
        finished(await play_episode(lane, seat, client, run))
