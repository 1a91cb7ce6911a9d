# SPDX-License-Identifier: Apache-2.0
"""The YAML trees, their typed form, and what is refused."""

from __future__ import annotations

import ast
import dataclasses
import json
import pickle
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from verl.trainer.config.schema import (
    ActorRolloutRefConfig,
    PPOConfig,
    SFTConfig,
    build_config,
    check_device,
    ignored_keys,
    key_paths,
    load_config,
    nearest_key,
    validate_ppo_config,
    validate_sft_config,
)
from verl.utils.errors import UserError

SHARED = Path(__file__).resolve().parents[3] / "shared"
SPEC = SHARED / "spec" / "verl_agent.md"
LAUNCHES = SHARED / "compat" / "launch_overrides.json"

RUNNABLE = [
    "actor_rollout_ref.rollout.name=hf",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8",
    "algorithm.adv_estimator=grpo",
]
# Scripts of groups that are no part of this project (single-turn mathematics, Megatron, an own config).
SKIPPED = ("recipe/prime", "recipe/spin", "recipe/sppo", "recipe/r1", "recipe/dapo", "examples/split_placement")


def ppo(*overrides: str) -> PPOConfig:
    return build_config(PPOConfig, load_config("ppo_trainer", list(overrides)))


def runnable(*overrides: str) -> PPOConfig:
    return ppo(*RUNNABLE, *overrides)


def spec_table(title: str) -> dict[str, str]:
    """key -> default, as text, of the table under the heading that names `title`."""
    if not SPEC.exists():
        pytest.skip(f"{SPEC} is not there")
    section = SPEC.read_text(encoding="utf-8").split(title, 1)[1].split("\n### ", 1)[0]
    rows = re.findall(r"^\| `([\w.]+)` \| `(.*?)` \| [LPDX] \|", section, flags=re.M)
    assert len(rows) > 40
    return dict(rows)


def read_default(text: str) -> Any:
    if text.startswith("$") or text in ("null", "{}"):
        return {"null": None, "{}": {}}.get(text, text)
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def leaf(tree: Any, key: str) -> Any:
    for part in key.split("."):
        assert isinstance(tree, dict) and part in tree, f"{key} is missing"
        tree = tree[part]
    return tree


@pytest.mark.parametrize(
    ("config_name", "title", "ours"),
    [
        ("ppo_trainer", "### 2.1 ", {"data.train_files", "data.val_files"}),
        ("sft_trainer", "### 2.3 ", {"trainer.default_hdfs_dir"}),
    ],
)
def test_every_key_of_the_reference_is_there_with_its_default(config_name: str, title: str, ours: set[str]) -> None:
    expected = spec_table(title)
    tree = OmegaConf.to_container(load_config(config_name), resolve=False)
    differing = {key for key, text in expected.items() if leaf(tree, key) != read_default(text)}
    assert differing == ours


@pytest.mark.parametrize("key", ["data.seed", "actor_rollout_ref.actor.optim.betas", "critic.optim.lr_warmup_steps"])
def test_keys_absent_from_the_reference_may_be_added_with_plus(key: str) -> None:
    value = "[0.8,0.9]" if key.endswith("betas") else "3"
    assert load_config("ppo_trainer", [f"+{key}={value}"]) is not None


@pytest.mark.parametrize(("cls", "name"), [(PPOConfig, "ppo_trainer"), (SFTConfig, "sft_trainer")])
def test_dataclass_defaults_equal_the_yaml(cls: type, name: str) -> None:
    assert build_config(cls, load_config(name)) == cls()
    flat = set(key_paths(cls))
    tree = OmegaConf.to_container(load_config(name), resolve=False)
    assert set(_all_keys(tree, "")) >= {key for key in flat if not key.startswith("reward_model.model.fsdp_config")} - {
        # The reference policy has no optimizer and shards like the actor; a null section has no keys.
        *(key for key in flat if ".ref.fsdp_config." in key or ".mixed_precision." in key),
        "critic.optim.num_cycles",
    }


def _all_keys(tree: Any, prefix: str) -> list[str]:
    if not isinstance(tree, dict):
        return []
    return [path for key, value in tree.items() for path in (prefix + key, *_all_keys(value, f"{prefix}{key}."))]


def test_grpo_alfworld_script_runs_with_the_hf_engine_by_overrides_alone() -> None:
    if not LAUNCHES.exists():
        pytest.skip(f"{LAUNCHES} is not there")
    overrides = json.loads(LAUNCHES.read_text(encoding="utf-8"))["examples/grpo_trainer/run_alfworld.sh"]
    with pytest.raises(UserError, match=r"rollout\.name=hf"):
        validate_ppo_config(build_config(PPOConfig, load_config("ppo_trainer", overrides)))
    validate_ppo_config(
        build_config(PPOConfig, load_config("ppo_trainer", [*overrides, "actor_rollout_ref.rollout.name=hf"]))
    )


def test_interpolated_keys_follow_the_key_they_copy() -> None:
    cfg = ppo(
        "data.max_prompt_length=96",
        "data.train_batch_size=6",
        "actor_rollout_ref.actor.use_dynamic_bsz=True",
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=99",
        "actor_rollout_ref.model.path=m/n",
        "trainer.project_name=p",
        "trainer.experiment_name=7",
    )
    assert cfg.actor_rollout_ref.rollout.prompt_length == 96
    assert cfg.data.gen_batch_size == 6
    assert cfg.actor_rollout_ref.ref.log_prob_use_dynamic_bsz and cfg.critic.use_dynamic_bsz
    assert cfg.actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu == 99
    assert cfg.critic.model.tokenizer_path == cfg.reward_model.model.input_tokenizer == "m/n"
    assert cfg.trainer.experiment_name == "7"
    assert cfg.trainer.default_local_dir == "checkpoints/p/7"


def test_a_partial_mapping_is_laid_over_the_yaml() -> None:
    cfg = build_config(PPOConfig, {"data": {"max_response_length": 17}})
    assert cfg.actor_rollout_ref.rollout.response_length == 17
    assert cfg.env.max_steps == 50


def test_configs_are_frozen_and_cross_process_borders() -> None:
    cfg = ppo()
    with pytest.raises(dataclasses.FrozenInstanceError):
        cfg.trainer.nnodes = 2  # type: ignore[misc]
    assert pickle.loads(pickle.dumps(cfg)) == cfg


def test_values_are_converted_to_the_type_of_the_field() -> None:
    cfg = build_config(
        PPOConfig,
        {
            "data": {"train_batch_size": "12", "truncation": "left", "train_files": ["a", "b"], "seed": None},
            "trainer": {"logger": "console", "val_only": "true", "total_epochs": 3.0},
            "actor_rollout_ref": {"actor": {"optim": {"lr": "1e-6", "betas": [0, "0.5"]}, "grad_clip": 1}},
            "env": {"sokoban": {"dim_room": [7, 8]}},
        },
    )
    assert cfg.data.train_batch_size == 12 and cfg.data.seed == 1
    assert cfg.data.train_files == ("a", "b")
    assert cfg.trainer.logger == ("console",) and cfg.trainer.val_only is True
    assert cfg.trainer.total_epochs == 3 and isinstance(cfg.trainer.total_epochs, int)
    optim = cfg.actor_rollout_ref.actor.optim
    assert optim.lr == 1e-6 and optim.betas == (0.0, 0.5)
    assert isinstance(cfg.actor_rollout_ref.actor.grad_clip, float)
    assert cfg.env.sokoban.dim_room == (7, 8)


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("data.train_batch_size=many", "data.train_batch_size=many: expected an integer"),
        ("data.train_batch_size=0", "data.train_batch_size=0: expected an integer of at least 1"),
        ("data.train_batch_size=2.5", "data.train_batch_size=2.5: expected an integer"),
        ("data.train_batch_size=True", "data.train_batch_size=True: expected an integer"),
        ("data.train_batch_size=null", "data.train_batch_size=null: expected an integer"),
        ("trainer.val_only=3", "trainer.val_only=3: expected True or False"),
        ("actor_rollout_ref.actor.optim.lr=nan", "actor_rollout_ref.actor.optim.lr=nan: expected a number"),
        ("actor_rollout_ref.actor.clip_ratio_c=1", "clip_ratio_c=1: expected a number above 1"),
        ("actor_rollout_ref.rollout.top_p=1.5", "top_p=1.5: expected a number above 0 and at most 1"),
        ("actor_rollout_ref.rollout.name=vlm", "expected one of vllm, sglang, hf; did you mean vllm?"),
        ("actor_rollout_ref.actor.strategy=megatron", "strategy=megatron: expected one of fsdp, fsdp2"),
        ("trainer.device=npu", "trainer.device=npu: expected one of cuda, cpu, auto"),
        ("env.sokoban.dim_room=[1]", "env.sokoban.dim_room=[1]: expected a list of 2 values"),
        ("env.alfworld=3", "env.alfworld=3: expected a section"),
        ("actor_rollout_ref.model.override_config=3", "override_config=3: expected a section"),
        ("trainer.project_name=[a]", "trainer.project_name=['a']: expected text"),
        ("data.seed=${nowhere}", "data.seed: "),
    ],
)
def test_wrong_values_are_refused_with_the_full_key(override: str, expected: str) -> None:
    with pytest.raises(UserError) as caught:
        ppo(override)
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("key", "near"),
    [
        ("trainer.total_epoch", "trainer.total_epochs"),
        ("trianer", "trainer"),
        ("actor_rollout_ref.actor.lr", "actor_rollout_ref.actor.optim.lr"),
        ("algorithm.kl_coef", "algorithm.kl_ctrl.kl_coef"),
        ("env.alfworld.eval_data_set", "env.alfworld.eval_dataset"),
        ("actor_rollout_ref.rollout.tensor_parallel_size", "actor_rollout_ref.rollout.tensor_model_parallel_size"),
    ],
)
def test_an_unknown_key_is_answered_with_the_nearest_valid_one(key: str, near: str) -> None:
    tree: Any = 1
    for part in reversed(key.split(".")):
        tree = {part: tree}
    with pytest.raises(UserError, match=re.escape(f"unknown config key {key}; did you mean {near}?")):
        build_config(PPOConfig, tree)


def test_a_key_near_to_nothing_gets_no_suggestion() -> None:
    assert nearest_key("zzzz.qqqq", key_paths(PPOConfig)) is None
    with pytest.raises(UserError, match=r"unknown config key zzqq; --cfg job"):
        build_config(PPOConfig, {"zzqq": 1})


def test_a_part_of_the_tree_can_be_built_alone() -> None:
    cfg = build_config(ActorRolloutRefConfig, {"actor": {"ppo_epochs": 2}, "rollout": {"name": "hf"}})
    assert cfg.actor.ppo_epochs == 2 and cfg.ref == ActorRolloutRefConfig().ref
    with pytest.raises(UserError, match=r"unknown config key actor\.ppo_epoch; did you mean actor\.ppo_epochs"):
        build_config(ActorRolloutRefConfig, {"actor": {"ppo_epoch": 2}})


@dataclasses.dataclass(frozen=True)
class ShapingConfig:
    alpha: float = 1.0
    level: str = "episode"


def test_a_recipe_adds_a_section() -> None:
    tree = load_config("ppo_trainer", ["trainer.nnodes=3"])
    OmegaConf.set_struct(tree, False)
    tree["shaping"] = {"alpha": "${trainer.nnodes}"}
    cfg = build_config(PPOConfig, tree, {"shaping": ShapingConfig})
    assert cfg.extra == {"shaping": ShapingConfig(alpha=3.0)}
    assert build_config(PPOConfig, {}, {"shaping": ShapingConfig}).extra["shaping"] == ShapingConfig()
    with pytest.raises(UserError, match="unknown config key shaping"):
        build_config(PPOConfig, tree)
    tree["shaping"]["alpa"] = 1
    with pytest.raises(UserError, match=r"unknown config key shaping\.alpa; did you mean shaping\.alpha"):
        build_config(PPOConfig, tree, {"shaping": ShapingConfig})


def test_a_recipe_config_over_the_core_one_composes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "toy_recipe_config"
    package.mkdir()
    (package / "__init__.py").write_text("", encoding="utf-8")
    (package / "toy_trainer.yaml").write_text(
        "hydra:\n  searchpath: [pkg://verl.trainer.config]\n"
        "defaults: [ppo_trainer, _self_]\n"
        "shaping: {alpha: 0.5, level: step}\nalgorithm: {adv_estimator: grpo}\n",
        encoding="utf-8",
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    tree = load_config("toy_trainer", ["shaping.alpha=0.25"], "toy_recipe_config")
    cfg = build_config(PPOConfig, tree, {"shaping": ShapingConfig})
    assert cfg.extra["shaping"] == ShapingConfig(0.25, "step") and cfg.algorithm.adv_estimator == "grpo"


def test_old_global_micro_batches_become_per_rank_ones() -> None:
    cfg = ppo("actor_rollout_ref.actor.ppo_micro_batch_size=64", "trainer.n_gpus_per_node=4")
    assert cfg.actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu == 16
    assert cfg.actor_rollout_ref.actor.ppo_micro_batch_size is None


def test_val_out_selects_the_other_split() -> None:
    assert ppo("trainer.val_out=True").env.alfworld.eval_dataset == "eval_out_of_distribution"
    assert ppo().env.alfworld.eval_dataset == "eval_in_distribution"


def test_a_runnable_config_passes() -> None:
    validate_ppo_config(runnable())
    validate_ppo_config(runnable("actor_rollout_ref.actor.strategy=fsdp2", "trainer.device=cpu"))
    # Any number of tasks, members and ranks runs: rows are padded.
    validate_ppo_config(runnable("data.train_batch_size=3", "env.rollout.n=2", "trainer.n_gpus_per_node=2"))
    validate_ppo_config(
        runnable("actor_rollout_ref.actor.use_dynamic_bsz=True", "actor_rollout_ref.actor.ppo_mini_batch_size=24")
    )


R = "actor_rollout_ref.rollout"
A = "actor_rollout_ref.actor"


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([f"{R}.name=vllm"], "rollout.name=hf"),
        ([f"{R}.name=sglang"], "rollout.name=hf"),
        ([f"{R}.mode=async", "data.train_batch_size=1"], "one episode; set mode=sync"),
        ([f"{R}.n=2"], "env.rollout.n"),
        ([f"{R}.multi_turn.enable=True"], "multi_turn.enable"),
        ([f"{R}.temperature=0"], "above 0"),
        ([f"{R}.val_kwargs.do_sample=True"], "val_kwargs.temperature above 0"),
        ([f"{R}.stop=[x]"], "rollout.stop"),
        ([f"{R}.min_p=0.1"], "rollout.min_p"),
        ([f"{R}.max_model_len=100"], "set it to 1024 or null"),
        ([f"{A}.ulysses_sequence_parallel_size=2"], "actor.ulysses_sequence_parallel_size=1"),
        (["actor_rollout_ref.hybrid_engine=False"], "hybrid_engine"),
        (["actor_rollout_ref.model.use_liger=True"], "use_liger=False"),
        (["actor_rollout_ref.model.use_fused_kernels=True"], "use_fused_kernels=False"),
        (["actor_rollout_ref.model.enable_activation_offload=True"], "enable_activation_offload=False"),
        (["actor_rollout_ref.model.use_shm=True"], "use_shm=False"),
        ([f"{A}.use_kl_loss=True", f"{A}.kl_loss_type=full"], "low_var_kl"),
        ([f"{A}.fsdp_config.fsdp_size=3"], "fsdp_size=3 does not divide the 8 ranks"),
        (["reward_model.enable=True"], "reward_model.enable"),
        (["reward_model.launch_reward_fn_async=True"], "launch_reward_fn_async"),
        (["reward_model.reward_manager=dapo"], "episode"),
        (["algorithm.filter_groups.enable=True"], "filter_groups.enable"),
        (["algorithm.use_pf_ppo=True", "algorithm.adv_estimator=grpo"], "use_pf_ppo"),
        (["algorithm.adv_estimator=remax"], "adv_estimator=rloo"),
        (["algorithm.adv_estimator=grpo_passk"], "env.rollout.n to 2 or more"),
        (
            ["algorithm.gigpo.enable_similarity=True", "algorithm.gigpo.similarity_thresh=1.0"],
            "enable_similarity=False",
        ),
        (["data.custom_cls.path=x.py"], "custom_cls"),
        (["data.use_shm=True"], "data.use_shm=False"),
        (["data.seed=5"], "set env.seed=5"),
        (["data.need_tools_kwargs=True"], "set it to False"),
        (["custom_reward_function.path=x.py"], "custom_reward_function.path"),
        (["+reward_model.reward_kwargs.max_resp_len=9"], "reward_model.reward_kwargs"),
        (["+reward_model.overlong_buffer.enable=True"], "reward_model.overlong_buffer"),
        ([f"{R}.limit_images=2"], "limit_images"),
        ([f"{R}.prompt_length=100"], "must equal data.max_prompt_length=512"),
        (["data.gen_batch_size=3"], "must equal data.train_batch_size=1024"),
        (["data.shuffle=False"], "data.shuffle=True"),
        (["trainer.log_llm_steps=True"], "rollout_data_dir"),
        (["trainer.resume_mode=resume_path"], "needs trainer.resume_from_path"),
        (["trainer.resume_from_path=x/global_step_3"], "trainer.resume_mode=resume_path"),
        (["trainer.resume_mode=resume_path", "trainer.resume_from_path=x"], "global_step_N"),
        (["trainer.default_hdfs_dir=hdfs://a"], "local folder"),
        (["actor_rollout_ref.model.path=hdfs://a"], "actor_rollout_ref.model.path=hdfs://a"),
        (["trainer.logger=[consol]"], "did you mean console?"),
        ([f"{A}.checkpoint.contents=[model]"], "lacks optimizer, extra"),
        ([f"{A}.ppo_micro_batch_size_per_gpu=null"], "ppo_micro_batch_size_per_gpu is not set"),
        ([f"{R}.log_prob_micro_batch_size_per_gpu=null"], "log_prob_micro_batch_size_per_gpu is not set"),
        ([f"{A}.use_kl_loss=True"], "ref.log_prob_micro_batch_size_per_gpu is not set"),
        (["algorithm.use_kl_in_reward=True"], "ref.log_prob_micro_batch_size_per_gpu is not set"),
        ([f"{A}.ppo_micro_batch_size=8"], "both set"),
        ([f"{A}.use_dynamic_bsz=True", f"{A}.ppo_max_token_len_per_gpu=1000"], "max_token_len_per_gpu=1000 is below"),
        ([f"{R}.log_prob_use_dynamic_bsz=True", f"{R}.log_prob_max_token_len_per_gpu=9"], "set it to 1024 or more"),
        (["algorithm.adv_estimator=gae"], "critic.ppo_micro_batch_size_per_gpu is not set"),
        ([f"{A}.ppo_mini_batch_size=3"], "=3 rows cannot be shared equally by 8 ranks; set"),
        ([f"{A}.ppo_mini_batch_size=3"], "to 8."),
        ([f"{A}.ppo_mini_batch_size=20"], "to 16 or 24."),
        ([f"{A}.ppo_mini_batch_size=48"], "_per_gpu=6 or"),
        ([f"{A}.ppo_mini_batch_size=96"], "_per_gpu=6 or actor_rollout_ref.actor.ppo_mini_batch_size=128."),
        (
            [f"{A}.ppo_micro_batch_size_per_gpu=null", f"{A}.ppo_micro_batch_size=12"],
            "=12 does not divide by the 8 ranks",
        ),
    ],
)
def test_what_cannot_work_is_refused_in_one_sentence(overrides: list[str], expected: str) -> None:
    with pytest.raises(UserError) as caught:
        validate_ppo_config(runnable(*overrides))
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


def test_keys_that_nobody_reads_are_listed_when_set() -> None:
    assert ignored_keys(ppo()) == ()
    assert ignored_keys(runnable("actor_rollout_ref.actor.shuffle=True", "trainer.log_eval_steps=True")) == (
        "actor_rollout_ref.actor.shuffle",
        "trainer.log_eval_steps",
    )


def test_suggested_sizes_are_accepted() -> None:
    for mini, micro in ((16, 2), (24, 3), (48, 6), (128, 8), (8, 1)):
        validate_ppo_config(runnable(f"{A}.ppo_mini_batch_size={mini}", f"{A}.ppo_micro_batch_size_per_gpu={micro}"))


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("model.use_liger=True", "use_liger=False"),
        ("model.use_shm=True", "use_shm"),
        ("ulysses_sequence_parallel_size=2", "ulysses_sequence_parallel_size=1"),
        ("data.chat_template=x", "chat_template"),
        ("data.custom_cls.path=x", "data.custom_cls.name"),
        ("trainer.default_hdfs_dir=hdfs://a", "default_hdfs_dir"),
        ("trainer.resume_path=hdfs://a", "trainer.resume_path"),
        ("trainer.logger=[tensorbord]", "did you mean tensorboard?"),
    ],
)
def test_sft_refusals(override: str, expected: str) -> None:
    cfg = build_config(SFTConfig, load_config("sft_trainer", [override]))
    with pytest.raises(UserError) as caught:
        validate_sft_config(cfg)
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


def test_cuda_without_a_device_is_refused_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match=r"trainer\.device=cpu"):
        check_device("cuda")
    assert check_device("auto") == check_device("cpu") == "cpu"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert check_device("auto") == check_device("cuda") == "cuda"


def test_unknown_overrides_are_refused_by_load_config() -> None:
    with pytest.raises(UserError, match=r"unknown config key trianer\.nnodes; did you mean trainer\.nnodes\?"):
        load_config("ppo_trainer", ["trianer.nnodes=2"])
    with pytest.raises(UserError, match="nowhere"):
        load_config("nowhere")


def test_building_needs_no_heavy_package() -> None:
    import subprocess

    code = (
        "import sys; from verl.trainer.config.schema import *; validate_ppo_config; "
        "build_config(PPOConfig, load_config('ppo_trainer')); "
        "print(sorted({'torch', 'vllm', 'flash_attn', 'ray', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
