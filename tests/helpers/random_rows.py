# SPDX-License-Identifier: Apache-2.0
"""A hypothesis strategy for the rows that estimators read."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from hypothesis import strategies as st

WIDTH = 5


@dataclass
class Rows:
    """Random rows: several tasks, each with trajectories of different lengths, some of them interleaved."""

    rewards: torch.Tensor
    mask: torch.Tensor
    index: np.ndarray
    traj: np.ndarray
    anchors: np.ndarray
    step_rewards: np.ndarray


@st.composite
def rows(draw: st.DrawFn, min_members: int = 1) -> Rows:
    # Values on a grid: sums are exact, so that "equal" and "zero" mean the same to both sides.
    grid = st.integers(-8, 8).map(lambda value: value / 4)
    episodes = [
        (f"task{task}", f"task{task}-member{member}", draw(st.integers(1, 4)))
        for task in range(draw(st.integers(1, 4)))
        for member in range(draw(st.integers(min_members, 4)))
    ]
    names = [(task, traj) for task, traj, turns in episodes for _ in range(turns)]
    if draw(st.booleans()):  # turn by turn instead of episode by episode
        names = [(task, traj) for turn in range(4) for task, traj, turns in episodes if turn < turns]
    count = len(names)

    def values(strategy: st.SearchStrategy[float], size: int) -> list[float]:
        return draw(st.lists(strategy, min_size=size, max_size=size))

    rewards = torch.tensor(values(grid, count * WIDTH)).reshape(count, WIDTH)
    lengths = torch.tensor(values(st.integers(1, WIDTH).map(float), count))
    mask = (torch.arange(WIDTH) < lengths[:, None]).long()
    return Rows(
        rewards * mask,
        mask,
        np.array([task for task, _ in names], dtype=object),
        np.array([traj for _, traj in names], dtype=object),
        np.array(draw(st.lists(st.sampled_from("abc"), min_size=count, max_size=count)), dtype=object),
        np.array(values(grid, count), dtype=object),
    )
