# SPDX-License-Identifier: Apache-2.0
"""ALFWorld that an untrained policy wins now and then: any text stands for a step of the game's own plan.

Everything else is the real environment: games, prompts, history, admissible actions, rewards. Listed in
`algorithm.recipe_modules`, this module makes `env.env_name=coded_alfworld` known to a program.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agent_system.environments import register
from agent_system.environments.env_package.alfworld.game import AlfworldGame
from agent_system.environments.env_package.alfworld.manager import AlfWorldEnvironmentManager, make_alfworld_manager
from agent_system.environments.env_package.alfworld.oracle import Oracle

__all__ = ["MAX_PLAN", "CodedManager", "make_coded_manager"]

MAX_PLAN = 4
"""Games whose plan is longer are left out: random steps would hardly ever win them."""


class CodedManager(AlfWorldEnvironmentManager):
    """A text is a number; one in six is left as it is, which the projection calls invalid."""

    plans: dict[str, list[str]]

    def step(self, text_actions: Sequence[str], slots: Sequence[int] | None = None) -> Any:
        targets = range(len(self._tasks)) if slots is None else slots
        texts = [self._translate(text, slot) for text, slot in zip(text_actions, targets, strict=True)]
        return super().step(texts, slots)

    def _translate(self, text: str, slot: int) -> str:
        number = zlib.crc32(text.encode("utf-8"))
        if number % 6 == 0:
            return text
        plan = self.plans[self._tasks[slot]["gamefile"]]
        return f"<think>so</think><action>{plan[number // 6 % len(plan)]}</action>"


def make_coded_manager(config: Any, is_train: bool) -> CodedManager:
    """The real manager's slots and games, the short ones of them."""
    base = make_alfworld_manager(config, is_train)
    folder = Path(str(base.data_dir))
    plans = {task["gamefile"]: list(Oracle(AlfworldGame(folder / task["gamefile"]))) for task in base.tasks}
    manager = CodedManager(
        base.envs, base.projection_f, config, env_name="alfworld", split=base.split, panel_hash=base.panel_hash,
        tasks=[task for task in base.tasks if len(plans[task["gamefile"]]) <= MAX_PLAN], seed=config.env.seed,
        data_dir=base.data_dir,
    )  # fmt: skip
    manager.plans = plans
    return manager


register("coded_alfworld", "tests.helpers.coded_alfworld:make_coded_manager")
