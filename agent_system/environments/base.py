# SPDX-License-Identifier: Apache-2.0
"""The environment manager contract and everything that text environments share.

A manager turns a vector env into prompts and model text into actions:

    obs, infos = manager.reset({"tasks": tasks})          # one task per slot
    obs, rewards, dones, infos = manager.step(texts, slots)  # model text for the slots still alive
    manager.success_evaluator(...)                        # after the last turn

`obs` is `{"text": prompts, "image": None, "anchor": raw observations}`; `text[i]` is the whole user message for slot
`slots[i]`, `anchor[i]` is what the environment said, without history, and is compared between episodes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from agent_system.environments.prompt_builder import PromptBuilder
from agent_system.environments.task_stream import TaskStream
from agent_system.environments.vector_env import Info, Task, VectorEnv
from agent_system.memory import SimpleMemory

__all__ = ["EnvironmentManagerBase", "ManagerConfig", "Projection", "to_numpy"]

Obs = dict[str, Any]

# Model texts -> (actions, 0/1 flags). Never raises, never changes its input.
Projection = Callable[[list[str]], tuple[list[str], list[int]]]


class _ManagerSection(Protocol):
    @property
    def history_length(self) -> int: ...


class ManagerConfig(Protocol):
    """What a manager reads of the configuration."""

    @property
    def env(self) -> _ManagerSection: ...


def to_numpy(data: Any) -> np.ndarray:
    """Tensor (any device), number, bool, list or tuple -> ndarray; an ndarray comes back as it is.

    Raises:
        TypeError: anything else.
    """
    if isinstance(data, np.ndarray):
        return data
    if isinstance(data, int | float | bool | list | tuple | np.generic):
        return np.asarray(data)
    if hasattr(data, "detach"):
        array: np.ndarray = data.detach().cpu().numpy()
        return array
    raise TypeError(f"cannot turn {type(data).__name__} into an array")


class EnvironmentManagerBase:
    """Shared step, reset and success evaluation. A subclass sets `builder`, or writes `build_text_obs`, and may extend
    the hooks.

    Every info dict of `reset` and `step` carries: `won` (bool), `admissible_actions` (list of str), `state_key` (str,
    the facts after the step), `task` (dict: what rebuilds the episode, plus `instruction` and `task_type`). Those of
    `step` also: `action` (str, as sent), `is_action_valid` (bool: the text had the demanded form), `is_admissible`
    (bool: the environment offered this action), `is_malformed` (bool: valid form, but no usable action in it).
    Optional: `tool_calling` (0/1), `task_score` (float).
    """

    builder: PromptBuilder | None = None
    """Makes the prompts of `build_text_obs`."""

    def __init__(
        self,
        envs: VectorEnv,
        projection_f: Projection,
        config: ManagerConfig,
        *,
        env_name: str = "",
        tasks: Sequence[Task] = (),
        seed: int = 0,
        split: str = "train",
        panel_hash: str = "",
        data_dir: Path | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> None:
        """
        Args:
            envs: the slots; closed by `close`.
            projection_f: model texts -> actions and format flags.
            config: only `config.env.history_length` is read here.
            env_name: name in trajectory records.
            tasks: what `draw_tasks` draws from and validation plays; may be empty when `reset` always gets tasks.
            seed: seed of the task order.
            split: name of the task set in reports.
            panel_hash: hash of the task list in reports.
            data_dir: folder that paths in tasks are relative to, where the environment has one.
            metadata: what the record of a run says about the environment's data (JSON types).
        """
        self.envs = envs
        self.projection_f = projection_f
        self.config = config
        self.env_name = env_name
        self.split = split
        self.panel_hash = panel_hash
        self.data_dir = data_dir
        self.metadata = dict(metadata or {})
        self.memory = SimpleMemory()
        self.task_stream = TaskStream(tasks, seed) if tasks else None
        self._tasks: list[Task] = []
        self._raw: list[str] = []
        self._infos: list[Info] = []

    @property
    def num_slots(self) -> int:
        """How many episodes fit at once."""
        return self.envs.num_slots

    @property
    def tasks(self) -> list[Task]:
        """All tasks of this manager's split, in a fixed order."""
        return [] if self.task_stream is None else self.task_stream.tasks

    def draw_tasks(self, count: int) -> list[Task]:
        """The next `count` tasks of the endless, seeded order."""
        if self.task_stream is None:
            raise ValueError(f"the {self.env_name or 'environment'} manager has no task list to draw from")
        return self.task_stream.take(count)

    # ---- the two calls of an episode

    def reset(self, kwargs: Mapping[str, Any] | None = None) -> tuple[Obs, list[Info]]:
        """Start one episode per task.

        Args:
            kwargs: `{"tasks": [...]}`, one task per slot (at most `num_slots`); None draws one task for every slot.

        Returns:
            Observations and infos of the started slots, in slot order.
        """
        tasks = self.draw_tasks(self.num_slots) if kwargs is None else [dict(task) for task in kwargs["tasks"]]
        observations, infos = self.envs.reset(tasks)
        self._tasks = tasks
        self._raw = list(observations)
        self._infos = list(infos)
        self.memory.reset(len(tasks))
        self.on_reset(observations, infos)
        for slot, info in enumerate(infos):
            self._complete(info, slot)
        slots = range(len(tasks))
        return self._obs(slots), infos

    def step(
        self, text_actions: Sequence[str], slots: Sequence[int] | None = None
    ) -> tuple[Obs, np.ndarray, np.ndarray, list[Info]]:
        """One turn of the named slots (None = all started ones); the others stay exactly as they are.

        Args:
            text_actions: raw model text per entry of `slots`; any text is allowed.
            slots: distinct slot numbers, any order.

        Returns:
            observations, rewards (float32), dones (bool), infos; entry i belongs to `slots[i]`. A slot that is done
            should not be stepped again before the next reset.
        """
        targets = list(range(len(self._tasks))) if slots is None else [int(slot) for slot in slots]
        texts = list(text_actions)
        actions, valids = self.projection_f(list(texts))
        offered = [self._infos[slot]["admissible_actions"] for slot in targets]
        observations, rewards, dones, infos = self.envs.step(targets, actions)
        self.memory.store({"text_obs": [self._raw[slot] for slot in targets], "action": actions}, targets)
        for row, slot in enumerate(targets):
            self._raw[slot] = observations[row]
            self._infos[slot] = infos[row]
            self._complete(infos[row], slot)
            infos[row]["action"] = actions[row]
            infos[row]["is_action_valid"] = bool(valids[row])
            infos[row]["is_admissible"] = self.is_offered(actions[row], offered[row])
            infos[row]["is_malformed"] = bool(valids[row]) and not actions[row]
        return self._obs(targets), np.asarray(rewards, dtype=np.float32), np.asarray(dones, dtype=bool), infos

    def close(self) -> None:
        """Release the environments; calling it twice is fine."""
        self.envs.close()

    # ---- prompts

    def build_text_obs(self, slots: Sequence[int], max_history: int | None = None) -> list[str]:
        """The user message of each named slot, with at most `max_history` past turns (None = as configured).

        The task, the current observation and the admissible actions are in it whatever `max_history` is.
        """
        if self.builder is None:
            raise NotImplementedError(f"{type(self).__name__} does not build prompts")
        return [
            self.builder.build(
                self.instruction(slot),
                self.history(slot),
                self.observation(slot),
                self.admissible_actions(slot),
                max_history,
            )
            for slot in slots
        ]

    def instruction(self, slot: int) -> str:
        """The task of `slot` in words."""
        return str(self._tasks[slot]["instruction"])

    def history_shown(self, slot: int) -> int:
        """How many past turns the prompt of `slot` shows by default."""
        return min(max(self.config.env.history_length, 0), len(self.memory[slot]))

    def history(self, slot: int) -> list[tuple[str, str]]:
        """All past (observation, action) pairs of `slot`, oldest first."""
        return [(turn["text_obs"], turn["action"]) for turn in self.memory[slot]]

    def recent_history(self, slot: int, max_history: int | None = None) -> list[tuple[str, str]]:
        """The newest pairs that a prompt shows: as configured, and at most `max_history` of them."""
        shown = self.history_shown(slot) if max_history is None else min(max_history, self.history_shown(slot))
        history = self.history(slot)
        return history[len(history) - shown :]

    def observation(self, slot: int) -> str:
        """What the environment said last in `slot`."""
        return self._raw[slot]

    def admissible_actions(self, slot: int) -> list[str]:
        """What the environment offers now in `slot`."""
        actions: list[str] = self._infos[slot]["admissible_actions"]
        return actions

    def is_offered(self, action: str, offered: Sequence[str]) -> bool:
        """Whether `offered` allows `action`; a subclass whose list has placeholders says how they are filled."""
        return action in offered

    def on_reset(self, observations: Sequence[str], infos: Sequence[Info]) -> None:
        """Called by `reset` before prompts are built, for what a subclass reads off the first observations."""

    def task_record(self, slot: int) -> dict[str, Any]:
        """The `task` entry of infos and trajectory records."""
        return dict(self._tasks[slot])

    def _obs(self, slots: Sequence[int]) -> Obs:
        return {"text": self.build_text_obs(slots), "image": None, "anchor": [self._raw[slot] for slot in slots]}

    def _complete(self, info: Info, slot: int) -> None:
        info["admissible_actions"] = info["admissible_commands"]
        info["task"] = self.task_record(slot)

    # ---- success

    def success_evaluator(
        self,
        *,
        total_infos: Sequence[Sequence[Info]],
        total_batch_list: Sequence[Sequence[Mapping[str, Any]]],
        episode_rewards: np.ndarray,
        episode_lengths: np.ndarray,
    ) -> dict[str, np.ndarray]:
        """Success values per key; `success_rate` has one entry per episode, other keys may have fewer.

        Args:
            total_infos: per episode, the infos of its turns.
            total_batch_list: per episode, one dict per turn with at least `active_masks` (bool).
            episode_rewards, episode_lengths: per episode; for subclasses.
        """
        success: dict[str, list[float]] = defaultdict(list)
        for index in range(len(total_batch_list)):
            self._process_batch(index, total_batch_list, total_infos, success)
        return {key: np.asarray(values, dtype=np.float32) for key, values in success.items()}

    def _process_batch(
        self,
        batch_idx: int,
        total_batch_list: Sequence[Sequence[Mapping[str, Any]]],
        total_infos: Sequence[Sequence[Info]],
        success: dict[str, list[float]],
    ) -> None:
        """Append the values of one episode: by default `won` of its last active turn."""
        info = self._last_active(batch_idx, total_batch_list, total_infos)
        success["success_rate"].append(float(info["won"]))

    @staticmethod
    def _last_active(
        batch_idx: int, total_batch_list: Sequence[Sequence[Mapping[str, Any]]], total_infos: Sequence[Sequence[Info]]
    ) -> Info:
        for turn in range(len(total_batch_list[batch_idx]) - 1, -1, -1):
            if total_batch_list[batch_idx][turn]["active_masks"]:
                return total_infos[batch_idx][turn]
        raise ValueError(f"episode {batch_idx} has no active turn")

    # ---- state

    def state_dict(self) -> dict[str, Any]:
        """Where the task order stands (JSON types). Episodes under way are not part of it."""
        return {} if self.task_stream is None else {"task_stream": self.task_stream.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue the task order; raises UserError when the state belongs to another task list or seed."""
        if self.task_stream is not None:
            self.task_stream.load_state_dict(state["task_stream"])
