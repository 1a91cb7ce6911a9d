# SPDX-License-Identifier: Apache-2.0
"""The manager contract, on TOY and on recorded ALFWorld games; registry; make_envs."""

import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest

from agent_system.environments import make_envs, register
from agent_system.environments.check import EnvContractError, check_env_manager
from agent_system.environments.env_package.alfworld.manager import TASK_NAMES, AlfWorldEnvironmentManager
from agent_system.environments.registry import env_factory
from tests.helpers.toy_env import TOY_TASKS, ToyEnv, register_toy, say, toy_manager
from verl.utils.errors import UserError

SHARED = Path(__file__).parents[4] / "shared"
DATA = SHARED / "data" / "alfworld"


def alfworld_config(**changes: Any) -> Any:
    values = {
        "style": "full",
        "history": 2,
        "workers": 0,
        "timeout": 60.0,
        "dataset": "eval_in_distribution",
        "train": 2,
        "val": 3,
        "n": 2,
        "data_dir": str(DATA),
        "name": "alfworld/AlfredTWEnv",
        "val_out": False,
    } | changes
    alfworld = SimpleNamespace(
        eval_dataset=values["dataset"],
        data_dir=values["data_dir"],
        source="data",
        generated=None,
        prompt_style=values["style"],
    )
    env = SimpleNamespace(
        env_name=values["name"],
        seed=0,
        history_length=values["history"],
        num_workers=values["workers"],
        worker_timeout=values["timeout"],
        resources_per_worker=SimpleNamespace(num_cpus=0.1, num_gpus=0.0),
        rollout=SimpleNamespace(n=values["n"]),
        alfworld=alfworld,
    )
    data = SimpleNamespace(train_batch_size=values["train"], val_batch_size=values["val"])
    return SimpleNamespace(env=env, data=data, trainer=SimpleNamespace(val_out=values["val_out"]))


@pytest.fixture(scope="module")
def alfworld() -> AlfWorldEnvironmentManager:
    if not DATA.is_dir():
        pytest.skip(f"{DATA} is not here")
    manager, _ = make_envs(alfworld_config())
    assert isinstance(manager, AlfWorldEnvironmentManager)
    return manager


def test_toy_keeps_the_contract() -> None:
    check_env_manager(toy_manager(4))


@pytest.mark.parametrize("style", ["full", "compact"])
def test_alfworld_keeps_the_contract(style: str) -> None:
    if not DATA.is_dir():
        pytest.skip(f"{DATA} is not here")
    for manager in make_envs(alfworld_config(style=style)):
        check_env_manager(manager)
        manager.close()
        manager.close()


class _LeakyToy(ToyEnv):
    """Shares its state between slots."""

    shared: ClassVar[dict[str, str]] = {}

    @property  # type: ignore[override]
    def state(self) -> str:
        return self.shared["state"]

    @state.setter
    def state(self, value: str) -> None:
        self.shared["state"] = value


def test_the_check_finds_shared_state() -> None:
    manager = toy_manager(2, factory=_LeakyToy)
    with pytest.raises(EnvContractError):
        check_env_manager(manager)


class _Forgetful(ToyEnv):
    """Says something else in every episode."""

    episodes = 0

    def reset(self, task: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        _Forgetful.episodes += 1
        return super().reset(task)

    def _text(self) -> str:
        return super()._text() if self.state == "hall" else f"{super()._text()} {self.episodes}"


def test_the_check_finds_episodes_that_cannot_be_played_again() -> None:
    with pytest.raises(EnvContractError, match="lead elsewhere"):
        check_env_manager(toy_manager(2, factory=_Forgetful))


def test_the_check_finds_a_mutating_projection() -> None:
    manager = toy_manager(2)

    class Texts(list):
        pass

    inner = manager.projection_f
    seen: list[list[str]] = []

    def projection(texts: list[str]) -> tuple[list[str], list[int]]:
        result = inner(texts)
        texts[:] = result[0]
        seen.append(texts)
        return result

    manager.projection_f = projection
    # The manager hands out a copy, so that even a projection that writes into its input does no harm.
    check_env_manager(manager)
    assert seen


def test_groups_share_task_and_first_observation_and_groups_differ(alfworld: AlfWorldEnvironmentManager) -> None:
    tasks = [task for task in alfworld.draw_tasks(2) for _ in range(2)]
    obs, infos = alfworld.reset({"tasks": tasks})
    assert obs["anchor"][0] == obs["anchor"][1] != obs["anchor"][2] == obs["anchor"][3]
    assert infos[0]["task"] == infos[1]["task"] != infos[2]["task"]
    record = infos[0]["task"]
    assert set(record) == {"gamefile", "sha256", "task_type", "instruction"}
    assert not Path(record["gamefile"]).is_absolute() and len(record["sha256"]) == 64
    assert obs["anchor"][0].endswith(record["instruction"])


def test_observation_is_the_raw_text_and_history_appears(alfworld: AlfWorldEnvironmentManager) -> None:
    obs, _ = alfworld.reset({"tasks": alfworld.tasks[:1]})
    assert obs["anchor"][0].startswith("-= Welcome to TextWorld, ALFRED! =-\n\n")
    assert obs["anchor"][0] in obs["text"][0] and "step(s) so far" not in obs["text"][0]
    action = "go to " + alfworld._infos[0]["admissible_actions"][0].removeprefix("go to ")
    after, rewards, dones, infos = alfworld.step([say(action)])
    assert f"Action 1: '{action}'" in after["text"][0] and after["anchor"][0] in after["text"][0]
    assert "Your task is to: " in after["text"][0]
    assert "'help'" not in after["text"][0] and f"'{infos[0]['admissible_actions'][0]}'" in after["text"][0]
    assert (rewards.tolist(), dones.tolist()) == ([0.0], [False])
    assert (infos[0]["action"], infos[0]["is_action_valid"], infos[0]["is_admissible"]) == (action, True, True)


def test_a_win_pays_ten_and_counts_for_its_own_episode_only(alfworld: AlfWorldEnvironmentManager) -> None:
    from agent_system.environments.env_package.alfworld.game import AlfworldGame
    from agent_system.environments.env_package.alfworld.oracle import Oracle

    task = alfworld.tasks[0]
    plan = Oracle(AlfworldGame(DATA / task["gamefile"]))
    alfworld.reset({"tasks": [task, task]})
    for action in plan:
        _, rewards, dones, infos = alfworld.step([say(action), say("look")])
    assert rewards.tolist() == [10.0, 0.0] and dones.tolist() == [True, False]
    assert [info["won"] for info in infos] == [True, False]


def test_success_keys_by_task_type(alfworld: AlfWorldEnvironmentManager) -> None:
    folders = {
        "pick_and_place_simple-A-None-B-1": "pick_and_place_success_rate",
        "pick_two_obj_and_place-A-None-B-1": "pick_two_obj_and_place_success_rate",
        "look_at_obj_in_light-A-None-B-1": "look_at_obj_in_light_success_rate",
        "pick_heat_then_place_in_recep-A-None-B-1": "pick_heat_then_place_in_recep_success_rate",
        "pick_cool_then_place_in_recep-A-None-B-1": "pick_cool_then_place_in_recep_success_rate",
        "pick_clean_then_place_in_recep-A-None-B-1": "pick_clean_then_place_in_recep_success_rate",
    }
    assert len(folders) == len(TASK_NAMES)
    infos = [
        [{"won": i % 2 == 0, "task": {"gamefile": f"json_2.1.1/train/{folder}/trial_1/game.tw-pddl"}}]
        for i, folder in enumerate(folders)
    ]
    success = alfworld.success_evaluator(
        total_infos=infos,
        total_batch_list=[[{"active_masks": True}] for _ in infos],
        episode_rewards=np.zeros(6),
        episode_lengths=np.ones(6),
    )
    assert success["success_rate"].tolist() == [1, 0, 1, 0, 1, 0]
    assert {key: values.tolist() for key, values in success.items() if key != "success_rate"} == {
        key: [float(i % 2 == 0)] for i, key in enumerate(folders.values())
    }


def test_last_active_turn_decides() -> None:
    manager = toy_manager(2)
    success = manager.success_evaluator(
        total_infos=[[{"won": True}, {"won": False}]],
        total_batch_list=[[{"active_masks": True}, {"active_masks": False}]],
        episode_rewards=np.zeros(1),
        episode_lengths=np.ones(1),
    )
    assert success["success_rate"].tolist() == [1.0]


def test_splits_sizes_and_seeds() -> None:
    if not DATA.is_dir():
        pytest.skip(f"{DATA} is not here")
    train, val = make_envs(alfworld_config(train=3, n=4, val=5))
    assert (train.num_slots, val.num_slots) == (12, 5)
    assert (train.split, val.split) == ("train", "valid_seen")
    assert make_envs(alfworld_config(val_out=True))[1].split == "valid_unseen"
    assert make_envs(alfworld_config(dataset="eval_out_of_distribution"))[1].split == "valid_unseen"
    assert train.panel_hash != val.panel_hash
    assert train.draw_tasks(7) != train.tasks


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "alfwrld/AlfredTWEnv"}, "did you mean alfworld"),
        ({"name": "alfworld/AlfredThorEnv"}, "only the text games"),
        ({"data_dir": "/nonexistent"}, "/nonexistent"),
    ],
)
def test_user_errors(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        make_envs(alfworld_config(**changes))


def test_registering() -> None:
    register_toy()
    register_toy()
    assert env_factory("toy/anything").__name__ == "make_toy_manager"
    with pytest.raises(ValueError, match="registered already"):
        register("toy", "other.module:function")
    with pytest.raises(ValueError, match="module:function"):
        register("another", "no_colon")


@dataclass
class _ToyData:
    train_batch_size: int = 2
    val_batch_size: int | None = None


@dataclass
class _ToyConfig:
    env: Any = field(
        default_factory=lambda: SimpleNamespace(env_name="toy", seed=5, history_length=1, rollout=SimpleNamespace(n=3))
    )
    data: _ToyData = field(default_factory=_ToyData)


def test_make_envs_of_a_registered_environment() -> None:
    register_toy()
    train, val = make_envs(_ToyConfig())
    assert (train.num_slots, val.num_slots) == (6, len(TOY_TASKS))
    order = [train.draw_tasks(3) for _ in range(4)]
    other = [val.draw_tasks(3) for _ in range(4)]
    assert order != other


def test_importing_the_package_imports_nothing_heavy() -> None:
    code = (
        "import sys, agent_system.environments as e, agent_system.environments.env_manager as m\n"
        "import agent_system.environments.env_package.alfworld.envs\n"
        "heavy = {'torch', 'ray', 'transformers', 'alfworld', 'textworld'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "assert m.AlfWorldEnvironmentManager.__name__ == 'AlfWorldEnvironmentManager'\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[3])
