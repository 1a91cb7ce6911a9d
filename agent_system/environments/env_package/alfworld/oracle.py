# SPDX-License-Identifier: Apache-2.0
"""A winning plan read off a game's facts: it proves that a game can be won."""

from __future__ import annotations

from agent_system.environments.env_package.alfworld.game import AlfworldGame
from agent_system.environments.env_package.alfworld.problem import GameData

__all__ = ["NoPlanError", "Oracle", "scripted_plan"]

_TOOLS = {"clean": ("clean", "sinkbasintype"), "hot": ("heat", "microwavetype"), "cool": ("cool", "fridgetype")}


class NoPlanError(ValueError):
    """The script finds no way to win the game (which does not prove that there is none)."""


class _Script:
    """Commands so far, and what they changed: where the agent stands and what it opened."""

    def __init__(self, data: GameData) -> None:
        self.data = data
        self.commands: list[str] = []
        self._location = data.start.location
        self._opened = data.start.opened

    def go(self, receptacle: int) -> None:
        if self._location != self.data.location_of[receptacle]:
            self.commands.append(f"go to {self.data.receptacles[receptacle]}")
            self._location = self.data.location_of[receptacle]

    def reach_into(self, receptacle: int) -> None:
        self.go(receptacle)
        bit = 1 << receptacle
        if self.data.openable & bit and not self._opened & bit:
            self.commands.append(f"open {self.data.receptacles[receptacle]}")
            self._opened |= bit

    def take(self, item: int, source: int) -> None:
        self.reach_into(source)
        self.commands.append(f"take {self.data.objects[item]} from {self.data.receptacles[source]}")

    def treat(self, item: int, state: str) -> None:
        verb, kind = _TOOLS[state]
        tools = [r for r, t in enumerate(self.data.receptacle_types) if t == kind and self.data.location_of[r] >= 0]
        if not tools:
            raise NoPlanError(f"there is nothing to {verb} with")
        self.go(tools[0])
        self.commands.append(f"{verb} {self.data.objects[item]} with {self.data.receptacles[tools[0]]}")


def _sources(data: GameData) -> list[tuple[int, int]]:
    """(object, receptacle) of every goal object that can be picked up somewhere."""
    return [
        (o, r)
        for r, inside in enumerate(data.start.contents)
        for o in inside
        if data.location_of[r] >= 0 and data.goal_objects >> o & 1 and data.pickupable >> o & 1
    ]


def _place_plan(data: GameData) -> list[str]:
    states = sorted(data.goal.states)
    if "sliced" in states or {"hot", "cool"} <= set(states):
        raise NoPlanError("the script cannot bring an object into the states asked for")
    sources = _sources(data)
    best: list[str] | None = None
    for target in data.goal_receptacles:
        # Without a state to bring about, what lies in the target already counts.
        there = [] if states else [o for o, r in sources if r == target]
        fitting = [(o, r) for o, r in sources if data.fits[target] >> o & 1 and (states or r != target)]
        needed = data.goal.count - len(there)
        if data.location_of[target] < 0 or len({o for o, _ in fitting}) < needed:
            continue
        script = _Script(data)
        for o, r in fitting[:needed]:
            script.take(o, r)
            for state in states:
                script.treat(o, state)
            script.reach_into(target)
            script.commands.append(f"move {data.objects[o]} to {data.receptacles[target]}")
        if best is None or len(script.commands) < len(best):
            best = script.commands
    if best is None:
        raise NoPlanError("no receptacle of the goal can get the objects")
    return best


def _look_plan(data: GameData) -> list[str]:
    lamps = [
        (o, r)
        for r, inside in enumerate(data.start.contents)
        for o in inside
        if data.goal_lamps >> o & 1 and data.location_of[r] >= 0
    ]
    sources = _sources(data)
    if not lamps or not sources or data.goal.states:
        raise NoPlanError("there is no lamp, or nothing to look at")
    script = _Script(data)
    script.take(*sources[0])
    lamp, place = lamps[0]
    script.go(place)
    script.commands.append(f"use {data.objects[lamp]}")
    return script.commands


def scripted_plan(data: GameData) -> list[str]:
    """Commands that win the game from its start: take, treat, put, for each object needed.

    Raises:
        NoPlanError: the script finds none (an object in hand at the start, a sliced goal, nothing that fits).
    """
    if data.start.held >= 0:
        raise NoPlanError("the agent starts with an object in hand")
    return _look_plan(data) if data.goal.lamp_type is not None else _place_plan(data)


class Oracle(list[str]):
    """The winning plan of a game, as a list of commands from its start.

    It knows the game's facts, so it is no model for a policy to imitate (see `Explorer`).

    Raises:
        NoPlanError: see `scripted_plan`.
        UserError: the game runs in the stock engine.
    """

    def __init__(self, game: AlfworldGame) -> None:
        super().__init__(scripted_plan(game.data))
