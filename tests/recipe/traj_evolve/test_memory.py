# SPDX-License-Identifier: Apache-2.0
"""Where every weight and optimizer tensor of policy and discriminator is, phase by phase."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.recipe.traj_evolve.support import (
    discriminator_weights,
    evolve_trainer,
    logged,
    policy_weights,
    run_evolve,
    same,
    without_clocks,
)
from tests.recipe.traj_evolve.two_memories import groups_that_move, places, use_two_memories, watch
from verl.utils.fsdp_utils import move_optimizer_state

# event -> weights and optimizer of the policy, weights and optimizer of the discriminator. The first update comes
# with step 2, so that the discriminator has no optimizer state before.
ON, OFF, NEVER = "device", "host", "none"
AT_REST = {"policy scoring pass", "policy training pass", "policy step", "engine pass", "end of step"}
EXPECTED = {
    "discriminator scoring pass": (ON, ON, ON, OFF),
    "discriminator training pass": (OFF, OFF, ON, ON),
    "discriminator step": (OFF, OFF, ON, ON),
    "save": (OFF, OFF, ON, ON),
} | dict.fromkeys(AT_REST, (ON, ON, OFF, OFF))


def options(discriminator: Path) -> list[str]:
    return [
        f"traj_evolve.discriminator_model_path={discriminator}", "traj_evolve.evolve_freq=2",
        "traj_evolve.update_batch_size=16", "trainer.total_epochs=4", "trainer.save_freq=2",
    ]  # fmt: skip


def test_placement_in_every_phase(
    tiny_model_dir: Path, discriminator_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, lines = run_evolve(tiny_model_dir, tmp_path / "plain", *options(discriminator_dir))
    use_two_memories(monkeypatch)
    trainer = evolve_trainer(tiny_model_dir, tmp_path / "moved", *options(discriminator_dir), ranks=groups_that_move)
    policy: Any = trainer.worker_groups["actor_rollout"].worker  # type: ignore[attr-defined]
    judge: Any = trainer.worker_groups["discriminator"].worker  # type: ignore[attr-defined]
    assert places(judge.model, judge.optimizer) == (OFF, NEVER)
    seen: dict[str, set[tuple[str, ...]]] = {}

    def report(event: str) -> None:
        assert not (policy._in_rollout and event.startswith("discriminator")), "the engine is awake"
        where = (*places(policy.actor_model, policy.optimizer), *places(judge.model, judge.optimizer))
        seen.setdefault(event, set()).add(where)

    watch(policy.actor_model, policy.optimizer, "policy", report)
    watch(judge.model, judge.optimizer, "discriminator", report)
    policy.rollout.module.register_forward_pre_hook(lambda *_: report("engine pass"))
    save, log = judge.checkpoints.save_checkpoint, trainer._log_step
    monkeypatch.setattr(judge.checkpoints, "save_checkpoint", lambda *a: (report("save"), save(*a)))
    monkeypatch.setattr(trainer, "_log_step", lambda *a: (report("end of step"), log(*a)))
    trainer.fit()

    assert set(seen) == set(EXPECTED)
    for event, where in seen.items():
        # NEVER: an optimizer that has not stepped yet has nothing anywhere.
        allowed = {EXPECTED[event], *_before_first_steps(EXPECTED[event])}
        assert EXPECTED[event] in where and where <= allowed, (event, where)
    # All the moving has changed no bit.
    assert without_clocks(logged(tmp_path / "moved")) == without_clocks(lines)
    assert same(policy_weights(trainer), policy_weights(plain))
    assert same(discriminator_weights(trainer), discriminator_weights(plain))
    # And a resumed run finds its tensors where they belong.
    again = evolve_trainer(tiny_model_dir, tmp_path / "moved", *options(discriminator_dir), ranks=groups_that_move)
    again._resume()
    judge = again.worker_groups["discriminator"].worker  # type: ignore[attr-defined]
    policy = again.worker_groups["actor_rollout"].worker  # type: ignore[attr-defined]
    assert (*places(policy.actor_model, policy.optimizer), *places(judge.model, judge.optimizer)) == (ON, ON, OFF, OFF)
    assert same(discriminator_weights(again), discriminator_weights(plain))


def _before_first_steps(where: tuple[str, ...]) -> set[tuple[str, ...]]:
    policy, policy_state, judge, _ = where
    return {
        (policy, NEVER, judge, NEVER),
        (policy, policy_state, judge, NEVER),
    }


def test_every_trained_model_leaves_for_the_discriminator(
    tiny_model_dir: Path, discriminator_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_two_memories(monkeypatch)
    given = [
        *options(discriminator_dir), "algorithm.adv_estimator=gae", f"critic.model.path={tiny_model_dir}",
        "critic.strategy=fsdp2", "critic.ppo_micro_batch_size_per_gpu=32", "critic.ppo_mini_batch_size=64",
        "critic.model.enable_gradient_checkpointing=False", "trainer.total_epochs=2",
    ]  # fmt: skip
    trainer = evolve_trainer(tiny_model_dir, tmp_path, *given, ranks=groups_that_move)
    workers: dict[str, Any] = {name: group.worker for name, group in trainer.worker_groups.items()}  # type: ignore[attr-defined]
    policy, critic, judge = workers["actor_rollout"], workers["critic"], workers["discriminator"]
    seen: dict[str, list[tuple[str, ...]]] = {}

    def report(event: str) -> None:
        where = (*places(policy.actor_model, policy.optimizer), *places(critic.model, critic.optimizer))
        seen.setdefault(event, []).append(where)

    watch(judge.model, judge.optimizer, "discriminator", report)
    watch(critic.model, critic.optimizer, "critic", report)
    save = judge.checkpoints.save_checkpoint
    monkeypatch.setattr(judge.checkpoints, "save_checkpoint", lambda *a: (report("save"), save(*a)))
    trainer.fit()

    for event in ("discriminator training pass", "discriminator step", "save"):
        assert set(seen[event]) == {(OFF, OFF, OFF, OFF)}, event
    for event in ("critic scoring pass", "critic training pass", "critic step"):
        assert seen[event][-1] == (ON, ON, ON, ON), event
    assert (*places(policy.actor_model, policy.optimizer), *places(critic.model, critic.optimizer)) == (ON,) * 4


def test_placement_names_every_place(tiny_model_dir: Path, discriminator_dir: Path, tmp_path: Path) -> None:
    given = [*options(discriminator_dir), "trainer.total_epochs=2"]
    trainer, _ = run_evolve(tiny_model_dir, tmp_path, *given)
    group: Any = trainer.worker_groups["discriminator"]
    assert group.placement() == [{"parameters": "cpu", "optimizer": "cpu"}]
    move_optimizer_state(group.worker.optimizer, torch.device("meta"))
    assert group.placement() == [{"parameters": "cpu", "optimizer": "cpu,meta"}]
    assert group.device_memory() == [{}]
