# SPDX-License-Identifier: Apache-2.0
"""Batched generation with any Hugging Face causal language model.

Prefill: equal prompts are computed once, rows are sorted by length and cut into blocks of a token budget, so that short
rows do not pay for long ones. Decode: one token for all live rows per forward pass; when half of the rows have ended,
they leave the batch (`hf_decode`).
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

from verl.trainer.config.worker_sections import RolloutConfig
from verl.utils.errors import UserError
from verl.utils.model import compute_position_id_with_mask
from verl.workers.model_builder import load_config
from verl.workers.rollout.base import BaseRollout, EngineSpec, Generation
from verl.workers.rollout.hf_decode import DecodeBatch, Prefilled, Run, can_join, join_caches
from verl.workers.rollout.probe import record_states, scores_of_next_tokens
from verl.workers.rollout.sampling import SamplingParams

__all__ = ["HFRollout"]

# Prefill block on the CPU: activations of about this many tokens stay in the cache of one core (measured: 16 rows of
# 100 tokens are 15-35 % quicker than 64 at 0.5-3 M parameters).
_CPU_PREFILL_TOKENS = 1600


class HFRollout(BaseRollout):
    """Prefill and decode loop over an unsharded model in eval mode.

    Args:
        module: the model; its weights are replaced by `update_weights`.
        share_weights: take tensors of equal device and dtype over as they are instead of copying them. Only for a
            caller that owns unsharded weights which live as long as the engine.
    """

    def __init__(
        self,
        module: PreTrainedModel,
        config: RolloutConfig,
        *,
        eos_token_ids: Sequence[int],
        pad_token_id: int,
        seed: int = 0,
        share_weights: bool = False,
    ) -> None:
        super().__init__(config, eos_token_ids=eos_token_ids, pad_token_id=pad_token_id, dtype=module.dtype, seed=seed)
        self.module = module.eval().requires_grad_(False)
        self.share_weights = share_weights
        self._run: Run | None = None
        on_cpu = self.device.type == "cpu"
        self.prefill_tokens = _CPU_PREFILL_TOKENS if on_cpu else config.max_num_batched_tokens
        accepted = inspect.signature(module.forward).parameters
        # The keyword of the key/value cache was renamed in transformers 5.
        self._cache_keyword = "cache" if "cache" in accepted else "past_key_values"
        self._keep_last = {"logits_to_keep": 1} if "logits_to_keep" in accepted else {}

    @classmethod
    def build(cls, spec: EngineSpec) -> HFRollout:
        """See `BaseRollout.build`."""
        model_config = load_config(
            spec.model_path, override_config=spec.override_config, trust_remote_code=spec.trust_remote_code
        )
        _check_rotary_scaling(model_config.to_dict(), spec)
        # The initial weights are never used, and drawing them must not move the process-wide generators.
        devices = [] if spec.device.type == "cpu" else [spec.device]
        with torch.random.fork_rng(devices=devices), spec.device:
            module = AutoModelForCausalLM.from_config(
                model_config, dtype=spec.dtype, trust_remote_code=spec.trust_remote_code
            )
        engine = cls(
            module,
            spec.config,
            eos_token_ids=spec.eos_token_ids,
            pad_token_id=spec.pad_token_id,
            seed=spec.seed,
            share_weights=spec.share_weights,
        )
        engine.release_weights()
        return engine

    @property
    def device(self) -> torch.device:
        """Where the model computes."""
        return self.module.device

    @torch.no_grad()
    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """See `BaseRollout.update_weights`."""
        targets: dict[str, Tensor] = self.module.state_dict(keep_vars=True)
        # Tied weights have several names and arrive under at least one of them.
        missing = {id(tensor) for tensor in self.module.parameters()}
        for name, weight in weights:
            if name not in targets:
                raise RuntimeError(f"the rollout engine has no weight {name!r}")
            target = targets[name]
            if self.share_weights and weight.device == target.device and weight.dtype == target.dtype:
                target.data = weight
            elif target.numel() == 0:
                target.data = weight.to(device=target.device, dtype=target.dtype, copy=True)
            else:
                target.copy_(weight)
            missing.discard(id(target))
        if missing:
            names = [name for name, tensor in self.module.named_parameters() if id(tensor) in missing]
            raise RuntimeError(f"the rollout engine got no new values for {', '.join(sorted(names))}")
        self.version = version

    @torch.no_grad()
    def release_weights(self) -> None:
        """See `BaseRollout.release_weights`."""
        for parameter in self.module.parameters():
            parameter.data = parameter.new_empty(0)

    @torch.inference_mode()
    def probe_log_probs(self, tokens: Tensor) -> Tensor:
        """See `BaseRollout.probe_log_probs`."""
        logits = self.module(input_ids=tokens[None].to(self.device), use_cache=False).logits[0]
        return scores_of_next_tokens(logits, tokens)

    def probe_states(self, tokens: Tensor, names: Sequence[str]) -> dict[str, Tensor]:
        """See `BaseRollout.probe_states`."""
        with record_states(self.module, names) as states:
            self.probe_log_probs(tokens)
        return states

    @torch.inference_mode()
    def generate(
        self, input_ids: Tensor, attention_mask: Tensor, seeds: Tensor, sampling: SamplingParams
    ) -> Generation:
        """See `BaseRollout.generate`; ``max_num_seqs`` rows are decoded at a time, which bounds the key/value cache."""
        run = self._new_run(sampling)
        run.add(torch.arange(input_ids.shape[0]), input_ids, attention_mask, seeds)
        keys, ended = run.advance(1.0)
        return ended.select(keys.argsort())

    @torch.inference_mode()
    def advance(
        self,
        keys: Tensor,
        input_ids: Tensor,
        attention_mask: Tensor,
        seeds: Tensor,
        sampling: SamplingParams,
        share: float,
    ) -> tuple[Tensor, Generation]:
        """See `BaseRollout.advance`; layers with windows or recurrent states let rows join only when all have ended."""
        if self._run is None:
            self._run = self._new_run(sampling)
        self._run.add(keys, input_ids, attention_mask, seeds)
        ended = self._run.advance(share)
        if not (self._run.waiting or self._run.batch.num_live):
            self._run = None
        return ended

    def abandon(self) -> None:
        """See `BaseRollout.abandon`."""
        super().abandon()
        self._run = None

    def _new_run(self, sampling: SamplingParams) -> Run:
        ends = () if sampling.ignore_eos else self.eos_token_ids
        end_ids = torch.tensor(ends, dtype=torch.int64, device=self.device)
        batch = DecodeBatch(self._forward, sampling, end_ids, self.pad_token_id)
        return Run(batch, self._prefill, self.config.max_num_seqs)

    def _forward(self, ids: Tensor, mask: Tensor, positions: Tensor, cache: DynamicCache) -> Tensor:
        """Logits ``(B, V)`` of the last column."""
        options: dict[str, Any] = {self._cache_keyword: cache, **self._keep_last}
        output = self.module(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=True, **options)
        return output.logits[:, -1]

    def _prefill(self, input_ids: Tensor, attention_mask: Tensor) -> Prefilled:
        """Runs the prompts ``(B, P)``."""
        input_ids, mask = input_ids.to(self.device), attention_mask.to(self.device).bool()
        lengths = mask.sum(dim=1)
        width = int(lengths.max())
        input_ids, mask = input_ids[:, -width:], mask[:, -width:]
        # A group's first turn asks the same prompt many times. -1 tells a pad token from padding.
        distinct, inverse = torch.unique(torch.where(mask, input_ids, -1), dim=0, return_inverse=True)
        by_length = (distinct >= 0).sum(dim=1).argsort(descending=True, stable=True)
        place = torch.empty_like(by_length)
        place[by_length] = torch.arange(by_length.shape[0], device=place.device)
        # Rows follow the order of the distinct prompts, so without duplicates the cache needs no reordering.
        rows = place[inverse].argsort(stable=True)
        source = place[inverse][rows]
        cache, logits = self._prefill_distinct(distinct[by_length])
        if distinct.shape[0] < rows.shape[0]:
            cache.batch_select_indices(source)
            logits = logits[source]
        return Prefilled(cache, logits, lengths[rows], rows)

    def _prefill_distinct(self, prompts: Tensor) -> tuple[DynamicCache, Tensor]:
        """Cache and next-token logits of prompts ``(D, P)`` sorted by falling length, -1 as left padding."""
        lengths = (prompts >= 0).sum(dim=1).tolist()
        # Layers with a window or a recurrent state cannot be padded and joined: one block.
        joinable = can_join(self._empty_cache())
        caches: list[DynamicCache] = []
        logits: list[Tensor] = []
        start = 0
        while start < len(lengths):
            stop = start + max(1, self.prefill_tokens // lengths[start]) if joinable else len(lengths)
            block = prompts[start:stop, -lengths[start] :]
            mask = block >= 0
            cache = self._empty_cache()
            positions = compute_position_id_with_mask(mask.long())
            logits.append(self._forward(block.clamp(min=0), mask, positions, cache))
            caches.append(cache)
            start = stop
        if not joinable:
            return caches[0], logits[0]
        return join_caches(caches, [cache.get_seq_length() for cache in caches]), torch.cat(logits)

    def _empty_cache(self) -> DynamicCache:
        return DynamicCache(config=self.module.config)


# Rotary embeddings whose frequencies depend on the longest row of a batch.
_SHARED_SCALINGS = ("dynamic", "longrope")


def _check_rotary_scaling(model: Mapping[str, Any], spec: EngineSpec) -> None:
    """Refuse models in which a long row changes what the rows beside it say; ``model``: the model's configuration.

    Raises:
        UserError: such a scaling, and rows may be long enough for it.
    """
    parameters = model.get("rope_parameters") or {}
    for kind in [parameters, *(value for value in parameters.values() if isinstance(value, dict))]:
        limit = kind.get("original_max_position_embeddings") or model.get("max_position_embeddings")
        longest = spec.config.max_row_length
        if kind.get("rope_type") in _SHARED_SCALINGS and limit is not None and longest > limit:
            raise UserError(
                f"{spec.model_path} scales its rotary positions ({kind['rope_type']}) by the longest row once "
                f"it exceeds {limit} tokens, and answers would depend on the rows beside them; let "
                f"data.max_prompt_length + data.max_response_length be at most {limit} instead of {longest}, or set "
                "actor_rollout_ref.rollout.name=vllm"
            )
