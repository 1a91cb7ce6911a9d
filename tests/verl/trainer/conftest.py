# SPDX-License-Identifier: Apache-2.0
"""Generated games and a tiny policy for the real runs of this folder, made once a session."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def games_and_policy(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Games of small rooms, and a policy whose tokenizer knows their words."""
    from agent_system.environments.env_package.alfworld.game import AlfworldGame
    from agent_system.environments.env_package.alfworld.generate import generate_games
    from tests.helpers.tiny import SENTENCES, make_tiny_model

    root = tmp_path_factory.mktemp("algorithms")
    games = generate_games(root / "games", 24, 2, 2, seed=1, max_receptacles=5, max_objects=6)
    texts = list(SENTENCES)
    for path in sorted(games.glob("json_2.1.1/train/*/*/game.tw-pddl")):
        observation, info = AlfworldGame(path).reset()
        texts += [observation, *info["admissible_commands"]]
    model = make_tiny_model(root / "model", hidden_size=32, intermediate_size=64, vocab_size=700, texts=texts)
    return games, model
