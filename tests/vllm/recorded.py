# SPDX-License-Identifier: Apache-2.0
"""Engines for a comparison of two runs: vLLM that writes down what it samples, and HF that says it again.

Named in `actor_rollout_ref.model.external_lib`, a worker imports this module before it builds its engine, and finds the
two in place of the engines `vllm` and `hf`. The answers lie beside the model's folder, by the seed of their row.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from verl.workers.rollout.base import EngineSpec, Generation
from verl.workers.rollout.engines import ENGINES, EngineEntry, load_engine
from verl.workers.rollout.hf_rollout import HFRollout
from verl.workers.rollout.probe import scores_of_next_tokens
from verl.workers.rollout.sampling import SamplingParams


def _folder(spec: EngineSpec) -> Path:
    folder = Path(spec.model_path).parent / "recorded"
    folder.mkdir(exist_ok=True)
    return folder


class ReplayedRollout(HFRollout):
    """Answers what was recorded for the row's seed, scored with its own weights."""

    folder: Path

    @classmethod
    def build(cls, spec: EngineSpec) -> ReplayedRollout:
        engine = super().build(spec)
        assert isinstance(engine, ReplayedRollout)
        engine.folder = _folder(spec)
        return engine

    @torch.inference_mode()
    def advance(
        self, keys: Tensor, input_ids: Tensor, attention_mask: Tensor, seeds: Tensor, sampling: SamplingParams,
        share: float,
    ) -> tuple[Tensor, Generation]:  # fmt: skip
        answers: list[list[int]] = [torch.load(self.folder / f"{seed}.pt") for seed in seeds.tolist()]
        size, limit = len(answers), sampling.max_new_tokens
        tokens = torch.full((size, limit), self.pad_token_id, dtype=torch.int64)
        log_probs = torch.full((size, limit), -1.0)
        for row, answer in enumerate(answers):
            ids = torch.cat([input_ids[row][attention_mask[row].bool()], torch.tensor(answer)])
            logits = self.module(input_ids=ids[None], use_cache=False).logits[0]
            tokens[row, : len(answer)] = torch.tensor(answer)
            log_probs[row, : len(answer)] = scores_of_next_tokens(logits, ids)[-len(answer) :]
        return keys, Generation(tokens, torch.tensor([len(answer) for answer in answers]), log_probs)


def _recording(engine: Any) -> Any:
    class RecordingRollout(engine):  # type: ignore[misc]
        """Writes down every answer, and the version of every sync."""

        def advance(
            self, keys: Tensor, input_ids: Tensor, attention_mask: Tensor, seeds: Tensor, sampling: SamplingParams,
            share: float,
        ) -> tuple[Tensor, Generation]:  # fmt: skip
            seed_of = dict(zip(keys.tolist(), seeds.tolist()))
            ended, out = super().advance(keys, input_ids, attention_mask, seeds, sampling, share)
            for key, ids, length in zip(ended.tolist(), out.tokens.tolist(), out.lengths.tolist()):
                torch.save(ids[:length], _folder(self.spec) / f"{seed_of[key]}.pt")
            return ended, out

        def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
            super().update_weights(weights, version)
            with (_folder(self.spec) / "syncs.txt").open("a") as file:
                file.write(f"{version}\n")

    return RecordingRollout


Recorded = _recording(load_engine("vllm"))
ENGINES["vllm"] = EngineEntry(__name__, "Recorded", "vllm")
ENGINES["hf"] = EngineEntry(__name__, "ReplayedRollout")
