# SPDX-License-Identifier: Apache-2.0
"""Config sections of the run: data, trainer, Ray, environments."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, Literal

from verl.trainer.config.fields import (
    NULL_MEANS_DEFAULT,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
)

__all__ = [
    "AlfworldConfig",
    "CustomClsConfig",
    "DataConfig",
    "DiscoveryWorldConfig",
    "EnvConfig",
    "EnvRolloutConfig",
    "GeneratedGamesConfig",
    "GeneratedShopConfig",
    "RayInitConfig",
    "ResourcesConfig",
    "SearchConfig",
    "SokobanConfig",
    "TrainerConfig",
    "WebshopConfig",
]


@dataclass(frozen=True)
class CustomClsConfig:
    """A class in a user's file, put in place of the built-in data set."""

    path: str | None = None
    name: str | None = None


@dataclass(frozen=True)
class DataConfig:
    """Task stream, prompt and response lengths."""

    tokenizer: str | None = None
    use_shm: bool = False
    train_files: str | tuple[str, ...] | None = None
    """null = the environment defines the task stream; parquet = placeholder rows, only their number counts."""
    val_files: str | tuple[str, ...] | None = None
    prompt_key: str = "prompt"
    reward_fn_key: str = "data_source"
    max_prompt_length: PositiveInt = 512
    """P, tokens; prompts are padded on the left."""
    max_response_length: PositiveInt = 512
    """R, tokens; responses are padded on the right."""
    train_batch_size: PositiveInt = 1024
    """Groups (tasks) per training step."""
    gen_batch_size: PositiveInt = 1024
    """Must equal train_batch_size with environments."""
    val_batch_size: PositiveInt | None = None
    """Validation slots; null = train_batch_size (see `num_val_slots`)."""
    return_raw_input_ids: bool = False
    return_raw_chat: bool = False
    return_full_prompt: bool = False
    shuffle: bool = True
    """Draw tasks in a seeded random order."""
    filter_overlong_prompts: bool = False
    filter_overlong_prompts_workers: PositiveInt = 1
    truncation: Literal["error", "left", "right", "middle"] = "error"
    """For a prompt that is too long even without history."""
    image_key: str = "images"
    video_key: str = "videos"
    trust_remote_code: bool = False
    apply_chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Extra arguments of the tokenizer's apply_chat_template."""
    custom_cls: CustomClsConfig = field(default_factory=CustomClsConfig)
    seed: int = field(default=1, metadata=NULL_MEANS_DEFAULT)
    """Accepted for old scripts; the task order follows env.seed."""
    dataloader_num_workers: NonNegativeInt = field(default=8, metadata=NULL_MEANS_DEFAULT)
    cache_dir: str | None = None
    need_tools_kwargs: bool = field(default=False, metadata=NULL_MEANS_DEFAULT)

    @property
    def num_val_slots(self) -> int:
        """Episodes played at the same time in validation."""
        return self.train_batch_size if self.val_batch_size is None else self.val_batch_size


@dataclass(frozen=True)
class TrainerConfig:
    """Length of the run, machines, logging, checkpoints."""

    balance_batch: bool = True
    total_epochs: PositiveInt = 30
    total_training_steps: PositiveInt | None = None
    """Overrides steps per epoch * total_epochs."""
    project_name: str = "verl_examples"
    experiment_name: str = "gsm8k"
    logger: tuple[str, ...] = ("console", "wandb")
    """Backends besides metrics.jsonl, which is always written."""
    log_val_generations: NonNegativeInt = 0
    """Validation episodes that wandb and TensorBoard show as text."""
    rollout_data_dir: str | None = None
    validation_data_dir: str | None = None
    nnodes: PositiveInt = 1
    n_gpus_per_node: PositiveInt = 8
    """Ranks per node (processes on the CPU)."""
    save_freq: int = -1
    """Steps; <= 0 = never."""
    resume_mode: Literal["auto", "disable", "resume_path"] = "auto"
    resume_from_path: str | None = None
    val_before_train: bool = True
    val_only: bool = False
    val_out: bool = False
    """Validate on the out-of-distribution split."""
    test_freq: int = -1
    """Steps; <= 0 = never."""
    critic_warmup: NonNegativeInt = 0
    """The actor is updated from this step on."""
    default_hdfs_dir: str | None = None
    del_local_ckpt_after_load: bool = False
    default_local_dir: str = "checkpoints/verl_examples/gsm8k"
    max_actor_ckpt_to_keep: PositiveInt | None = None
    max_critic_ckpt_to_keep: PositiveInt | None = None
    remove_previous_ckpt_in_save: bool = field(default=False, metadata=NULL_MEANS_DEFAULT)
    ray_wait_register_center_timeout: PositiveInt = 300
    """Seconds."""
    device: Literal["cuda", "cpu", "auto"] = "cuda"
    adjust_before_advantage: bool = False
    """True restores the reference's order: pad the batch, then compute advantages."""
    log_eval_steps: bool = False
    log_llm_steps: bool = False
    log_llm_steps_max_chars: PositiveInt = 8000

    @property
    def world_size(self) -> int:
        """Ranks of the whole run."""
        return self.nnodes * self.n_gpus_per_node


@dataclass(frozen=True)
class RayInitConfig:
    """Arguments of ray.init; null = left out."""

    num_cpus: PositiveInt | None = None
    num_gpus: NonNegativeInt | None = None
    address: str | None = None
    namespace: str | None = None
    object_store_memory: PositiveInt | None = None
    """Bytes."""
    runtime_env: dict[str, Any] | None = None

    def ray_kwargs(self) -> dict[str, Any]:
        """The keys that are set, as keyword arguments."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: value for name, value in values.items() if value is not None}


@dataclass(frozen=True)
class ResourcesConfig:
    """Ray resources of one environment actor."""

    num_cpus: NonNegativeFloat = 0.1
    num_gpus: NonNegativeFloat = 0.0


@dataclass(frozen=True)
class EnvRolloutConfig:
    """Groups."""

    n: int = 1
    """Members of a group; <= 0 = one group (1)."""


@dataclass(frozen=True)
class GeneratedGamesConfig:
    """Games made by the project's generator (`env.alfworld.source=generated`)."""

    dir: str | None = None
    """null = a folder of the user's cache, made on first use."""
    train: PositiveInt = 200
    valid_seen: PositiveInt = 24
    valid_unseen: PositiveInt = 24
    seed: int = 0
    max_receptacles: PositiveInt | None = None
    """Rooms are trimmed to so many receptacles; null = whole rooms."""
    max_objects: NonNegativeInt | None = None
    """At most so many objects besides the task's; null = no limit."""
    max_object_classes: PositiveInt | None = None
    """Only so many object classes occur; null = all."""


@dataclass(frozen=True)
class AlfworldConfig:
    """ALFWorld games and prompts."""

    eval_dataset: Literal["eval_in_distribution", "eval_out_of_distribution"] = "eval_in_distribution"
    data_dir: str | None = None
    """null = $ALFWORLD_DATA, then ~/.cache/alfworld."""
    source: Literal["data", "generated"] = "data"
    generated: GeneratedGamesConfig = field(default_factory=GeneratedGamesConfig)
    prompt_style: Literal["full", "compact"] = "full"


@dataclass(frozen=True)
class SearchConfig:
    """Search tool client."""

    log_requests: bool = False
    search_url: str | tuple[str, ...] = "http://127.0.0.1:8000/retrieve"
    topk: PositiveInt = 3
    timeout: PositiveFloat = 60.0
    """Seconds."""


@dataclass(frozen=True)
class SokobanConfig:
    """Sokoban rooms."""

    dim_room: tuple[int, int] = (6, 6)
    num_boxes: PositiveInt = 1
    search_depth: PositiveInt = 30
    mode: Literal["tiny_rgb_array", "rgb_array"] = "tiny_rgb_array"


@dataclass(frozen=True)
class GeneratedShopConfig:
    """A shop made by the project's generator (`env.webshop.source=generated`)."""

    dir: str | None = None
    """null = a folder of the user's cache, made on first use."""
    products: PositiveInt = 1000
    goals: PositiveInt = 2000
    seed: int = 0


@dataclass(frozen=True)
class WebshopConfig:
    """WebShop catalogue, goals and prompts."""

    use_small: bool = True
    """The 1,000-product files; False = the files of all 1.18 million products."""
    human_goals: bool = False
    """Goals people wrote; False = synthetic ones."""
    data_dir: str | None = None
    """Folder of the product and goal files; null = $WEBSHOP_DATA."""
    source: Literal["data", "generated"] = "data"
    generated: GeneratedShopConfig = field(default_factory=GeneratedShopConfig)
    split: Literal["goal", "product"] | None = None
    """What training and validation do not share; null = goal for data files, product for a generated shop."""
    legacy_goal_order: bool = False
    """True restores the reference's order: every group shuffles the goals with its own seed (nothing is held out)."""
    val_goals: PositiveInt | None = None
    """At most so many of the held-out goals are played; null = all."""
    option_match: Literal["upstream", "fixed"] = "upstream"
    """How the reward compares the options bought with those wanted."""
    observation_mode: Literal["text", "text_rich"] = "text"
    """text_rich marks buttons and what was clicked; text does not show which options are selected."""
    prompt_style: Literal["full", "compact"] = "full"


@dataclass(frozen=True)
class DiscoveryWorldConfig:
    """Accepted for old scripts; no such environment here."""

    scenario_name: str | None = None
    difficulty: str | None = None


@dataclass(frozen=True)
class EnvConfig:
    """Environment and its workers."""

    env_name: str = "alfworld/AlfredTWEnv"
    seed: int = 0
    """Training seed; validation uses seed + 1000."""
    max_steps: PositiveInt = 50
    """Turns per episode."""
    history_length: int = 2
    """Past steps shown in the prompt; <= 0 = none."""
    num_workers: NonNegativeInt | None = None
    """Environment actors; null = from the number of cores."""
    worker_timeout: PositiveFloat = 300.0
    """Seconds that one reset or step of an environment actor may take; then the run ends and names the task."""
    resources_per_worker: ResourcesConfig = field(default_factory=ResourcesConfig)
    rollout: EnvRolloutConfig = field(default_factory=EnvRolloutConfig)
    alfworld: AlfworldConfig = field(default_factory=AlfworldConfig)
    search: SearchConfig = field(default_factory=SearchConfig)
    sokoban: SokobanConfig = field(default_factory=SokobanConfig)
    webshop: WebshopConfig = field(default_factory=WebshopConfig)
    discoveryworld: DiscoveryWorldConfig = field(default_factory=DiscoveryWorldConfig)

    @property
    def group_size(self) -> int:
        """Members of a group, at least 1."""
        return max(1, self.rollout.n)
