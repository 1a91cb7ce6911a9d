# SPDX-License-Identifier: Apache-2.0
"""What a run shows of its texts: the turns of a training step as a file, some episodes of a validation."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from verl.protocol import DataProto
from verl.trainer.ppo.columns import tensors_of
from verl.utils.fs import atomic_write

__all__ = ["choose_samples", "write_turns"]

_SAMPLES_SEED = 42


def write_turns(path: Path, batch: DataProto, tokenizer: Any, step: int) -> None:
    """One JSON line a turn: ``input``, ``output``, ``score`` (the row's summed token scores) and ``step``."""
    tensors = tensors_of(batch)
    inputs = tokenizer.batch_decode(tensors["prompts"], skip_special_tokens=True)
    outputs = tokenizer.batch_decode(tensors["responses"], skip_special_tokens=True)
    scores = tensors["token_level_scores"].sum(dim=-1).tolist()
    lines = [
        json.dumps({"input": given, "output": said, "score": score, "step": step}, ensure_ascii=False)
        for given, said, score in zip(inputs, outputs, scores, strict=True)
    ]
    atomic_write(path, "\n".join(lines) + "\n")


def choose_samples(samples: Sequence[tuple[str, str, float]], count: int) -> list[tuple[str, str, float]]:
    """``count`` of the (input, output, score); of the same inputs in every validation, so that one can follow them."""
    ordered = sorted(samples)
    chosen = np.random.default_rng(_SAMPLES_SEED).permutation(len(ordered))[:count]
    return [ordered[index] for index in chosen]
