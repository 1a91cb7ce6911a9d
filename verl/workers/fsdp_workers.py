# SPDX-License-Identifier: Apache-2.0
"""Worker roles over FSDP: the policy with its rollout engine, and the frozen reference policy."""

from __future__ import annotations

import logging
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from transformers import AutoModelForCausalLM

from verl.protocol import DataProto
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.trainer.config.model_sections import FSDPConfig
from verl.trainer.config.worker_sections import ActorRolloutRefConfig
from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager, save_hf_model
from verl.utils.device import resolve_device
from verl.utils.distributed import initialize_process_group
from verl.utils.errors import UserError
from verl.utils.fs import copy_to_local
from verl.utils.fsdp_utils import (
    create_device_mesh,
    get_sharding_strategy,
    iter_full_parameters,
    load_fsdp_model_to_gpu,
    load_fsdp_optimizer,
    offload_fsdp_model_to_cpu,
    offload_fsdp_optimizer,
)
from verl.utils.import_utils import import_external_libs
from verl.utils.model import collect_eos_token_ids, get_generation_config
from verl.utils.tokenizer import hf_tokenizer
from verl.workers.actor.dp_actor import DataParallelPPOActor
from verl.workers.actor.forward import MicroBatching
from verl.workers.model_builder import (
    build_lr_scheduler,
    build_model,
    build_optimizer,
    load_config,
    resolve_precision,
    to_dtype,
)
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.hf_rollout import HFRollout

__all__ = ["ActorRolloutRefWorker", "create_device_mesh", "get_sharding_strategy"]

logger = logging.getLogger(__name__)

_ROLES = ("actor", "actor_rollout", "actor_rollout_ref", "ref")
_GIB = 1024.0**3


def _micro_batching(
    *, per_rank: int | None, over_all_ranks: int | None, dynamic: bool, max_tokens: int, world_size: int
) -> MicroBatching:
    """Micro-batch size of one rank; the old global form is divided by the number of ranks."""
    if dynamic:
        return MicroBatching(max_tokens=max_tokens)
    if per_rank is None and over_all_ranks is not None:
        per_rank = max(1, over_all_ranks // world_size)
    return MicroBatching(rows=per_rank)


class ActorRolloutRefWorker(Worker):
    """One rank of the policy (``actor``), with its engine (``actor_rollout``), or of the reference policy (``ref``).

    Args:
        config: the ``actor_rollout_ref`` section, ``actor.optim.total_training_steps`` filled in.
        role: ``actor``, ``actor_rollout``, ``actor_rollout_ref`` or ``ref``.
        device: ``cpu``, ``cuda`` or ``auto``.
    """

    def __init__(self, config: ActorRolloutRefConfig, role: str, device: str = "cuda") -> None:
        super().__init__()
        if role not in _ROLES:
            raise ValueError(f"role {role!r} is unknown (known: {', '.join(_ROLES)})")
        self.config = config
        self.role = role
        self.device = resolve_device(device)
        initialize_process_group(self.device)
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
            self._init_checkpoints()

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
        self.lr_scheduler: LambdaLR = build_lr_scheduler(self.optimizer, optim)
        self.actor = DataParallelPPOActor(
            actor,
            self.actor_model,
            self.optimizer,
            device=self.device,
            use_remove_padding=self.config.model.use_remove_padding,
            score_batching=_micro_batching(
                per_rank=rollout.log_prob_micro_batch_size_per_gpu,
                over_all_ranks=rollout.log_prob_micro_batch_size,
                dynamic=rollout.log_prob_use_dynamic_bsz,
                max_tokens=rollout.log_prob_max_token_len_per_gpu,
                world_size=self.world_size,
            ),
            update_batching=_micro_batching(
                per_rank=actor.ppo_micro_batch_size_per_gpu,
                over_all_ranks=actor.ppo_micro_batch_size,
                dynamic=actor.use_dynamic_bsz,
                max_tokens=actor.ppo_max_token_len_per_gpu,
                world_size=self.world_size,
            ),
        )
        self._offload(optimizer=True)

    def _init_ref(self, path: str) -> None:
        ref = self.config.ref
        fsdp_config = ref.fsdp_config
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
            score_batching=_micro_batching(
                per_rank=ref.log_prob_micro_batch_size_per_gpu,
                over_all_ranks=ref.log_prob_micro_batch_size,
                dynamic=ref.log_prob_use_dynamic_bsz,
                max_tokens=ref.log_prob_max_token_len_per_gpu,
                world_size=self.world_size,
            ),
        )

    def _build_rollout(self, path: str) -> BaseRollout:
        rollout, model_config, fsdp_config = self.config.rollout, self.config.model, self.config.actor.fsdp_config
        if rollout.name != "hf":
            raise UserError(
                f"actor_rollout_ref.rollout.name={rollout.name} is not available in this version; set it to hf"
            )
        # Half precision on a CPU is slower, and its sampling would drift from the float32 policy that is trained.
        on_cpu = self.device.type == "cpu"
        dtype = resolve_precision(fsdp_config, self.device).model if on_cpu else to_dtype(rollout.dtype)
        config = load_config(
            path, override_config=model_config.override_config, trust_remote_code=model_config.trust_remote_code
        )
        # The initial weights are never used, and drawing them must not move the process-wide generators.
        devices = [] if on_cpu else [self.device]
        with torch.random.fork_rng(devices=devices), self.device:
            module = AutoModelForCausalLM.from_config(
                config, dtype=dtype, trust_remote_code=model_config.trust_remote_code
            )
        engine = HFRollout(
            module,
            rollout,
            eos_token_ids=collect_eos_token_ids(self.generation_config, self.tokenizer.eos_token_id),
            pad_token_id=self.tokenizer.pad_token_id,
            seed=(rollout.seed or 0) + self.rank,
            # With one rank FSDP2's shard is the whole weight and stays in place while it is trained.
            share_weights=self.world_size == 1
            and self.config.actor.strategy == "fsdp2"
            and not (fsdp_config.param_offload or fsdp_config.offload_policy),
        )
        engine.release_weights()
        return engine

    def _init_checkpoints(self) -> None:
        self.checkpoints = FSDPCheckpointManager(
            self.actor_model,
            self.optimizer,
            self.lr_scheduler,
            self.tokenizer,
            self.config.actor.checkpoint.contents,
            generation_config=self.generation_config,
            generators={"rollout": self.rollout.seed_generator} if self.has_rollout else {},
            trust_remote_code=self.config.model.trust_remote_code,
        )

    # --- memory -----------------------------------------------------------------------------------------------------

    @property
    def _is_movable(self) -> bool:
        """Whether weights and optimizer state can be moved: with ``offload_policy`` FSDP itself fetches them."""
        return self.device.type == "cuda" and not self.config.actor.fsdp_config.offload_policy

    def _offload(self, *, optimizer: bool) -> None:
        fsdp_config = self.config.actor.fsdp_config
        if not self._is_movable:
            return
        if optimizer and fsdp_config.optimizer_offload:
            offload_fsdp_optimizer(self.optimizer)
        if fsdp_config.param_offload:
            offload_fsdp_model_to_cpu(self.actor_model)

    @contextmanager
    def _actor_on_device(self, *, optimizer: bool = False) -> Iterator[None]:
        """The policy's weights (and optimizer state) where they are used, and back in host memory afterwards."""
        fsdp_config = self.config.actor.fsdp_config
        if self._is_movable:
            if fsdp_config.param_offload:
                load_fsdp_model_to_gpu(self.actor_model, self.device)
            if optimizer and fsdp_config.optimizer_offload:
                load_fsdp_optimizer(self.optimizer, self.device)
        try:
            yield
        finally:
            self._offload(optimizer=optimizer)

    def _memory_metrics(self) -> dict[str, float]:
        # Linux reports the peak resident size in KiB.
        metrics = {"perf/cpu_memory_used_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / _GIB}
        if self.device.type == "cuda":
            metrics["perf/max_memory_allocated_gb"] = torch.cuda.max_memory_allocated(self.device) / _GIB
            metrics["perf/max_memory_reserved_gb"] = torch.cuda.max_memory_reserved(self.device) / _GIB
        return metrics

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def memory_report(self) -> dict[str, float]:
        """This rank's peaks in GiB: resident host memory and, on CUDA, allocated and reserved device memory."""
        return self._memory_metrics()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def release_device_memory(self) -> None:
        """Moves weights and optimizer state to host memory, so that another role of the process can use the device.

        Not for use inside a rollout session; outside of one the engine holds no weights anyway. `restore_device_memory`
        must come before this role computes again. On the CPU both do nothing.
        """
        if self._is_movable:
            # The optimizer first: moving the model ends with handing torch's free blocks back to the device.
            offload_fsdp_optimizer(self.optimizer)
            offload_fsdp_model_to_cpu(self.actor_model)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def restore_device_memory(self) -> None:
        """Takes back what `release_device_memory` moved, except what the config keeps in host memory between calls."""
        fsdp_config = self.config.actor.fsdp_config
        if not self._is_movable:
            return
        if not fsdp_config.param_offload:
            load_fsdp_model_to_gpu(self.actor_model, self.device)
        if not fsdp_config.optimizer_offload:
            load_fsdp_optimizer(self.optimizer, self.device)

    # --- rollout ----------------------------------------------------------------------------------------------------

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def start_rollout(self, version: int) -> None:
        """Brings the engine to the policy's present weights; a collective. ``version`` labels them and never falls.

        Raises:
            ValueError: ``version`` is smaller than the last one.
        """
        if version < self.rollout.version:
            raise ValueError(f"rollout version {version} is older than the engine's {self.rollout.version}")
        with self._actor_on_device():
            self.rollout.update_weights(iter_full_parameters(self.actor_model), version)
        self._in_rollout = True

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def end_rollout(self) -> None:
        """Ends the session: the engine gives its weights' memory back, and generating again needs `start_rollout`."""
        self._in_rollout = False
        self.rollout.release_weights()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def rollout_version(self) -> int:
        """Version of the engine's weights, -1 before the first session."""
        return self.rollout.version

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def generate_sequences(self, prompts: DataProto) -> DataProto:
        """Responses to this rank's prompts, see `BaseRollout.generate_sequences`.

        Raises:
            RuntimeError: outside a session; the engine's weights would be stale.
        """
        if not self._in_rollout:
            raise RuntimeError("generate_sequences needs a session: use `with rollout_session(wg, version):`")
        return self.rollout.generate_sequences(prompts)

    # --- log-probabilities and updates --------------------------------------------------------------------------------

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute_log_prob(self, data: DataProto) -> DataProto:
        """``old_log_probs`` and ``entropys`` ``(B, R)`` of the policy at the sampling temperature."""
        self._set_temperature(data)
        with self._actor_on_device():
            log_probs, entropys = self.actor.compute_log_prob(data, calculate_entropy=True)
        tensors = {"old_log_probs": log_probs}
        if entropys is not None:
            tensors["entropys"] = entropys
        return DataProto.from_dict(tensors)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute_ref_log_prob(self, data: DataProto) -> DataProto:
        """``ref_log_prob`` ``(B, R)`` of the reference policy at the sampling temperature."""
        self._set_temperature(data)
        log_probs, _ = self.ref_policy.compute_log_prob(data)
        return DataProto.from_dict({"ref_log_prob": log_probs})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def update_actor(self, data: DataProto) -> DataProto:
        """One pass of policy updates, then one step of the schedule; see `DataParallelPPOActor.update_policy`.

        Returns:
            A DataProto without rows; ``meta_info["metrics"]`` holds numbers already reduced over ranks, ``actor/lr``
            being the rate that was used.
        """
        self._set_temperature(data)
        with self._actor_on_device(optimizer=True):
            metrics = self.actor.update_policy(data)
        metrics["actor/lr"] = float(self.optimizer.param_groups[0]["lr"])
        self.lr_scheduler.step()
        metrics.update(self._memory_metrics())
        return DataProto(meta_info={"metrics": metrics})

    def _set_temperature(self, data: DataProto) -> None:
        data.meta_info.setdefault("temperature", self.config.rollout.temperature)

    # --- checkpoints --------------------------------------------------------------------------------------------------

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_checkpoint(self, local_path: str | Path, global_step: int = 0) -> None:
        """Writes this rank's part of the policy into ``local_path``, see `FSDPCheckpointManager`."""
        with self._actor_on_device(optimizer=True):
            self.checkpoints.save_checkpoint(local_path, global_step)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, local_path: str | Path | None) -> None:
        """Restores the policy, its optimizer, schedule and random states; None does nothing.

        Raises:
            UserError: files of this rank are missing.
        """
        with self._actor_on_device(optimizer=True):
            self.checkpoints.load_checkpoint(local_path)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def export_hf(self, path: str | Path) -> None:
        """Writes the policy as a Hugging Face folder with its tokenizer."""
        with self._actor_on_device():
            save_hf_model(
                self.actor_model,
                path,
                tokenizer=self.tokenizer,
                generation_config=self.generation_config,
                trust_remote_code=self.config.model.trust_remote_code,
            )
