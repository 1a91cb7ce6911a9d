# SPDX-License-Identifier: Apache-2.0
"""TOY: a deterministic text game with four states that is won at depth 2.

    hall --open the <colour> door--> room --take the <colour> key--> vault (won)
    hall --open another door--> pit; in the pit and in the room, `go back` leads to the hall

The task names the colour. Registered as environment `toy` by `register_toy`; tests build it with `make_toy_manager`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from agent_system.environments import register
from agent_system.environments.base import EnvironmentManagerBase
from agent_system.environments.env_package.alfworld.projection import alfworld_projection
from agent_system.environments.vector_env import TextEnv, VectorEnv, WorkerResources, make_vector_env
from verl.utils.errors import UserError

COLOURS = ("red", "blue", "green")
TOY_TASKS = tuple({"name": f"toy-{colour}", "task_type": "toy"} for colour in COLOURS)


class ToyEnv:
    """One TOY game."""

    def __init__(self) -> None:
        self.state, self.colour = "hall", ""

    def reset(self, task: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        self.state, self.colour = "hall", task["name"].removeprefix("toy-")
        return self._text(), self._info()

    def step(self, action: str) -> tuple[str, float, bool, dict[str, Any]]:
        if action in self._commands():
            self.state = self._next(action)
            text = self._text()
        else:
            text = "Nothing happens."
        won = self.state == "vault"
        return text, 10.0 * won, won, self._info()

    def close(self) -> None:
        self.state = "closed"

    def _next(self, action: str) -> str:
        if action == "go back":
            return "hall"
        if action.startswith("take"):
            return "vault"
        return "room" if self.colour in action else "pit"

    def _commands(self) -> list[str]:
        if self.state == "hall":
            return [f"open the {colour} door" for colour in COLOURS]
        return {"room": ["go back", f"take the {self.colour} key"], "pit": ["go back"]}.get(self.state, ["wait"])

    def _text(self) -> str:
        return f"You are in the {self.state}."

    def _info(self) -> dict[str, Any]:
        return {
            "won": self.state == "vault",
            "admissible_commands": self._commands(),
            "state_key": f"{self.colour}:{self.state}",
        }


class TroubleEnv(ToyEnv):
    """Obeys TOY's commands and a few that make trouble."""

    def reset(self, task: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        if task["name"] == "unreadable":
            raise UserError("the game file x is unreadable; remove it")
        if task["name"] == "hang":
            time.sleep(60)
        return super().reset(task)

    def step(self, action: str) -> tuple[str, float, bool, dict[str, Any]]:
        if action == "crash":
            raise ZeroDivisionError("by hand")
        if action == "die":
            os._exit(3)
        if action == "hang":
            time.sleep(60)
        return super().step(action)


class SlowEnv(ToyEnv):
    """Steps take a while, so that something can happen in the middle of one."""

    def step(self, action: str) -> tuple[str, float, bool, dict[str, Any]]:
        time.sleep(0.4)
        return super().step(action)


class ForgetfulEnv(ToyEnv):
    """Describes the room differently in every process: its episodes cannot be played again."""

    def _text(self) -> str:
        return f"{super()._text()} {os.getpid()}" if self.state == "room" else super()._text()


class ToyManager(EnvironmentManagerBase):
    """Prompt: colour, past turns, place, commands."""

    def build_text_obs(self, slots: Sequence[int], max_history: int | None = None) -> list[str]:
        prompts = []
        for slot in slots:
            shown = self.history_shown(slot) if max_history is None else min(max_history, self.history_shown(slot))
            history = self.history(slot)
            past = [f"{obs} >{action}" for obs, action in history[len(history) - shown :]]
            colour = self._tasks[slot]["name"].removeprefix("toy-")
            commands = self._infos[slot]["admissible_actions"]
            prompts.append("\n".join([f"Find the {colour} key.", *past, self._raw[slot], *commands]))
        return prompts


def toy_manager(
    num_slots: int,
    *,
    num_workers: int = 0,
    history_length: int = 2,
    seed: int = 0,
    tasks: Sequence[dict[str, Any]] = TOY_TASKS,
    factory: Callable[[], TextEnv] = ToyEnv,
    envs: VectorEnv | None = None,
) -> ToyManager:
    """A manager with `num_slots` slots; `num_workers=0` plays in this process."""
    config = SimpleNamespace(env=SimpleNamespace(history_length=history_length))
    slots = envs or make_vector_env(factory, num_slots, num_workers, WorkerResources())
    return ToyManager(
        slots, alfworld_projection, config, env_name="toy", tasks=tasks, seed=seed, split="toy", panel_hash="toy"
    )


def make_toy_manager(config: Any, is_train: bool) -> ToyManager:
    """Entry point of the registry: train_batch_size * n slots, or val_batch_size slots."""
    group = max(config.env.rollout.n, 1)
    slots = config.data.train_batch_size * group if is_train else config.data.val_batch_size or len(TOY_TASKS)
    return toy_manager(
        slots,
        num_workers=0,
        history_length=config.env.history_length,
        seed=config.env.seed + (0 if is_train else 1000),
    )


def register_toy() -> None:
    """Make `env.env_name=toy` known."""
    register("toy", "tests.helpers.toy_env:make_toy_manager")


def say(action: str) -> str:
    """A well-formed response."""
    return f"<think>go</think><action>{action}</action>"
