# SPDX-License-Identifier: Apache-2.0
"""Tasks of a shop: what a record says about one, how the shop behind it is found again, and the two splits."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args, overload

import numpy as np

from agent_system.environments.task_stream import TaskStream
from agent_system.trajectory import task_key
from verl.utils.errors import UserError

if TYPE_CHECKING:
    from agent_system.environments.env_package.webshop.catalogue import Catalogue
    from agent_system.environments.env_package.webshop.goals import GoalSet

__all__ = [
    "FIXED_SEED",
    "LEGACY_VAL_GOALS",
    "GoalStream",
    "GoalTasks",
    "LegacyGoalStream",
    "Shop",
    "ShopSettings",
    "open_shop",
    "shop_of_task",
]

FIXED_SEED = 233
"""Seed of WebShop's own shuffle of the goals."""

LEGACY_VAL_GOALS = 500
"""The reference validates on goals 0 to 499 and trains on the rest."""

_OptionMatch = Literal["upstream", "fixed"]

_SHOPS_KEPT = 1024
"""Per process: in the reference's order each group of a batch has a shop of its own."""

_WAY_OUT = "set --data-dir (or WEBSHOP_DATA) to the folder of the shop that was played"


@dataclass(frozen=True)
class ShopSettings:
    """Which shop and which goals; equal settings give equal goals with equal numbers on every machine."""

    data_dir: str | None = None
    """None = $WEBSHOP_DATA."""
    small: bool = True
    human_goals: bool = False
    """Goals people wrote. A generated shop has one kind of goals only."""
    option_match: _OptionMatch = "upstream"
    seed: int = FIXED_SEED
    """Of goal order and prices; other than the default only for the reference's order."""

    def __post_init__(self) -> None:
        """Settings come from records, too.

        Raises:
            UserError: a value of another type.
        """
        for name, kind in (("small", bool), ("human_goals", bool), ("seed", int)):
            value = self.as_task()[name]
            if type(value) is not kind:
                raise UserError(f"{name}={value!r} of a WebShop shop is no {kind.__name__}.")
        if self.option_match not in get_args(_OptionMatch):
            raise UserError(f"option_match={self.option_match!r} of a WebShop shop: choose upstream or fixed.")

    def as_task(self) -> dict[str, Any]:
        """The part that a task record keeps: everything but the place of the files. JSON types."""
        return {
            "small": self.small,
            "human_goals": self.human_goals,
            "option_match": self.option_match,
            "seed": self.seed,
        }


@dataclass(frozen=True)
class Shop:
    """A loaded shop with its goals."""

    settings: ShopSettings
    catalogue: Catalogue
    goals: GoalSet

    def task(self, index: int) -> dict[str, Any]:
        """The task of one goal: what finds the goal again, and what reports and splits want to know of it."""
        goal = self.goals[index]
        return {
            "catalogue_hash": self.catalogue.hash,
            "goal_index": int(index),
            "goal_asin": goal.asin,
            "goal_hash": self.goals.hash,
            "goal_set": self.settings.as_task(),
            "instruction": goal.instruction_text,
            "task_type": goal.category or "unknown",
            "winnable": bool(self.goals.winnable(index)),
        }

    def check(self, task: Mapping[str, Any]) -> int:
        """The goal number of a task of this shop.

        Raises:
            UserError: the task belongs to another shop or other goals, or names no goal.
        """
        index = task.get("goal_index")
        if not isinstance(index, int) or isinstance(index, bool):
            raise UserError(f"the task has no `goal_index` ({index!r}); it is no WebShop task.")
        expected = task.get("catalogue_hash")
        if expected != self.catalogue.hash:
            raise UserError(
                f"the shop in {self.catalogue.data_dir} is not the one that was played (its hash is "
                f"{self.catalogue.hash[:16]}, the task says {str(expected)[:16]}); {_WAY_OUT}."
            )
        # Attributes, options and prices of a goal can differ where its words do not. Early records lack the hash.
        same = task.get("goal_hash", self.goals.hash) == self.goals.hash and 0 <= index < len(self.goals)
        if same:
            goal = self.goals[index]
            same = (goal.asin, goal.instruction_text) == (task.get("goal_asin"), task.get("instruction"))
        if not same:
            raise UserError(
                f"goal {index} of the shop in {self.catalogue.data_dir} is not the one that was played "
                f"({task.get('goal_asin')}: {str(task.get('instruction'))[:60]!r}): the products are the same, the "
                f"goals ({self.catalogue.files.human.name}) are not; {_WAY_OUT}."
            )
        return index

    def metadata(self) -> dict[str, Any]:
        """For the record of a run: products, goals, hashes, the noun extractor. JSON types."""
        return self.goals.metadata()


@lru_cache(maxsize=_SHOPS_KEPT)
def open_shop(settings: ShopSettings) -> Shop:
    """Load a shop once per process and settings; shops of one folder share the catalogue.

    Raises:
        UserError: no data, or a file is missing or broken.
    """
    from agent_system.environments.env_package.webshop.catalogue import Catalogue
    from agent_system.environments.env_package.webshop.goals import GoalSet

    catalogue = Catalogue.load(settings.data_dir, small=settings.small)
    goals = GoalSet.load(
        catalogue,
        # None: the kind that the shop has; a generated one has no synthetic goals.
        human_goals=settings.human_goals or None,
        seed=settings.seed,
        option_match=settings.option_match,
    )
    return Shop(settings, catalogue, goals)


def shop_of_task(task: Mapping[str, Any], data_dir: str | Path | None) -> Shop:
    """The shop of a task record, from files in `data_dir` (None: $WEBSHOP_DATA).

    Raises:
        UserError: the record does not say which goals it counts, or `open_shop` fails.
    """
    goal_set = task.get("goal_set")
    if not isinstance(goal_set, dict):
        raise UserError("the record's task has no `goal_set`; it is no WebShop task and cannot be rebuilt.")
    try:
        settings = ShopSettings(data_dir=None if data_dir is None else str(data_dir), **goal_set)
    except (TypeError, UserError) as error:
        raise UserError(f"the record's `goal_set` {goal_set} cannot be read ({error}).") from error
    return open_shop(settings)


class GoalTasks(Sequence[dict[str, Any]]):
    """The tasks of some goals, made when asked for: the full shop has millions of them."""

    def __init__(self, shop: Shop, indices: np.ndarray) -> None:
        """
        Args:
            indices: int64 (tasks,), goal numbers in the order of the tasks.
        """
        self._shop = shop
        self.indices = indices

    def __len__(self) -> int:
        return len(self.indices)

    @overload
    def __getitem__(self, item: int) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, item: slice) -> GoalTasks: ...
    def __getitem__(self, item: int | slice) -> dict[str, Any] | GoalTasks:
        if isinstance(item, slice):
            return GoalTasks(self._shop, self.indices[item])
        return self._shop.task(int(self.indices[item]))

    @property
    def hash(self) -> str:
        """Names the goals and their order (16 hex digits)."""
        numbers = hashlib.sha256(np.ascontiguousarray(self.indices, "<i8").tobytes()).hexdigest()
        return task_key({"goal_set": self._shop.goals.hash, "indices": numbers})


class GoalStream(TaskStream):
    """A task stream over `GoalTasks`, which are neither copied nor hashed one by one."""

    def __init__(self, tasks: GoalTasks, seed: int) -> None:
        super().__init__(tasks[:1], seed)
        self._goals = tasks
        self._tasks = tasks  # type: ignore[assignment]

    def _fingerprint(self) -> str:
        return self._goals.hash


class LegacyGoalStream(TaskStream):
    """The reference's draws: per reset, distinct goal numbers for the groups of a batch, from one random state.

    Group g counts in the goal order of environment seed `seed + g`, so equal numbers are different goals in different
    groups. A draw of another size than `num_groups` goes on with the groups from 0.
    """

    def __init__(self, settings: ShopSettings, numbers: Sequence[int], seed: int, num_groups: int) -> None:
        """
        Args:
            settings: of the shop; the seed in it does not count.
            numbers: goal numbers that may be drawn.
            seed: of the draws and, plus the group, of the orders.
            num_groups: groups of a batch.
        """
        self._settings = settings
        self._numbers = np.asarray(numbers)
        self._seed = seed
        self._num_groups = min(num_groups, len(self._numbers))
        self._draws = 0
        self._random = np.random.RandomState(seed)

    def __len__(self) -> int:
        return len(self._numbers)

    @property
    def tasks(self) -> list[dict[str, Any]]:
        """The first draw, whatever was drawn since."""
        return self._draw(np.random.RandomState(self._seed), self._num_groups)

    def take(self, count: int) -> list[dict[str, Any]]:
        taken: list[dict[str, Any]] = []
        while len(taken) < count:
            taken += self._draw(self._random, min(self._num_groups, count - len(taken)))
            self._draws += 1
        return taken

    def _draw(self, random: np.random.RandomState, count: int) -> list[dict[str, Any]]:
        chosen = random.choice(self._numbers, self._num_groups, replace=False)[:count]
        return [self._task(group, int(number)) for group, number in enumerate(chosen)]

    def _task(self, group: int, number: int) -> dict[str, Any]:
        return open_shop(replace(self._settings, seed=self._seed + group)).task(number)

    def state_dict(self) -> dict[str, Any]:
        return {"position": self._draws, "seed": self._seed, "fingerprint": self._fingerprint()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._draws = self._position
        self._random = np.random.RandomState(self._seed)
        for _ in range(self._draws):
            self._random.choice(self._numbers, self._num_groups, replace=False)

    def _fingerprint(self) -> str:
        numbers = self._numbers.tolist()
        return task_key({"goal_set": self._settings.as_task(), "numbers": numbers, "groups": self._num_groups})
