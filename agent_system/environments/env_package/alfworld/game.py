# SPDX-License-Identifier: Apache-2.0
"""`AlfworldGame`: one text game, in the specialised simulator where it knows the game, else in the interpreter."""

from __future__ import annotations

import os
from collections.abc import Hashable
from pathlib import Path
from typing import Any, Literal, NamedTuple

from agent_system.environments.env_package.alfworld.goal import TASK_TYPES, Goal
from agent_system.environments.env_package.alfworld.interpreted import load_interpreted
from agent_system.environments.env_package.alfworld.interpreter import Interpreter
from agent_system.environments.env_package.alfworld.problem import GameData, load_game
from agent_system.environments.env_package.alfworld.simulator import Simulator
from agent_system.environments.env_package.alfworld.stock import StockEngine
from verl.utils.errors import UserError

__all__ = ["WIN_REWARD", "AlfworldGame", "Info", "Snapshot"]

WIN_REWARD = 10.0
"""Reward of a step after which the game is won; every other step gives 0."""

Info = dict[str, Any]
Engine = Literal["auto", "simulator", "interpreter", "stock"]


class Snapshot(NamedTuple):
    """A state of one game; picklable. `game` names the game it belongs to."""

    game: str
    state: Any


class AlfworldGame:
    """One ALFWorld text game.

    `reset()` starts (or restarts) an episode and returns the opening text; `step(command)` plays one command. A
    command that is not admissible, whatever its text, is answered with "Nothing happens." and changes nothing.
    `done` equals `won`; the game goes on after a win as the stock engine does, and the caller ends episodes and keeps
    the step limit. Equal game files give equal texts in every process.

    Infos: `won` (bool), `admissible_commands` (sorted list, the caller's own copy), `extra.gamefile` (str),
    `task_type` (one of `TASK_TYPES`).

    Args:
        gamefile: path of a `game.tw-pddl`.
        engine: "auto" takes the simulator for the known domain and grammar and the interpreter for other files;
            "simulator", "interpreter" and "stock" insist. The stock engine is textworld's own, thousands of times
            slower; it decides every doubt, and it runs expressions of the file as Python.

    Raises:
        UserError: the file is missing or unreadable, or the engine asked for cannot run it.
    """

    def __init__(self, gamefile: str | Path, engine: Engine = "auto") -> None:
        self.gamefile = os.fspath(gamefile)
        self._data = load_game(gamefile) if engine in ("auto", "simulator") else None
        if self._data is None and engine == "simulator":
            raise UserError(
                f"The game file {gamefile} was made with another domain, grammar or kind of goal than the simulator "
                "knows; leave the engine at auto, which runs it in the interpreter."
            )
        self._engine: Simulator | Interpreter | StockEngine
        if self._data is not None:
            self._engine, self._identity = Simulator(self._data), self._data.key
        elif engine == "stock":
            self._engine, self._identity = StockEngine(gamefile), self.gamefile
        else:
            game = load_interpreted(gamefile)
            self._engine, self._identity = Interpreter(game, self.gamefile), game.key
        self._task = "" if self._data is None else self._data.task
        self._started = False
        self._task_type = _task_type_of(self.gamefile) if self._data is None else self._data.goal.task_type

    @property
    def data(self) -> GameData:
        """The game's constant facts and its start, for oracles.

        Raises:
            UserError: the game does not run in the simulator.
        """
        if self._data is None:
            raise UserError(
                f"The game file {self.gamefile} was made with another domain or grammar than the simulator knows: its "
                "facts are not available."
            )
        return self._data

    @property
    def goal(self) -> Goal:
        """What wins the game (see `data`)."""
        return self.data.goal

    @property
    def task(self) -> str:
        """The task sentence, `Your task is to: ...`; outside the simulator it is known from the first reset on."""
        return self._task

    @property
    def task_type(self) -> str:
        """The task type, from the goal, or from the game's folder name where the goal is not known."""
        return self._task_type

    @property
    def state_key(self) -> str:
        """Hex hash of the game and the facts that matter: equal keys mean that equal commands lead to equal ends.

        Equal across processes and PYTHONHASHSEED values; looking around does not change it.
        """
        return self._engine.state_key()

    @property
    def state_id(self) -> Hashable:
        """A cheap value that is equal for two states of this game exactly when `state_key` is; for this process."""
        return self._engine.state_id()

    def reset(self) -> tuple[str, Info]:
        """Start an episode: opening text and infos."""
        observation = self._engine.reset()
        self._started = True
        if not self._task:
            self._task = observation[observation.rfind("Your task is to:") :]
        return observation, self._info()

    def step(self, command: str) -> tuple[str, float, bool, Info]:
        """Play one command: observation, reward (`WIN_REWARD` while won, else 0.0), done (= won), infos."""
        if not self._started:
            raise RuntimeError("step() before reset()")
        observation = self._engine.step(command)
        won = self._engine.won
        return observation, WIN_REWARD if won else 0.0, won, self._info()

    def snapshot(self) -> Snapshot:
        """The current state, to go back to with `restore`, here or in another `AlfworldGame` of the same file."""
        return Snapshot(self._identity, self._engine.state())

    def restore(self, snapshot: Snapshot) -> Info:
        """Continue from a snapshot; returns the infos of that state.

        Raises:
            ValueError: the snapshot was taken in another game.
        """
        if snapshot.game != self._identity:
            raise ValueError(f"the snapshot belongs to game {snapshot.game}, not to {self._identity}")
        self._engine.restore(snapshot.state)
        self._started = True
        return self._info()

    def _info(self) -> Info:
        return {
            "won": self._engine.won,
            "admissible_commands": self._engine.commands(),
            "extra.gamefile": self.gamefile,
            "task_type": self._task_type,
        }


def _task_type_of(gamefile: str) -> str:
    folder = Path(gamefile).absolute().parent.parent.name
    return next((name for name in TASK_TYPES if folder.startswith(f"{name}-")), "")
