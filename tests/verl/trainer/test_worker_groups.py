# SPDX-License-Identifier: Apache-2.0
"""What the trainer and its hooks use to let the ranks score rows."""

from __future__ import annotations

import pytest
import torch

from verl.protocol import DataProto
from verl.trainer.ppo.columns import MODEL_COLUMNS
from verl.trainer.ppo.worker_groups import score_rows


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_rows_are_filled_up_for_the_ranks_and_come_back_in_order(ranks: int) -> None:
    seen: list[DataProto] = []

    def method(rows: DataProto) -> DataProto:
        seen.append(rows)
        return DataProto.from_dict({"old_log_probs": rows.batch["responses"] * 0.5}, meta_info={"from": "a rank"})

    columns = {name: torch.arange(5 * 3).reshape(5, 3) for name in (*MODEL_COLUMNS, "advantages")}
    batch = DataProto.from_dict(columns, meta_info={"temperature": 9.0})
    scored = score_rows(method, batch, world_size=ranks, temperature=0.7)
    assert torch.equal(scored.batch["old_log_probs"], columns["responses"] * 0.5) and scored.meta_info == {}
    (rows,) = seen
    assert len(rows) % ranks == 0 and set(rows.batch.keys()) == set(MODEL_COLUMNS)
    assert rows.meta_info["temperature"] == 0.7 and batch.meta_info == {"temperature": 9.0}
