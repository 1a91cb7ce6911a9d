# SPDX-License-Identifier: Apache-2.0
"""Runs any environment manager through its contract; every environment's test calls it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from agent_system.environments.base import EnvironmentManagerBase

__all__ = ["MALFORMED_TEXTS", "EnvContractError", "check_env_manager", "tagged"]

MALFORMED_TEXTS = (
    "",
    "no tags at all",
    "<action>look",
    "</action><think></think><action>look",
    "<think>a</think><action>look</action><action>inventory</action>",
    "<think>a</think><action></action>",
    "<think>\u6211</think><action>look</action>",
    "<think>x</think><action>fly to the moon</action>",
    "<think>" + "x" * 10_000 + "</think><action>" + "y" * 10_000 + "</action>",
    "<think>\x00\x1b[31m\t\r\n</think><action>\x07look\x00</action>",
    "{current_observation} %s {0} \ud83d\ude00 \u2028",
)
"""Model texts that a manager must take without raising."""

_REPLAYED_TURNS = 5
_RESET_KEYS = {"won": bool, "admissible_actions": list, "state_key": str, "task": dict}
_STEP_KEYS = _RESET_KEYS | {"action": str, "is_action_valid": bool, "is_admissible": bool, "is_malformed": bool}


class EnvContractError(AssertionError):
    """The manager breaks its contract; the message says where."""


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise EnvContractError(message)


def tagged(action: str) -> str:
    """A well-formed response of the project's own prompts."""
    return f"<think>check</think><action>{action}</action>"


def check_env_manager(
    manager: EnvironmentManagerBase,
    tasks: Sequence[dict[str, Any]] | None = None,
    *,
    respond: Callable[[str], str] = tagged,
) -> None:
    """Play a few turns and check every promise of `EnvironmentManagerBase`; the manager is reset in the end.

    Args:
        manager: any manager with at least two slots.
        tasks: tasks to play (None = the manager's own); at least one.
        respond: action -> a model text that the manager's projection reads as that action.

    Raises:
        EnvContractError: the first broken promise.
    """
    pool = list(tasks) if tasks is not None else manager.tasks
    _require(manager.num_slots >= 2, "the check needs at least two slots")
    _require(bool(pool), "the check needs at least one task")
    _check_tasks_and_state(manager)
    _check_groups(manager, pool)
    _check_subset(manager, pool, respond)
    _check_replay(manager, pool, respond)
    _check_texts(manager, pool)
    _check_success(manager, pool, respond)
    manager.reset({"tasks": pool[:1]})


def _check_obs(obs: dict[str, Any], count: int, where: str) -> None:
    _require(set(obs) == {"text", "image", "anchor"}, f"{where}: observation keys are {sorted(obs)}")
    for key in ("text", "anchor"):
        value = obs[key]
        _require(isinstance(value, list) and len(value) == count, f"{where}: obs[{key!r}] is not a list of {count}")
        _require(all(isinstance(item, str) and item for item in value), f"{where}: obs[{key!r}] holds a non-text")


def _check_infos(infos: Sequence[dict[str, Any]], count: int, keys: dict[str, type], where: str) -> None:
    _require(len(infos) == count, f"{where}: {len(infos)} infos for {count} slots")
    for info in infos:
        for key, kind in keys.items():
            found = info.get(key)
            _require(isinstance(found, kind), f"{where}: info[{key!r}] is {found!r}, not {kind.__name__}")


def _check_tasks_and_state(manager: EnvironmentManagerBase) -> None:
    if manager.task_stream is None:
        return
    state = manager.state_dict()
    first = manager.draw_tasks(2)
    manager.load_state_dict(state)
    _require(manager.draw_tasks(2) == first, "load_state_dict does not restore the task order")
    manager.load_state_dict(state)


def _check_groups(manager: EnvironmentManagerBase, pool: Sequence[dict[str, Any]]) -> None:
    """Equal tasks look the same in every slot, at every reset."""
    obs, infos = manager.reset({"tasks": [pool[0]] * 2})
    _check_obs(obs, 2, "reset")
    _check_infos(infos, 2, _RESET_KEYS, "reset")
    _require(len(set(obs["text"])) == len(set(obs["anchor"])) == 1, "two slots of one task start differently")
    _require(infos[0]["state_key"] == infos[1]["state_key"], "two slots of one task have different state keys")
    again, _ = manager.reset({"tasks": [pool[0]] * 2})
    _require(again == obs, "a second reset of the same task starts differently")


def _check_subset(
    manager: EnvironmentManagerBase, pool: Sequence[dict[str, Any]], respond: Callable[[str], str]
) -> None:
    """Stepping slot 1 leaves slot 0 alone, and the results come in the order asked for."""
    obs, infos = manager.reset({"tasks": [pool[0]] * 2})
    action = respond(infos[1]["admissible_actions"][0])
    stepped, rewards, dones, step_infos = manager.step([action], [1])
    _check_step(stepped, rewards, dones, step_infos, 1)
    _require(step_infos[0]["is_admissible"], f"info['is_admissible'] is False for the offered action {action}")
    _require(manager.build_text_obs([0]) == obs["text"][:1], "stepping slot 1 changed the prompt of slot 0")
    later, _, _, _ = manager.step([action], [0])
    _require(later == stepped, "slot 0 answers differently from slot 1 after the same action")
    shown = manager.history_shown(0)
    _require(0 <= shown <= 1, f"history_shown says {shown} after one turn")
    _require(bool(manager.build_text_obs([0], 0)[0]), "no prompt without history")


def _check_replay(
    manager: EnvironmentManagerBase, pool: Sequence[dict[str, Any]], respond: Callable[[str], str]
) -> None:
    """The same actions lead to the same texts and states again, in another slot too: a dead actor's episodes are
    continued by playing them again."""
    obs, infos = manager.reset({"tasks": [pool[-1]]})
    actions: list[str] = []
    seen = [(obs["anchor"][0], infos[0]["state_key"])]
    done = False
    while not done and len(actions) < _REPLAYED_TURNS:
        offered = list(infos[0]["admissible_actions"])
        infos[0]["admissible_actions"].clear()  # what infos carry is the caller's own
        actions.append(respond(offered[-1 - len(actions) % len(offered)]))
        obs, _, dones, infos = manager.step(actions[-1:], [0])
        seen.append((obs["anchor"][0], infos[0]["state_key"]))
        done = bool(dones[0])
    obs, infos = manager.reset({"tasks": [pool[-1]] * 2})
    again = [(obs["anchor"][1], infos[1]["state_key"])]
    for action in actions:
        obs, _, _, infos = manager.step([action], [1])
        again.append((obs["anchor"][0], infos[0]["state_key"]))
    _require(again == seen, f"the same actions lead elsewhere in another slot: {again} instead of {seen}")


def _check_step(obs: dict[str, Any], rewards: Any, dones: Any, infos: Sequence[dict[str, Any]], count: int) -> None:
    _check_obs(obs, count, "step")
    _check_infos(infos, count, _STEP_KEYS, "step")
    for name, array in (("rewards", rewards), ("dones", dones)):
        _require(isinstance(array, np.ndarray) and array.shape == (count,), f"step: {name} is not an array of {count}")
    _require(dones.dtype == bool, f"step: dones has dtype {dones.dtype}")


def _check_texts(manager: EnvironmentManagerBase, pool: Sequence[dict[str, Any]]) -> None:
    """Any model text is taken, and the texts are not changed."""
    for text in MALFORMED_TEXTS:
        manager.reset({"tasks": pool[:1]})
        texts = [text]
        result = manager.step(texts)
        _check_step(*result, 1)
        _require(texts == [text], "step changed the list of model texts")


def _check_success(
    manager: EnvironmentManagerBase, pool: Sequence[dict[str, Any]], respond: Callable[[str], str]
) -> None:
    _, infos = manager.reset({"tasks": [pool[i % len(pool)] for i in range(2)]})
    _, rewards, _, step_infos = manager.step([respond(info["admissible_actions"][0]) for info in infos])
    success = manager.success_evaluator(
        total_infos=[[info] for info in step_infos],
        total_batch_list=[[{"active_masks": True}] for _ in step_infos],
        episode_rewards=rewards,
        episode_lengths=np.ones(2),
    )
    _require("success_rate" in success, "success_evaluator has no success_rate")
    _require(len(success["success_rate"]) == 2, "success_rate must have one entry per episode")
    expected = [float(info["won"]) for info in step_infos]
    _require(list(success["success_rate"]) == expected, "success_rate differs from the environments' own `won`")
