# SPDX-License-Identifier: Apache-2.0
"""Stage 2, report: how well a discriminator predicts the labels of held-out tasks, beside two trivial rules.

    python -m agent_system.step_discriminator.discriminator_trainer.evaluate --model MODEL_DIR --data data/val.parquet

Writes the metrics into `discriminator.json` of the model folder, and a report as JSON and Markdown. Exit status: 0, or
2 with one line on stderr when nothing was written.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agent_system.programs import check_output, run_program
from verl.utils.errors import UserError
from verl.utils.fs import atomic_write

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd

__all__ = ["evaluate", "main", "read_rows", "score_rows"]

logger = logging.getLogger(__name__)

_COLUMNS = ("prompt", "traj_uid", "step_index", "label", "source", "task_type", "trivial")

Metrics = dict[str, float | int | None]


def read_rows(path: str | Path) -> pd.DataFrame:
    """Rows that `prepare` wrote. Raises UserError when the file is missing or something else."""
    import pandas as pd
    import pyarrow as pa

    file = Path(path).expanduser()
    if not file.is_file():
        raise UserError(f"--data: {file} does not exist; give the val.parquet that prepare wrote")
    try:
        frame = pd.read_parquet(file)
    except (pa.ArrowInvalid, OSError) as error:
        raise UserError(f"--data: {file} cannot be read as parquet ({error})") from error
    missing = [name for name in _COLUMNS if name not in frame.columns]
    if missing or frame.empty:
        what = f"lacks the columns {', '.join(missing)}" if missing else "has no rows"
        raise UserError(f"--data: {file} {what}; give the val.parquet that prepare wrote")
    return frame


def score_rows(frame: pd.DataFrame, scorer: Any) -> np.ndarray:
    """(N,) float32 P(necessary) of every row; rows of one episode share their prefix."""
    import numpy as np

    from verl.utils.dataset.sft_dataset import render_prompts, tokenize_texts

    ids = tokenize_texts(render_prompts(frame["prompt"].tolist(), scorer.tokenizer), scorer.tokenizer)
    groups = [np.asarray(index) for _, index in sorted(frame.groupby("traj_uid").indices.items())]
    credit = np.empty(len(frame), dtype=np.float32)
    for index, values in zip(groups, scorer.score_token_ids([[ids[i] for i in index] for index in groups])):
        credit[index] = values
    return credit


def evaluate(frame: pd.DataFrame, credit: np.ndarray, threshold: float) -> dict[str, dict[str, Metrics]]:
    """`{part: {predictor: metrics}}`: parts are all, one per source, one per task type."""
    from agent_system.step_discriminator.discriminator_trainer.metrics import binary_metrics, majority_credit

    label = frame["label"].to_numpy()
    trivial = frame["trivial"].to_numpy().astype(float)
    parts = {"all": label >= 0}
    for column, name in (("source", "source"), ("task_type", "task type")):
        for value in sorted(frame[column].unique()):
            parts[f"{name} {value}"] = (frame[column] == value).to_numpy()
    return {
        name: {
            "discriminator": binary_metrics(credit[rows], label[rows], threshold),
            "always the majority": binary_metrics(majority_credit(label)[rows], label[rows]),
            "unchanged or repeated": binary_metrics(trivial[rows], label[rows]),
        }
        for name, rows in parts.items()
    }


def _markdown(results: Mapping[str, Mapping[str, Metrics]], model: str, data: str) -> str:
    from agent_system.step_discriminator.discriminator_trainer.metrics import table

    parts = [f"## {name}\n\n{table(result)}" for name, result in results.items()]
    intro = (
        f"# Step-credit discriminator on held-out tasks\n\nModel {model}, rows {data}. Baselines: every step the more "
        "frequent label; redundant iff the observation did not change or the action was done before.\n"
    )
    return "\n".join([intro, *parts])


def _load(folder: str, device: str) -> tuple[Any, Any, Any]:
    import torch
    from transformers import AutoModelForCausalLM

    from agent_system.step_discriminator.discriminator import DiscriminatorConfig
    from verl.utils.device import resolve_device
    from verl.utils.tokenizer import hf_tokenizer

    config = DiscriminatorConfig.load(folder)
    place = resolve_device(device)
    dtype = torch.float32 if place.type == "cpu" else torch.bfloat16
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa")
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"--model: no model could be loaded from {folder} ({reason}); run finish again") from error
    return model.to(place), hf_tokenizer(folder, config_key="--model"), config


def run(model_dir: str, data: str, report: str, device: str) -> dict[str, dict[str, Metrics]]:
    """Score, write `{report}.json`, `{report}.md` and the metrics of `discriminator.json`; returns the results."""
    frame = read_rows(data)
    model, tokenizer, config = _load(model_dir, device)
    from agent_system.step_discriminator.discriminator import DiscriminatorScorer

    scorer = DiscriminatorScorer(model, tokenizer, config)
    results = evaluate(frame, score_rows(frame, scorer), config.threshold)
    atomic_write(f"{report}.json", json.dumps(results, indent=2, allow_nan=False) + "\n")
    atomic_write(f"{report}.md", _markdown(results, model_dir, data))
    held_out: dict[str, Any] = {name: result["discriminator"] for name, result in results.items()}
    config.save(model_dir, tokenizer, held_out)
    return results


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="evaluate", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", required=True, help="discriminator folder (from finish)")
    parser.add_argument("--data", required=True, help="val.parquet from prepare")
    parser.add_argument("--report", default=None, help="report path without suffix (default: MODEL/report)")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    args = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    return run_program(lambda: _run(args))


def _run(args: argparse.Namespace) -> int:
    model = str(Path(args.model).expanduser())
    report = args.report if args.report is not None else str(Path(model) / "report")
    check_output(f"{report}.json", "--report")
    results = run(model, args.data, report, args.device)
    from agent_system.step_discriminator.discriminator_trainer.metrics import table

    sources = {name: result for name, result in results.items() if name == "all" or name.startswith("source ")}
    for name, result in sources.items():
        sys.stdout.write(f"{name}\n{table(result)}\n")
    sys.stdout.write(f"report: {report}.json, {report}.md\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
