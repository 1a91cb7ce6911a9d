# SPDX-License-Identifier: Apache-2.0
"""The installed stock engine behind the simulator's interface: slow, exact, what the other engines are measured by."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import Any

from verl.utils.errors import UserError

__all__ = ["StockEngine"]

# Written by actions and read by nothing (`isOn` also drifts from the engine's own record).
_IGNORED_FACTS = frozenset({"checked", "ison"})


@contextmanager
def _own_argv() -> Iterator[None]:
    """The planner's translator overwrites sys.argv; give it back."""
    saved = sys.argv
    try:
        yield
    finally:
        sys.argv = saved


class StockEngine:
    """One game in TextWorld's engine, with alfworld's names. A snapshot is the list of commands since the reset.

    Loading and every reset take about a second, a step 35-130 ms. Not usable from threads.

    Raises:
        UserError: the packages are not installed, or the file cannot be loaded.
    """

    def __init__(self, gamefile: str | Path) -> None:
        try:
            from alfworld.agents.environment.alfred_tw_env import AlfredDemangler, AlfredInfos
            from textworld.core import EnvInfos
            from textworld.envs.pddl import PddlEnv
        except ImportError as error:
            raise UserError(
                f"The stock engine was asked for and cannot be imported ({error}); install alfworld and "
                "textworld[pddl], or leave the engine at auto."
            ) from error
        infos = EnvInfos(won=True, admissible_commands=True, extras=["gamefile"])
        self._env: Any = AlfredInfos(AlfredDemangler(PddlEnv(infos), shuffle=False))
        with _own_argv():
            try:
                self._env.load(os.fspath(gamefile))
            except Exception as error:
                # The parsers of domain, problem and grammar have no common exception.
                raise UserError(
                    f"The game file {gamefile} cannot be loaded by the stock engine ({type(error).__name__}: "
                    f"{' '.join(str(error).split())[:200]}); download the data again, or remove this game."
                ) from error
        self._gamefile = os.fspath(gamefile)
        self._state: Any = None
        self._history: list[str] = []
        self.won = False

    def reset(self) -> str:
        """Go back to the start; returns the opening text."""
        with _own_argv():
            self._state = self._env.reset()
        self._history = []
        self.won = bool(self._state["won"])
        return str(self._state.feedback)

    def step(self, command: str) -> str:
        """Apply a command and return the feedback."""
        self._state, _, _ = self._env.step(command)
        self._history.append(command)
        self.won = bool(self._state["won"])
        return str(self._state.feedback)

    def commands(self) -> list[str]:
        """The admissible commands, sorted."""
        return list(self._state["admissible_commands"])

    def state(self) -> tuple[str, ...]:
        """The commands since the reset."""
        return tuple(self._history)

    def restore(self, state: tuple[str, ...]) -> None:
        """Reset and play `state` again (slow: the engine's own snapshots do not cover its text generator)."""
        self.reset()
        for command in state:
            self.step(command)

    def state_id(self) -> str:
        """The same as `state_key`."""
        return self.state_key()

    def state_key(self) -> str:
        """Hash of the game file and of the facts that a later command can depend on."""
        facts = sorted(
            str(fact)
            for fact in self._state["_facts"]
            if fact.name not in _IGNORED_FACTS and not fact.is_negation and not fact.name.startswith("new-axiom")
        )
        text = "\n".join([os.path.basename(os.path.dirname(self._gamefile)), *facts])
        return blake2b(text.encode("utf-8"), digest_size=16).hexdigest()
