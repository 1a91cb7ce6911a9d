# SPDX-License-Identifier: Apache-2.0
"""What differs between the quickstart's environments: one `Profile` each. The pipeline knows no environment by name."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from agent_system.environments.prompt_builder import PromptBuilder

__all__ = ["PROFILES", "Profile", "Sizes"]


@dataclass(frozen=True)
class Sizes:
    """Everything that differs between the full run and `--smoke`."""

    world: Mapping[str, int]
    """Options of the generator program, without the dashes."""
    demonstrations: int
    """Expert episodes for SFT, on training tasks."""
    held_out: int
    """Tasks of the evaluation panel."""
    sft_steps: int
    sft_batch: int
    analysed: int
    """Expert episodes for stage 1, on training tasks."""
    discriminator_steps: int
    discriminator_batch: int
    train_batch: int
    """Tasks per RL step."""
    group_size: int
    rl_steps: int
    eval_samples: int
    """Episodes per held-out task."""
    max_steps: int
    """Turns of an episode of the policy."""


@dataclass(frozen=True)
class Profile:
    """One environment of the quickstart."""

    name: str
    """As in the names of the launch scripts and in `env_name`."""
    world: str
    """Folder of what the generator makes, below the run's folder."""
    world_title: str
    """Sentence about it, formatted with the options of `Sizes.world`."""
    tasks: str
    """What a task is called, in the plural."""
    generator: str
    """Program that writes the folder; takes `--out` and `--seed`."""
    full: Sizes
    smoke: Sizes
    prompts: Callable[[str, int], PromptBuilder]
    """(prompt style, history length) -> builder."""
    phrases: str
    """How the tokenizer finds its whole-token phrases: a key of `tiny_policy.PHRASES`."""
    tokenizer_rows: int
    """SFT rows that the tokenizer is fitted to."""
    vocab_size: int
    num_phrases: int
    detour_rate: float
    error_rate: float
    history_length: int
    max_prompt_length: int
    """Tokens, in RL."""
    max_response_length: int
    sft_length: int
    """Tokens of prompt and response, in SFT."""
    discriminator_length: int
    """Tokens of a row of stage 2."""
    mini_batch: int
    """Rows per optimizer step of RL."""
    label_source: Literal["single", "minimal"]
    """What makes a step redundant, in all stages and in the report: see `traj_evolve.label_source`."""
    discriminator_lr: float
    overrides: Sequence[str]
    """RL settings of this environment, formatted with `world` (folder) and `held_out`."""
    sft_overrides: Sequence[str] = ()
    discriminator_overrides: Sequence[str] = ()
    """Settings of the two fine-tuning phases."""

    def sizes(self, smoke: bool) -> Sizes:
        """The sizes of a full or of a smoke run."""
        return self.smoke if smoke else self.full


def _alfworld_prompts(style: str, history_length: int) -> PromptBuilder:
    from agent_system.environments.env_package.alfworld.prompt_builder import AlfworldPromptBuilder

    return AlfworldPromptBuilder(style, history_length)


def _webshop_prompts(style: str, history_length: int) -> PromptBuilder:
    from agent_system.environments.env_package.webshop.prompt_builder import WebshopPromptBuilder

    return WebshopPromptBuilder(style, history_length)


_ALFWORLD = Profile(
    name="alfworld",
    world="games",
    world_title="generate {train:,} training games and two held-out sets",
    tasks="games",
    generator="agent_system.environments.env_package.alfworld.generate_games",
    full=Sizes(
        world={"train": 4000, "valid-seen": 12, "valid-unseen": 120, "max-receptacles": 10, "max-object-classes": 26},
        demonstrations=4000,
        held_out=120,
        sft_steps=500,
        sft_batch=64,
        analysed=800,
        discriminator_steps=100,
        discriminator_batch=64,
        train_batch=8,
        group_size=8,
        rl_steps=18,
        eval_samples=2,
        max_steps=25,
    ),
    smoke=Sizes(
        world={"train": 60, "valid-seen": 8, "valid-unseen": 8, "max-receptacles": 10, "max-object-classes": 26},
        demonstrations=60,
        held_out=8,
        sft_steps=12,
        sft_batch=64,
        analysed=20,
        discriminator_steps=4,
        discriminator_batch=64,
        train_batch=4,
        group_size=4,
        rl_steps=2,
        eval_samples=1,
        max_steps=8,
    ),
    prompts=_alfworld_prompts,
    phrases="things",
    tokenizer_rows=10_000,
    vocab_size=512,
    num_phrases=640,
    detour_rate=0.15,
    error_rate=0.1,
    history_length=2,
    max_prompt_length=256,
    max_response_length=24,
    sft_length=512,
    discriminator_length=1024,
    mini_batch=320,
    label_source="single",
    discriminator_lr=1e-3,
    overrides=(
        "env.alfworld.data_dir={world}",
        "env.alfworld.prompt_style=compact",
        "env.alfworld.eval_dataset=eval_out_of_distribution",
    ),
)

_WEBSHOP = Profile(
    name="webshop",
    world="shop",
    world_title="generate a shop of {products:,} products with {goals:,} goals",
    tasks="goals",
    generator="agent_system.environments.env_package.webshop.generate_catalogue",
    full=Sizes(
        world={"products": 1000, "goals": 4000},
        demonstrations=3000,
        held_out=120,
        sft_steps=600,
        sft_batch=64,
        analysed=800,
        discriminator_steps=80,
        discriminator_batch=32,
        train_batch=8,
        group_size=8,
        rl_steps=18,
        eval_samples=2,
        max_steps=15,
    ),
    smoke=Sizes(
        world={"products": 100, "goals": 120},
        demonstrations=60,
        held_out=8,
        sft_steps=12,
        sft_batch=64,
        analysed=20,
        discriminator_steps=3,
        discriminator_batch=16,
        train_batch=4,
        group_size=4,
        rl_steps=2,
        eval_samples=1,
        max_steps=8,
    ),
    prompts=_webshop_prompts,
    phrases="clicks",
    tokenizer_rows=40_000,
    vocab_size=1408,
    num_phrases=4096,
    detour_rate=0.1,
    error_rate=0.05,
    history_length=2,
    max_prompt_length=320,
    max_response_length=28,
    sft_length=512,
    discriminator_length=1024,
    mini_batch=160,
    # Needless steps come in pairs here, opening a page and leaving it: neither can go alone.
    label_source="minimal",
    discriminator_lr=3e-3,
    overrides=(
        "env.webshop.data_dir={world}",
        "env.webshop.split=product",
        "env.webshop.val_goals={held_out}",
        "env.webshop.prompt_style=compact",
        "actor_rollout_ref.model.use_remove_padding=True",
    ),
    # Half of a padded batch would be padding: an index page has 40 tokens, a page of results 190.
    sft_overrides=("use_remove_padding=True", "data.prompt_loss_weight=0.1"),
    discriminator_overrides=("use_remove_padding=True",),
)

PROFILES: Mapping[str, Profile] = {profile.name: profile for profile in (_ALFWORLD, _WEBSHOP)}
