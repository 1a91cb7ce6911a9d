# SPDX-License-Identifier: Apache-2.0
"""Per-rank sharded checkpoints of one model role."""

from __future__ import annotations

from verl.utils.checkpoint.checkpoint_manager import find_latest_ckpt_path, get_checkpoint_tracker_filename

__all__ = ["find_latest_ckpt_path", "get_checkpoint_tracker_filename"]
