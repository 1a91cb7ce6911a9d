# SPDX-License-Identifier: Apache-2.0
"""Names of verl and verl-agent that this package leaves out, and what to use instead.

Code written for those packages imports many modules. Importing one that is not here ends in an ImportError whose one
sentence says why; without it, the message would only say that there is no such module.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from types import ModuleType
from typing import NoReturn

__all__ = ["ABSENT", "absent_name", "explain_absent_modules"]

_MEGATRON = "Megatron is not part of this package; models run under FSDP (strategy fsdp or fsdp2)"
_SGLANG = "SGLang is not part of this package; set actor_rollout_ref.rollout.name to another engine"
_VLLM_COPY = "engines are reached through their public interface, see verl.workers.rollout.BaseRollout"
_TOOLS = "tool calls are made by an environment (agent_system.environments), not by the engine"
_SCORES = "rewards come from the environment; a recipe reshapes them in its after_reward hook"
_PACKING = "rows are packed by verl.workers.forward.RowForward, which works with every attention implementation"
_SEQUENCE = "sequence parallelism is not part of this package; leave ulysses_sequence_parallel_size at 1"
_LOADING = "models are loaded and sharded by verl.workers.model_builder.build_model"
_SINGLE_TURN = "this recipe trains on single-turn answers without an environment and is not part of this package"
_ENVIRONMENT = "this environment is not part of this package; agent_system.environments.register adds your own"
_ONE_WORKER = "one worker serves both values of rollout.mode; use ActorRolloutRefWorker of verl.workers.fsdp_workers"
_ONE_MANAGER = "one environment manager serves every recipe; use agent_system.environments.make_envs"

ABSENT: dict[str, str] = {
    "agent_system.environments.env_manager.AppWorldEnvironmentManager": _ENVIRONMENT,
    "agent_system.environments.env_manager.DiscoveryWorldEnvironmentManager": _ENVIRONMENT,
    "agent_system.environments.env_manager.GymCardEnvironmentManager": _ENVIRONMENT,
    "agent_system.environments.env_manager.SearchEnvironmentManager": _ENVIRONMENT,
    "agent_system.environments.env_manager.SokobanEnvironmentManager": _ENVIRONMENT,
    "agent_system.environments.env_package.alfworld.alfworld": "the installed package alfworld is used; import that",
    "agent_system.environments.env_package.appworld": _ENVIRONMENT,
    "agent_system.environments.env_package.discovery": _ENVIRONMENT,
    "agent_system.environments.env_package.gym_cards": _ENVIRONMENT,
    "agent_system.environments.env_package.search.build_search_envs": _ENVIRONMENT,
    "agent_system.environments.env_package.search.third_party": _ENVIRONMENT,
    "agent_system.environments.env_package.sokoban.build_sokoban_envs": _ENVIRONMENT,
    "agent_system.environments.env_package.sokoban.sokoban": _ENVIRONMENT,
    "agent_system.environments.prompts.discoveryworld": _ENVIRONMENT,
    "agent_system.environments.prompts.APPWORLD_TEMPLATE": _ENVIRONMENT,
    "agent_system.environments.prompts.APPWORLD_TEMPLATE_NO_HIS": _ENVIRONMENT,
    "agent_system.environments.prompts.DISCOVERYWORLD_TEMPLATE": _ENVIRONMENT,
    "agent_system.environments.prompts.DISCOVERYWORLD_TEMPLATE_NO_HIS": _ENVIRONMENT,
    "agent_system.environments.prompts.GYM_CARDS_BLACKJACK_TEMPLATE": _ENVIRONMENT,
    "agent_system.environments.prompts.GYM_CARDS_EZPOINTS_TEMPLATE": _ENVIRONMENT,
    "agent_system.environments.prompts.GYM_CARDS_NUMBERLINE_TEMPLATE": _ENVIRONMENT,
    "agent_system.environments.prompts.GYM_CARDS_POINTS24_TEMPLATE": _ENVIRONMENT,
    "agent_system.environments.prompts.SEARCH_TEMPLATE": _ENVIRONMENT,
    "agent_system.environments.prompts.SEARCH_TEMPLATE_NO_HIS": _ENVIRONMENT,
    "agent_system.environments.prompts.SOKOBAN_TEMPLATE": _ENVIRONMENT,
    "agent_system.environments.prompts.SOKOBAN_TEMPLATE_NO_HIS": _ENVIRONMENT,
    "agent_system.environments.prompts.SOKOBAN_VISUAL_TEMPLATE": _ENVIRONMENT,
    "examples.ppo_trainer.naive_chat_scheduler": "chat schedulers belong to asynchronous engines and are not part of "
    "this package; agent_system.multi_turn_rollout plays the turns",
    "gigpo": "GiGPO is in recipe.gigpo",
    "recipe.hgpo.env_manager": _ONE_MANAGER,
    "recipe.hgpo.hgpo_ray_trainer": "HGPO registers itself with the one trainer; use verl.trainer.ppo.ray_trainer",
    "recipe.prime": _SINGLE_TURN,
    "recipe.r1": _SINGLE_TURN,
    "recipe.spin": _SINGLE_TURN,
    "recipe.sppo": _SINGLE_TURN,
    "verl.models": "Hugging Face models are used as they are under FSDP, without patches and without Megatron copies",
    "verl.single_controller.base.megatron": _MEGATRON,
    "verl.single_controller.ray.megatron": _MEGATRON,
    "verl.third_party": _VLLM_COPY,
    "verl.tools": _TOOLS,
    "verl.trainer.main_eval": "scoring of single-turn answers is not part of this package; validation plays the tasks",
    "verl.trainer.ppo.reward": _SCORES,
    "verl.utils.activation_offload": "activations are not offloaded; use model.enable_gradient_checkpointing",
    "verl.utils.dataset.rm_dataset": "reward models are not trained; the environment gives the reward",
    "verl.utils.dataset.RMDataset": "reward models are not trained; the environment gives the reward",
    "verl.utils.dataset.vision_utils": "environments with images are not part of this package",
    "verl.utils.experimental": "fused heads are not part of this package; the head runs on response tokens only",
    "verl.utils.fsdp_utils.fsdp2_load_full_state_dict": _LOADING,
    "verl.utils.fsdp_utils.get_init_weight_context_manager": _LOADING,
    "verl.utils.fsdp_utils.init_fn": _LOADING,
    "verl.utils.fsdp_utils.layered_summon_lora_params": "full_state_dict of the same module gathers adapters, too",
    "verl.utils.megatron": _MEGATRON,
    "verl.utils.megatron_utils": _MEGATRON,
    "verl.utils.ray_utils": "worker groups put their arguments into Ray's store themselves; use ray.put for your own",
    "verl.utils.rendezvous": "processes meet through torch.distributed and MASTER_ADDR, MASTER_PORT",
    "verl.utils.reward_score.math": _SCORES,
    "verl.utils.reward_score.prime_code": _SCORES,
    "verl.utils.reward_score.prime_math": _SCORES,
    "verl.utils.reward_score.sandbox_fusion": _SCORES,
    "verl.utils.torch_functional.log_probs_from_logits_all_rmpad": _PACKING,
    "verl.utils.torch_functional.log_probs_from_logits_response_rmpad": _PACKING,
    "verl.utils.ulysses": _SEQUENCE,
    "verl.utils.vllm_utils": _VLLM_COPY,
    "verl.workers.fsdp_workers.AsyncActorRolloutRefWorker": _ONE_WORKER,
    "verl.workers.fsdp_workers.RewardModelWorker": "reward models are not run; the environment gives the reward",
    "verl.workers.megatron_workers": _MEGATRON,
    "verl.workers.reward_manager": "rewards come from the environment; see agent_system.reward_manager",
    "verl.workers.rollout.async_server": _ONE_WORKER,
    "verl.workers.rollout.schemas": _TOOLS,
    "verl.workers.rollout.sglang_rollout": _SGLANG,
    "verl.workers.sharding_manager": "an engine takes its weights in verl.workers.rollout.rollout_session",
}
"""Dotted name of a module, or of a name in one, -> why it is not here; holds for everything below it too."""


def _reason(name: str) -> str | None:
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        reason = ABSENT.get(".".join(parts[:length]))
        if reason is not None:
            return reason
    return None


def absent_name(module: str, name: str) -> NoReturn:
    """For a module's ``__getattr__``: ImportError with the reason for a listed name, else the usual AttributeError."""
    reason = _reason(f"{module}.{name}")
    if reason is None or name.startswith("__"):
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    raise ImportError(f"{module}.{name} does not exist: {reason}.")


class _AbsentModules(MetaPathFinder):
    """Asked last, for modules that no other finder knows."""

    def find_spec(self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> None:
        """None for unknown modules, so that the usual error follows; ModuleNotFoundError for listed ones."""
        reason = _reason(fullname)
        if reason is not None:
            raise ModuleNotFoundError(f"{fullname} does not exist: {reason}.", name=fullname)


def explain_absent_modules() -> None:
    """Make imports of listed modules say why they fail; a second call changes nothing."""
    if not any(isinstance(finder, _AbsentModules) for finder in sys.meta_path):
        sys.meta_path.append(_AbsentModules())
