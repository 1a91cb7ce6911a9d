# SPDX-License-Identifier: Apache-2.0
"""Access to a batch's tensor columns."""

from __future__ import annotations

from tensordict import TensorDict

from verl.protocol import DataProto

MODEL_COLUMNS = ("input_ids", "attention_mask", "position_ids", "responses")
"""What a model needs of a row to score its response."""


def tensors_of(data: DataProto) -> TensorDict:
    """The tensor columns of a batch that must have some.

    Raises:
        ValueError: the batch has no tensors.
    """
    if data.batch is None:
        raise ValueError("this batch has no tensor columns")
    return data.batch
