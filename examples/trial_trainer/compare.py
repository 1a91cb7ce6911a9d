# SPDX-License-Identifier: Apache-2.0
"""GRPO, TRIAL and its two controls from one start policy: `python -m examples.trial_trainer.compare`.

World, demonstrations and SFT policy are made by the quickstart's own phases. Then four runs of the same settings, seed
and tasks differ in the dense term only, and every policy plays the same held-out tasks with the same seeds.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from agent_system.trajectory import task_key
from examples.quickstart.phases import Phase
from examples.quickstart.pipeline import ROOT, Quickstart, run_program
from examples.quickstart.profiles import Profile, Sizes
from examples.quickstart.report import Evaluation, interval, load_evaluation, read_metrics, summarise, table
from verl.utils.errors import UserError
from verl.utils.fs import atomic_write

__all__ = ["RUNS", "Comparison", "difference"]

NOTE = "generated tasks, a tiny policy and one training seed: not the paper's setting"
RL_STEPS, EVAL_SAMPLES = 20, 5
RUNS: Mapping[str, tuple[str, str]] = {
    "grpo": ("GRPO", "trial.enable=False"),
    "trial": ("TRIAL", "trial.allocation=relative"),
    "uniform": ("uniform", "trial.allocation=uniform"),
    "permuted": ("permuted", "trial.allocation=permuted"),
}
"""Folder -> name in the tables, what sets the run apart."""
OUTCOME_TOKENS: Mapping[str, int] = {"alfworld": 64, "webshop": 800}
"""Environment -> `trial.max_outcome_length`: room for every answer (longest in 400 episodes each: 49; 769, a page of
results)."""
LOGGED = (
    "gap_mean",
    "gap_mean_success",
    "gap_mean_failure",
    "gap_abs_mean",
    "weight_max",
    "dense_to_grpo_ratio",
    "outcomes_shortened",
)


class Comparison(Quickstart):
    """The quickstart's start policy, then the four runs."""

    folder: ClassVar[str] = "trial"

    @classmethod
    def sizes_for(cls, profile: Profile, smoke: bool) -> Sizes:
        sizes = profile.sizes(smoke)
        return replace(sizes, rl_steps=1) if smoke else replace(sizes, rl_steps=RL_STEPS, eval_samples=EVAL_SAMPLES)

    def phases(self) -> list[Phase]:
        return [*self._policy_phases(), *(self._run_phase(name) for name in RUNS)]

    def _run_phase(self, name: str) -> Phase:
        title, own = RUNS[name]
        script = ROOT / "examples/trial_trainer" / f"run_{self.profile.name}.sh"
        command = [
            "bash", str(script), "hf", *self._rl_overrides(name), own,
            f"trial.max_outcome_length={OUTCOME_TOKENS[self.profile.name]}",
            # The start policy is the same for all: it plays once.
            f"trainer.val_before_train={name == 'grpo'}",
        ]  # fmt: skip
        steps = self.sizes.rl_steps
        return Phase(name, f"{title}, {steps} steps", command, self.validation(name, steps), {}, steps)

    def validation(self, name: str, step: int) -> Path:
        """Result file of a run's validation."""
        return self.out / name / "validation" / f"step_{step}.json"

    def result(self) -> str:
        """Write `summary.json`; the tables as Markdown.

        Raises:
            UserError: a result is missing, or the policies did not play the same tasks.
        """
        steps = self.sizes.rl_steps
        evaluations = {"start": load_evaluation("SFT", self.out / "grpo" / "validation", 0)}
        evaluations |= {
            name: load_evaluation(title, self.out / name / "validation", steps) for name, (title, _) in RUNS.items()
        }
        panels = {evaluation.record["panel_hash"] for evaluation in evaluations.values()}
        if len(panels) != 1:
            raise UserError(f"the policies were not evaluated on the same tasks (panels {sorted(panels)})")
        rows = [summarise(evaluation, self.profile.name, self.world) for evaluation in evaluations.values()]
        runs = {name: _run_numbers(read_metrics(self.out / name)) for name in RUNS}
        for name, numbers in runs.items():
            numbers["success_minus_grpo"] = difference(evaluations["grpo"], evaluations[name])
        summary = {"note": NOTE, "panel_hash": panels.pop(), "policies": rows, "runs": runs}
        atomic_write(self.out / "summary.json", json.dumps(summary, indent=1, allow_nan=False) + "\n")
        panel = f"{rows[0]['num_games']} held-out {self.profile.tasks}, {rows[0]['num_episodes']} episodes each"
        return f"{table(rows)}\n\n{_runs_table(runs)}\n\n{panel}; {NOTE}."


def difference(base: Evaluation, other: Evaluation) -> dict[str, float] | None:
    """Success of `other` minus that of `base`, episode by episode of the same tasks and seeds, with its interval."""
    values = [float(b.success) - float(a.success) for a, b in zip(base.episodes, other.episodes, strict=True)]
    return interval(values, [task_key(episode.task) for episode in base.episodes])


def _run_numbers(lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Means over the training steps: what TRIAL logs, and its pass as a share of the step's time.

    The time of a step is without validation and checkpoint: they come with a few steps only.
    """
    numbers: dict[str, Any] = {}
    for name in LOGGED:
        values = [line[f"trial/{name}"] for line in lines if f"trial/{name}" in line]
        if values:
            numbers[name] = float(np.mean(values))

    def seconds(phase: str) -> float:
        return sum(line.get(f"timing_s/{phase}", 0.0) for line in lines)

    step = seconds("step") - seconds("testing") - seconds("save_checkpoint")
    spent = seconds("hindsight_log_prob")
    return numbers | {"seconds_per_step": step / len(lines), "pass_share_of_step": spent / step}


def _runs_table(runs: Mapping[str, Mapping[str, Any]]) -> str:
    heads = ["success minus GRPO, points", *LOGGED, "s per step", "pass, % of step"]
    lines = [f"| run | {' | '.join(heads)} |", "|---" * (len(heads) + 1) + "|"]
    for name, numbers in runs.items():
        change = numbers["success_minus_grpo"]
        cells = ["{:+.1f} [{:+.1f}, {:+.1f}]".format(*(100 * change[key] for key in ("mean", "low", "high")))]
        cells += [f"{numbers[key]:.3f}" if key in numbers else "-" for key in LOGGED]
        cells += [f"{numbers['seconds_per_step']:.1f}", f"{100 * numbers['pass_share_of_step']:.1f}"]
        lines.append(f"| {RUNS[name][0]} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Command line."""
    run_program(Comparison, "GRPO, TRIAL and its controls from one start policy.")


if __name__ == "__main__":
    main()
