# SPDX-License-Identifier: Apache-2.0
"""What a player of an ALFWorld game knows from the texts it has seen: the task, the room, what lies where."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from verl.utils.errors import UserError

__all__ = ["Belief", "Task", "parse_task"]

_STATE_WORDS = {"clean": "clean", "hot": "hot", "heat": "hot", "cool": "cool"}
_TASKS = (
    (re.compile(r"(?:put|find) two (\w+) (?:in|and put them in) (\w+)"), ""),
    (re.compile(r"put a (?P<state>clean|hot|cool) (?P<obj>\w+) in (?P<recep>\w+)"), "state"),
    (re.compile(r"(?P<state>clean|heat|cool) some (?P<obj>\w+) and put it in (?P<recep>\w+)"), "state"),
    (re.compile(r"(?:look at|examine the) (\w+) (?:under|with) the (\w+)"), "lamp"),
    (re.compile(r"put (?:a|some) (\w+) (?:in|on) (\w+)"), "one"),
)
_NAME = re.compile(r"\ba ([a-z]+ \d+)")
_SEEN = re.compile(r"(?:On the (?P<on>[a-z]+ \d+)|The (?P<in>[a-z]+ \d+) is open\. In it), you see (?P<list>[^.]*)\.")
_TREAT = {"clean": "clean", "heat": "hot", "cool": "cool"}


@dataclass(frozen=True, slots=True)
class Task:
    """A task as its sentence says it; classes as players see them (`mug`). `state`, `lamp`, `receptacle` may be ""."""

    object_class: str
    receptacle: str
    lamp: str
    state: str
    count: int


def parse_task(sentence: str) -> Task:
    """Understand a task sentence made from the package's templates.

    Raises:
        UserError: the sentence is of another form (for example written by a person).
    """
    text = sentence.rpartition("Your task is to:")[2].strip().rstrip(".")
    for pattern, kind in _TASKS:
        match = pattern.fullmatch(text)
        if match is None:
            continue
        if kind == "state":
            return Task(match["obj"], match["recep"], "", _STATE_WORDS[match["state"]], 1)
        first, second = match.groups()
        if kind == "lamp":
            return Task(first, "", second, "", 1)
        return Task(first, second, "", "", 1 if kind == "one" else 2)
    raise UserError(f"The scripted experts do not understand the task {text!r}; they know the templates of alfworld.")


@dataclass(slots=True)
class Belief:
    """Knowledge built up from texts. A receptacle is in `contents` once its inside has been seen."""

    places: list[str]
    contents: dict[str, list[str]] = field(default_factory=dict)
    held: str = ""
    states: dict[str, str] = field(default_factory=dict)
    """Object -> the last treatment it got (`clean`, `hot`, `cool`)."""

    @classmethod
    def from_opening(cls, observation: str, commands: list[str]) -> Belief:
        """Knowledge after the opening text; the commands name the places where the text describes only the spot."""
        room = observation.rpartition("Your task is to:")[0]
        offered = [command[6:] for command in commands if command.startswith("go to ")]
        return cls(places=list(dict.fromkeys([*_NAME.findall(room), *offered])))

    def update(self, action: str, observation: str) -> None:
        """Take in the answer to an action; "Nothing happens." teaches nothing."""
        if observation == "Nothing happens.":
            return
        for match in _SEEN.finditer(observation):
            self.contents[match["on"] or match["in"]] = _NAME.findall(match["list"])
        verb, _, rest = action.partition(" ")
        if verb == "take":
            name, _, place = rest.partition(" from ")
            self.held = name
            if name in self.contents.get(place, []):
                self.contents[place].remove(name)
        elif verb == "move":
            name, _, place = rest.partition(" to ")
            self.held = ""
            self.contents.setdefault(place, []).append(name)
        elif verb in _TREAT:
            self.states[rest.partition(" with ")[0]] = _TREAT[verb]

    def where(self, object_class: str) -> list[tuple[str, str]]:
        """(object, receptacle) of every known object of a class, in the order seen."""
        return [
            (name, place)
            for place, names in self.contents.items()
            for name in names
            if name.rpartition(" ")[0] == object_class
        ]
