# SPDX-License-Identifier: Apache-2.0
"""Dynamic sampling (``algorithm.filter_groups``): train on groups whose episodes differ, play until there are enough.

A group whose episodes all end alike teaches nothing under a group-relative estimator. Groups are kept or dropped whole,
after the hooks of the recipes have seen them, so that a credit method can make equal successes differ.
"""

from __future__ import annotations

import logging

import numpy as np

from verl.protocol import DataProto
from verl.trainer.config.algorithm_sections import FilterGroupsConfig
from verl.utils.errors import UserError

__all__ = ["SHAPED_REWARDS", "GroupSampler", "episode_values"]

logger = logging.getLogger(__name__)

SHAPED_REWARDS = "shaped_episode_rewards"
"""Column of a credit method, written in ``after_rollout``; it decides instead of ``episode_rewards`` where present."""

# What published scripts call the outcome; with environments that is the episode's reward.
_OUTCOME_NAMES = (None, "acc", "score", "seq_reward", "seq_final_reward", "episode_rewards")
# Equal rewards that went through different sums still count as equal.
_TOLERANCE = 1e-6
_BATCHES_PER_WARNING = 10


def episode_values(batch: DataProto, metric: str | None) -> np.ndarray:
    """The number that decides, for every row: ``(B,)`` float64, constant within an episode.

    Raises:
        UserError: ``metric`` names neither the outcome nor a column.
    """
    columns = batch.non_tensor_batch
    if metric in _OUTCOME_NAMES:
        name = SHAPED_REWARDS if SHAPED_REWARDS in columns else "episode_rewards"
    elif metric in columns:
        name = str(metric)
    else:
        raise UserError(
            f"algorithm.filter_groups.metric={metric} is no column of the batch; set it to null for the episode "
            f"reward, or to one of {', '.join(sorted(columns))}"
        )
    return columns[name].astype(np.float64)


class GroupSampler:
    """Counts the groups of one step and says which of them are trained on.

    Args:
        target: groups to train on, ``data.train_batch_size``.
        config: ``max_num_gen_batches`` above 0 ends the search; what is then missing is filled up with the latest
            groups of equal rewards, which is reported. 0 or less goes on until there are enough.
        step: for messages.
    """

    def __init__(self, target: int, config: FilterGroupsConfig, step: int) -> None:
        self._target = target
        self._config = config
        self._step = step
        self.num_batches = 0
        self._varied: list[str] = []
        self._equal: list[str] = []

    @property
    def is_done(self) -> bool:
        """Whether no further generation batch is needed, or allowed."""
        limit = self._config.max_num_gen_batches
        return len(self._varied) >= self._target or 0 < limit <= self.num_batches

    def add(self, batch: DataProto) -> None:
        """Take the groups of one generation batch, in row order."""
        values = episode_values(batch, self._config.metric)
        uids = batch.non_tensor_batch["uid"]
        for uid in dict.fromkeys(uids.tolist()):
            spread = np.ptp(values[uids == uid])
            (self._varied if spread > _TOLERANCE else self._equal).append(uid)
        self.num_batches += 1
        logger.info(
            "step %d: %d of %d groups have episodes that differ, after %d generation batches",
            self._step, len(self._varied), self._target, self.num_batches,
        )  # fmt: skip
        if self.is_done:
            self._report_fillers()
        elif self._config.max_num_gen_batches <= 0 and self.num_batches % _BATCHES_PER_WARNING == 0:
            logger.warning(
                "step %d: only %d of %d groups have episodes that differ after %d generation batches, and "
                "algorithm.filter_groups.max_num_gen_batches=%d never gives up; the policy may always win or always "
                "lose here",
                self._step, len(self._varied), self._target, self.num_batches, self._config.max_num_gen_batches,
            )  # fmt: skip

    def _report_fillers(self) -> None:
        kept = len(self._varied)
        if kept < self._target:
            logger.warning(
                "step %d: %d of %d groups have episodes that differ after %d generation batches "
                "(algorithm.filter_groups.max_num_gen_batches); %d groups of equal rewards fill the batch",
                self._step, kept, self._target, self.num_batches, self._target - kept,
            )  # fmt: skip

    def chosen(self) -> frozenset[str]:
        """The groups to train on if no further batch came, exactly ``target`` of them.

        Those of the next call are among these and the next batch's groups, as a batch has ``target`` groups.
        """
        kept = self._varied[: self._target]
        missing = self._target - len(kept)
        return frozenset([*kept, *self._equal[len(self._equal) - missing :]])

    def metrics(self) -> dict[str, float]:
        """Counts of this step: batches and groups generated, groups that differ, groups trained on of either kind."""
        trained = min(len(self._varied), self._target)
        return {
            "dynamic_sampling/generation_batches": float(self.num_batches),
            "dynamic_sampling/groups_generated": float(len(self._varied) + len(self._equal)),
            "dynamic_sampling/groups_kept": float(len(self._varied)),
            "dynamic_sampling/groups_trained": float(trained),
            "dynamic_sampling/groups_filled": float(self._target - trained),
        }
