# SPDX-License-Identifier: Apache-2.0
"""Supervised fine-tuning program: `python -m verl.trainer.fsdp_sft_trainer key=value ...`, alone or under torchrun.

`FSDPSFTTrainer` and `create_sft_dataset` can be imported from here; they are loaded on first use, so that `--help`
needs no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from verl.utils.cli import hydra_program

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from verl.trainer.config.schema import SFTConfig
    from verl.trainer.sft.trainer import FSDPSFTTrainer, create_sft_dataset

__all__ = ["FSDPSFTTrainer", "create_sft_dataset", "main", "run_sft"]


def __getattr__(name: str) -> Any:
    if name in ("FSDPSFTTrainer", "create_sft_dataset"):
        from verl.trainer.sft import trainer

        return getattr(trainer, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def run_sft(config: SFTConfig) -> dict[str, float]:
    """Train as `config` says and return the last metrics; leaves the process group if it made one.

    Raises:
        UserError: the config asks for something impossible, or names files that are missing or unsuitable.
    """
    from verl.trainer.config.schema import validate_sft_config

    validate_sft_config(config)
    import torch.distributed as dist

    from verl.trainer.sft.trainer import FSDPSFTTrainer

    joined_before = dist.is_initialized()
    try:
        return FSDPSFTTrainer(config).fit()
    finally:
        if dist.is_initialized() and not joined_before:
            dist.destroy_process_group()


def _run(cfg: DictConfig) -> None:
    from verl.trainer.config.schema import SFTConfig, build_config

    run_sft(build_config(SFTConfig, cfg))


main = hydra_program(_run, "verl.trainer.config", "sft_trainer")

if __name__ == "__main__":
    main()
