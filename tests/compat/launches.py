# SPDX-License-Identifier: Apache-2.0
"""What becomes of the launch scripts written for verl-agent: composed with our config, built, validated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl.trainer.config.generation_sections import GenerationConfig, validate_generation_config
from verl.trainer.config.schema import PPOConfig, SFTConfig, build_config, load_config, validate_sft_config
from verl.trainer.main_ppo import read_config
from verl.utils.errors import UserError

_SINGLE_TURN = "single-turn answers without an environment"
_IMAGES = "an environment with images"

OUT_OF_SCOPE: dict[str, str] = {
    "examples/gigpo_dynamic_trainer/run_sokoban.sh": _IMAGES,
    "examples/gigpo_trainer/run_blackjack.sh": _IMAGES,
    "examples/gigpo_trainer/run_ezpoints.sh": _IMAGES,
    "examples/gigpo_trainer/run_numberline.sh": _IMAGES,
    "examples/gigpo_trainer/run_sokoban.sh": _IMAGES,
    "examples/gigpo_trainer/run_sokoban_qwen3vl.sh": _IMAGES,
    "examples/grpo_trainer/run_balckjack.sh": _IMAGES,
    "examples/grpo_trainer/run_sokoban.sh": _IMAGES,
    "examples/gigpo_trainer/run_search.sh": "an environment that needs a retrieval service",
    "examples/ppo_trainer/run_discoveryworld.sh": "an environment of one fork only",
    "examples/split_placement/run_deepseek7b_llm.sh": "a program that places roles on separate devices",
    "recipe/dapo/test_dapo_7b_math_megatron.sh": "Megatron",
    "recipe/prime/run_prime_qwen.sh": _SINGLE_TURN,
    "recipe/r1/run_r1_distill_qwen.sh": "offline scoring of single-turn answers",
    "recipe/spin/run_spin.sh": _SINGLE_TURN,
    "recipe/sppo/run_qwen2.5-7b_rm.sh": "a reward model",
}
"""Scripts of parts that this project leaves out, and the part."""

NO_CONFIG = ("examples/split_placement/", "recipe/prime/", "recipe/r1/", "recipe/spin/", "recipe/sppo/")
"""Those with a config file of their own; the others must compose all the same, so that forks can start from them."""

KNOWN_REFUSALS: dict[str, str] = {
    "rollout.name=vllm": "the package vllm is not installed; rollout.name=hf runs anywhere",
    "rollout.tensor_model_parallel_size": "tensor parallel size that does not divide the ranks",
    "rollout.n=16": "group size of single-turn answers; with an environment it is env.rollout.n",
    "reward_manager=dapo": "reward manager of single-turn answers",
    "ulysses_sequence_parallel_size": "no sequence parallelism",
    "use_liger": "needs the package liger-kernel",
}
"""Part of a refusal -> why it is one that we mean."""

ENGINE_KEYS = {
    "generation": "rollout.name",
    "ppo_trainer": "actor_rollout_ref.rollout.name",
    "dapo_trainer": "actor_rollout_ref.rollout.name",
}
"""Config -> its key of the engine; fine-tuning has none."""


@dataclass(frozen=True)
class Verdict:
    """`refusal` is the sentence for the overrides as they are, `with_hf` the one after setting the engine to hf.

    None = accepted; `with_hf` is None as well where there is no engine.
    """

    script: str
    config: Any
    refusal: str | None
    with_hf: str | None


def config_of(script: str) -> tuple[str, str]:
    """(module, name) of the YAML that a script composes with."""
    if script.startswith("examples/sft/"):
        return "verl.trainer.config", "sft_trainer"
    if script.startswith("examples/generation/"):
        return "verl.trainer.config", "generation"
    if script.startswith("recipe/dapo/"):
        return "recipe.dapo.config", "dapo_trainer"
    return "verl.trainer.config", "ppo_trainer"


def compose(script: str, overrides: Sequence[str]) -> DictConfig:
    """The tree of a script's program. Raises UserError for an unknown key."""
    module, name = config_of(script)
    return load_config(name, overrides, module)


def build(script: str, tree: DictConfig) -> Any:
    """The typed config without validation. Raises UserError for a wrong value."""
    classes = {"sft_trainer": SFTConfig, "generation": GenerationConfig}
    return build_config(classes.get(config_of(script)[1], PPOConfig), tree)


def refusal(script: str, tree: DictConfig) -> str | None:
    """The sentence with which the script's program ends before it starts anything; None when it goes on."""
    try:
        config = build(script, tree)
        if isinstance(config, SFTConfig):
            validate_sft_config(config)
        elif isinstance(config, GenerationConfig):
            validate_generation_config(config)
        else:
            read_config(tree)
    except UserError as error:
        return str(error)
    return None


def judge(script: str, overrides: Sequence[str]) -> Verdict:
    """What our programs say to a script."""
    tree = compose(script, overrides)
    config, as_it_is = build(script, tree), refusal(script, tree)
    engine = ENGINE_KEYS.get(config_of(script)[1])
    if as_it_is is None or engine is None:
        return Verdict(script, config, as_it_is, None)
    OmegaConf.update(tree, engine, "hf")
    return Verdict(script, config, as_it_is, refusal(script, tree))


def meaning(refusal: str) -> str | None:
    """Why a refusal is one that we mean; None for an unexpected one."""
    return next((why for part, why in KNOWN_REFUSALS.items() if part in refusal), None)


def in_scope(launches: Mapping[str, Sequence[str]]) -> dict[str, Sequence[str]]:
    """The entries whose part this project has."""
    return {script: overrides for script, overrides in launches.items() if script not in OUT_OF_SCOPE}


def counts(verdicts: Sequence[Verdict], total: int) -> dict[str, int]:
    """`{all, out of scope, in scope, accepted, accepted with rollout.name=hf, refused}`."""
    as_they_are = sum(verdict.refusal is None for verdict in verdicts)
    has_engine = [v for v in verdicts if v.refusal is not None and config_of(v.script)[1] in ENGINE_KEYS]
    with_hf = sum(verdict.with_hf is None for verdict in has_engine)
    return {
        "scripts": total,
        "out of scope": total - len(verdicts),
        "in scope": len(verdicts),
        "accepted as they are": as_they_are,
        "accepted with rollout.name=hf": with_hf,
        "refused": len(verdicts) - as_they_are - with_hf,
    }
