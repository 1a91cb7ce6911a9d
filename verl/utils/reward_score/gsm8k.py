# SPDX-License-Identifier: Apache-2.0
"""Grade-school arithmetic (GSM8K): the answer is a number, written after `####` or simply the last one."""

from __future__ import annotations

import re
from typing import Literal

__all__ = ["compute_score", "extract_solution"]

Method = Literal["strict", "flexible"]
_MARKED = re.compile(r"#### *(-?[0-9.,]+)")
_NUMBER = re.compile(r"-?[0-9.,]*[0-9]")


def extract_solution(solution_str: str, method: Method = "strict") -> str | None:
    """The number of an answer without thousands separators; None without one.

    Args:
        method: `strict` takes the last number marked by `####`, `flexible` the last number of the text.

    Raises:
        ValueError: unknown method.
    """
    if method not in ("strict", "flexible"):
        raise ValueError(f"method={method!r} is unknown; use strict or flexible")
    found = (_MARKED if method == "strict" else _NUMBER).findall(solution_str)
    return found[-1].replace(",", "").rstrip(".") if found else None


def compute_score(
    solution_str: str,
    ground_truth: str,
    method: Method = "strict",
    format_score: float = 0.0,
    score: float = 1.0,
) -> float:
    """`score` for the right number, `format_score` for another one, 0 without a number."""
    answer = extract_solution(solution_str, method)
    if answer is None:
        return 0.0
    return score if answer == ground_truth else format_score
