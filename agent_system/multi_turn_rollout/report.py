# SPDX-License-Identifier: Apache-2.0
"""What a rollout says about itself: how full its batches were, and where its time went."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from agent_system.multi_turn_rollout.episode_buffer import EpisodeBuffer

__all__ = ["OCCUPANCY_TURNS", "RolloutTally", "rollout_metrics"]

logger = logging.getLogger(__name__)

OCCUPANCY_TURNS = (1, 2, 5, 10, 20, 50, 100)
"""Turns, counted from 1, whose occupancy is logged; a metric for each of fifty turns would drown the others."""

_COUNTS = (
    "generate_calls",
    "num_tokens",
    "close_draws",
    "prompts_shortened",
    "history_turns_dropped",
    "prompts_truncated",
)


@dataclass
class RolloutTally:
    """Counters and seconds of one rollout."""

    counts: Counter[str] = field(default_factory=Counter)
    seconds: dict[str, float] = field(default_factory=dict)
    """By what the loop waited for: `env`, `tokenize`, `generate`; `engine` is what the engine itself took."""
    live: Counter[int] = field(default_factory=Counter)
    """Turn, from 0 -> episodes that were alive in it."""

    @contextmanager
    def timer(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.add_seconds(name, time.perf_counter() - start)

    def add_seconds(self, name: str, seconds: float) -> None:
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds

    def add_generation(self, turns: np.ndarray, seconds: float) -> None:
        """Take a generate call: turns, from 0, of the rows that it finished, and how long the engine was at it."""
        self.live.update(turns.tolist())
        self.counts["generate_calls"] += 1
        self.add_seconds("engine", seconds)


def rollout_metrics(
    buffer: EpisodeBuffer, success: Mapping[str, np.ndarray], tally: RolloutTally, max_steps: int
) -> dict[str, float]:
    """`rollout/*`, `episode/*`, `timing_s/rollout_*` of one rollout that has just ended.

    `rollout/occupancy/turn_N` is the share of the episodes that turn N still plays (0 after the last one),
    `rollout/occupancy/mean` its mean over the turns played. `rollout/close_draws` are tokens that rounding decided, see
    `verl.workers.rollout.sampling` (0 where the engine does not know).

    `timing_s/rollout_env`, `_tokenize` and `_generate` are seconds that the loop waited for environments, spent on
    prompts and decoding, and waited for generation: all its time but bookkeeping. `timing_s/rollout_engine` is how long
    rank 0's engine generated; what that exceeds `_generate` by was hidden behind environments and prompts.
    """
    infos = [info for episode in buffer.infos for info in episode]
    rows, episodes, turns = len(infos), len(buffer.seats), int(buffer.lengths.max())
    metrics: dict[str, float] = {
        "rollout/num_episodes": float(episodes),
        "rollout/num_rows": float(rows),
        "rollout/num_turns": float(turns),
        "rollout/occupancy/mean": rows / (episodes * turns),
        "episode/truncated_ratio": float(1.0 - buffer.done.mean()),
        "episode/admissible_action_ratio": sum(info["is_admissible"] for info in infos) / rows,
        "episode/malformed_action_ratio": sum(info["is_malformed"] for info in infos) / rows,
    }
    for turn in OCCUPANCY_TURNS:
        if turn <= max_steps:
            metrics[f"rollout/occupancy/turn_{turn}"] = tally.live[turn - 1] / episodes
    metrics |= {f"episode/{key}": float(values.mean()) for key, values in success.items()}
    metrics |= {f"rollout/{name}": float(tally.counts[name]) for name in _COUNTS}
    metrics |= {f"timing_s/rollout_{name}": seconds for name, seconds in tally.seconds.items()}
    logger.debug("live episodes by turn: %s", ", ".join(str(tally.live[turn]) for turn in range(turns)))
    return metrics
