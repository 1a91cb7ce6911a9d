# SPDX-License-Identifier: Apache-2.0
"""Expert trajectories -> SFT rows for a policy: `python -m examples.quickstart.sft_data`.

Every row is one turn: the prompt that the environment manager would show, and the expert's response. Mistakes of the
expert stay in the history, so that the policy learns to go on after a failed action, but are never a target.
"""

import argparse
import io
import logging
from pathlib import Path

import numpy as np

from agent_system.environments.prompt_builder import PromptBuilder
from examples.quickstart.profiles import PROFILES
from verl.utils.errors import UserError
from verl.utils.fs import atomic_write

logger = logging.getLogger(__name__)


def sft_rows(trajectories: list, builder: PromptBuilder) -> list[dict[str, str]]:
    """Rows `{prompt, response, traj_uid, step_index}` of the successful trajectories, in order.

    Args:
        trajectories: `agent_system.trajectory.Trajectory` records with expert responses.
        builder: makes the prompts.
    """
    rows = []
    for trajectory in trajectories:
        if not trajectory.success:
            continue
        history: list[tuple[str, str]] = []
        for step in trajectory.steps:
            if step.response is not None and step.expert_kind != "mistake":
                prompt = builder.build(
                    trajectory.task["instruction"], history, step.observation, list(step.admissible_actions)
                )
                rows.append(
                    {
                        "prompt": prompt,
                        "response": step.response,
                        "traj_uid": trajectory.traj_uid,
                        "step_index": step.step_index,
                    }
                )
            history.append((step.observation, step.action))
    return rows


def write_parquet(rows: list[dict[str, str]], path: Path) -> None:
    """Write rows to `path`, whole or not at all."""
    import pandas as pd

    buffer = io.BytesIO()
    pd.DataFrame(rows).to_parquet(buffer, index=False)
    atomic_write(path, buffer.getvalue())


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Turn expert trajectories into SFT parquet files.")
    parser.add_argument("--env", choices=PROFILES, default=next(iter(PROFILES)), help="default %(default)s")
    parser.add_argument("--trajectories", type=Path, required=True, help="trajectories.jsonl of an expert")
    parser.add_argument("--out", type=Path, required=True, help="folder for train.parquet and val.parquet")
    parser.add_argument("--prompt-style", choices=("full", "compact"), default="compact")
    parser.add_argument("--history-length", type=int, default=2, help="past turns in the prompt (default 2)")
    parser.add_argument(
        "--val-fraction", type=float, default=0.02, help="share of the episodes held out (default 0.02)"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the row order")
    args = parser.parse_args()

    from agent_system.trajectory import load_trajectories

    if not args.trajectories.is_file():
        raise SystemExit(f"error: {args.trajectories} not found; make it with the collect program of stage 1")
    trajectories, report = load_trajectories(args.trajectories)
    if report.bad:
        logger.warning("%s: %d broken records left out", args.trajectories, len(report.bad))
    if len(trajectories) < 2:
        raise SystemExit(f"error: {args.trajectories} holds {len(trajectories)} usable trajectories; at least 2 needed")
    builder = PROFILES[args.env].prompts(args.prompt_style, args.history_length)
    rng = np.random.default_rng(args.seed)
    order = rng.permutation(len(trajectories))
    held_out = max(1, int(len(trajectories) * args.val_fraction))
    parts = {"val": order[:held_out], "train": order[held_out:]}
    for name, members in parts.items():
        rows = sft_rows([trajectories[i] for i in members], builder)
        if not rows:
            raise SystemExit(f"error: the {name} part of {args.trajectories} has no successful trajectory")
        shuffled = [rows[i] for i in rng.permutation(len(rows))]
        write_parquet(shuffled, args.out / f"{name}.parquet")
        print(f"{args.out / name}.parquet: {len(shuffled):,} rows of {len(members):,} episodes")


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        raise SystemExit(f"error: {error}") from None
