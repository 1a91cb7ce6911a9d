# SPDX-License-Identifier: Apache-2.0
"""Which games are played: each of the validation panel once, training in an order that survives resume, whatever the
number of slots and actors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from agent_system.environments.env_package.alfworld.generate import generate_games
from agent_system.environments.env_package.alfworld.manager import AlfWorldEnvironmentManager, make_alfworld_manager
from agent_system.environments.env_package.alfworld.manifest import load_manifest
from agent_system.multi_turn_rollout import TrajectoryCollector, Validator
from tests.agent_system.env.test_managers import alfworld_config
from tests.helpers.fake_actor import FakeActorGroup
from tests.helpers.rollout_config import rollout_config
from tests.helpers.tiny import make_tiny_tokenizer
from tests.helpers.toy_env import say
from verl.utils.errors import UserError


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """12 training and 7 validation games."""
    folder = tmp_path_factory.mktemp("panel") / "games"
    return generate_games(folder, 12, 7, 0, seed=6, max_receptacles=8, max_object_classes=20)


def make(data_dir: Path, *, is_train: bool = False, **changes: Any) -> AlfWorldEnvironmentManager:
    return make_alfworld_manager(alfworld_config(data_dir=str(data_dir), style="compact", **changes), is_train)


def random_command(prompt: str, seed: int) -> str:
    commands = prompt.rsplit("<|im_end|>", 1)[0].split("Commands:\n")[1].split("\n")
    return say(commands[seed % len(commands)])


@pytest.mark.parametrize(("slots", "workers"), [(1, 0), (3, 1), (4, 2), (7, 3), (12, 2)])
def test_validation_plays_every_game_once(
    data_dir: Path, tmp_path: Path, ray_session: Any, slots: int, workers: int
) -> None:
    tokenizer = make_tiny_tokenizer()
    config = rollout_config(max_steps=4, prompt=1024, local_dir=str(tmp_path), val_sample=True)

    def validate(manager: AlfWorldEnvironmentManager, folder: Path) -> Any:
        validator = Validator(config, TrajectoryCollector(config, tokenizer), output_dir=folder)
        try:
            return validator.validate(manager, FakeActorGroup(tokenizer, random_command), step=1)
        finally:
            manager.close()

    result = validate(make(data_dir, val=slots, workers=workers), tmp_path / "a")
    expected = validate(make(data_dir, val=7), tmp_path / "b")
    manifest = load_manifest(data_dir, "valid_seen")
    assert [episode.task["gamefile"] for episode in result.episodes] == [game.path for game in manifest.games]
    assert result.episodes == expected.episodes and result.record == expected.record
    record = json.loads((tmp_path / "a" / "step_1.json").read_text())
    assert record["split_hash"] == manifest.hash and record["panel_hash"] and record["num_episodes"] == 7


def test_the_panel_hash_changes_with_the_games(data_dir: Path, tmp_path: Path) -> None:
    before = load_manifest(data_dir, "valid_seen")
    other = generate_games(tmp_path / "other", 12, 8, 0, seed=6, max_receptacles=8, max_object_classes=20)
    assert load_manifest(other, "valid_seen").hash != before.hash
    assert make(data_dir).panel_hash == before.hash != make(other).panel_hash


def test_training_order_survives_resume_with_other_numbers(data_dir: Path) -> None:
    def names(manager: AlfWorldEnvironmentManager, counts: list[int]) -> list[str]:
        return [task["gamefile"] for count in counts for task in manager.draw_tasks(count)]

    straight = make(data_dir, is_train=True)
    expected = names(straight, [4] * 9)
    assert sorted(expected[:12]) == sorted(expected[12:24]) == [task["gamefile"] for task in straight.tasks]
    assert expected[:12] != expected[12:24] != expected[24:]
    first = make(data_dir, is_train=True)
    assert names(first, [4] * 4) == expected[:16]
    state = json.loads(json.dumps(first.state_dict()))
    # Other numbers of slots and actors: the order is the same.
    resumed = make(data_dir, is_train=True, workers=2, n=3, train=4)
    resumed.load_state_dict(state)
    assert names(resumed, [4] * 5) == expected[16:]
    with pytest.raises(UserError, match="other tasks"):
        make(data_dir, is_train=False).load_state_dict(state)


def test_generated_games_take_every_option(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from types import SimpleNamespace

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    config = alfworld_config(style="compact")
    config.env.alfworld.source = "generated"
    options = {"train": 6, "valid_seen": 2, "valid_unseen": 2, "seed": 1, "dir": None}
    config.env.alfworld.generated = SimpleNamespace(**options, max_receptacles=7, max_objects=3, max_object_classes=18)
    manager = make_alfworld_manager(config, True)
    (folder,) = (tmp_path / "trajevolve").glob("alfworld-????????????")
    written = json.loads((folder / "generation.json").read_text())["options"]
    assert {key: written[key] for key in ("train", "max_receptacles", "max_objects", "max_object_classes")} == {
        "train": 6, "max_receptacles": 7, "max_objects": 3, "max_object_classes": 18,
    }  # fmt: skip
    assert len(manager.tasks) == 6
