# SPDX-License-Identifier: Apache-2.0
"""Rows that join vLLM while it generates sample what they sample together."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.streams import assert_equal_rows, named, stream
from tests.verl.workers.support import prompt_batch
from verl.workers.rollout.session import rollout_session

pytestmark = pytest.mark.vllm

MANY_ENDS = tuple(range(2, 40))


@pytest.mark.parametrize("sizes", [[16], [1, 5, 0, 7, 3]])
def test_joining_rows_sample_what_they_sample_together(
    make_policy: Callable[[str], Any], model_dirs: dict[str, Path], sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    group = make_policy("tied")
    engine = group.worker.rollout
    monkeypatch.setattr(engine, "eos_token_ids", MANY_ENDS)
    prompts = prompt_batch(model_dirs["tied"], repeat=2)
    with rollout_session(group, group.rollout_version()[0] + 1):
        whole = engine.generate_sequences(prompts)
        ended, counts = stream(engine, named(prompts, 0.25), sizes)
        assert_equal_rows(ended, whole)
        assert max(counts) < 16 and sum(counts) == 16
        # What is left behind does not come back.
        assert len(engine.generate_some(prompts)) < 16
    with rollout_session(group, group.rollout_version()[0] + 1):
        assert_equal_rows(stream(engine, prompts, [16])[0], whole)
