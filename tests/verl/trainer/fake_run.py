# SPDX-License-Identifier: Apache-2.0
"""The real trainer around fakes: a run of a few milliseconds a step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.verl.trainer import fakes
from verl.trainer.config.schema import PPOConfig, build_config, load_config
from verl.trainer.ppo.ray_trainer import RayPPOTrainer


def config_for(folder: Path, *overrides: str) -> PPOConfig:
    base = [
        f"trainer.default_local_dir={folder}", "trainer.logger=[]", "trainer.total_epochs=4", "trainer.device=cpu",
        "trainer.n_gpus_per_node=1", "trainer.val_before_train=False", "algorithm.adv_estimator=grpo",
        "data.train_batch_size=2", "env.rollout.n=4",
    ]  # fmt: skip
    return build_config(PPOConfig, load_config("ppo_trainer", [*base, *overrides]))


class Run:
    """A trainer and its surroundings."""

    def __init__(
        self,
        config: PPOConfig,
        *,
        steps_per_epoch: int = 1,
        hook: bool = False,
        collector: fakes.FakeCollector | None = None,
        **more: Any,
    ) -> None:
        self.envs, self.validator = fakes.FakeEnvs(), fakes.FakeValidator()
        self.hook = fakes.RecordingHook(config)
        fakes.FakePolicy.log = []
        self.trainer = RayPPOTrainer(
            config,
            fakes.FakeTokenizer(),
            collector=collector or fakes.FakeCollector(),
            validator=self.validator,
            reward_fn=fakes.episode_rewards,
            train_envs=self.envs,
            val_envs=None,
            make_worker_groups=fakes.fake_worker_groups,
            hooks=[self.hook] if hook else [],
            steps_per_epoch=steps_per_epoch,
            **more,
        )
        self.folder = self.trainer.store.root

    def go(self) -> Run:
        self.trainer.init_workers()
        self.trainer.fit()
        return self

    @property
    def policy(self) -> fakes.FakePolicy:
        worker: fakes.FakePolicy = self.trainer.actor_rollout_wg.worker
        return worker

    @property
    def weight(self) -> float:
        return self.policy.weight

    @property
    def critic(self) -> fakes.FakeCritic:
        worker: fakes.FakeCritic = self.trainer.worker_groups["critic"].worker
        return worker

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]
