# SPDX-License-Identifier: Apache-2.0
"""Recipes register on import, add a typed config group and a hook, and are checked before training."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from verl.trainer.config.schema import PPOConfig
from verl.trainer.ppo import recipes
from verl.utils.errors import UserError

RECIPE = """
from dataclasses import dataclass
from verl.trainer.ppo.recipes import TrainerHook, register_recipe
from verl.utils.errors import UserError

@dataclass(frozen=True)
class Group:
    enable: bool = True
    strength: float = 0.5

class Hook(TrainerHook):
    @classmethod
    def is_enabled(cls, config):
        return config.extra["my_group"].enable

    @classmethod
    def check_config(cls, config):
        if config.extra["my_group"].strength < 0:
            raise UserError("my_group.strength must not be negative")

class NoHook:
    pass

register_recipe("mine", config_key="my_group", config_cls=Group, hook=f"{__name__}:Hook")
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    (tmp_path / "some_recipe_for_test.py").write_text(RECIPE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(recipes, "_REGISTRY", recipes._Registry())
    yield "some_recipe_for_test"
    sys.modules.pop("some_recipe_for_test", None)


def test_a_recipe_brings_its_config_group_and_hook(module: str) -> None:
    found = recipes.load_recipes([module, module])
    assert [recipe.name for recipe in found] == ["mine"]
    assert recipes.load_recipes([module]) == found
    group = recipes.extra_config_sections(found)["my_group"]
    hooks = recipes.build_hooks(found, PPOConfig(extra={"my_group": group()}))
    assert [hook.name for hook in hooks] == ["mine"]
    assert recipes.build_hooks(found, PPOConfig(extra={"my_group": group(enable=False)})) == []
    with pytest.raises(UserError, match="strength"):
        recipes.hook_classes(found, PPOConfig(extra={"my_group": group(strength=-1.0)}))


def test_only_the_modules_asked_for_take_part(module: str) -> None:
    recipes.load_recipes([module])
    assert recipes.load_recipes([]) == ()
    assert recipes.load_recipes(["verl.trainer.ppo.core_algos"]) == ()


def test_missing_module_names_the_key(module: str) -> None:
    with pytest.raises(UserError, match=r"algorithm.recipe_modules names 'recipe.nothing_here'"):
        recipes.load_recipes(["recipe.nothing_here"])


def test_an_import_error_inside_a_recipe_travels(tmp_path: Path, module: str) -> None:
    (tmp_path / "broken_recipe_for_test.py").write_text("import a_package_that_is_not_there\n")
    with pytest.raises(ModuleNotFoundError, match="a_package_that_is_not_there"):
        recipes.load_recipes(["broken_recipe_for_test"])


def test_bad_registrations(module: str) -> None:
    recipes.load_recipes([module])
    with pytest.raises(ValueError, match="already registered by some_recipe_for_test"):
        recipes.register_recipe("mine")
    with pytest.raises(ValueError, match="together"):
        recipes.register_recipe("half", config_key="half")
    wrong = recipes.Recipe("wrong", module, hook=f"{module}:NoHook")
    with pytest.raises(ValueError, match="TrainerHook"):
        recipes.hook_classes([wrong], PPOConfig())
