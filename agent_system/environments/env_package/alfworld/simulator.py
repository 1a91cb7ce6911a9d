# SPDX-License-Identifier: Apache-2.0
"""A simulator of the ALFWorld text domain: the same texts, commands and outcomes as the stock engine, without it.

The domain has one agent and thirteen kinds of commands, so a step with text and admissible commands is a few list
operations on bit masks: 3-10 microseconds. Two oddities of the stock engine are kept because they are visible: `look`
in the middle of the room sees nothing, and an object that was taken from one receptacle and put into another one at
the same place is listed "next to it".
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from hashlib import blake2b
from typing import ClassVar

from agent_system.environments.env_package.alfworld.problem import GameData, SimState

__all__ = ["Simulator"]

_HELP = (
    ("look", "look around your current location"),
    ("inventory", "check your current inventory"),
    ("go to (receptacle)", "move to a receptacle"),
    ("open (receptacle)", "open a receptacle"),
    ("close (receptacle)", "close a receptacle"),
    ("take (object) from (receptacle)", "take an object from a receptacle"),
    ("move (object) to (receptacle)", "place an object in or on a receptacle"),
    ("examine (something)", "examine a receptacle or an object"),
    ("use (object)", "use an object"),
    ("heat (object) with (receptacle)", "heat an object using a receptacle"),
    ("clean (object) with (receptacle)", "clean an object using a receptacle"),
    ("cool (object) with (receptacle)", "cool an object using a receptacle"),
    ("slice (object) with (object)", "slice an object using a sharp object"),
)
# The stock text pads to column 36, except `move`, which it pads two columns short.
_HELP_TEXT = "Available commands:\n" + "".join(
    f"  {command + ':':<{32 if command.startswith('move') else 34}}{meaning}\n" for command, meaning in _HELP
)
_NOTHING = "Nothing happens."
_KNIVES = frozenset({"knifetype", "butterknifetype"})
_TOOLS = {"sinkbasintype": "clean", "microwavetype": "heat", "fridgetype": "cool"}


def _listing(names: list[str]) -> str:
    if not names:
        return "nothing"
    if len(names) == 1:
        return names[0]
    return ", ".join(names[:-1]) + ", and " + names[-1]


class Simulator:
    """The current state of one game and the rules. `data` is shared and never changed."""

    __slots__ = (
        "_at",
        "_clean",
        "_commands",
        "_contents",
        "_cool",
        "_data",
        "_held",
        "_hot",
        "_left",
        "_location",
        "_opened",
        "_sliced",
        "_toggled",
        "won",
    )  # fmt: skip

    def __init__(self, data: GameData) -> None:
        self._data = data
        self._commands: list[str] = []
        self.won = False
        self.restore(data.start)
        self.won = self._goal_reached()

    # -- the interface ------------------------------------------------------------------------------------------

    def reset(self) -> str:
        """Go back to the start; returns the opening text."""
        self.restore(self._data.start)
        self.won = self._goal_reached()
        data = self._data
        if data.receptacles_at[self._location]:
            room = self._look()
        else:
            placed = [f"a {name}" for r, name in enumerate(data.receptacles) if data.location_of[r] >= 0]
            room = f"You are in the middle of a room. Looking quickly around you, you see {_listing(placed)}."
        return f"-= Welcome to TextWorld, ALFRED! =-\n\n{room}\n\n{data.task}"

    def step(self, command: str) -> str:
        """Apply a command and return the feedback; anything not admissible changes nothing."""
        command = command.strip()
        if command not in self._commands:
            return _NOTHING
        verb, _, rest = command.partition(" ")
        return self._RULES[verb](self, rest)

    def commands(self) -> list[str]:
        """The admissible commands, sorted, as a list of the caller's own."""
        return self._commands.copy()

    def state(self) -> SimState:
        """The current state; immutable, picklable."""
        return SimState(
            self._location, self._held, self._opened, tuple(self._contents), tuple(self._at), tuple(self._left),
            self._clean, self._hot, self._cool, self._sliced, self._toggled, self.won,
        )  # fmt: skip

    def restore(self, state: SimState) -> None:
        """Continue from a state of the same game."""
        (
            self._location, self._held, self._opened, contents, at, left,
            self._clean, self._hot, self._cool, self._sliced, self._toggled, self.won,
        ) = state  # fmt: skip
        self._contents = list(contents)
        self._at = list(at)
        self._left = list(left)
        self._refresh()

    def state_id(self) -> Hashable:
        """Identifies the same facts as `state_key` does, at a tenth of its cost, among states of this game only."""
        return (
            self._location, self._held, self._opened, tuple(self._contents), tuple(self._at), self._clean, self._hot,
            self._cool, self._sliced, self._toggled,
        )  # fmt: skip

    def state_key(self) -> str:
        """Hash of the game and of every fact of the domain that a later command or the goal can depend on.

        Left out: `checked` and `isOn`, which actions write and nothing reads, and the `left` marks, which are no
        facts of the domain and only colour the text of `look`.
        """
        facts = (
            self._location, self._held, self._opened, self._contents, self._at, self._clean, self._hot, self._cool,
            self._sliced, self._toggled,
        )  # fmt: skip
        return blake2b(f"{self._data.key}{facts}".encode("ascii"), digest_size=16).hexdigest()

    # -- what can be done ---------------------------------------------------------------------------------------

    def _refresh(self) -> None:
        data, held, opened = self._data, self._held, self._opened
        here = data.receptacles_at[self._location]
        # Verbs before and after "go to", so that the long list of places needs no sorting again.
        before: list[str] = []
        after = ["help", "inventory", "look"]
        for r in here:
            name = data.receptacles[r]
            before.append(f"examine {name}")
            bit = 1 << r
            accessible = True
            if data.openable & bit:
                accessible = bool(opened & bit)
                if accessible:
                    before.append(f"close {name}")
                else:
                    after.append(f"open {name}")
            if held < 0:
                if accessible:
                    for o in self._contents[r]:
                        if data.pickupable >> o & 1:
                            after.append(f"take {data.objects[o]} from {name}")
            else:
                if accessible and data.fits[r] >> held & 1:
                    after.append(f"move {data.objects[held]} to {name}")
                tool = _TOOLS.get(data.receptacle_types[r])
                if tool is not None:
                    self._tool_command(tool, data.objects[held], name, before, after)
            if data.toggleable:
                for o in self._contents[r]:
                    if data.toggleable >> o & 1:
                        after.append(f"use {data.objects[o]}")
        if held >= 0:
            before.append(f"examine {data.objects[held]}")
            if data.sliceable and not _KNIVES.isdisjoint(data.object_types[held]):
                for o, places in enumerate(self._at):
                    if places >> self._location & 1 and data.sliceable >> o & 1:
                        after.append(f"slice {data.objects[o]} with {data.objects[held]}")
        before.sort()
        after.sort()
        self._commands = [*before, *data.goto[self._location], *after]

    def _tool_command(self, tool: str, held: str, receptacle: str, before: list[str], after: list[str]) -> None:
        data, bit = self._data, 1 << self._held
        if tool == "clean" and data.cleanable & bit:
            before.append(f"clean {held} with {receptacle}")
        elif tool == "cool" and data.coolable & bit:
            before.append(f"cool {held} with {receptacle}")
        elif tool == "heat" and data.heatable & bit:
            after.append(f"heat {held} with {receptacle}")

    def _goal_reached(self) -> bool:
        data, goal = self._data, self._data.goal
        eligible = data.goal_objects
        for state in goal.states:
            eligible &= {"clean": self._clean, "hot": self._hot, "cool": self._cool, "sliced": self._sliced}[state]
        if goal.lamp_type is not None:
            if self._held < 0 or not eligible >> self._held & 1:
                return False
            lamps = data.goal_lamps & self._toggled
            return any(lamps >> o & 1 for r in data.receptacles_at[self._location] for o in self._contents[r])
        return any(sum(eligible >> o & 1 for o in self._contents[r]) >= goal.count for r in data.goal_receptacles)

    # -- what is done -------------------------------------------------------------------------------------------

    def _changed(self) -> None:
        self._refresh()
        self.won = self._goal_reached()

    def _go(self, rest: str) -> str:
        r = self._data.receptacle_index[rest[3:]]
        self._location = self._data.location_of[r]
        self._refresh()
        if self._data.goal_lamps:
            self.won = self._goal_reached()
        return f"You arrive at {rest[3:]}. {self._describe(r)}"

    def _open(self, rest: str) -> str:
        r = self._data.receptacle_index[rest]
        self._opened |= 1 << r
        self._refresh()
        return f"You open the {rest}. {self._describe(r)}"

    def _close(self, rest: str) -> str:
        self._opened &= ~(1 << self._data.receptacle_index[rest])
        self._refresh()
        return f"You close the {rest}."

    def _take(self, rest: str) -> str:
        name, _, receptacle = rest.partition(" from ")
        o, r = self._data.object_index[name], self._data.receptacle_index[receptacle]
        self._contents[r] = tuple(i for i in self._contents[r] if i != o)
        self._held = o
        self._at[o] &= ~(1 << self._location)
        self._left[o] |= 1 << r
        self._changed()
        return f"You pick up the {name} from the {receptacle}."

    def _move(self, rest: str) -> str:
        name, _, receptacle = rest.partition(" to ")
        o, r = self._held, self._data.receptacle_index[receptacle]
        self._contents[r] = tuple(sorted({*self._contents[r], o}))
        self._held = -1
        self._at[o] |= 1 << self._location
        self._left[o] &= ~(1 << r)
        self._changed()
        return f"You move the {name} to the {receptacle}."

    def _clean_held(self, rest: str) -> str:
        self._clean |= 1 << self._held
        self._changed()
        return self._used("clean", rest)

    def _heat_held(self, rest: str) -> str:
        self._hot |= 1 << self._held
        self._cool &= ~(1 << self._held)
        self._changed()
        return self._used("heat", rest)

    def _cool_held(self, rest: str) -> str:
        self._cool |= 1 << self._held
        self._hot &= ~(1 << self._held)
        self._changed()
        return self._used("cool", rest)

    def _used(self, verb: str, rest: str) -> str:
        name, _, receptacle = rest.partition(" with ")
        return f"You {verb} the {name} using the {receptacle}."

    def _use(self, rest: str) -> str:
        self._toggled |= 1 << self._data.object_index[rest]
        self._changed()
        # The engine never forgets that a lamp was switched, so its text never says "turn off".
        return f"You turn on the {rest}."

    def _slice(self, rest: str) -> str:
        name, _, knife = rest.partition(" with ")
        self._sliced |= 1 << self._data.object_index[name]
        self._changed()
        return f"You sliced the {name} with the {knife}."

    # -- what is seen -------------------------------------------------------------------------------------------

    def _describe(self, r: int) -> str:
        data, name = self._data, self._data.receptacles[r]
        seen = _listing([f"a {data.objects[o]}" for o in self._contents[r]])
        if not data.openable >> r & 1:
            return f"On the {name}, you see {seen}."
        if self._opened >> r & 1:
            return f"The {name} is open. In it, you see {seen}."
        return f"The {name} is closed."

    def _look(self, rest: str = "") -> str:
        data, location = self._data, self._location
        here = data.receptacles_at[location]
        if not here:
            return "You are in the middle of a room. Looking quickly around you, you see nothing."
        beside = [
            f"a {data.objects[o]}"
            for o, left in enumerate(self._left)
            if left and self._at[o] >> location & 1
            for r in here
            if left >> r & 1
        ]
        facing = _listing([data.receptacles[r] for r in here])
        return f"You are facing the {facing}. Next to it, you see {_listing(beside)}."

    def _examine(self, rest: str) -> str:
        data = self._data
        r = data.receptacle_index.get(rest)
        if r is not None:
            return self._describe(r)
        o = data.object_index[rest]
        inside = data.inside[o]
        if inside is not None:
            return f"This is a normal {rest}. In it, you see {_listing([f'a {data.objects[i]}' for i in inside])}."
        clean, hot, cool, cut = (bits >> o & 1 for bits in (self._clean, self._hot, self._cool, self._sliced))
        temperature = "hot" if hot else "cool" if cool else ""
        if cut and (clean or temperature):
            words = [temperature, "and"] if clean and temperature else [temperature]
            return f"This is a {' '.join([*filter(None, words), *(['clean'] if clean else []), 'sliced'])} {rest}."
        if clean and temperature:
            return f"This is a {temperature} and clean {rest}."
        if hot or clean or cool:
            return f"This is a {'hot' if hot else 'clean' if clean else 'cold'} {rest}."
        if data.toggleable >> o & 1 and self._toggled >> o & 1:
            return f"This {rest} is on."
        if cut:
            return f"This is a sliced {rest}."
        return f"There's nothing special about {rest}."

    def _inventory(self, rest: str) -> str:
        if self._held < 0:
            return "You are not carrying anything."
        return f"You are carrying: a {self._data.objects[self._held]}."

    def _help(self, rest: str) -> str:
        return _HELP_TEXT

    _RULES: ClassVar[Mapping[str, Callable[[Simulator, str], str]]] = {
        "go": _go, "open": _open, "close": _close, "take": _take, "move": _move, "clean": _clean_held,
        "heat": _heat_held, "cool": _cool_held, "use": _use, "slice": _slice, "look": _look, "examine": _examine,
        "inventory": _inventory, "help": _help,
    }  # fmt: skip
