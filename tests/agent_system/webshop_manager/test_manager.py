# SPDX-License-Identifier: Apache-2.0
"""The WebShop manager on a generated shop and, where it is at hand, on the original data: contract, tasks, success."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agent_system.environments import make_envs
from agent_system.environments.check import check_env_manager, tagged
from agent_system.environments.env_package.webshop import build_webshop_envs
from agent_system.environments.env_package.webshop.data_files import HUMAN_FILE
from agent_system.environments.env_package.webshop.envs import WebshopGame
from agent_system.environments.env_package.webshop.manager import SCORE_KEY, WINNABLE_KEY, WebshopEnvironmentManager
from agent_system.environments.env_package.webshop.pages import SEARCH_ACTION
from agent_system.environments.env_package.webshop.tasks import LegacyGoalStream, ShopSettings, open_shop, shop_of_task
from tests.agent_system.webshop_manager.conftest import WebshopConfigMaker
from verl.utils.errors import UserError


def best_purchase(manager: WebshopEnvironmentManager, task: dict[str, Any]) -> list[str]:
    """Actions that buy the goal's product with the options asked for."""
    goal = open_shop(ShopSettings(str(manager.data_dir), option_match="upstream")).goals[task["goal_index"]]
    wanted = goal.goal_options.values() if isinstance(goal.goal_options, dict) else goal.goal_options
    values = [value.rpartition(": ")[2] for value in wanted]
    return [
        f"search[{goal.name}]",
        f"click[{goal.asin.lower()}]",
        *(f"click[{value}]" for value in values),
        "click[buy now]",
    ]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"prompt_style": "compact"},
        {"observation_mode": "text_rich", "prompt_style": "compact", "history": 0},
        {"split": "goal", "option_match": "fixed"},
    ],
    ids=str,
)
def test_the_contract_is_kept(changes: dict[str, Any], make_config: WebshopConfigMaker) -> None:
    for manager in make_envs(make_config(**changes)):
        check_env_manager(manager)
        manager.close()
        manager.close()


def test_the_contract_is_kept_on_the_original_data(shared_dir: Path, make_config: WebshopConfigMaker) -> None:
    for manager in make_envs(make_config(data_dir=str(shared_dir / "data" / "webshop"))):
        check_env_manager(manager)


def test_training_and_validation_share_no_goal_and_by_product_no_product(make_config: WebshopConfigMaker) -> None:
    for split, field in (("goal", "goal_index"), ("product", "goal_asin")):
        train, val = make_envs(make_config(split=split))
        sides = [{task[field] for task in manager.tasks} for manager in (train, val)]
        assert sides[0] and sides[1] and not sides[0] & sides[1]
        assert train.panel_hash != val.panel_hash and (train.split, val.split) == ("train", "val")
    by_default = make_envs(make_config())[1]
    assert by_default.panel_hash == val.panel_hash
    assert by_default.metadata["split"] == "product" and by_default.metadata["overlap"]["shared_products"] == 0


def test_the_original_data_is_split_by_goal(shared_dir: Path, make_config: WebshopConfigMaker) -> None:
    train, val = make_envs(make_config(data_dir=str(shared_dir / "data" / "webshop")))
    assert [task["goal_index"] for task in val.tasks] == list(range(500))
    assert sorted(task["goal_index"] for task in train.tasks) == list(range(500, 6910))
    assert val.metadata["split"] == "goal" and val.metadata["overlap"]["shared_products"] > 0
    few = make_envs(make_config(data_dir=str(shared_dir / "data" / "webshop"), val_goals=5))[1]
    assert [task["goal_index"] for task in few.tasks] == [0, 100, 200, 300, 400]


def test_groups_share_a_goal_and_the_order_is_seeded_and_resumes(make_config: WebshopConfigMaker) -> None:
    train, _ = make_envs(make_config())
    again, _ = make_envs(make_config())
    other, _ = make_envs(make_config(seed=1))
    first = [train.draw_tasks(3) for _ in range(4)]
    assert first == [again.draw_tasks(3) for _ in range(4)] != [other.draw_tasks(3) for _ in range(4)]
    state = json.loads(json.dumps(train.state_dict()))
    following = train.draw_tasks(3)
    fresh, _ = make_envs(make_config())
    fresh.load_state_dict(state)
    assert fresh.draw_tasks(3) == following
    with pytest.raises(UserError, match="task order"):
        other.load_state_dict(state)
    tasks = [task for task in following for _ in range(2)]
    obs, infos = train.reset({"tasks": tasks})
    assert infos[0]["task"] == infos[1]["task"] != infos[2]["task"]
    assert following[0]["instruction"] in obs["text"][0] and following[0]["instruction"] in obs["text"][1]


def test_a_task_record_rebuilds_the_goal_and_refuses_another_shop(make_config: WebshopConfigMaker) -> None:
    train, _ = make_envs(make_config())
    task = train.tasks[0]
    assert set(task) == {
        "catalogue_hash", "goal_index", "goal_asin", "goal_hash", "goal_set", "instruction", "task_type", "winnable",
    }  # fmt: skip
    assert json.loads(json.dumps(task)) == task
    for change, message in (
        ({"catalogue_hash": "0" * 64}, "not the one that was played"),
        ({"goal_asin": "B000000000"}, "not the one that was played"),
        ({"goal_index": 10**6}, "not the one that was played"),
        ({"goal_hash": "0" * 64}, "not the one that was played"),
        ({"goal_hash": None}, "not the one that was played"),
        ({"instruction": "another"}, "not the one that was played"),
        ({"goal_index": "3"}, "no `goal_index`"),
        ({"goal_set": None}, "no `goal_set`"),
        ({"goal_set": {"colour": 1}}, "cannot be read"),
        ({"goal_set": {"option_match": "foo"}}, "cannot be read .*choose upstream or fixed"),
        ({"goal_set": {"option_match": ["fixed"]}}, "cannot be read .*choose upstream or fixed"),
        ({"goal_set": {"seed": [1]}}, r"cannot be read .*seed=\[1\]"),
        ({"goal_set": {"seed": True}}, "cannot be read .*seed=True"),
        ({"goal_set": {"small": "no"}}, "cannot be read .*small='no'"),
        ({"goal_set": {"human_goals": None}}, "cannot be read .*human_goals=None"),
        ({"goal_set": {"data_dir": "/"}}, "cannot be read"),
    ):
        with pytest.raises(UserError, match=message):
            train.reset({"tasks": [{**task, **change}]})
    # Records from before the goals had a hash.
    early = {name: value for name, value in task.items() if name != "goal_hash"}
    assert train.reset({"tasks": [early]})[0]["anchor"] == train.reset({"tasks": [task]})[0]["anchor"]
    with pytest.raises(UserError, match="not the one that was played"):
        train.reset({"tasks": [{**early, "instruction": "another"}]})


@pytest.mark.parametrize("field", ["instruction", "instruction_attributes", "instruction_options", None])
def test_a_record_of_other_goals_for_the_same_products_is_refused(
    shop_dir: Path, tmp_path: Path, field: str | None
) -> None:
    """Whether a goal was changed in a way that its words show or not, or (None) goals were added."""
    other = shutil.copytree(shop_dir, tmp_path / "other")
    entries = json.loads((other / HUMAN_FILE).read_text(encoding="utf-8"))
    some = next(iter(entries.values()))
    if field is None:
        some.append(some[0])
    else:
        some[0][field] = "another request" if field == "instruction" else ["another"]
    (other / HUMAN_FILE).write_text(json.dumps(entries), encoding="utf-8")
    played, changed = (open_shop(ShopSettings(str(folder))) for folder in (shop_dir, other))
    assert played.catalogue.hash == changed.catalogue.hash
    for index in range(0, 160, 10):
        task = played.task(index)
        with pytest.raises(UserError, match=r"not the one that was played.*items_human_ins\.json.*--data-dir"):
            shop_of_task(task, other).check(task)
        assert shop_of_task(task, shop_dir).check(task) == index


def test_a_win_pays_ten_and_scores_count_for_their_own_episode(make_config: WebshopConfigMaker) -> None:
    train, _ = make_envs(make_config())
    task = next(task for task in train.tasks if task["winnable"])
    plan = best_purchase(train, task)
    train.reset({"tasks": [task, task, task]})
    histories: list[list[Any]] = [[], [], []]
    rewards = np.zeros(3)
    for turn, action in enumerate(plan):
        texts = [tagged(action), tagged("click[search]"), tagged(action if turn != 2 else "click[buy now]")]
        live = [slot for slot in range(3) if not (histories[slot] and histories[slot][-1]["done"])]
        obs, reward, dones, infos = train.step([texts[slot] for slot in live], live)
        for row, slot in enumerate(live):
            rewards[slot] += reward[row]
            histories[slot].append({**infos[row], "done": bool(dones[row])})
            if dones[row]:
                assert infos[row]["admissible_actions"] == [] and "Thank you" in obs["anchor"][row]
    assert rewards[0] == 10.0 and rewards[1] == 0.0
    success = train.success_evaluator(
        total_infos=histories,
        total_batch_list=[[{"active_masks": True}] * len(infos) for infos in histories],
        episode_rewards=rewards,
        episode_lengths=np.array([len(infos) for infos in histories]),
    )
    assert success["success_rate"][:2].tolist() == success[WINNABLE_KEY][:2].tolist() == [1.0, 0.0]
    assert success[SCORE_KEY][:2].tolist() == [1.0, 0.0]
    assert success[SCORE_KEY][2] == pytest.approx(histories[2][-1]["task_score"])


def test_a_purchase_pays_once(make_config: WebshopConfigMaker) -> None:
    train, _ = make_envs(make_config())
    task = next(task for task in train.tasks if task["winnable"])
    game = WebshopGame(open_shop(ShopSettings(str(train.data_dir))), task["goal_index"])
    game.reset()
    results = [game.step(action) for action in [*best_purchase(train, task), "click[buy now]", "search[a]", "x"]]
    assert [reward for _, reward, _, _ in results] == [0.0] * (len(results) - 4) + [10.0, 0.0, 0.0, 0.0]
    assert all(done and info["won"] for _, _, done, info in results[-4:])


def test_goals_that_cannot_be_won_are_left_out_of_one_key_only(make_config: WebshopConfigMaker) -> None:
    train, _ = make_envs(make_config())
    infos = [
        [{"won": won, "task_score": 0.5, "task": {"winnable": can}}] for won, can in ((False, False), (True, True))
    ]
    success = train.success_evaluator(
        total_infos=infos,
        total_batch_list=[[{"active_masks": True}] for _ in infos],
        episode_rewards=np.zeros(2),
        episode_lengths=np.ones(2),
    )
    assert success["success_rate"].tolist() == [0.0, 1.0]
    assert success[WINNABLE_KEY].tolist() == [1.0]
    assert set(success) == {"success_rate", SCORE_KEY, WINNABLE_KEY}


def test_validity(make_config: WebshopConfigMaker) -> None:
    train, _ = make_envs(make_config())
    task = train.tasks[0]

    def flags(text: str) -> tuple[bool, bool, bool]:
        _, infos = train.reset({"tasks": [task]})
        assert infos[0]["admissible_actions"][0] == SEARCH_ACTION
        info = train.step([text])[3][0]
        return info["is_action_valid"], info["is_admissible"], info["is_malformed"]

    assert flags(tagged("search[red mug]")) == (True, True, False)
    assert flags(tagged("click[search]")) == (True, True, False)
    assert flags(tagged("click[buy now]")) == (True, False, False)
    assert flags("search[red mug]") == (False, True, False)
    assert flags(tagged("")) == (True, False, True)


def test_the_record_of_a_run_names_the_shop_and_the_noun_extractor(
    make_config: WebshopConfigMaker, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    _, val = make_envs(make_config())
    for side in ("training", "validation"):
        (line,) = (text for text in caplog.messages if text.startswith(f"WebShop {side}: "))
        assert "nouns=table:title_nouns.json" in line and "goals=160" in line
    record = json.loads(json.dumps(val.metadata))
    assert (record["products"], record["goals"]) == (80, 160)
    assert record["nouns"] and record["catalogue_hash"] and record["option_match"] == "upstream"
    assert record["held_out"] is True


def test_legacy_order(shared_dir: Path, make_config: WebshopConfigMaker) -> None:
    """Every group has its own order; the numbers are those that numpy's old generator draws for the reference."""
    data = str(shared_dir / "data" / "webshop")
    config = make_config(data_dir=data, legacy_goal_order=True, seed=17)
    train, val = make_envs(config)
    state = np.random.RandomState(17)
    for _ in range(2):
        drawn = train.draw_tasks(3)
        assert [task["goal_index"] for task in drawn] == state.choice(range(500, 6910), 3, replace=False).tolist()
        assert [task["goal_set"]["seed"] for task in drawn] == [17, 18, 19]
    expected = np.random.RandomState(1017).choice(range(500), 4, replace=False).tolist()
    assert [task["goal_index"] for task in val.tasks] == expected
    fresh, _ = make_envs(config)
    fresh.load_state_dict(json.loads(json.dumps(train.state_dict())))
    assert fresh.draw_tasks(3) == train.draw_tasks(3)
    check_env_manager(train)
    assert val.metadata["split"] == "legacy_goal_order" and val.metadata["held_out"] is False


@pytest.mark.parametrize("changes", [{"split": "goal"}, {"split": "product"}, {"val_goals": 5}], ids=str)
def test_legacy_order_holds_nothing_out_whatever_is_asked(
    changes: dict[str, Any], make_config: WebshopConfigMaker
) -> None:
    ((name, value),) = changes.items()
    with pytest.raises(UserError, match=rf"legacy_goal_order=True and env\.webshop\.{name}={value}: .*only one"):
        make_envs(make_config(legacy_goal_order=True, **changes))


def test_the_goals_of_many_groups_are_made_once(shop_dir: Path) -> None:
    stream = LegacyGoalStream(ShopSettings(str(shop_dir)), range(160), 1000, 150)
    stream.take(150)
    made = open_shop.cache_info().misses
    for task in stream.take(300):
        shop_of_task(task, shop_dir)
    assert open_shop.cache_info().misses == made


def test_contradictions_and_missing_data_are_one_sentence(
    make_config: WebshopConfigMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match=r"env\.webshop\.source=generated and env\.webshop\.data_dir"):
        make_envs(make_config(source="generated"))
    with pytest.raises(UserError, match=str(tmp_path / "nowhere")):
        make_envs(make_config(data_dir=str(tmp_path / "nowhere")))
    monkeypatch.delenv("WEBSHOP_DATA", raising=False)
    with pytest.raises(UserError, match="WEBSHOP_DATA"):
        make_envs(make_config(data_dir=None))
    with pytest.raises(UserError, match="legacy_goal_order=True trains on goals from 500"):
        make_envs(make_config(legacy_goal_order=True))


def test_slots_in_actors_play_the_same(make_config: WebshopConfigMaker, shop_dir: Path, ray_session: None) -> None:
    train, _ = make_envs(make_config())
    tasks = train.tasks[:4]
    resources = {"num_cpus": 0.1}
    remote = build_webshop_envs(0, 2, 2, resources, True, {"data_dir": str(shop_dir), "num_workers": 2})
    local = build_webshop_envs(0, 2, 2, resources, True, {"data_dir": str(shop_dir), "num_workers": 0})
    try:
        assert remote.reset(tasks) == local.reset(tasks)
        actions = [f"search[{task['task_type']}]" for task in tasks]
        assert remote.step(range(4), actions) == local.step(range(4), actions)
    finally:
        remote.close()


def test_importing_the_package_imports_nothing_heavy() -> None:
    code = (
        "import sys, agent_system.environments.env_package.webshop.manager\n"
        "heavy = {'torch', 'ray', 'transformers', 'spacy', 'alfworld'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[3])
