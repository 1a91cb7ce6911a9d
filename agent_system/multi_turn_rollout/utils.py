# SPDX-License-Identifier: Apache-2.0
"""Helpers under the names that code written for verl-agent imports."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

if TYPE_CHECKING:
    import torch

    from verl.protocol import DataProto

__all__ = ["adjust_batch", "filter_group_data", "numpy_to_torch", "process_image", "to_list_of_dict", "torch_to_numpy"]


def to_list_of_dict(batch: DataProto) -> list[dict[str, Any]]:
    """One dict a row: every tensor and numpy column's entry."""
    columns: dict[str, Any] = {} if batch.batch is None else dict(batch.batch.items())
    columns |= batch.non_tensor_batch
    return [{name: column[row] for name, column in columns.items()} for row in range(len(batch))]


def torch_to_numpy(tensor: Any, is_object: bool = False) -> np.ndarray:
    """Tensor (any device) or array -> ndarray, of dtype object if asked for. TypeError for anything else."""
    import torch

    if isinstance(tensor, torch.Tensor):
        tensor = tensor.detach().cpu().numpy()
    if not isinstance(tensor, np.ndarray):
        raise TypeError(f"expected a tensor or an array, got {type(tensor).__name__}")
    return tensor.astype(object) if is_object else tensor


def numpy_to_torch(array: Any, device: Any) -> torch.Tensor:
    """Array or tensor -> tensor on `device`. TypeError for anything else."""
    import torch

    if isinstance(array, np.ndarray):
        array = torch.from_numpy(array)
    if not isinstance(array, torch.Tensor):
        raise TypeError(f"expected an array or a tensor, got {type(array).__name__}")
    return array.to(device)


def process_image(*args: Any, **kwargs: Any) -> NoReturn:
    """Not part of this version."""
    raise NotImplementedError("process_image: environments with images are not part of this version")


def adjust_batch(*args: Any, **kwargs: Any) -> NoReturn:
    """Not part of this version."""
    raise NotImplementedError(
        "adjust_batch: the trainer fills batches itself, see verl.trainer.ppo.batch_ops.pad_with_masked_rows and "
        "duplicate_rows (trainer.adjust_before_advantage)"
    )


def filter_group_data(*args: Any, **kwargs: Any) -> NoReturn:
    """Not part of this version."""
    raise NotImplementedError(
        "filter_group_data: the trainer filters whole groups itself, see verl.trainer.ppo.dynamic_sampling "
        "(algorithm.filter_groups)"
    )
