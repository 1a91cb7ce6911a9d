# SPDX-License-Identifier: Apache-2.0
"""Combinations of the SFT program's config values that cannot work, refused before a model is loaded."""

from __future__ import annotations

from verl.trainer.config.sft_sections import SFTConfig
from verl.trainer.config.validate import check_backends, check_remote, refuse
from verl.utils.import_utils import is_installed

__all__ = ["validate_sft_config"]


def validate_sft_config(cfg: SFTConfig) -> None:
    """Raise UserError for the first combination in `cfg` that this version cannot run.

    Batch sizes are never refused: ranks and micro-batches that come short of rows are filled with empty ones.
    """
    refuse(
        [
            (
                cfg.ulysses_sequence_parallel_size > 1,
                "ulysses_sequence_parallel_size above 1 is not available; set ulysses_sequence_parallel_size=1.",
            ),
            (
                cfg.model.use_liger and not is_installed("liger_kernel"),
                "model.use_liger=True needs the package liger-kernel; install it or set model.use_liger=False.",
            ),
            (
                cfg.model.use_shm or cfg.data.use_shm,
                "use_shm is not available; set model.use_shm=False and data.use_shm=False.",
            ),
            (
                cfg.optim.name == "muon" and cfg.model.strategy == "fsdp",
                "optim.name=muon needs whole matrices; set model.strategy=fsdp2 or optim.name=adamw.",
            ),
            (
                cfg.data.custom_cls.path is not None and cfg.data.custom_cls.name is None,
                "data.custom_cls.path is set without data.custom_cls.name; set it to the class in that file.",
            ),
            (
                cfg.data.custom_cls.path is not None and cfg.data.weight_key is not None,
                "data.weight_key is not read with data.custom_cls; set one of the two to null.",
            ),
            (
                cfg.data.chat_template is not None,
                "data.chat_template is not available (the tokenizer's own template is used); set it to null.",
            ),
            (
                cfg.trainer.default_hdfs_dir is not None,
                "trainer.default_hdfs_dir is not supported; set it to null and copy trainer.default_local_dir later.",
            ),
        ]
    )
    check_backends(cfg.trainer.logger)
    check_remote(
        {
            "trainer.default_local_dir": cfg.trainer.default_local_dir,
            "trainer.resume_path": cfg.trainer.resume_path,
            "model.partial_pretrain": cfg.model.partial_pretrain,
            "data.train_files": cfg.data.train_files,
            "data.val_files": cfg.data.val_files,
        }
    )
