# SPDX-License-Identifier: Apache-2.0
"""Training with vLLM: two steps of GRPO on generated ALFWorld games, in Ray workers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.helpers.tiny import SENTENCES, make_tiny_model
from tests.verl.trainer.alfworld_run import alfworld_overrides, changed_by, exported_weights, logged, model_weights
from verl.trainer.config.schema import load_config
from verl.trainer.main_ppo import run_ppo

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def games_and_policy(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Games of small rooms, and a policy that vLLM takes on the CPU."""
    from agent_system.environments.env_package.alfworld.game import AlfworldGame
    from agent_system.environments.env_package.alfworld.generate import generate_games

    root = tmp_path_factory.mktemp("training")
    games = generate_games(root / "games", 16, 2, 2, seed=1, max_receptacles=5, max_objects=6)
    texts = list(SENTENCES)
    for path in sorted(games.glob("json_2.1.1/train/*/*/game.tw-pddl")):
        observation, info = AlfworldGame(path).reset()
        texts += [observation, *info["admissible_commands"]]
    return games, make_tiny_model(root / "model" / "hf", num_heads=2, num_kv_heads=1, vocab_size=700, texts=texts)


def train(games: Path, model: Path, out: Path, *more: str) -> list[dict[str, Any]]:
    run_ppo(
        load_config(
            "ppo_trainer",
            [
                *alfworld_overrides(games, model, out), "algorithm.adv_estimator=grpo",
                "actor_rollout_ref.model.external_lib=tests.vllm.recorded", "trainer.test_freq=2", *more,
            ],
        )
    )  # fmt: skip
    return logged(out)


@pytest.fixture(scope="module")
def first(games_and_policy: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory, ray_session: None) -> Path:
    """Folder of a run with vLLM, whose answers are recorded."""
    out = tmp_path_factory.mktemp("runs") / "vllm"
    train(*games_and_policy, out, "actor_rollout_ref.rollout.name=vllm")
    # One sync a step for all its turns, and one for the validation after the second.
    assert (games_and_policy[1].parent / "recorded" / "syncs.txt").read_text().split() == ["1", "2", "3"]
    return out


def test_losses_are_those_of_the_hf_engine_on_the_same_tokens(
    games_and_policy: tuple[Path, Path], first: Path, tmp_path: Path
) -> None:
    vllm = logged(first)
    hf = train(*games_and_policy, tmp_path / "hf", "actor_rollout_ref.rollout.name=hf")
    assert [line["step"] for line in vllm] == [1, 2]
    for ours, theirs in zip(vllm, hf, strict=True):
        for name in theirs:
            if name.startswith(("actor/", "critic/", "episode/", "response_length/", "prompt_length/", "val/")):
                assert ours[name] == pytest.approx(theirs[name], rel=1e-5, abs=1e-6), name
        assert ours["actor/grad_norm"] > 0
        # What the engine reports is what the policy computes.
        assert ours["training/rollout_probs_diff_max"] < 1e-4
    assert changed_by(exported_weights(first, 2), exported_weights(tmp_path / "hf", 2)) < 1e-6
    assert changed_by(exported_weights(first, 2), model_weights(games_and_policy[1])) > 1e-4


def test_a_run_repeats_itself_to_the_last_bit(games_and_policy: tuple[Path, Path], first: Path, tmp_path: Path) -> None:
    again = train(*games_and_policy, tmp_path / "again", "actor_rollout_ref.rollout.name=vllm")
    for before, after in zip(logged(first), again, strict=True):
        same = [name for name in before if not name.startswith(("timing", "perf/"))]
        assert len(same) > 30
        assert {name: after[name] for name in same} == {name: before[name] for name in same}
    assert changed_by(exported_weights(first, 2), exported_weights(tmp_path / "again", 2)) == 0
