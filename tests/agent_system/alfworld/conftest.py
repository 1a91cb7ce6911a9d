# SPDX-License-Identifier: Apache-2.0
"""Small sets of generated games, made once per session."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def games_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """36 training games in whole rooms, 12 and 12 held-out ones."""
    from agent_system.environments.env_package.alfworld.generate import generate_games

    return generate_games(tmp_path_factory.mktemp("games") / "full", train=36, valid_seen=12, valid_unseen=12, seed=3)


@pytest.fixture(scope="session")
def small_games_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """120 training games with at most 10 receptacles and 26 object classes, 6 and 6 held-out ones."""
    from agent_system.environments.env_package.alfworld.generate import generate_games

    out = tmp_path_factory.mktemp("games") / "small"
    return generate_games(out, 120, 6, 6, seed=5, max_receptacles=10, max_object_classes=26)


@pytest.fixture(scope="session")
def gamefiles(games_dir: Path) -> list[Path]:
    """Game files of `games_dir`, all splits, sorted."""
    return sorted(games_dir.glob("json_2.1.1/*/*/*/game.tw-pddl"))


@pytest.fixture(scope="session")
def small_gamefiles(small_games_dir: Path) -> list[Path]:
    """Game files of `small_games_dir`, all splits, sorted."""
    return sorted(small_games_dir.glob("json_2.1.1/*/*/*/game.tw-pddl"))
