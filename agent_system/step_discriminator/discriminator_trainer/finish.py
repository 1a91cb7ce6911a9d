# SPDX-License-Identifier: Apache-2.0
"""Stage 2, last but one: the newest fine-tuning checkpoint becomes a discriminator folder.

    python -m agent_system.step_discriminator.discriminator_trainer.finish --sft RUN_DIR --data DATA_DIR --out MODEL_DIR

The folder loads with `from_pretrained` and holds `discriminator.json`; optimizer state stays behind. `evaluate` adds
the validation metrics. Exit status: 0, or 2 with one line on stderr when nothing was written.
"""

from __future__ import annotations

import argparse
import logging
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from agent_system.programs import check_output, run_program
from agent_system.step_discriminator import DISCRIMINATOR_FILE
from agent_system.step_discriminator.discriminator_trainer.prepare import prepared_max_length
from verl.utils.errors import UserError
from verl.utils.fs import atomic_dir

__all__ = ["finish", "main"]

_LEAVE_OUT = "resume"


def finish(checkpoint: str | Path, out: str | Path, *, max_length: int, threshold: float = 0.5) -> Path:
    """Copy the Hugging Face part of `checkpoint` to `out` and add `discriminator.json`; whole or not at all.

    Raises:
        UserError: `checkpoint` has no model, `out` is something else than a discriminator or cannot be written, or a
            number is out of range.
    """
    from agent_system.step_discriminator.discriminator import DiscriminatorConfig
    from verl.utils.tokenizer import hf_tokenizer

    if max_length < 1:
        raise UserError(f"--max-length {max_length}: give the number of tokens that prepare was given")
    if not 0.0 <= threshold <= 1.0:
        raise UserError(f"--threshold {threshold}: a credit lies between 0 and 1")
    source, target = Path(checkpoint), check_output(out, "--out", folder=True)
    if not (source / "config.json").is_file():
        raise UserError(f"--sft: {source} holds no model (config.json is missing); give the folder of a finished run")
    if target.exists() and any(target.iterdir()) and not (target / DISCRIMINATOR_FILE).is_file():
        raise UserError(f"--out: {target} exists and is no discriminator; choose another folder")
    tokenizer = hf_tokenizer(str(source), config_key="--sft")
    config = DiscriminatorConfig(max_length=max_length, threshold=threshold)
    with atomic_dir(target, overwrite=True) as folder:
        shutil.copytree(source, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns(_LEAVE_OUT))
        config.save(folder, tokenizer)
    return target


def newest_checkpoint(run_dir: str | Path) -> Path:
    """The newest complete `global_step_N` of a fine-tuning run.

    Raises:
        UserError: there is none.
    """
    from verl.utils.checkpoint import find_latest_ckpt_path

    newest = find_latest_ckpt_path(run_dir, marker="config.json")
    if newest is None:
        run = Path(run_dir).expanduser()
        raise UserError(f"--sft: {run} holds no global_step_N folder; give the folder of a finished run")
    return Path(newest)


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="finish", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--sft", required=True, help="folder of the fine-tuning run (trainer.default_local_dir)")
    parser.add_argument("--out", required=True, help="discriminator folder to write")
    parser.add_argument("--data", help="folder that prepare wrote for this run; says --max-length")
    parser.add_argument("--max-length", type=int, help="as given to prepare (default: what --data says)")
    parser.add_argument("--threshold", type=float, default=0.5, help="credit below it is redundant (default 0.5)")
    args = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    return run_program(lambda: _run(args))


def _max_length(args: argparse.Namespace) -> int:
    """The length the rows were made for: a discriminator that is asked in longer texts was not trained on them."""
    given: int | None = args.max_length
    if args.data is None:
        if given is None:
            raise UserError("--data (or --max-length) is missing; give the folder that prepare wrote for this run")
        return given
    prepared = prepared_max_length(args.data)
    if given is not None and given != prepared:
        raise UserError(f"--max-length {given}: prepare made the rows of {args.data} for {prepared}; leave it out")
    return prepared


def _run(args: argparse.Namespace) -> int:
    finish(newest_checkpoint(args.sft), args.out, max_length=_max_length(args), threshold=args.threshold)
    sys.stdout.write(f"discriminator folder: {args.out}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
