# SPDX-License-Identifier: Apache-2.0
"""Generation with vLLM inside the rank's own process, through its public interface.

Token ids go in and come out. With ``tensor_model_parallel_size`` T, every T neighbouring ranks share one engine: each
holds its part of the weights, all of them run the prompts of all, and each keeps the answers to its own.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from verl.workers.rollout.base import BaseRollout, EngineSpec, Generation
from verl.workers.rollout.probe import record_states
from verl.workers.rollout.sampling import SamplingParams, resolve_sampling, short_seeds
from verl.workers.rollout.vllm_setup import (
    build_llm,
    compilation,
    gives_processed_log_probs,
    prepare_environment,
    sampling_fields,
)

__all__ = ["VLLMRollout"]

logger = logging.getLogger(__name__)


class VLLMRollout(BaseRollout):
    """An engine that `build` has started; its weights come with `update_weights`.

    Args:
        spec: what it was built from.
        llm: the ``vllm.LLM``.
        group: the ranks that share the engine; None for an engine of one rank.
    """

    def __init__(self, spec: EngineSpec, llm: Any, group: dist.ProcessGroup | None = None) -> None:
        super().__init__(
            spec.config,
            eos_token_ids=spec.eos_token_ids,
            pad_token_id=spec.pad_token_id,
            dtype=spec.dtype,
            seed=spec.seed,
        )
        self.spec = spec
        self.llm = llm
        self.group = group
        self.on_cpu = spec.device.type == "cpu"
        self.can_sleep = spec.config.free_cache_engine and not self.on_cpu
        self.fields = sampling_fields(spec)
        self.processed_log_probs = gives_processed_log_probs()
        self._has_weights = False
        self._running: set[str] = set()
        self._asleep: list[str] = []
        self._buffers: dict[str, Tensor] = {}

    @classmethod
    def build(cls, spec: EngineSpec) -> VLLMRollout:
        """See `BaseRollout.build`; a collective of all ranks."""
        prepare_environment(spec.device)
        engine = cls(spec, build_llm(spec), _group_of(spec.config.tensor_model_parallel_size))
        if not engine.gives_log_probs(resolve_sampling(spec.config, {})):
            logger.warning(
                "this vLLM reports log-probs of the model's own distribution only: at another temperature than 1, or "
                "with top-k, top-p or penalties, there are no rollout_log_probs and no metrics about them"
            )
        engine.release_weights()
        return engine

    # --- weights ----------------------------------------------------------------------------------------------------

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """See `BaseRollout.update_weights`."""
        self._wake("weights")
        if self.on_cpu:
            self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(weights)})
            self.llm.apply_model(_repack_shared)
        else:
            self.llm.apply_model(lambda model: _load(model, weights))
        # What is cached was computed with other weights.
        self.llm.reset_prefix_cache()
        self._has_weights = True
        self.version = version

    def release_weights(self) -> None:
        """See `BaseRollout.release_weights`. On the CPU, where vLLM cannot sleep, the memory stays taken."""
        self._has_weights = False
        if self.can_sleep and not self._asleep:
            # Weights come again with the next sync, so they are dropped, not moved to host memory. Buffers do not come.
            [self._buffers] = self.llm.apply_model(_copy_buffers)
            self.llm.sleep(level=2)
            self._asleep = ["weights", "kv_cache"]

    def _wake(self, *parts: str) -> None:
        for part in parts:
            if part in self._asleep:
                self.llm.wake_up(tags=[part])
                self._asleep.remove(part)
                if part == "weights":
                    self.llm.apply_model(lambda model: _restore_buffers(model, self._buffers))

    # --- generation -------------------------------------------------------------------------------------------------

    def gives_log_probs(self, sampling: SamplingParams) -> bool:
        """See `BaseRollout.gives_log_probs`."""
        return self.processed_log_probs or (sampling.from_model and not self.fields)

    def generate(
        self, input_ids: Tensor, attention_mask: Tensor, seeds: Tensor, sampling: SamplingParams
    ) -> Generation:
        """See `BaseRollout.generate`."""
        if self._running:
            raise RuntimeError("rows are under way: advance ends them, abandon forgets them")
        keys, ended = self.advance(torch.arange(len(seeds)), input_ids, attention_mask, seeds, sampling, 1.0)
        return ended.select(keys.argsort())

    def advance(
        self,
        keys: Tensor,
        input_ids: Tensor,
        attention_mask: Tensor,
        seeds: Tensor,
        sampling: SamplingParams,
        share: float,
    ) -> tuple[Tensor, Generation]:
        """See `BaseRollout.advance`. Ranks that share an engine count their rows together."""
        from vllm.inputs import TokensPrompt
        from vllm.sampling_params import RequestOutputKind

        self._check_weights_are_there()
        prompts = [row[kept].tolist() for row, kept in zip(input_ids, attention_mask.bool())]
        own = (keys.tolist(), prompts, short_seeds(seeds).tolist())
        asked, rank = [own], 0
        if self.group is not None:
            asked, rank = [own] * dist.get_world_size(self.group), dist.get_rank(self.group)
            dist.all_gather_object(asked, own, group=self.group)
        engine = self.llm.llm_engine
        ended: list[tuple[int, Any]] = []
        with compilation(self.spec):
            for number, rows in enumerate(asked):
                for key, ids, seed in zip(*rows):
                    request = self._request(sampling, seed)
                    request.output_kind = RequestOutputKind.FINAL_ONLY
                    engine.add_request(f"{number}:{key}", TokensPrompt(prompt_token_ids=ids), request)
                    self._running.add(f"{number}:{key}")
            needed = max(1, math.ceil(share * len(self._running)))
            while self._running and needed > 0:
                for output in engine.step():
                    if output.finished:
                        needed -= 1
                        self._running.remove(output.request_id)
                        number, key = map(int, output.request_id.split(":"))
                        if number == rank:
                            ended.append((key, output))
        answers = [output for _, output in ended]
        return torch.tensor([key for key, _ in ended], dtype=torch.int64), self._generation(answers, sampling)

    def abandon(self) -> None:
        """See `BaseRollout.abandon`."""
        super().abandon()
        if self._running:
            self.llm.llm_engine.abort_request(sorted(self._running))
            self._running.clear()

    def _generation(self, answers: Sequence[Any], sampling: SamplingParams) -> Generation:
        """vLLM's outputs as tensors."""
        size, limit = len(answers), sampling.max_new_tokens
        tokens = torch.full((size, limit), self.pad_token_id, dtype=torch.int64)
        log_probs = torch.full((size, limit), -1.0, dtype=torch.float32)
        lengths = torch.zeros(size, dtype=torch.int64)
        for row, answer in enumerate(answers):
            [output] = answer.outputs
            ids = list(output.token_ids)
            lengths[row] = len(ids)
            tokens[row, : len(ids)] = torch.tensor(ids, dtype=torch.int64)
            log_probs[row, : len(ids)] = torch.tensor(_log_probs_of(ids, output.logprobs))
        return Generation(tokens, lengths, log_probs if self.gives_log_probs(sampling) else None)

    def _request(self, sampling: SamplingParams, seed: int) -> Any:
        """vLLM's SamplingParams of one row."""
        from vllm import SamplingParams as Request

        # Which tokens end a response is ours to say: vLLM would take one of them from the tokenizer, if it has any.
        ends = () if sampling.ignore_eos else self.eos_token_ids
        shape: dict[str, Any] = {"temperature": 0.0}
        if not sampling.greedy:
            shape = {
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "top_k": sampling.top_k if sampling.top_k > 0 else -1,
                "seed": seed,
            }
        return Request(
            **shape,
            **self.fields,
            max_tokens=sampling.max_new_tokens,
            stop_token_ids=[*ends, *(self.config.stop_token_ids or ())],
            ignore_eos=True,
            logprobs=0,
            detokenize="stop" in self.fields,
        )

    def _check_weights_are_there(self) -> None:
        if not self._has_weights:
            raise RuntimeError("the engine holds no weights: update_weights comes before generating")
        self._wake("kv_cache")

    # --- probe ------------------------------------------------------------------------------------------------------

    def probe_log_probs(self, tokens: Tensor) -> Tensor:
        """See `BaseRollout.probe_log_probs`."""
        from vllm import SamplingParams as Request
        from vllm.inputs import TokensPrompt

        self._check_weights_are_there()
        ids = tokens.tolist()
        request = Request(temperature=1.0, seed=0, max_tokens=1, prompt_logprobs=0, detokenize=False)
        with compilation(self.spec):
            [answer] = self.llm.generate([TokensPrompt(prompt_token_ids=ids)], [request], use_tqdm=False)
        return torch.tensor(_log_probs_of(ids[1:], answer.prompt_logprobs[1:]))

    def probe_states(self, tokens: Tensor, names: Sequence[str]) -> dict[str, Tensor]:
        """See `BaseRollout.probe_states`; empty where compiled code takes the place of the layers."""
        [recording] = self.llm.apply_model(lambda model: record_states(model, names))
        with recording as states:
            self.probe_log_probs(tokens)
        return dict(states)


def _log_probs_of(ids: Sequence[int], per_token: Sequence[Any]) -> list[float]:
    """vLLM gives a mapping from token to its entry for every position."""
    return [entries[token].logprob for token, entries in zip(ids, per_token)]


def _group_of(size: int) -> dist.ProcessGroup | None:
    """The ``size`` neighbouring ranks that share this rank's engine; a collective of all ranks.

    Neighbours, because that is how vLLM cuts the process group into engines.
    """
    if size == 1:
        return None
    own = None
    for first in range(0, dist.get_world_size(), size):
        ranks = list(range(first, first + size))
        group = dist.new_group(ranks, backend="gloo")
        if dist.get_rank() in ranks:
            own = group
    return own


def _load(model: nn.Module, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Hand weights to a model of vLLM, one at a time.

    Raises:
        RuntimeError: some of its own got no value.
    """
    loaded: set[str] | None = model.load_weights(weights)  # type: ignore[operator]
    if loaded is None:
        return
    missing = sorted({name for name, _ in model.named_parameters()} - set(loaded))
    if missing:
        raise RuntimeError(f"the rollout engine got no new values for {', '.join(missing)}")


def _repack_shared(model: nn.Module) -> None:
    """Prepare weights that several modules use for the CPU's kernels once more.

    Reloading does so for the module that the weight arrives under, and leaves the others, such as an output head tied
    to the embeddings, with what they prepared from the weights before.
    """
    users: dict[int, list[nn.Module]] = {}
    for module in model.modules():
        weight = module._parameters.get("weight")
        if weight is not None and weight.numel():
            users.setdefault(id(weight), []).append(module)
    for modules in users.values():
        for module in modules if len(modules) > 1 else ():
            module.quant_method.process_weights_after_loading(module)  # type: ignore[union-attr,operator]


def _copy_buffers(model: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.to("cpu", copy=True) for name, buffer in model.named_buffers()}


def _restore_buffers(model: nn.Module, buffers: dict[str, Tensor]) -> None:
    for name, buffer in model.named_buffers():
        buffer.copy_(buffers[name])
