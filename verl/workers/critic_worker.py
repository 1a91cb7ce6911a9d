# SPDX-License-Identifier: Apache-2.0
"""The value model as a worker role."""

from __future__ import annotations

import time

from verl.protocol import DataProto
from verl.single_controller.base.decorator import Dispatch, register
from verl.trainer.config.worker_sections import CriticConfig
from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager
from verl.utils.flops_counter import FlopsCounter
from verl.utils.fs import copy_to_local
from verl.utils.import_utils import import_external_libs
from verl.utils.lora import LoRASettings
from verl.utils.tokenizer import hf_tokenizer
from verl.workers.critic.dp_critic import DataParallelPPOCritic
from verl.workers.model_builder import build_lr_scheduler, build_model, build_optimizer
from verl.workers.model_worker import ModelMemory, ModelWorker

__all__ = ["CriticWorker"]

_PATH_KEY = "critic.model.path"


class CriticWorker(ModelWorker):
    """One rank of the value model.

    Args:
        config: the ``critic`` section, ``optim.total_training_steps`` filled in.
        device: ``cpu``, ``cuda`` or ``auto``.
    """

    def __init__(self, config: CriticConfig, device: str = "cuda") -> None:
        super().__init__(device)
        self.config = config

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Loads the model (a causal language model gets a new head, of zeros), builds optimizer and schedule.

        Raises:
            UserError: a model or tokenizer folder is missing or unreadable.
        """
        config, model_config = self.config, self.config.model
        import_external_libs(model_config.external_lib, "critic.model.external_lib")
        path = copy_to_local(model_config.path, _PATH_KEY)
        tokenizer = hf_tokenizer(
            copy_to_local(model_config.tokenizer_path, "critic.model.tokenizer_path"),
            config_key="critic.model.tokenizer_path",
            trust_remote_code=model_config.trust_remote_code,
        )
        lora = LoRASettings.of(model_config.lora_rank, model_config.lora_alpha, model_config.target_modules)
        self.model = build_model(
            path,
            strategy=config.strategy,
            device=self.device,
            fsdp_config=model_config.fsdp_config,
            override_config=model_config.override_config,
            enable_gradient_checkpointing=model_config.enable_gradient_checkpointing,
            trust_remote_code=model_config.trust_remote_code,
            use_remove_padding=model_config.use_remove_padding,
            lora=lora,
            value_head=True,
            config_key=_PATH_KEY,
        )
        optim = config.optim
        self.optimizer = build_optimizer(self.model, lr=optim.lr, betas=optim.betas, weight_decay=optim.weight_decay)
        self.lr_scheduler = build_lr_scheduler(self.optimizer, optim)
        self.critic = DataParallelPPOCritic(config, self.model, self.optimizer, device=self.device)
        self.memory = ModelMemory(self.model, self.optimizer, model_config.fsdp_config, self.device)
        self.flops = FlopsCounter(self.model.config, vocabulary_head=False, frozen=lora is not None)  # type: ignore[arg-type]
        self.checkpoints = FSDPCheckpointManager(
            self.model,
            self.optimizer,
            self.lr_scheduler,
            tokenizer,
            config.checkpoint.contents,
            trust_remote_code=model_config.trust_remote_code,
            value_head=True,
            lora=lora,
            base_model=path,
        )
        self.memory.rest()

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute_values(self, data: DataProto) -> DataProto:
        """``values`` ``(B, R)`` float32: the head's output before each response token, 0 outside the response mask."""
        with self.memory.on_device():
            return DataProto.from_dict({"values": self.critic.compute_values(data)})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def update_critic(self, data: DataProto) -> DataProto:
        """One pass of updates, then one step of the schedule; see `DataParallelPPOCritic.update_critic`.

        Returns:
            A DataProto without rows; ``meta_info["metrics"]`` holds numbers already reduced over ranks, ``critic/lr``
            being the rate that was used.
        """
        start = time.perf_counter()
        with self.memory.on_device(optimizer=True):
            metrics = self.critic.update_critic(data)
        metrics |= self._end_of_update("critic", data, time.perf_counter() - start, self.config.ppo_epochs)
        return DataProto(meta_info={"metrics": metrics})
