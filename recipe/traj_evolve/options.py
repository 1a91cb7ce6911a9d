# SPDX-License-Identifier: Apache-2.0
"""Typed form of the `traj_evolve` config group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from agent_system.step_discriminator.trajectory_analyzer.records import CreditOptions
from verl.trainer.config.fields import NonNegativeFloat, PositiveFloat, PositiveFraction, PositiveInt
from verl.utils.errors import UserError

__all__ = ["TrajEvolveConfig"]


@dataclass(frozen=True)
class TrajEvolveConfig:
    """Trajectory evolution on top of GRPO; every field is a key of the group of the same name.

    enable: False gives plain GRPO, bit for bit.
    label_source: which replayed label counts: `single` (one step deleted at a time) or `minimal` (in a success from
        which no step, run or pair of steps can be removed).
    alpha: weight of the redundancy penalty.
    evolve_freq: epochs between two updates of the discriminator.
    discriminator_model_path: folder written by stage 2; needed when credit_source is `discriminator`.
    discriminator_lr: AdamW learning rate of the online updates.
    discriminator_epochs: passes over the new labels per update.
    step_credit_value: a step whose credit is below it counts as redundant.
    credit_source: `discriminator`, `replay` (exact ablation in the environment) or `none` (plain GRPO).
    count_exploration: False leaves steps of the kind exploration out of the redundant ones.
    penalty: `relative` R' = R (1 - alpha rho); `absolute` R' = R - alpha rho R_max.
    level: `episode` shapes rewards only; `step` also scales positive advantages of redundant steps.
    buffer_size: successful episodes kept for the next update; older ones are dropped.
    max_replay_trajectories: newest episodes labelled by replay per update.
    score_batch_size: most trajectories in one forward pass of the discriminator on one rank.
    update_batch_size: rows per optimizer step of the online updates, over all ranks.
    micro_batch_size_per_gpu: rows per forward and backward of the online updates on one rank.
    """

    enable: bool = True
    label_source: Literal["single", "minimal"] = "single"
    alpha: NonNegativeFloat = 1.0
    evolve_freq: PositiveInt = 5
    discriminator_model_path: str | None = None
    discriminator_lr: PositiveFloat = 1e-5
    discriminator_epochs: PositiveInt = 1
    step_credit_value: PositiveFraction = 0.5
    credit_source: Literal["discriminator", "replay", "none"] = "discriminator"
    count_exploration: bool = True
    penalty: Literal["relative", "absolute"] = "relative"
    level: Literal["episode", "step"] = "episode"
    buffer_size: PositiveInt = 2048
    max_replay_trajectories: PositiveInt = 128
    score_batch_size: PositiveInt = 8
    update_batch_size: PositiveInt = 64
    micro_batch_size_per_gpu: PositiveInt = 8

    @property
    def credit_options(self) -> CreditOptions:
        """What replay is asked for: the labels of `label_source`, and nothing else."""
        if self.label_source == "minimal":
            return CreditOptions(mode="minimal", label_source="minimal")
        return CreditOptions(evolve=False)

    @property
    def is_active(self) -> bool:
        """Whether anything differs from plain GRPO."""
        return self.enable and self.credit_source != "none"

    @property
    def uses_discriminator(self) -> bool:
        """Whether credit comes from the model."""
        return self.is_active and self.credit_source == "discriminator"

    def validate(self) -> None:
        """Refuse combinations that cannot work; ranges and choices are checked when the config is built.

        Raises:
            UserError: names the key and what to set instead.
        """
        if self.uses_discriminator and self.discriminator_model_path is None:
            raise UserError(
                "traj_evolve.credit_source=discriminator needs traj_evolve.discriminator_model_path, the folder that "
                "stage 2 wrote; set it, or set traj_evolve.credit_source=replay"
            )
