# SPDX-License-Identifier: Apache-2.0
"""Random walks that visit the odd corners of a game, for comparing engines."""

from __future__ import annotations

import numpy as np

ODD_COMMANDS = (
    "", " ", "\t\n", "LOOK", "Look", "look ", " inventory", "look look", "go to", "go", "take", "open", "examine",
    "go to nowhere 1", "take apple 1", "take from", "move to", "put apple 1 in/on fridge 1", "use", "slice",
    "heat with", "examine agent1", "inventory 1", "\u00a0look\u3000", "\u4f60\u597d", "help me", "None", "x" * 500,
    "go to fridge 1 go to fridge 1", "{look}", "#look#", "look\nlook", "take apple 1 from", "close", "GO TO FRIDGE 1",
)  # fmt: skip


def next_command(commands: list[str], rng: np.random.Generator) -> str:
    """A random command: mostly an admissible one (verb first, so that rare verbs occur), else an odd one."""
    draw = rng.random()
    if draw < 0.06:
        return ODD_COMMANDS[rng.integers(len(ODD_COMMANDS))]
    if draw < 0.10:
        command = commands[rng.integers(len(commands))]
        return command.upper() if rng.random() < 0.3 else command.replace(" 1", " 2")
    if draw < 0.3:
        # Knives and tools are rarely met by chance, and the oddest texts need them.
        wanted = [c for c in commands if c.startswith(("take knife", "take butterknife"))]
        if any(c.startswith("move ") for c in commands) or not wanted:
            wanted += [c for c in commands if c.startswith(("go to sinkbasin", "go to microwave", "go to fridge"))]
        if wanted:
            return wanted[rng.integers(len(wanted))]
    verbs = sorted({command.split(" ")[0] for command in commands})
    weights = np.array([1.0 if verb in ("look", "inventory", "help", "close") else 3.0 for verb in verbs])
    verb = verbs[rng.choice(len(verbs), p=weights / weights.sum())]
    options = [command for command in commands if command.split(" ")[0] == verb]
    return options[rng.integers(len(options))]
