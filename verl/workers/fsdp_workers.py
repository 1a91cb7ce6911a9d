# SPDX-License-Identifier: Apache-2.0
"""Worker roles over FSDP: the policy with its rollout engine, the frozen reference policy; the critic by name."""

from __future__ import annotations

import time
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from verl.protocol import DataProto
from verl.single_controller.base.decorator import Dispatch, register
from verl.trainer.config.model_sections import FSDPConfig
from verl.trainer.config.worker_sections import ActorRolloutRefConfig
from verl.utils.absent import absent_name
from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager
from verl.utils.flops_counter import FlopsCounter
from verl.utils.fs import copy_to_local
from verl.utils.fsdp_utils import create_device_mesh, get_sharding_strategy, iter_full_parameters
from verl.utils.import_utils import import_external_libs
from verl.utils.lora import LoRASettings, adapters_off, merge_adapters
from verl.utils.model import collect_eos_token_ids, get_generation_config
from verl.utils.tokenizer import hf_tokenizer
from verl.utils.torch_dtypes import PrecisionType
from verl.workers.actor.dp_actor import DataParallelPPOActor
from verl.workers.batching import MicroBatching
from verl.workers.critic_worker import CriticWorker
from verl.workers.model_builder import (
    build_lr_scheduler,
    build_model,
    build_optimizer,
    resolve_precision,
)
from verl.workers.model_worker import ModelMemory, ModelWorker
from verl.workers.rollout.base import BaseRollout, EngineSpec
from verl.workers.rollout.engines import load_engine
from verl.workers.rollout.probe import PolicyProbe, probe_tolerance
from verl.workers.rollout.sampling import resolve_sampling

__all__ = ["ActorRolloutRefWorker", "CriticWorker", "create_device_mesh", "get_sharding_strategy"]

_ROLES = ("actor", "actor_rollout", "actor_rollout_ref", "ref")


class ActorRolloutRefWorker(ModelWorker):
    """One rank of the policy (``actor``), with its engine (``actor_rollout``), or of the reference policy (``ref``).

    Args:
        config: the ``actor_rollout_ref`` section, ``actor.optim.total_training_steps`` filled in.
        role: ``actor``, ``actor_rollout``, ``actor_rollout_ref`` or ``ref``.
        device: ``cpu``, ``cuda`` or ``auto``.
    """

    def __init__(self, config: ActorRolloutRefConfig, role: str, device: str = "cuda") -> None:
        super().__init__(device)
        if role not in _ROLES:
            raise ValueError(f"role {role!r} is unknown (known: {', '.join(_ROLES)})")
        self.config = config
        self.role = role
        self.lora = LoRASettings.of(config.model.lora_rank, config.model.lora_alpha, config.model.target_modules)
        self.has_actor = role != "ref"
        self.has_rollout = "rollout" in role
        self.has_ref = role.endswith("ref")
        self._in_rollout = False

    # --- construction -----------------------------------------------------------------------------------------------

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Loads tokenizer and models, builds optimizer, schedule and engine.

        Raises:
            UserError: the model folder is missing or unreadable.
        """
        model_config = self.config.model
        import_external_libs(model_config.external_lib)
        path = copy_to_local(model_config.path, "actor_rollout_ref.model.path")
        self.tokenizer = hf_tokenizer(path, trust_remote_code=model_config.trust_remote_code)
        self.generation_config = get_generation_config(path, model_config.trust_remote_code)
        if self.has_actor:
            self._init_actor(path)
        if self.has_rollout:
            self.rollout: BaseRollout = self._build_rollout(path)
        if self.has_ref:
            self._init_ref(path)
        if self.has_actor:
            self._init_checkpoints(path)

    def _build_policy(self, path: str, fsdp_config: FSDPConfig, *, trainable: bool, cpu_offload: bool) -> nn.Module:
        model_config = self.config.model
        return build_model(
            path,
            strategy=self.config.actor.strategy,
            device=self.device,
            fsdp_config=fsdp_config,
            trainable=trainable,
            override_config=model_config.override_config,
            enable_gradient_checkpointing=model_config.enable_gradient_checkpointing,
            trust_remote_code=model_config.trust_remote_code,
            use_remove_padding=model_config.use_remove_padding,
            use_liger=model_config.use_liger,
            lora=self.lora,
            cpu_offload=cpu_offload,
        )

    def _init_actor(self, path: str) -> None:
        actor, rollout = self.config.actor, self.config.rollout
        self.actor_model = self._build_policy(
            path, actor.fsdp_config, trainable=True, cpu_offload=actor.fsdp_config.offload_policy
        )
        optim = actor.optim
        self.optimizer: Optimizer = build_optimizer(
            self.actor_model, lr=optim.lr, betas=optim.betas, weight_decay=optim.weight_decay
        )
        self.lr_scheduler = build_lr_scheduler(self.optimizer, optim)
        self.actor = DataParallelPPOActor(
            actor,
            self.actor_model,
            self.optimizer,
            device=self.device,
            use_remove_padding=self.config.model.use_remove_padding,
            score_batching=MicroBatching.of(
                rollout.log_prob_micro_batch_size_per_gpu,
                rollout.log_prob_use_dynamic_bsz,
                rollout.log_prob_max_token_len_per_gpu,
            ),
            update_batching=MicroBatching.of(
                actor.ppo_micro_batch_size_per_gpu, actor.use_dynamic_bsz, actor.ppo_max_token_len_per_gpu
            ),
        )
        self.memory = ModelMemory(self.actor_model, self.optimizer, actor.fsdp_config, self.device)
        self.flops = FlopsCounter(self.actor_model.config, frozen=self.lora is not None)  # type: ignore[arg-type]
        self.memory.rest()

    @property
    def _reference_batching(self) -> MicroBatching:
        ref = self.config.ref
        return MicroBatching.of(
            ref.log_prob_micro_batch_size_per_gpu, ref.log_prob_use_dynamic_bsz, ref.log_prob_max_token_len_per_gpu
        )

    def _init_ref(self, path: str) -> None:
        fsdp_config = self.config.ref.fsdp_config
        self.ref_model = self._build_policy(
            path,
            fsdp_config,
            trainable=False,
            cpu_offload=fsdp_config.param_offload or fsdp_config.offload_policy,
        )
        self.ref_policy = DataParallelPPOActor(
            self.config.actor,
            self.ref_model,
            device=self.device,
            use_remove_padding=self.config.model.use_remove_padding,
            score_batching=self._reference_batching,
        )

    def _build_rollout(self, path: str) -> BaseRollout:
        rollout, model_config, fsdp_config = self.config.rollout, self.config.model, self.config.actor.fsdp_config
        # On a CPU as the policy: half precision gains little there, and its sampling would drift from what is trained.
        on_cpu = self.device.type == "cpu"
        precision = resolve_precision(fsdp_config, self.device)
        spec = EngineSpec(
            config=rollout,
            model_path=path,
            device=self.device,
            dtype=precision.model if on_cpu else PrecisionType.to_dtype(rollout.dtype),
            eos_token_ids=collect_eos_token_ids(self.generation_config, self.tokenizer.eos_token_id),
            pad_token_id=self.tokenizer.pad_token_id,
            seed=(rollout.seed or 0) + self.rank,
            override_config=model_config.override_config,
            trust_remote_code=model_config.trust_remote_code,
            # With one rank FSDP2's shard is the whole weight and stays in place while it is trained.
            share_weights=self.world_size == 1
            and self.config.actor.strategy == "fsdp2"
            and not (fsdp_config.param_offload or fsdp_config.offload_policy),
        )
        self.probe = PolicyProbe(
            self.actor_model,
            vocab_size=self.actor_model.config.vocab_size,  # type: ignore[arg-type,union-attr]
            dtype=max(precision.model, precision.param or precision.model, key=probe_tolerance),
            score=self._score_probe,
        )
        return load_engine(rollout.name).build(spec)

    def _init_checkpoints(self, path: str) -> None:
        self.checkpoints = FSDPCheckpointManager(
            self.actor_model,
            self.optimizer,
            self.lr_scheduler,
            self.tokenizer,
            self.config.actor.checkpoint.contents,
            generation_config=self.generation_config,
            generators={"rollout": self.rollout.seed_generator} if self.has_rollout else {},
            trust_remote_code=self.config.model.trust_remote_code,
            lora=self.lora,
            base_model=path,
        )

    # --- rollout ----------------------------------------------------------------------------------------------------

    def _score_probe(self, rows: DataProto) -> Tensor:
        with self.memory.on_device():
            return self.actor.compute_log_prob(rows)[0]

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def start_rollout(self, version: int) -> None:
        """Brings the engine to the policy's present weights; a collective. ``version`` labels them and never falls.

        Raises:
            ValueError: ``version`` is smaller than the last one.
            StaleWeightsError: the engine does not compute what the policy computes (``rollout.weight_probe``).
        """
        if version < self.rollout.version:
            raise ValueError(f"rollout version {version} is older than the engine's {self.rollout.version}")
        expected = self.probe.log_probs() if self.config.rollout.weight_probe else None
        with self.memory.on_device():
            weights = iter_full_parameters(self.actor_model)
            self.rollout.update_weights(weights if self.lora is None else merge_adapters(weights, self.lora), version)
        # After the policy's weights have left the device, where they do: an engine may need the room.
        if expected is not None:
            self.rollout.check_weights(self.probe, expected)
        self._in_rollout = True

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def end_rollout(self) -> None:
        """Ends the session: the engine gives its weights' memory back, and generating again needs `start_rollout`."""
        self._in_rollout = False
        self.rollout.abandon()
        self.rollout.release_weights()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def rollout_version(self) -> int:
        """Version of the engine's weights, -1 before the first session."""
        return self.rollout.version

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def gives_log_probs(self) -> bool:
        """Whether the engine says what it samples from in training, see `BaseRollout.gives_log_probs`."""
        return self.rollout.gives_log_probs(resolve_sampling(self.config.rollout, {}))

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def generate_sequences(self, prompts: DataProto) -> DataProto:
        """Responses to this rank's prompts, see `BaseRollout.generate_sequences`.

        Raises:
            RuntimeError: outside a session; the engine's weights would be stale.
        """
        self._check_session("generate_sequences")
        return self.rollout.generate_sequences(prompts)

    @register(dispatch_mode=Dispatch.DP_COMPUTE)
    def generate_some(self, prompts: DataProto) -> DataProto:
        """Takes on this rank's prompts and returns what has ended, see `BaseRollout.generate_some`.

        Raises:
            RuntimeError: outside a session; the engine's weights would be stale.
        """
        self._check_session("generate_some")
        return self.rollout.generate_some(prompts)

    def _check_session(self, method: str) -> None:
        if not self._in_rollout:
            raise RuntimeError(f"{method} needs a session: use `with rollout_session(wg, version):`")

    # --- log-probabilities and updates --------------------------------------------------------------------------------

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute_log_prob(self, data: DataProto) -> DataProto:
        """``old_log_probs`` and, unless ``meta_info["calculate_entropy"]`` is False, ``entropys`` ``(B, R)`` of the
        policy at the sampling temperature."""
        self._set_temperature(data)
        with_entropy = bool(data.meta_info.get("calculate_entropy", True))
        with self.memory.on_device():
            log_probs, entropys = self.actor.compute_log_prob(data, calculate_entropy=with_entropy)
        tensors = {"old_log_probs": log_probs}
        if entropys is not None:
            tensors["entropys"] = entropys
        return DataProto.from_dict(tensors)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute_ref_log_prob(self, data: DataProto) -> DataProto:
        """``ref_log_prob`` ``(B, R)`` of the reference policy at the sampling temperature.

        The role without a reference model of its own must be one with adapters: switched off, they leave the reference.
        """
        self._set_temperature(data)
        if self.has_ref:
            log_probs, _ = self.ref_policy.compute_log_prob(data)
        elif self.lora is None:
            raise RuntimeError(f"role {self.role} has no reference policy, and no adapters to switch off")
        else:
            with self.memory.on_device(), adapters_off(self.actor_model):
                log_probs, _ = self.actor.compute_log_prob(data, batching=self._reference_batching)
        return DataProto.from_dict({"ref_log_prob": log_probs})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def update_actor(self, data: DataProto) -> DataProto:
        """One pass of policy updates, then one step of the schedule; see `DataParallelPPOActor.update_policy`.

        Returns:
            A DataProto without rows; ``meta_info["metrics"]`` holds numbers already reduced over ranks, ``actor/lr``
            being the rate that was used.
        """
        self._set_temperature(data)
        start = time.perf_counter()
        with self.memory.on_device(optimizer=True):
            metrics = self.actor.update_policy(data)
        metrics |= self._end_of_update("actor", data, time.perf_counter() - start, self.config.actor.ppo_epochs)
        return DataProto(meta_info={"metrics": metrics})

    def _set_temperature(self, data: DataProto) -> None:
        data.meta_info.setdefault("temperature", self.config.rollout.temperature)


def __getattr__(name: str) -> Any:
    absent_name(__name__, name)
