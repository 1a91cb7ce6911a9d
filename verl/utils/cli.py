# SPDX-License-Identifier: Apache-2.0
"""Entry programs: Hydra with one-line errors and no output folders."""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from functools import wraps
from typing import NoReturn

import hydra
from hydra._internal.utils import get_args_parser
from omegaconf import DictConfig

from verl.trainer.config.loading import explain_overrides, load_config
from verl.utils.errors import UserError

__all__ = ["hydra_program"]

# No run folder, no log file, no change of the working directory.
_QUIET = {
    "hydra.run.dir": ".",
    "hydra.output_subdir": "null",
    "hydra.job.chdir": "False",
    "hydra/job_logging": "stdout",
}


def hydra_program(main: Callable[[DictConfig], None], config_module: str, config_name: str) -> Callable[[], None]:
    """A command-line program that calls `main` with the composed config.

    The command line is Hydra's (`key=value`, `--help`, `--cfg job`, `--multirun`, ...). Overrides are checked
    first: an unknown key is answered with the nearest valid one. A `UserError`, from there or from `main`, is
    printed as one line `error: ...` on stderr, and the exit status is 2. Other exceptions keep their traceback.

    Args:
        main: gets the composed tree; imports torch and the like inside.
        config_module: package with the YAML files, such as "verl.trainer.config".
        config_name: name of the YAML file without suffix.
    """

    @wraps(main)
    def task(cfg: DictConfig) -> None:
        try:
            main(cfg)
        except UserError as error:
            _exit_with(error)

    def program() -> None:
        # Intermixed: overrides may stand on both sides of a flag, as in `run.sh key=value --cfg job`.
        parsed = get_args_parser().parse_intermixed_args(sys.argv[1:])
        try:
            _check_arguments(parsed, config_module, config_name)
        except UserError as error:
            _exit_with(error)
        flags = _without(sys.argv[1:], parsed.overrides)
        given = {override.lstrip("+").partition("=")[0] for override in parsed.overrides}
        quiet = [f"{key}={value}" for key, value in _QUIET.items() if key not in given]
        sys.argv = [sys.argv[0], *flags, *parsed.overrides, *quiet]
        # Hydra hides the traceback of a failed job by default; a bug should show all of it.
        os.environ.setdefault("HYDRA_FULL_ERROR", "1")
        hydra.main(config_path=f"pkg://{config_module}", config_name=config_name, version_base=None)(task)()

    return program


def _without(arguments: Sequence[str], overrides: Sequence[str]) -> list[str]:
    """`arguments` without the overrides, which keep their order in both lists."""
    waiting = list(overrides)
    flags = []
    for argument in arguments:
        if waiting and argument == waiting[0]:
            waiting.pop(0)
        else:
            flags.append(argument)
    return flags


def _check_arguments(parsed: Namespace, config_module: str, config_name: str) -> None:
    if parsed.config_path or parsed.config_dir:
        return
    name = parsed.config_name or config_name
    if parsed.multirun:
        # Sweeps have values that only Hydra's sweeper can take apart, so that only the keys are checked.
        explain_overrides(name, parsed.overrides, config_module)
    else:
        load_config(name, parsed.overrides, config_module)


def _exit_with(error: UserError) -> NoReturn:
    # Under torchrun every rank finds the same mistake; one of them reports it.
    if os.environ.get("RANK", "0") == "0":
        # An error that crossed a Ray process keeps the original in `cause`; its own text is a whole traceback.
        cause = vars(error).get("cause", error)
        sys.stderr.write(f"error: {' '.join(str(cause).split())}\n")
    sys.exit(2)
