# SPDX-License-Identifier: Apache-2.0
"""What the credit analysis says about a trajectory: typed records and their JSON form."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from verl.utils.errors import UserError

__all__ = [
    "ANALYSIS_VERSION",
    "KINDS",
    "MODES",
    "STATUSES",
    "CreditOptions",
    "CreditRecord",
    "StepCredit",
]

ANALYSIS_VERSION = 2
"""Raised whenever the same trajectory could get other labels or other fields; part of every journal key."""

KINDS = ("exploration", "no_effect", "undone", "other")
"""Kinds of redundant steps, in the order in which they are tried."""

MODES = ("single", "minimal")
"""Values of `mode` and of `label_source`."""

STATUSES = ("labelled", "failed", "not_reproducible", "unreadable_game")


@dataclass(frozen=True)
class CreditOptions:
    """Choices of one analysis that change its result."""

    mode: str = "single"
    """`single`: every step is deleted alone. `minimal`: also look for the shortest success that greedy removal of
    steps and pairs of steps finds (`in_minimal`)."""
    label_source: str = "single"
    """Which label becomes `credit`: `single` = `necessary_single`, `minimal` = `in_minimal` (needs `mode=minimal`)."""
    label_failed: bool = False
    """Label failed trajectories by the same rule too: there a redundant step is one whose removal would have won."""
    evolve: bool = True
    """With `mode=single`, also look for a verified success without redundant single steps (`evolved_indices`)."""
    success_threshold: float = 1.0
    """Score in (0, 1] from which on a trajectory counts as a success. Below 1, redundant means that the final score
    does not fall below the whole trajectory's."""

    def __post_init__(self) -> None:
        for name in ("mode", "label_source"):
            value = getattr(self, name)
            if value not in MODES:
                raise UserError(f"{name}={value}: must be one of {', '.join(MODES)}.")
        if self.label_source == "minimal" and self.mode != "minimal":
            raise UserError("label_source=minimal needs the labels of mode=minimal; set mode=minimal too.")
        if self.mode == "minimal" and not self.evolve:
            raise UserError("mode=minimal is the search for an evolved trajectory; it cannot be switched off there.")
        if not 0.0 < self.success_threshold <= 1.0:
            raise UserError(f"success_threshold={self.success_threshold}: must be above 0 and at most 1.")

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return asdict(self)


@dataclass(frozen=True)
class StepCredit:
    """Credit of one step; the fields carry their JSON names."""

    step_index: int
    credit: int
    """1 necessary, 0 redundant, by `label_source`."""
    ablated_success: bool
    """The trajectory without this step still succeeds."""
    ablated_steps: int
    """Actions of the shortened replay up to its first success, or up to its end when it has none."""
    necessary_single: bool
    in_minimal: bool | None = None
    """The step is kept in `evolved_indices`. Only known with `mode=minimal`, and only for a success."""
    redundancy_kind: str | None = None
    """One of KINDS for a redundant step, None for a necessary one."""


@dataclass(frozen=True)
class CreditRecord:
    """Result for one trajectory."""

    traj_uid: str
    status: str
    """One of STATUSES; only `labelled` has steps."""
    reason: str | None = None
    succeeded: bool = False
    """The replay reached `success_threshold`; its last step is the first that did."""
    final_score: float | None = None
    """Score of the replay's last step, in [0, 1]; None without a replay."""
    steps: tuple[StepCredit, ...] = ()
    """One entry per action up to the first success (`num_steps` of them)."""
    evolved_indices: tuple[int, ...] | None = None
    """Indices kept in a verified shorter (or equal) success; None when none was looked for or the run failed."""
    replays: int = 0
    env_steps_used: int = 0
    """Environment steps really taken."""
    env_steps_naive: int = 0
    """Environment steps the same replays take when each starts from the beginning."""
    label_source: str = "single"

    @property
    def num_steps(self) -> int:
        return len(self.steps)

    @property
    def num_redundant(self) -> int:
        return sum(step.credit == 0 for step in self.steps)

    @property
    def redundancy(self) -> float | None:
        """Redundant steps / T in [0, 1]; None without labels."""
        return self.num_redundant / len(self.steps) if self.steps else None

    def kinds(self) -> dict[str, int]:
        """Number of redundant steps of each kind."""
        counts = dict.fromkeys(KINDS, 0)
        for step in self.steps:
            if step.credit == 0 and step.redundancy_kind is not None:
                counts[step.redundancy_kind] += 1
        return counts

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON types; `from_dict` turns it back."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> CreditRecord:
        fields = dict(data)
        fields["steps"] = tuple(StepCredit(**step) for step in data["steps"])
        evolved = data["evolved_indices"]
        fields["evolved_indices"] = None if evolved is None else tuple(evolved)
        return cls(**fields)
