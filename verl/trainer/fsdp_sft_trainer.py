# SPDX-License-Identifier: Apache-2.0
"""Supervised fine-tuning program: `python -m verl.trainer.fsdp_sft_trainer key=value ...`, alone or under torchrun.

`FSDPSFTTrainer` and `create_sft_dataset` can be imported from here; they are loaded on first use, so that `--help`
needs no torch.
"""

from __future__ import annotations

import importlib
import logging
from typing import TYPE_CHECKING, Any

from verl.utils.cli import hydra_program

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from verl.trainer.config.schema import SFTConfig
    from verl.trainer.sft.data import create_sft_dataset
    from verl.trainer.sft.trainer import FSDPSFTTrainer

__all__ = ["FSDPSFTTrainer", "create_sft_dataset", "main", "run_sft"]

logger = logging.getLogger(__name__)

_HOMES = {"FSDPSFTTrainer": "verl.trainer.sft.trainer", "create_sft_dataset": "verl.trainer.sft.data"}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def run_sft(config: SFTConfig) -> dict[str, float]:
    """Train as `config` says and return the last metrics; leaves the process group if it made one.

    Raises:
        UserError: the config asks for something impossible, or names files that are missing or unsuitable.
    """
    from verl.trainer.config.schema import ignored_keys, validate_sft_config

    validate_sft_config(config)
    unread = ignored_keys(config)
    if unread:
        logger.warning("set, but read by no part of this version: %s", ", ".join(unread))
    from verl.trainer.sft.trainer import FSDPSFTTrainer
    from verl.utils.distributed import own_process_group

    with own_process_group():
        return FSDPSFTTrainer(config).fit()


def _run(cfg: DictConfig) -> None:
    from verl.trainer.config.schema import SFTConfig, build_config

    run_sft(build_config(SFTConfig, cfg))


main = hydra_program(_run, "verl.trainer.config", "sft_trainer")

if __name__ == "__main__":
    main()
