# SPDX-License-Identifier: Apache-2.0
"""How a recipe (a credit method, an algorithm) attaches to the trainer without the trainer knowing its name.

A recipe is a module listed in ``algorithm.recipe_modules``. On import it registers advantage estimators and policy
losses (:mod:`verl.trainer.ppo.core_algos`) and, when it needs more, a :class:`Recipe`: a typed config group and a
:class:`TrainerHook`. The hook class is named as ``"module:Class"`` and imported only when training starts, so that
``--help`` of the recipe's entry stays free of torch.
"""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from verl.utils.errors import UserError

if TYPE_CHECKING:
    from verl.protocol import DataProto
    from verl.single_controller.base import ClassWithInitArgs, WorkerGroup
    from verl.trainer.config.schema import PPOConfig


logger = logging.getLogger(__name__)


class TimerFactory(Protocol):
    """``timer(name)``: a context manager that adds its wall time to ``timing_s/{name}`` of this step."""

    def __call__(self, name: str) -> AbstractContextManager[None]: ...


@dataclass
class TrainerContext:
    """What a hook sees of one training step.

    ``worker_groups``: role -> group, the hook's own roles included. ``metrics``: write scalars here, they are logged
    with the step. ``episodes``: the step's whole episodes (``agent_system.trajectory.Trajectory``), in slot order;
    empty before the rollout. ``epoch``: completed passes over the prompts before this step, counted across resumes.
    ``train_envs``: the environment manager; its task stream must not be advanced by a hook.
    """

    config: PPOConfig
    global_step: int
    epoch: int
    tokenizer: Any
    worker_groups: Mapping[str, WorkerGroup]
    metrics: dict[str, Any]
    timer: TimerFactory
    train_envs: Any
    episodes: Sequence[Any] = ()


class TrainerHook:
    """Base class of a recipe's hook: every method is optional and does nothing here.

    Batch methods work in place: they add columns (``batch.batch[name] = tensor`` of shape ``(B, ...)``,
    ``batch.non_tensor_batch[name] = array`` of length ``B``) and never change ``rewards`` or the row order. Rows of
    an episode are contiguous and in turn order in all of them.

    Order within a step: ``after_rollout``, (log-probs) ``after_log_prob``, (episode rewards) ``after_reward``,
    (invalid-action penalty, KL in reward, advantages) ``after_advantage``, (padding, balancing, update) and, when the
    step ends an epoch, ``epoch_end``; then validation and checkpoint.
    """

    name: str = ""
    """Set by :func:`build_hooks` to the recipe's name; names the hook's folder in a checkpoint."""

    def __init__(self, config: PPOConfig) -> None:
        self.config = config

    @classmethod
    def is_enabled(cls, config: PPOConfig) -> bool:
        """Whether the hook takes part at all; a disabled hook is not built (the run is then bit-equal to none)."""
        return True

    @classmethod
    def check_config(cls, config: PPOConfig) -> None:
        """Raise ``UserError`` for combinations that cannot work; called before a model is loaded."""

    def worker_roles(self, config: PPOConfig) -> dict[str, ClassWithInitArgs]:
        """Extra worker roles, co-located with the actor: role name -> ``ClassWithInitArgs(cls, ...)``."""
        return {}

    def init_workers(self, ctx: TrainerContext) -> None:
        """Called once, after the worker groups exist and before the actor's model is built."""

    def after_rollout(self, ctx: TrainerContext, batch: DataProto) -> None:
        """The rollout's rows and ``ctx.episodes``, before any filtering; the rollout engine sleeps.

        With dynamic sampling it is called once for every generation batch of the step: ``ctx.metrics`` is then the
        same dict each time, and the later methods see the rows of the groups that were kept. A column
        ``shaped_episode_rewards`` (one number an episode, on all its rows) decides which groups are kept.
        """

    def after_log_prob(self, ctx: TrainerContext, batch: DataProto) -> None:
        """``response_mask``, ``old_log_probs`` (and ``ref_log_prob``) are present."""

    def after_reward(self, ctx: TrainerContext, batch: DataProto) -> None:
        """``token_level_scores`` holds the episode reward at each row's last token; reshape it here."""

    def after_advantage(self, ctx: TrainerContext, batch: DataProto) -> None:
        """``advantages`` and ``returns`` are present; edit them here."""

    def epoch_end(self, ctx: TrainerContext, epoch: int) -> None:
        """``epoch`` passes over the prompts are complete, counted across resumes (the first call gets 1)."""

    def state_dict(self) -> dict[str, Any]:
        """Small JSON-able state, kept inside ``trainer_state.json``."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""

    def save(self, path: Path) -> None:
        """Write large state (weights, buffers) into the existing folder ``path``."""

    def load(self, path: Path) -> None:
        """Read what :meth:`save` wrote; the folder may be empty."""

    def close(self) -> None:
        """Release what the hook holds; called when training ends, also after an error."""


@dataclass(frozen=True)
class Recipe:
    """A registered recipe. ``module`` is the module that registered it."""

    name: str
    module: str
    config_key: str | None = None
    config_cls: type | None = None
    hook: str | None = None


@dataclass
class _Registry:
    recipes: dict[str, Recipe] = field(default_factory=dict)


_REGISTRY = _Registry()


def register_recipe(
    name: str, *, config_key: str | None = None, config_cls: type | None = None, hook: str | None = None
) -> None:
    """Register the calling module's recipe.

    Args:
        name: name of the recipe, also its folder name in checkpoints.
        config_key: top-level config group it adds; ``config_cls`` is the dataclass of that group, which arrives as
            ``config.extra[config_key]``.
        hook: ``"module:Class"`` of a :class:`TrainerHook`, imported when training starts.

    Raises:
        ValueError: the name belongs to another module, or only one of config_key and config_cls is given.
    """
    if (config_key is None) != (config_cls is None):
        raise ValueError(f"recipe {name!r}: give config_key and config_cls together")
    module = str(sys._getframe(1).f_globals["__name__"])
    present = _REGISTRY.recipes.get(name)
    if present is not None and present.module != module:
        raise ValueError(f"recipe {name!r} is already registered by {present.module}; choose another name")
    _REGISTRY.recipes[name] = Recipe(name, module, config_key, config_cls, hook)


def load_recipes(modules: Iterable[str]) -> tuple[Recipe, ...]:
    """Import the modules and return the recipes they (or modules below them) registered, in the order given.

    Raises:
        UserError: a module does not exist. Errors inside a module travel unchanged.
    """
    found: dict[str, Recipe] = {}
    for module in dict.fromkeys(modules):
        try:
            importlib.import_module(module)
        except ModuleNotFoundError as error:
            if error.name is None or not (module == error.name or module.startswith(f"{error.name}.")):
                raise
            raise UserError(
                f"algorithm.recipe_modules names {module!r}, but no module {error.name!r} can be imported; "
                "check the spelling, or install the package that holds it"
            ) from error
        for recipe in _REGISTRY.recipes.values():
            if recipe.module == module or recipe.module.startswith(f"{module}."):
                found[recipe.name] = recipe
    return tuple(found.values())


def extra_config_sections(recipes: Iterable[Recipe]) -> dict[str, type]:
    """Config groups that the recipes add, for ``build_config(..., extra_sections=...)``."""
    return {
        recipe.config_key: recipe.config_cls
        for recipe in recipes
        if recipe.config_key is not None and recipe.config_cls is not None
    }


def hook_classes(recipes: Iterable[Recipe], config: PPOConfig) -> dict[str, type[TrainerHook]]:
    """Hook classes of the recipes that are enabled by ``config``, already asked to check it, by recipe name.

    Raises:
        UserError: a hook refuses the config.
        ValueError: a recipe's ``hook`` is not ``module:Class`` of a :class:`TrainerHook`.
    """
    classes: dict[str, type[TrainerHook]] = {}
    for recipe in recipes:
        if recipe.hook is None:
            continue
        module, _, attribute = recipe.hook.partition(":")
        cls = vars(importlib.import_module(module)).get(attribute)
        if not (isinstance(cls, type) and issubclass(cls, TrainerHook)):
            raise ValueError(f"recipe {recipe.name!r}: hook {recipe.hook!r} does not name a TrainerHook")
        if cls.is_enabled(config):
            cls.check_config(config)
            classes[recipe.name] = cls
    return classes


def build_hooks(recipes: Iterable[Recipe], config: PPOConfig) -> list[TrainerHook]:
    """Hooks of the enabled recipes, in recipe order."""
    hooks = []
    for name, cls in hook_classes(recipes, config).items():
        hook = cls(config)
        hook.name = name
        hooks.append(hook)
    return hooks


def save_hooks(hooks: Iterable[TrainerHook], folder: Path) -> None:
    """Let every hook write its large state into ``{folder}/hooks/{name}``."""
    for hook in hooks:
        target = folder / "hooks" / hook.name
        target.mkdir(parents=True)
        hook.save(target)


def load_hooks(hooks: Sequence[TrainerHook], folder: Path, states: Mapping[str, Mapping[str, Any]]) -> None:
    """Restore the hooks from a checkpoint, and name what has no partner.

    Args:
        states: every hook's ``state_dict()``, by name.
    """
    for hook in hooks:
        if hook.name in states:
            hook.load_state_dict(states[hook.name])
            hook.load(folder / "hooks" / hook.name)
        else:
            logger.warning("%s holds no state of recipe %s, which starts afresh", folder, hook.name)
    for name in sorted(set(states) - {hook.name for hook in hooks}):
        logger.warning("%s holds state of recipe %s, which is not enabled in this run", folder, name)
