# SPDX-License-Identifier: Apache-2.0
"""Scoring of single-turn answers, for scripts that use it on its own; training takes rewards from the environment."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from verl.utils.absent import absent_name
from verl.utils.reward_score import gsm8k

__all__ = ["default_compute_score", "gsm8k"]


def default_compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Mapping[str, Any] | None = None
) -> float:
    """Score of an answer to a question of a known data set.

    Raises:
        NotImplementedError: no scorer for that data set is part of this package.
    """
    if data_source == "openai/gsm8k":
        return gsm8k.compute_score(solution_str, ground_truth)
    raise NotImplementedError(f"there is no scorer for data_source={data_source!r}, only one for openai/gsm8k")


def __getattr__(name: str) -> Any:
    absent_name(__name__, name)
