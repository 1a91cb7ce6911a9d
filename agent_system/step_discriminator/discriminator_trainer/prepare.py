# SPDX-License-Identifier: Apache-2.0
"""Stage 2, data: credit_analysis.json (one or many) -> train.parquet and val.parquet, split by task.

    python -m agent_system.step_discriminator.discriminator_trainer.prepare out/credit_analysis.json \\
        --model MODEL --out data

Each row asks about one step of a successful episode. Last steps are left out (necessary by construction). Exit status:
0, or 2 with one line on stderr when nothing was written.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import logging
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from agent_system.programs import check_output, run_program
from agent_system.step_discriminator.trajectory_analyzer.document import load_credit_analysis
from agent_system.trajectory import RecordError, Step, Trajectory, task_key
from verl.utils.errors import UserError
from verl.utils.fs import atomic_write, require_file

__all__ = [
    "LabelledEpisode",
    "PreparedData",
    "main",
    "prepare",
    "prepared_max_length",
    "read_episodes",
    "split_tasks",
    "trivial_labels",
]

logger = logging.getLogger(__name__)

TRAIN_FILE, VAL_FILE, REPORT_FILE = "train.parquet", "val.parquet", "prepare_report.json"


@dataclass(frozen=True)
class LabelledEpisode:
    """A successful episode with one label per step (1 necessary, 0 redundant)."""

    trajectory: Trajectory
    credits: tuple[int, ...]

    @property
    def task(self) -> str:
        """What must not be in both parts: the game's content hash or the goal product, else the whole task."""
        task = self.trajectory.task
        for name in ("sha256", "goal_asin"):
            if task.get(name):
                return str(task[name])
        return task_key(task)

    @property
    def source(self) -> str:
        """Who acted, for reports: the policy's kind."""
        return str(self.trajectory.policy.get("kind", "unknown"))


@dataclass(frozen=True)
class PreparedData:
    """What `prepare` wrote."""

    out_dir: Path
    report: Mapping[str, Any]


def prepared_max_length(folder: str | Path) -> int:
    """The `max_length` that `prepare` was given for a data folder. Raises UserError when it is no such folder."""
    file = Path(folder).expanduser() / REPORT_FILE
    try:
        length = json.loads(file.read_text(encoding="utf-8"))["max_length"]
    except OSError as error:
        raise UserError(f"--data: cannot read {file} ({error.strerror}); give the folder that prepare wrote") from error
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"--data: {file} is no report of prepare ({error!r}); run prepare again") from error
    if not isinstance(length, int) or isinstance(length, bool):
        raise UserError(f"--data: {file} has no number as max_length; run prepare again")
    return length


def read_episodes(
    paths: Sequence[str | Path], label_source: str | None = None
) -> tuple[list[LabelledEpisode], Counter[str], str]:
    """Labelled successes of credit analyses, in file order, counts of what was left out, and the label source.

    The same episode in two files counts once. Different episodes that share a `traj_uid` get distinct ones.

    Args:
        label_source: `single`, `minimal`, or None for what the analyses chose (`credit`).

    Raises:
        UserError: a file is missing, is no credit analysis, or holds a record that does not fit; the analyses chose
            different label sources, or lack the one asked for.
    """
    documents = [(path, load_credit_analysis(path)) for path in paths]
    sources = sorted({document["header"]["options"]["label_source"] for _, document in documents})
    if label_source is None and len(sources) > 1:
        raise UserError(f"the credit analyses have different labels ({', '.join(sources)}); choose with --label-source")
    source = label_source or sources[0]
    episodes: list[LabelledEpisode] = []
    skipped: Counter[str] = Counter()
    seen: dict[str, list[tuple[str, ...]]] = {}
    for path, document in documents:
        for index, record in enumerate(document["trajectories"]):
            if not record["succeeded"]:
                skipped["failed"] += 1
                continue
            episode = _episode(record, source, f"{path}, trajectory {index}")
            actions = (episode.task, *(step.action for step in episode.trajectory.steps))
            known = seen.setdefault(episode.trajectory.traj_uid, [])
            if actions in known:
                skipped["duplicate"] += 1
                continue
            known.append(actions)
            if len(known) > 1:
                uid = f"{episode.trajectory.traj_uid}#{len(known)}"
                episode = LabelledEpisode(replace(episode.trajectory, traj_uid=uid), episode.credits)
            episodes.append(episode)
    return episodes, skipped, source


def _episode(record: Any, source: str, where: str) -> LabelledEpisode:
    try:
        steps = [{name: step[name] for name in _STEP_FIELDS if name in step} for step in record["steps"]]
        plain = {name: record[name] for name in _TRAJECTORY_FIELDS if name in record} | {"steps": steps}
        trajectory = Trajectory.from_dict(plain)
        labels = [step[_LABEL_FIELDS[source]] for step in record["steps"]]
    except RecordError as error:
        raise UserError(f"{where}: {error}") from error
    except (KeyError, TypeError) as error:
        raise UserError(f"{where}: not a labelled trajectory ({error!r}); analyse it again") from error
    if source == "minimal" and None in labels:
        raise UserError(f"{where}: has no minimal labels; analyse with --mode minimal")
    if not labels or not all(isinstance(label, bool) for label in labels):
        raise UserError(f"{where}: {_LABEL_FIELDS[source]} must be true or false for every step; analyse it again")
    return LabelledEpisode(trajectory, tuple(map(int, labels)))


_LABEL_FIELDS = {"single": "necessary_single", "minimal": "in_minimal"}


_STEP_FIELDS = tuple(item.name for item in fields(Step))
_TRAJECTORY_FIELDS = tuple(item.name for item in fields(Trajectory))


def split_tasks(tasks: Iterable[str], val_share: float, seed: int) -> tuple[set[str], set[str]]:
    """Disjoint (train, val) task keys; at least one in each. Depends on the keys and the seed, not on their order.

    Tasks are ranked by a hash, so a task tends to stay on its side when others are added.

    Raises:
        UserError: fewer than two tasks, or a share outside (0, 1).
    """
    if not 0.0 < val_share < 1.0:
        raise UserError(f"--val-share {val_share} must lie between 0 and 1")
    ranked = sorted(set(tasks), key=lambda key: hashlib.blake2b(f"{seed}:{key}".encode(), digest_size=16).digest())
    if len(ranked) < 2:
        raise UserError(f"{len(ranked)} task cannot be split by task; analyse trajectories of at least two tasks")
    count = min(max(1, round(val_share * len(ranked))), len(ranked) - 1)
    return set(ranked[count:]), set(ranked[:count])


def trivial_labels(trajectory: Trajectory) -> list[int]:
    """Labels by the trivial rule: redundant (0) iff the observation did not change or the action was done before."""
    seen = [step.observation for step in trajectory.steps] + [trajectory.final_observation]
    done: set[str] = set()
    labels = []
    for index, step in enumerate(trajectory.steps):
        labels.append(0 if seen[index + 1] == seen[index] or step.action in done else 1)
        done.add(step.action)
    return labels


def prepare(
    credit_files: Sequence[str | Path],
    out_dir: str | Path,
    tokenizer: Any,
    *,
    max_length: int,
    val_share: float = 0.1,
    balance: bool = False,
    seed: int = 0,
    label_source: str | None = None,
) -> PreparedData:
    """Write `train.parquet`, `val.parquet` and `prepare_report.json`.

    Columns: prompt (chat messages), response, traj_uid, step_index, label, weight; for reports source, task_type, task
    and trivial (the trivial rule's label). With `balance`, training rows are weighted so that both classes weigh the
    same and the mean weight is 1.

    `label_source` is as in `read_episodes`.

    Raises:
        UserError: unreadable input, or nothing to train on.
    """
    import pandas as pd

    episodes, skipped, source = read_episodes(credit_files, label_source)
    if not episodes:
        raise UserError(f"no labelled success in {', '.join(map(str, credit_files))}; collect and analyse successes")
    rows, counts = _rows(episodes, tokenizer, max_length)
    train_tasks, val_tasks = split_tasks((row["task"] for row in rows), val_share, seed)
    frame = pd.DataFrame(rows)
    parts = {
        "train": frame[frame["task"].isin(train_tasks)].reset_index(drop=True),
        "val": frame[frame["task"].isin(val_tasks)].reset_index(drop=True),
    }
    if balance:
        parts["train"]["weight"] = _balancing(parts["train"]["label"].tolist())
    report = {
        "credit_files": [str(path) for path in credit_files],
        "label_source": source,
        "max_length": max_length,
        "seed": seed,
        "balance": balance,
        "trajectories": {"used": len({row["traj_uid"] for row in rows}), **counts, **skipped},
        **{name: _describe(part) for name, part in parts.items()},
    }
    folder = Path(out_dir).expanduser()
    for name, file in (("train", TRAIN_FILE), ("val", VAL_FILE)):
        buffer = io.BytesIO()
        parts[name].to_parquet(buffer, index=False)
        atomic_write(folder / file, buffer.getvalue())
    atomic_write(folder / REPORT_FILE, json.dumps(report, indent=2) + "\n")
    return PreparedData(folder, report)


def _rows(
    episodes: Sequence[LabelledEpisode], tokenizer: Any, max_length: int
) -> tuple[list[dict[str, Any]], dict[str, int]]:
    from agent_system.step_discriminator.step_prompt import EpisodeText, build_prompts, credit_rows

    rows: list[dict[str, Any]] = []
    counts = {"shortened": 0, "too_long": 0, "single_step": 0}
    for episode in episodes:
        trajectory = episode.trajectory
        text = EpisodeText.from_trajectory(trajectory)
        prompts = build_prompts(text, tokenizer, max_length)
        counts["shortened"] += prompts.shortened and prompts.fits
        counts["single_step"] += len(episode.credits) == 1
        if not prompts.fits:
            counts["too_long"] += 1
            continue
        trivial = trivial_labels(trajectory)
        for row in credit_rows(trajectory.traj_uid, text, episode.credits, prompts):
            rows.append(
                {
                    "prompt": [{"role": "user", "content": row.prompt}],
                    "response": row.response,
                    "traj_uid": row.traj_uid,
                    "step_index": row.step_index,
                    "label": row.label,
                    "weight": row.weight,
                    "source": episode.source,
                    "task_type": str(trajectory.task.get("task_type") or "unknown"),
                    "task": episode.task,
                    "trivial": trivial[row.step_index],
                }
            )
    if counts["too_long"]:
        logger.warning(
            "%d trajectories left out: longer than --max-length %d even without observations",
            counts["too_long"],
            max_length,
        )
    if not rows:
        raise UserError(f"no step to learn from among {len(episodes)} trajectories: {counts}; raise --max-length")
    return rows, counts


def _balancing(labels: Sequence[int]) -> list[float]:
    count = Counter(labels)
    return [len(labels) / (len(count) * count[label]) for label in labels]


def _describe(part: Any) -> dict[str, Any]:
    redundant = part["label"] == 0
    return {
        "tasks": int(part["task"].nunique()),
        "trajectories": int(part["traj_uid"].nunique()),
        "rows": len(part),
        "redundant": int(redundant.sum()),
        "redundant_share": float(redundant.mean()) if len(part) else None,
        "rows_by_source": {str(name): int(count) for name, count in sorted(part["source"].value_counts().items())},
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="prepare", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("credit", nargs="+", help="credit_analysis.json files of stage 1")
    parser.add_argument("--model", required=True, help="folder or id of the model to train; its tokenizer measures")
    parser.add_argument("--out", required=True, help="folder for the two parquet files and the report")
    parser.add_argument("--max-length", type=int, default=4096, help="most tokens of a row (default 4096)")
    parser.add_argument("--val-share", type=float, default=0.1, help="share of tasks held out (default 0.1)")
    parser.add_argument("--balance", action="store_true", help="weight the classes equally in training")
    parser.add_argument(
        "--label-source",
        choices=sorted(_LABEL_FIELDS),
        help="single: necessary alone; minimal: kept in the minimal success (default: what the analyses chose)",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the split (default 0)")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; returns the exit status."""
    args = _parser().parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    return run_program(lambda: _run(args))


def _run(args: argparse.Namespace) -> int:
    out = check_output(args.out, "--out", folder=True)
    # Before the tokenizer: looking for one on an unreachable hub takes a minute.
    for path in args.credit:
        require_file(path, "CREDIT.json")
    from verl.utils.tokenizer import hf_tokenizer

    result = prepare(
        args.credit,
        out,
        hf_tokenizer(args.model, config_key="--model"),
        max_length=args.max_length,
        val_share=args.val_share,
        balance=args.balance,
        seed=args.seed,
        label_source=args.label_source,
    )
    sys.stdout.write(_summary(result))
    return 0


def _summary(result: PreparedData) -> str:
    report = result.report
    lines = [f"trajectories: {', '.join(f'{count} {name}' for name, count in report['trajectories'].items())}"]
    for name in ("train", "val"):
        part = report[name]
        lines.append(
            f"{name}: {part['rows']} rows of {part['trajectories']} trajectories on {part['tasks']} tasks, "
            f"{part['redundant_share']:.1%} redundant"
        )
    return "\n".join([*lines, f"written to {result.out_dir}"]) + "\n"


if __name__ == "__main__":
    sys.exit(main())
