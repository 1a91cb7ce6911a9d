# SPDX-License-Identifier: Apache-2.0
"""Which goals train and which validate: fixed by a seed, disjoint, by goals or by whole products."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from verl.utils.errors import UserError

__all__ = ["SplitMode", "overlap", "split_goals"]

SplitMode = Literal["goal", "product"]

_VAL_GOALS = 500
_LARGEST_SHARE = 4


def split_goals(
    file_order: NDArray[np.int64],
    products: NDArray[np.int32],
    mode: SplitMode,
    seed: int,
    val_goals: int | None,
) -> dict[str, NDArray[np.int64]]:
    """See `GoalSet.split`.

    Args:
        file_order: int64 (goals,), place of goal i in the order of the files.
        products: int32 (goals,), number of the product of goal i.
    """
    if mode not in get_args(SplitMode):
        raise UserError(f"Unknown split of WebShop goals {mode!r}; choose goal or product.")
    total = len(file_order)
    wanted = min(_VAL_GOALS, total // _LARGEST_SHARE) if val_goals is None else val_goals
    if not 0 < wanted < total:
        raise UserError(f"{wanted} of {total} WebShop goals cannot be held out for validation; leave both sides some.")
    here = np.empty(total, np.int64)  # place in the files -> index in the set
    here[file_order] = np.arange(total)
    rng = random.Random(seed)
    if mode == "goal":
        order = list(range(total))
        rng.shuffle(order)
        by_chance = here[order]
        return {"train": by_chance[wanted:], "val": by_chance[:wanted]}
    names = np.unique(products).tolist()
    rng.shuffle(names)
    counts = np.bincount(products)
    held_out = np.cumsum(counts[names])
    last = int(np.searchsorted(held_out, wanted))
    if last + 1 >= len(names):
        raise UserError(f"Holding out {wanted} of {total} goals leaves no product for training; hold out fewer.")
    in_val = np.isin(products, names[: last + 1])[here]
    return {"train": here[~in_val], "val": here[in_val]}


def overlap(split: Mapping[str, NDArray[np.int64]], products: NDArray[np.int32]) -> dict[str, float]:
    """How much two sides share.

    Returns:
        `shared_products` (count), `train_products`, `val_products` (counts), `val_goals_on_shared_products` (share of
        the validation goals, 0 to 1).
    """
    train, val = np.unique(products[split["train"]]), np.unique(products[split["val"]])
    shared = np.intersect1d(train, val)
    return {
        "shared_products": len(shared),
        "train_products": len(train),
        "val_products": len(val),
        "val_goals_on_shared_products": float(np.isin(products[split["val"]], shared).mean()),
    }
