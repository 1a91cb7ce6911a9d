# SPDX-License-Identifier: Apache-2.0
"""Three real steps on generated ALFWorld games and on a generated shop with tiny policies, on the CPU."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from agent_system.environments import make_envs, registry
from agent_system.environments.env_package.webshop.experts import WebShopExplorer
from agent_system.environments.env_package.webshop.manager import WebshopEnvironmentManager
from agent_system.environments.env_package.webshop.pages import click, parse_page
from recipe.trial.outcome import outcome_views
from tests.agent_system.webshop_manager.conftest import WebshopConfigMaker
from tests.agent_system.webshop_manager.shop_run import make_shop_policy, shop_overrides
from tests.recipe.traj_evolve.support import logged
from tests.recipe.trial.support import MODULE, TOKENS, read_trial_config
from tests.verl.trainer.alfworld_run import alfworld_overrides, changed_by, exported_weights, model_weights
from tests.verl.trainer.toy_run import toy_overrides
from verl.trainer.config.schema import load_config
from verl.trainer.main_ppo import build_trainer, check_inputs, run_ppo
from verl.trainer.ppo.recipes import TrainerHook
from verl.trainer.ppo.worker_groups import local_worker_groups


def run_here(given: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The program's own steps with one rank in this process; returns the episodes of training."""
    episodes: list[Any] = []
    monkeypatch.setattr(TrainerHook, "after_rollout", lambda self, ctx, batch: episodes.extend(ctx.episodes))
    config, recipes = read_trial_config([*given, "trainer.total_epochs=3", "trainer.save_freq=3", "env.num_workers=0"])
    check_inputs(config)
    train_envs, val_envs = make_envs(config)
    trainer = build_trainer(
        config, recipes, device="cpu", make_worker_groups=local_worker_groups, train_envs=train_envs, val_envs=val_envs
    )
    trainer.init_workers()
    trainer.fit()
    train_envs.close()
    val_envs.close()
    return episodes


def check(out: Path, model: Path, turns: int) -> None:
    lines = [line for line in logged(out) if "trial/gap_mean" in line]
    assert [line["step"] for line in lines] == [1, 2, 3]
    for line in lines:
        assert not {name: value for name, value in line.items() if value is None or not math.isfinite(value)}
        assert line["trial/gap_abs_mean"] > 0.0 and line["trial/weight_max"] > line["trial/weight_min"] >= 0.0
        assert 0.0 < line["trial/weight_entropy"] < math.log(turns)
        assert 0.0 < line["timing_s/hindsight_log_prob"] < line["timing_s/step"]
        assert line["actor/grad_norm"] > 0.0
    assert changed_by(model_weights(model), exported_weights(out, 3)) > 1e-5


def test_three_steps_on_alfworld(
    games_and_policy: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    games, model = games_and_policy
    episodes = run_here([*alfworld_overrides(games, model, tmp_path)], monkeypatch)
    check(tmp_path, model, turns=6)
    lines = logged(tmp_path)
    assert any(
        {"trial/gap_mean_success", "trial/gap_mean_failure", "trial/dense_to_grpo_ratio"} <= set(x) for x in lines
    )
    won = next(episode for episode in episodes if episode.success)
    assert outcome_views(won)[-1].startswith("\n\nThis turn leads to: the task is solved.\n")
    assert won.final_observation in outcome_views(won)[-1] and won.final_observation


def let_a_customer_play(monkeypatch: pytest.MonkeyPatch, turns: int) -> None:
    """In every second slot the actions are those of a scripted customer, whatever the policy writes; the one in slot 2
    buys the last product of the first page, as it is."""
    customers: dict[int, WebShopExplorer] = {}
    plain = WebshopEnvironmentManager.step

    def act(self: Any, slot: int) -> str:
        page, offered = self.observation(slot), self.admissible_actions(slot)
        if not self.history(slot):
            request: Any = SimpleNamespace(instruction=self.instruction(slot))
            customers[slot] = WebShopExplorer(request, np.random.default_rng(slot), max_steps=turns)
        elif slot == 2:
            products = parse_page(page, offered).products
            return click(products[-1][0]) if products else click("buy now")
        return customers[slot].act(page, self._infos[slot]).action

    def step(self: Any, texts: Sequence[str], slots: Sequence[int] | None = None) -> Any:
        assert slots is not None
        pairs = zip(texts, slots, strict=True)
        played = [text if slot % 2 else f"<think>so</think><action>{act(self, slot)}</action>" for text, slot in pairs]
        return plain(self, played, slots)

    monkeypatch.setattr(WebshopEnvironmentManager, "step", step)


def test_three_steps_on_the_shop(
    make_config: WebshopConfigMaker, shop_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = make_shop_policy(tmp_path / "policy", make_config)
    given = [
        *shop_overrides(shop_dir, policy, tmp_path / "run"), "trial.max_outcome_length=64", "env.max_steps=10",
        "data.max_prompt_length=1024",
        "actor_rollout_ref.actor.checkpoint.contents=[model,optimizer,extra,hf_model]",
    ]  # fmt: skip
    let_a_customer_play(monkeypatch, turns=10)
    episodes = run_here(given, monkeypatch)
    check(tmp_path / "run", policy, turns=10)
    assert len(episodes) == 12
    last = {
        episode.traj_uid: outcome_views(episode)[-1].removeprefix("\n\nThis turn leads to: ") for episode in episodes
    }
    exact = [episode for episode in episodes if episode.success]
    other = [episode for episode in episodes if not episode.success and not episode.truncated]
    assert len(exact) == len(other) == 3
    for episode in exact:
        assert last[episode.traj_uid].startswith("the purchase is exactly what was asked for.\nThank you for shopping")
    for episode in other:
        score = f"(score {episode.task_score:.2f} of 1).\nThank you for shopping"
        assert last[episode.traj_uid].startswith(f"the purchase is not exactly what was asked for {score}")
    for episode in episodes:
        if episode.truncated:
            assert last[episode.traj_uid].startswith("nothing was bought, and no turns are left.\n'")
    # Customers choose options, and the page does not show it.
    chosen = [
        view
        for episode in (*exact, *other)
        for step, view in zip(episode.steps, outcome_views(episode), strict=True)
        if f"leads to: the option is selected ({step.action}), and the page stays the same.\n{step.observation}" in view
    ]
    assert chosen


@pytest.mark.slow
@pytest.mark.usefixtures("ray_session")
def test_two_packed_ranks_on_ray_equal_one(
    tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Other tests register TOY with the manager that wants tagged actions.
    monkeypatch.setitem(registry._ENTRY_POINTS, "toy", "tests.recipe.traj_evolve.test_ray:make_coded_manager")
    lines = {}
    for ranks in (1, 2):
        given = [
            *toy_overrides(tiny_model_dir, tmp_path / str(ranks)), "env.env_name=toy", TOKENS,
            f"trainer.n_gpus_per_node={ranks}", f"actor_rollout_ref.model.use_remove_padding={ranks == 2}",
            "trainer.total_epochs=1", "trial.allocation=permuted", "env.rollout.n=7",
        ]  # fmt: skip
        run_ppo(load_config("trial_trainer", given, "recipe.trial.config"), (MODULE,))
        (lines[ranks],) = logged(tmp_path / str(ranks))
    names = {name for name in lines[1] if name.startswith("trial/")} | {"episode/reward/mean"}
    assert len(names) > 7 and names <= set(lines[2])
    for name in names:
        assert lines[1][name] == pytest.approx(lines[2][name], abs=1e-3), name
