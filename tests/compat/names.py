# SPDX-License-Identifier: Apache-2.0
"""Names that scripts, recipes, forks and tests of verl and verl-agent import, by module."""

from __future__ import annotations

NAMES: dict[str, str] = {
    "verl": "DataProto __version__",
    "verl.protocol": "DataProto DataProtoItem DataProtoFuture DataProtoConfig pad_dataproto_to_divisor "
    "unpad_dataproto union_tensor_dict union_numpy_dict fold_batch_dim unfold_batch_dim collate_fn "
    "list_of_dict_to_dict_of_list all_gather_data_proto",
    "verl.trainer.main_ppo": "main run_ppo TaskRunner create_rl_dataset create_rl_sampler",
    "verl.trainer.ppo.ray_trainer": "RayPPOTrainer ResourcePoolManager Role WorkerType AdvantageEstimator "
    "apply_kl_penalty apply_invalid_action_penalty compute_response_mask compute_advantage _timer "
    "compute_data_metrics compute_timing_metrics",
    "verl.trainer.ppo.core_algos": "AdaptiveKLController FixedKLController get_kl_controller "
    "compute_gae_advantage_return compute_grpo_outcome_advantage compute_grpo_passk_outcome_advantage "
    "compute_reinforce_plus_plus_baseline_outcome_advantage compute_reinforce_plus_plus_outcome_advantage "
    "compute_rloo_outcome_advantage compute_remax_outcome_advantage compute_rewards agg_loss compute_policy_loss "
    "compute_policy_loss_gspo compute_entropy_loss compute_value_loss kl_penalty compute_pf_ppo_reweight_data",
    "verl.trainer.ppo.metric_utils": "compute_data_metrics compute_timing_metrics compute_throughout_metrics "
    "process_validation_metrics bootstrap_metric calc_maj_val reduce_metrics _compute_response_info",
    "verl.utils.metric": "reduce_metrics",
    "verl.trainer.ppo.reward": "get_custom_reward_fn load_reward_manager compute_reward compute_reward_async",
    "verl.trainer.constants_ppo": "get_ppo_ray_runtime_env",
    "verl.trainer.fsdp_sft_trainer": "FSDPSFTTrainer create_sft_dataset",
    "verl.single_controller.base": "Worker WorkerGroup ClassWithInitArgs ResourcePool",
    "verl.single_controller.base.worker": "Worker",
    "verl.single_controller.base.decorator": "Dispatch Execute register register_dispatch_mode update_dispatch_mode "
    "get_predefined_dispatch_fn collect_all_to_all DISPATCH_MODE_FN_REGISTRY MAGIC_ATTR",
    "verl.single_controller.ray": "RayWorkerGroup RayResourcePool RayClassWithInitArgs create_colocated_worker_cls "
    "create_colocated_worker_cls_fused create_colocated_worker_raw_cls merge_resource_pool",
    "verl.single_controller.ray.base": "RayWorkerGroup RayResourcePool RayClassWithInitArgs "
    "create_colocated_worker_cls create_colocated_worker_cls_fused create_colocated_worker_raw_cls merge_resource_pool",
    "verl.workers.fsdp_workers": "ActorRolloutRefWorker CriticWorker RewardModelWorker AsyncActorRolloutRefWorker "
    "create_device_mesh get_sharding_strategy",
    "verl.workers.actor": "BasePPOActor DataParallelPPOActor",
    "verl.workers.critic": "BasePPOCritic DataParallelPPOCritic",
    "verl.workers.rollout": "BaseRollout HFRollout",
    "verl.workers.reward_manager": "NaiveRewardManager DAPORewardManager BatchRewardManager PrimeRewardManager",
    "verl.utils": "hf_tokenizer hf_processor",
    "verl.utils.torch_functional": "masked_mean masked_sum masked_var masked_whiten logprobs_from_logits "
    "logprobs_from_logits_naive logprobs_from_logits_v2 entropy_from_logits clip_by_value get_response_mask "
    "pad_2d_list_to_length pad_sequence_to_length postprocess_data tokenize_and_postprocess_data remove_pad_token "
    "log_probs_from_logits_response get_constant_schedule_with_warmup get_cosine_schedule_with_warmup "
    "get_wsd_schedule_with_warmup distributed_mean_max_min_std distributed_masked_mean",
    "verl.utils.seqlen_balancing": "get_seqlen_balanced_partitions log_seqlen_unbalance rearrange_micro_batches "
    "get_reverse_idx ceildiv karmarkar_karp",
    "verl.utils.model": "compute_position_id_with_mask update_model_config print_model_size get_generation_config "
    "create_random_mask",
    "verl.utils.fs": "copy_to_local copy_local_path_from_hdfs",
    "verl.utils.hdfs_io": "copy makedirs exists",
    "verl.utils.tracking": "Tracking ValidationGenerationsLogger",
    "verl.utils.dataset.rl_dataset": "RLHFDataset collate_fn",
    "verl.utils.dataset": "SFTDataset RMDataset",
    "verl.utils.dataset.multiturn_sft_dataset": "MultiTurnSFTDataset",
    "verl.utils.checkpoint.checkpoint_manager": "BaseCheckpointManager find_latest_ckpt_path "
    "get_checkpoint_tracker_filename",
    "verl.utils.checkpoint.fsdp_checkpoint_manager": "FSDPCheckpointManager",
    "verl.utils.fsdp_utils": "get_fsdp_wrap_policy get_init_weight_context_manager init_fn apply_fsdp2 "
    "fsdp2_load_full_state_dict fsdp2_clip_grad_norm_ fsdp_version offload_fsdp_model_to_cpu load_fsdp_model_to_gpu "
    "offload_fsdp_optimizer load_fsdp_optimizer layered_summon_lora_params MixedPrecisionPolicy",
    "verl.utils.ulysses": "ulysses_pad ulysses_pad_and_slice_inputs gather_outpus_and_unpad",
    "verl.utils.py_functional": "append_to_dict union_two_dict convert_to_regular_types timeout_limit",
    "verl.utils.import_utils": "import_external_libs load_extern_type deprecated",
    "verl.utils.device": "get_device_name get_torch_device is_cuda_available",
    "verl.utils.flops_counter": "FlopsCounter",
    "verl.utils.debug": "log_gpu_memory_usage GPUMemoryLogger",
    "verl.utils.distributed": "initialize_global_process_group",
    "verl.utils.torch_dtypes": "PrecisionType",
    "verl.utils.reward_score": "default_compute_score",
    "agent_system.environments": "EnvironmentManagerBase make_envs",
    "agent_system.environments.base": "EnvironmentManagerBase to_numpy",
    "agent_system.environments.env_manager": "make_envs AlfWorldEnvironmentManager WebshopEnvironmentManager "
    "SearchEnvironmentManager SokobanEnvironmentManager GymCardEnvironmentManager AppWorldEnvironmentManager",
    "agent_system.environments.prompts": "ALFWORLD_TEMPLATE ALFWORLD_TEMPLATE_NO_HIS WEBSHOP_TEMPLATE "
    "WEBSHOP_TEMPLATE_NO_HIS SEARCH_TEMPLATE SEARCH_TEMPLATE_NO_HIS SOKOBAN_TEMPLATE SOKOBAN_TEMPLATE_NO_HIS "
    "SOKOBAN_VISUAL_TEMPLATE GYM_CARDS_NUMBERLINE_TEMPLATE GYM_CARDS_BLACKJACK_TEMPLATE GYM_CARDS_EZPOINTS_TEMPLATE "
    "GYM_CARDS_POINTS24_TEMPLATE APPWORLD_TEMPLATE APPWORLD_TEMPLATE_NO_HIS",
    "agent_system.environments.env_package.alfworld": "build_alfworld_envs alfworld_projection",
    "agent_system.environments.env_package.webshop": "build_webshop_envs webshop_projection",
    "agent_system.environments.env_package.search": "build_search_envs search_projection",
    "agent_system.environments.env_package.sokoban": "build_sokoban_envs sokoban_projection",
    "agent_system.environments.env_package.appworld": "build_appworld_envs appworld_projection",
    "agent_system.environments.env_package.gym_cards": "build_gymcards_envs gym_projection",
    "agent_system.multi_turn_rollout": "TrajectoryCollector adjust_batch",
    "agent_system.multi_turn_rollout.utils": "filter_group_data to_list_of_dict torch_to_numpy numpy_to_torch "
    "process_image",
    "agent_system.memory": "SimpleMemory SearchMemory",
    "agent_system.memory.base": "BaseMemory",
    "agent_system.reward_manager": "EpisodeRewardManager",
    "recipe.gigpo.core_gigpo": "compute_gigpo_outcome_advantage compute_step_discounted_returns build_step_group "
    "step_norm_reward episode_norm_reward to_hashable are_similar summarize_group_size",
    "recipe.hgpo.core_hgpo": "compute_hgpo_outcome_advantage hgpo_advantage_estimate compute_step_discounted_returns",
}
"""Module -> names, separated by spaces."""

PROGRAMS = (
    "verl.trainer.main_ppo",
    "verl.trainer.fsdp_sft_trainer",
    "verl.trainer.main_generation",
    "examples.data_preprocess.prepare",
    "recipe.hgpo.main_hgpo",
    "recipe.dapo.main_dapo",
    "verl.model_merger",
)
"""Modules that launchers run with `python -m`."""
