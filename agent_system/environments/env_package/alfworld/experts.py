# SPDX-License-Identifier: Apache-2.0
"""Scripted experts: an explorer, fit to be imitated, and the oracle, which only proves that a game can be won."""

from __future__ import annotations

import numpy as np

from agent_system.environments.env_package.alfworld.belief import Belief, parse_task
from agent_system.environments.env_package.alfworld.game import AlfworldGame, Info
from agent_system.environments.env_package.alfworld.homes import CLOSED_HOMES, likely_homes
from agent_system.environments.env_package.alfworld.oracle import NoPlanError, Oracle
from agent_system.environments.expert import Distractions, ExpertAction
from verl.utils.errors import UserError

__all__ = ["ExpertAction", "Explorer", "NoPlanError", "Oracle"]

_TOOLS = {
    "clean": ("sinkbasin", "clean", "wash"),
    "hot": ("microwave", "heat", "heat"),
    "cool": ("fridge", "cool", "cool"),
}
# Detours and mistakes stop here (share of the step limit), so that even a long game ends in time.
_DISTRACTED_SHARE = 0.6
_CLOSED_DELAY = 2.0


class Explorer:
    """Plays one game from its texts alone.

    It searches receptacles in a seeded random order, those where such an object is usually kept first, opens closed
    ones, takes what it needs, cleans, heats or cools it, and brings it where it belongs. It always recovers from its
    own detours and mistakes.

    Args:
        game: the game, of which only the task sentence is read; reset it before the first `act`.
        rng: source of every random choice.
        detour_rate: chance, before each step of the plan, of a useless step instead: look, inventory, examine,
            visiting a known place, taking something and putting it back.
        error_rate: chance, likewise, of a command that is not admissible (an absent object, a wrong place, a
            malformed command).
        max_steps: the caller's step limit; late in the episode there are no more detours or mistakes.
    """

    def __init__(
        self,
        game: AlfworldGame,
        rng: np.random.Generator,
        detour_rate: float = 0.0,
        error_rate: float = 0.0,
        max_steps: int = 50,
    ) -> None:
        self._game = game
        self._rng = rng
        self._distractions = Distractions(rng, detour_rate, error_rate, int(max_steps * _DISTRACTED_SHARE))
        self._step = 0
        self._last_action = ""
        self._return = ""  # the command that puts back what a detour took
        self._orders: dict[str, list[str]] = {}
        self._unsuitable: set[str] = set()
        self._target = ""

    def act(self, observation: str, info: Info) -> ExpertAction:
        """The next command, given the text just seen (first the opening text) and its infos."""
        if self._step == 0:
            try:
                self._task = parse_task(self._game.task)
            except UserError as error:
                raise UserError(f"The game {self._game.gamefile}: {error}") from error
            self._belief = Belief.from_opening(observation, info["admissible_commands"])
        else:
            self._belief.update(self._last_action, observation)
        self._commands: list[str] = info["admissible_commands"]
        self._admissible = frozenset(self._commands)
        choice = self._choose()
        self._step += 1
        self._last_action = choice.action
        return choice

    def took(self, action: str) -> None:
        """Tell that another command was played than the one `act` returned last."""
        if action != self._last_action:
            self._last_action = action
            self._return = ""

    # -- what kind of step --------------------------------------------------------------------------------------

    def _choose(self) -> ExpertAction:
        if self._return:
            command, self._return = self._return, ""
            if command in self._admissible:
                return ExpertAction(command, "put it back", "detour")
        kind = self._distractions.kind(self._step)
        if kind == "mistake":
            return self._mistake()
        if kind == "detour":
            return self._detour()
        action, thought = self._plan()
        return ExpertAction(action, thought, "plan")

    def _pick(self, options: list[str]) -> str:
        return options[int(self._rng.integers(len(options)))]

    def _detour(self) -> ExpertAction:
        belief = self._belief
        examine = [c for c in self._commands if c.startswith("examine ")]
        visits = [f"go to {place}" for place in belief.contents if f"go to {place}" in self._admissible]
        takes = [
            c
            for c in self._commands
            if c.startswith("take ") and c.split(" ", 2)[1] != self._task.object_class and self._step > 0
        ]
        kinds = {"look": ["look"], "inventory": ["inventory"], "examine": examine, "visit": visits, "take": takes}
        kind = self._pick([name for name, options in kinds.items() if options])
        action = self._pick(kinds[kind])
        if kind == "take":
            name, _, place = action[5:].partition(" from ")
            self._return = f"move {name} to {place}"
        thought = {
            "look": "look around first",
            "inventory": "check my hands",
            "examine": "look more closely",
            "visit": "check there again",
            "take": "maybe this one",
        }[kind]
        return ExpertAction(action, thought, "detour")

    def _mistake(self) -> ExpertAction:
        task, belief = self._task, self._belief
        place = self._pick(belief.places) if belief.places else "room 1"
        here = next((c[8:] for c in self._commands if c.startswith("examine ") and c[8:] in belief.places), place)
        thing = belief.held or f"{task.object_class} 1"
        options = [
            f"take {task.object_class} {int(self._rng.integers(1, 5))} from {here}",
            f"take {task.object_class}",
            f"open {place}",
            f"go to {task.object_class} 1",
            f"move {thing} to {place}",
            f"put {thing} in/on {here}",
        ]
        wrong = [command for command in options if command not in self._admissible]
        return ExpertAction(self._pick(wrong), f"try the {task.object_class}", "mistake")

    # -- the plan -----------------------------------------------------------------------------------------------

    def _plan(self) -> tuple[str, str]:
        belief, task = self._belief, self._task
        held = belief.held
        if held and held.rpartition(" ")[0] != task.object_class:
            return self._put_down()
        if held:
            return self._light(held) if task.lamp else self._deliver(held)
        target = self._choose_target()
        for name, place in belief.where(task.object_class):
            done = place == target and (not task.state or belief.states.get(name) == task.state)
            take = f"take {name} from {place}"
            if done or (self._here(place) and take not in self._admissible and not self._can_open(place)):
                continue
            if take in self._admissible:
                return take, f"take the {task.object_class}"
            return self._reach(place, f"get the {task.object_class}")
        return self._search(task.object_class)

    def _deliver(self, held: str) -> tuple[str, str]:
        belief, task = self._belief, self._task
        if task.state and belief.states.get(held) != task.state:
            kind, verb, word = _TOOLS[task.state]
            for tool in self._of_class(kind):
                command = f"{verb} {held} with {tool}"
                if command in self._admissible:
                    return command, f"{word} the {task.object_class}"
                if not self._here(tool):
                    return f"go to {tool}", f"{word} the {task.object_class}"
        target = self._choose_target()
        command = f"move {held} to {target}"
        if command in self._admissible:
            return command, f"place the {task.object_class}"
        if self._here(target) and not self._can_open(target):
            self._unsuitable.add(target)
            self._target = ""
            target = self._choose_target()
        return self._reach(target, f"place the {task.object_class}")

    def _light(self, held: str) -> tuple[str, str]:
        lamp_class = self._task.lamp
        for lamp, place in self._belief.where(lamp_class):
            command = f"use {lamp}"
            if command in self._admissible:
                return command, f"use the {lamp_class}"
            if not self._here(place):
                return f"go to {place}", f"use the {lamp_class}"
        return self._search(lamp_class)

    def _put_down(self) -> tuple[str, str]:
        """Get rid of something that is not wanted: where it can be put at once, else at the next open place."""
        moves = [c for c in self._commands if c.startswith("move ")]
        if moves:
            return moves[0], "put it down"
        closed = [c for c in self._commands if c.startswith("open ")]
        if closed:
            return closed[0], "put it down"
        order = self._order(self._belief.held.rpartition(" ")[0])
        place = next((p for p in order if not self._here(p)), "")
        return (f"go to {place}" if place else "look"), "put it down"

    def _search(self, object_class: str) -> tuple[str, str]:
        """Look into the next receptacle whose inside is not known."""
        for place in self._order(object_class):
            if place not in self._belief.contents:
                return self._reach(place, f"find the {object_class}")
        # Everything was seen, yet the object is not where it should be: go through the places again.
        place = self._pick(self._belief.places)
        return (f"go to {place}" if not self._here(place) else "look"), f"find the {object_class}"

    def _reach(self, place: str, thought: str) -> tuple[str, str]:
        """One step towards seeing into, or putting into, a receptacle."""
        if not self._here(place):
            return f"go to {place}", thought
        if self._can_open(place):
            return f"open {place}", "look inside it"
        return f"examine {place}", "look at it"

    # -- what is known ------------------------------------------------------------------------------------------

    def _here(self, place: str) -> bool:
        return f"go to {place}" not in self._admissible

    def _can_open(self, place: str) -> bool:
        return f"open {place}" in self._admissible

    def _of_class(self, kind: str) -> list[str]:
        return [p for p in self._belief.places if p.rpartition(" ")[0] == kind]

    def _choose_target(self) -> str:
        """The receptacle to bring things to: one choice per game, where a first object lies already if possible."""
        if not self._target and self._task.receptacle:
            options = self._targets()
            if options:
                self._target = self._pick(options)
        if self._task.count > 1 and not self._belief.held and not self._in_place(self._target):
            # Nothing was brought yet: an object seen in a receptacle of the right class decides for it.
            found = [p for _, p in self._belief.where(self._task.object_class) if p in self._targets()]
            self._target = found[0] if found else self._target
        return self._target

    def _targets(self) -> list[str]:
        return [p for p in self._of_class(self._task.receptacle) if p not in self._unsuitable]

    def _in_place(self, place: str) -> int:
        return sum(p == place for _, p in self._belief.where(self._task.object_class))

    def _order(self, object_class: str) -> list[str]:
        """All places in the order of search for a class, drawn once per game and class."""
        if object_class not in self._orders:
            likely = likely_homes(object_class)
            keys = {}
            for place, draw in zip(self._belief.places, self._rng.random(len(self._belief.places)), strict=True):
                kind = place.rpartition(" ")[0]
                # Closed ones cost an extra step, so they tend to come later.
                keys[place] = (kind not in likely, float(draw) * (_CLOSED_DELAY if kind in CLOSED_HOMES else 1.0))
            self._orders[object_class] = sorted(keys, key=lambda place: keys[place])
        return self._orders[object_class]
