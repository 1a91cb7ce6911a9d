# SPDX-License-Identifier: Apache-2.0
"""Prompts handed to a generation engine in portions, and what comes back of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from verl.protocol import DataProto
from verl.workers.rollout.base import BaseRollout


def named(prompts: DataProto, share: float) -> DataProto:
    """The prompts, each with its number as the name of its row."""
    prompts.batch["row"] = torch.arange(len(prompts))
    prompts.meta_info["share"] = share
    return prompts


def stream(rollout: BaseRollout, prompts: DataProto, sizes: Sequence[int]) -> tuple[dict[int, DataProto], list[int]]:
    """Hand the prompts over in portions of `sizes`, then wait for the rest; rows by number, and rows of every call."""
    ended: dict[int, DataProto] = {}
    counts, start = [], 0
    for size in [*sizes, *[0] * len(prompts)]:
        out = rollout.generate_some(prompts[start : start + size])
        start += size
        counts.append(len(out))
        for place, row in enumerate(out.batch["row"].tolist()):
            assert row not in ended
            ended[row] = out[place : place + 1]
    return ended, counts


def assert_equal_rows(ended: dict[int, DataProto], whole: DataProto) -> None:
    assert sorted(ended) == list(range(len(whole)))
    for row, single in ended.items():
        for name, column in whole.batch.items():
            if column.is_floating_point():
                assert torch.allclose(single.batch[name][0], column[row], atol=1e-4), (row, name)
            elif name != "close_draws":
                assert torch.equal(single.batch[name][0], column[row]), (row, name)
