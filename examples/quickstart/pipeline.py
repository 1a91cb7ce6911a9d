# SPDX-License-Identifier: Apache-2.0
"""The quickstart: games, a tiny policy, the three stages, GRPO beside TrajEvolve, one table.

Every phase is one of the project's own programs with small settings, as a user would call it; nothing here is special
to the pipeline but the sizes. Run by `examples/quickstart/run.sh`.
"""

import argparse
import json
import os
import shutil
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from examples.quickstart.phases import Phase, PhaseRunner
from verl.utils.errors import UserError
from verl.utils.fs import atomic_write

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Sizes:
    """Everything that differs between the full run and `--smoke`."""

    train_games: int
    seen_games: int
    unseen_games: int
    sft_steps: int
    sft_batch: int
    analysed: int
    discriminator_steps: int
    train_batch: int
    group_size: int
    rl_steps: int
    eval_samples: int
    max_steps: int


FULL = Sizes(
    train_games=4000,
    seen_games=12,
    unseen_games=120,
    sft_steps=500,
    sft_batch=64,
    analysed=800,
    discriminator_steps=100,
    train_batch=8,
    group_size=8,
    rl_steps=18,
    eval_samples=2,
    max_steps=25,
)
SMOKE = Sizes(
    train_games=60,
    seen_games=8,
    unseen_games=8,
    sft_steps=12,
    sft_batch=64,
    analysed=20,
    discriminator_steps=4,
    train_batch=4,
    group_size=4,
    rl_steps=2,
    eval_samples=1,
    max_steps=8,
)
MAX_RECEPTACLES = 10
MAX_OBJECT_CLASSES = 26
DETOUR_RATE = 0.15
ERROR_RATE = 0.1
HISTORY_LENGTH = 2
NUM_RANKS = 2
# One process that trains alone may use all cores; waiting threads must not spin, or two-thread kernels crawl as soon as
# anything else runs.
THREADS = {"OMP_NUM_THREADS": str(os.cpu_count() or 1), "OMP_WAIT_POLICY": "PASSIVE"}


class Quickstart:
    """Paths and phases of one run."""

    def __init__(self, out: Path, sizes: Sizes, seed: int) -> None:
        self.out = out
        self.sizes = sizes
        self.seed = seed
        self.python = os.environ.get("PYTHON", sys.executable)
        self.games = out / "games"
        self.demos = out / "demonstrations.jsonl"
        self.sft_data = out / "sft_data"
        self.init = out / "policy_init"
        self.sft = out / "policy_sft"
        self.credit = out / "credit_analysis.json"
        self.discriminator = out / "discriminator"

    @property
    def start(self) -> Path:
        """The SFT policy: where both RL runs and the discriminator start."""
        return self.sft / f"global_step_{self.sizes.sft_steps}"

    def phases(self) -> list[Phase]:
        """All phases in order."""
        return [*self._policy_phases(), *self._credit_phases(), *self._rl_phases()]

    def _module(self, module: str, *arguments: object) -> list[str]:
        return [self.python, "-m", module, *(str(argument) for argument in arguments)]

    def _policy_phases(self) -> list[Phase]:
        sizes = self.sizes
        generate = self._module(
            "agent_system.environments.env_package.alfworld.generate_games",
            "--out", self.games, "--train", sizes.train_games, "--valid-seen", sizes.seen_games,
            "--valid-unseen", sizes.unseen_games, "--seed", self.seed, "--max-receptacles", MAX_RECEPTACLES,
            "--max-object-classes", MAX_OBJECT_CLASSES,
        )  # fmt: skip
        collect = self._module(
            "agent_system.step_discriminator.trajectory_analyzer.collect",
            "--data-dir", self.games, "--split", "train", "--out", self.demos, "--num", sizes.train_games,
            "--detour-rate", DETOUR_RATE, "--error-rate", ERROR_RATE, "--seed", self.seed,
        )  # fmt: skip
        rows = self._module(
            "examples.quickstart.sft_data", "--trajectories", self.demos, "--out", self.sft_data,
            "--prompt-style", "compact", "--history-length", HISTORY_LENGTH, "--seed", self.seed,
        )  # fmt: skip
        policy = self._module(
            "examples.quickstart.tiny_policy", "--texts", self.sft_data / "train.parquet", "--out", self.init,
            "--seed", self.seed,
        )  # fmt: skip
        sft = self._module(
            "verl.trainer.fsdp_sft_trainer",
            f"data.train_files={self.sft_data / 'train.parquet'}",
            f"data.val_files={self.sft_data / 'val.parquet'}",
            "data.prompt_key=prompt",
            "data.response_key=response",
            "data.prompt_dict_keys=[]",
            f"data.train_batch_size={sizes.sft_batch}",
            "data.micro_batch_size_per_gpu=64",
            "data.max_length=512",
            "data.truncation=right",
            f"model.partial_pretrain={self.init}",
            "optim.name=muon",
            "data.prompt_loss_weight=0.3",
            "optim.lr=1e-2",
            "optim.muon_lr=0.02",
            f"trainer.total_training_steps={sizes.sft_steps}",
            "trainer.total_epochs=20",
            f"trainer.default_local_dir={self.sft}",
            "trainer.default_hdfs_dir=null",
            "trainer.device=cpu",
            f"trainer.seed={self.seed}",
        )
        return [
            Phase(
                "games", f"generate {sizes.train_games:,} training games and two held-out sets", generate, self.games
            ),
            Phase("demonstrations", "play every training game with the explorer expert", collect, self.demos),
            Phase("sft_data", "write the demonstrations as SFT rows", rows, self.sft_data / "train.parquet"),
            Phase("policy_init", "train a tokenizer, initialise a tiny policy", policy, self.init),
            Phase("sft", "SFT of the policy on the demonstrations", sft, self.start, THREADS, sizes.sft_steps),
        ]

    def _credit_phases(self) -> list[Phase]:
        sizes = self.sizes
        stage1 = [
            "bash", str(ROOT / "agent_system/step_discriminator/trajectory_analyzer/run_credit_analysis_alfworld.sh"),
            f"DATA_DIR={self.games}", "SPLIT=train", f"NUM={sizes.analysed}", f"DETOUR_RATE={DETOUR_RATE}",
            f"ERROR_RATE={ERROR_RATE}", f"SEED={self.seed + 1}", f"OUT_DIR={self.out}",
        ]  # fmt: skip
        stage2 = [
            "bash", str(ROOT / "agent_system/step_discriminator/discriminator_trainer/run_training_alfworld.sh"),
            str(self.credit), f"MODEL={self.start}", f"OUT_DIR={self.discriminator}", "MAX_LENGTH=1024", "DEVICE=cpu",
            f"SEED={self.seed}", "model.enable_gradient_checkpointing=False", "data.train_batch_size=64",
            "data.micro_batch_size_per_gpu=32", "optim.lr=1e-3",
            f"trainer.total_training_steps={sizes.discriminator_steps}", "trainer.total_epochs=20",
            "trainer.logger=[console]",
        ]  # fmt: skip
        done = self.discriminator / "report.json"
        return [
            Phase("credit_analysis", f"stage 1: credit analysis of {sizes.analysed:,} episodes", stage1, self.credit),
            Phase(
                "discriminator",
                "stage 2: train the step discriminator",
                stage2,
                done,
                THREADS,
                sizes.discriminator_steps,
            ),
        ]

    def _rl_phases(self) -> list[Phase]:
        sizes = self.sizes
        grpo = ["bash", str(ROOT / "examples/grpo_trainer/run_alfworld.sh"), "hf", *self._rl_overrides("grpo")]
        evolve = [
            "bash", str(ROOT / "examples/traj_evolve_trainer/run_alfworld.sh"), "hf",
            *self._rl_overrides("traj_evolve"),
            "trainer.val_before_train=False",
            f"traj_evolve.discriminator_model_path={self.discriminator / 'model'}",
            "traj_evolve.discriminator_lr=3e-4",
            f"traj_evolve.evolve_freq={max(1, sizes.rl_steps // 4)}",
            "traj_evolve.update_batch_size=64",
            "traj_evolve.micro_batch_size_per_gpu=32",
        ]  # fmt: skip
        report = self._module(
            "examples.quickstart.report", "--out", self.out, "--games", self.games, "--steps", sizes.rl_steps
        )
        last = f"validation/step_{sizes.rl_steps}.json"
        return [
            Phase("grpo", f"GRPO, {sizes.rl_steps} steps", grpo, self.out / "grpo" / last, {}, sizes.rl_steps),
            Phase(
                "traj_evolve", f"stage 3: TrajEvolve, {sizes.rl_steps} steps", evolve,
                self.out / "traj_evolve" / last, {}, sizes.rl_steps,
            ),
            Phase("report", "replay the evaluation episodes, compare", report, self.out / "summary.json"),
        ]  # fmt: skip

    def _rl_overrides(self, name: str) -> list[str]:
        """What turns the launch scripts' GPU settings into a run of the tiny policy on two cores."""
        sizes = self.sizes
        return [
            "trainer.device=cpu",
            f"trainer.n_gpus_per_node={NUM_RANKS}",
            "trainer.logger=[console,tensorboard]",
            f"trainer.default_local_dir={self.out / name}",
            "trainer.project_name=quickstart",
            f"trainer.experiment_name={name}",
            f"trainer.total_epochs={sizes.rl_steps}",
            f"trainer.save_freq={sizes.rl_steps}",
            f"trainer.test_freq={sizes.rl_steps}",
            f"data.train_batch_size={sizes.train_batch}",
            f"data.val_batch_size={sizes.unseen_games}",
            "data.max_prompt_length=256",
            "data.max_response_length=24",
            f"actor_rollout_ref.model.path={self.start}",
            "actor_rollout_ref.model.use_remove_padding=False",
            "actor_rollout_ref.model.enable_gradient_checkpointing=False",
            "actor_rollout_ref.actor.use_kl_loss=False",
            "actor_rollout_ref.actor.entropy_coeff=0",
            "actor_rollout_ref.actor.optim.lr=5e-4",
            "actor_rollout_ref.actor.ppo_mini_batch_size=320",
            "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=80",
            "actor_rollout_ref.actor.checkpoint.contents=[model,optimizer,extra,hf_model]",
            "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=160",
            "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
            "actor_rollout_ref.rollout.val_kwargs.temperature=1.0",
            f"actor_rollout_ref.rollout.val_kwargs.n={sizes.eval_samples}",
            f"env.seed={self.seed}",
            f"env.max_steps={sizes.max_steps}",
            f"env.rollout.n={sizes.group_size}",
            f"env.history_length={HISTORY_LENGTH}",
            f"env.alfworld.data_dir={self.games}",
            "env.alfworld.prompt_style=compact",
            "env.alfworld.eval_dataset=eval_out_of_distribution",
        ]


def prepare_out(out: Path, options: dict[str, object], *, fresh: bool) -> None:
    """Make the output folder, or check that what is there was made with the same options.

    Raises:
        UserError: the folder holds a run with other options.
    """
    record = out / "options.json"
    if fresh and record.is_file():
        shutil.rmtree(out)
    if record.is_file():
        before = json.loads(record.read_text(encoding="utf-8"))
        if before != options:
            raise UserError(f"{out} holds a run with other options ({before}); use --fresh to replace it, or --out")
    elif out.exists() and any(out.iterdir()):
        raise UserError(f"{out} exists and is not a quickstart folder; choose another with --out")
    out.mkdir(parents=True, exist_ok=True)
    atomic_write(record, json.dumps(options, indent=1) + "\n")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="The whole pipeline on generated games with a tiny model.")
    parser.add_argument("--smoke", action="store_true", help="every phase, but too short to learn much")
    parser.add_argument("--out", type=Path, help="default outputs/quickstart (outputs/quickstart-smoke with --smoke)")
    parser.add_argument("--seed", type=int, default=0, help="seed of games, demonstrations, training (default 0)")
    parser.add_argument("--fresh", action="store_true", help="start over instead of continuing")
    args = parser.parse_args()
    sizes = SMOKE if args.smoke else FULL
    out = (args.out or ROOT / "outputs" / ("quickstart-smoke" if args.smoke else "quickstart")).resolve()
    started = time.monotonic()
    try:
        prepare_out(out, {"seed": args.seed, **asdict(sizes)}, fresh=args.fresh)
        quickstart = Quickstart(out, sizes, args.seed)
        phases = quickstart.phases()
        runner = PhaseRunner(out, len(phases))
        for phase in phases:
            runner.run(phase)
        log = (out / "logs" / "report.log").read_text(encoding="utf-8")
        print(log.partition("\n")[2], end="")
    except UserError as error:
        sys.stderr.write(f"error: {error}\n")
        raise SystemExit(2) from None
    print(f"finished in {time.monotonic() - started:.0f} s; everything is in {out}")


if __name__ == "__main__":
    main()
