# SPDX-License-Identifier: Apache-2.0
"""The quickstart: generated tasks, a tiny policy, the three stages, GRPO beside TrajEvolve, one table.

Every phase is one of the project's own programs with small settings, as a user would call it; nothing here is special
to the pipeline but the sizes. Run by `examples/quickstart/run.sh`.
"""

import argparse
import json
import os
import shutil
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import ClassVar

from examples.quickstart.phases import Phase, PhaseRunner
from examples.quickstart.profiles import PROFILES, Profile, Sizes
from verl.utils.errors import UserError
from verl.utils.fs import atomic_write

ROOT = Path(__file__).resolve().parents[2]

NUM_RANKS = 2
# One process that trains alone may use all cores; waiting threads must not spin, or two-thread kernels crawl as soon as
# anything else runs.
THREADS = {"OMP_NUM_THREADS": str(os.cpu_count() or 1), "OMP_WAIT_POLICY": "PASSIVE"}


class Quickstart:
    """Paths and phases of one run. A subclass may run other phases from the same start policy."""

    folder: ClassVar[str] = "quickstart"
    """Where a run goes that is not told, below `outputs`."""

    def __init__(self, out: Path, profile: Profile, sizes: Sizes, seed: int) -> None:
        self.out = out
        self.profile = profile
        self.sizes = sizes
        self.seed = seed
        self.python = os.environ.get("PYTHON", sys.executable)
        self.world = out / profile.world
        self.demos = out / "demonstrations.jsonl"
        self.sft_data = out / "sft_data"
        self.init = out / "policy_init"
        self.sft = out / "policy_sft"
        self.credit = out / "credit_analysis.json"
        self.discriminator = out / "discriminator"

    @classmethod
    def sizes_for(cls, profile: Profile, smoke: bool) -> Sizes:
        """The sizes of a full or of a smoke run."""
        return profile.sizes(smoke)

    @property
    def start(self) -> Path:
        """The SFT policy: where both RL runs and the discriminator start."""
        return self.sft / f"global_step_{self.sizes.sft_steps}"

    def phases(self) -> list[Phase]:
        """All phases in order."""
        return [*self._policy_phases(), *self._credit_phases(), *self._rl_phases()]

    def result(self) -> str:
        """What is printed at the end, once all phases are done."""
        log = (self.out / "logs" / "report.log").read_text(encoding="utf-8")
        return log.partition("\n")[2].rstrip("\n")

    def _module(self, module: str, *arguments: object) -> list[str]:
        return [self.python, "-m", module, *(str(argument) for argument in arguments)]

    def _policy_phases(self) -> list[Phase]:
        sizes, profile = self.sizes, self.profile
        options = [text for name, value in sizes.world.items() for text in (f"--{name}", value)]
        generate = self._module(profile.generator, "--out", self.world, "--seed", self.seed, *options)
        collect = self._module(
            "agent_system.step_discriminator.trajectory_analyzer.collect", "--env", profile.name,
            "--data-dir", self.world, "--split", "train", "--out", self.demos, "--num", sizes.demonstrations,
            "--detour-rate", profile.detour_rate, "--error-rate", profile.error_rate, "--seed", self.seed,
        )  # fmt: skip
        rows = self._module(
            "examples.quickstart.sft_data", "--env", profile.name, "--trajectories", self.demos,
            "--out", self.sft_data, "--prompt-style", "compact", "--history-length", profile.history_length,
            "--seed", self.seed,
        )  # fmt: skip
        policy = self._module(
            "examples.quickstart.tiny_policy", "--texts", self.sft_data / "train.parquet", "--out", self.init,
            "--phrases", profile.phrases, "--vocab-size", profile.vocab_size, "--num-phrases", profile.num_phrases,
            "--rows", profile.tokenizer_rows,
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
            f"data.max_length={profile.sft_length}",
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
            *profile.sft_overrides,
        )
        return [
            Phase(profile.world, profile.world_title.format(**sizes.world), generate, self.world),
            Phase(
                "demonstrations",
                f"the explorer expert plays {sizes.demonstrations:,} training {profile.tasks}",
                collect,
                self.demos,
            ),
            Phase("sft_data", "write the demonstrations as SFT rows", rows, self.sft_data / "train.parquet"),
            Phase("policy_init", "train a tokenizer, initialise a tiny policy", policy, self.init),
            Phase("sft", "SFT of the policy on the demonstrations", sft, self.start, THREADS, sizes.sft_steps),
        ]

    def _credit_phases(self) -> list[Phase]:
        sizes, profile = self.sizes, self.profile
        package = ROOT / "agent_system/step_discriminator"
        stage1 = [
            "bash", str(package / f"trajectory_analyzer/run_credit_analysis_{profile.name}.sh"),
            f"DATA_DIR={self.world}", "SPLIT=train", f"NUM={sizes.analysed}", f"DETOUR_RATE={profile.detour_rate}",
            f"ERROR_RATE={profile.error_rate}", f"SEED={self.seed + 1}", f"OUT_DIR={self.out}",
            f"MODE={profile.label_source}", f"LABEL_SOURCE={profile.label_source}",
        ]  # fmt: skip
        stage2 = [
            "bash", str(package / f"discriminator_trainer/run_training_{profile.name}.sh"),
            str(self.credit), f"MODEL={self.start}", f"OUT_DIR={self.discriminator}",
            f"MAX_LENGTH={profile.discriminator_length}", "DEVICE=cpu", f"SEED={self.seed}",
            "model.enable_gradient_checkpointing=False", f"data.train_batch_size={sizes.discriminator_batch}",
            "data.micro_batch_size_per_gpu=32", f"optim.lr={profile.discriminator_lr}",
            f"trainer.total_training_steps={sizes.discriminator_steps}", "trainer.total_epochs=20",
            "trainer.logger=[console]", *profile.discriminator_overrides,
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
        script = f"run_{self.profile.name}.sh"
        grpo = ["bash", str(ROOT / "examples/grpo_trainer" / script), "hf", *self._rl_overrides("grpo")]
        evolve = [
            "bash", str(ROOT / "examples/traj_evolve_trainer" / script), "hf",
            *self._rl_overrides("traj_evolve"),
            "trainer.val_before_train=False",
            f"traj_evolve.discriminator_model_path={self.discriminator / 'model'}",
            f"traj_evolve.label_source={self.profile.label_source}",
            "traj_evolve.discriminator_lr=3e-4",
            f"traj_evolve.evolve_freq={max(1, sizes.rl_steps // 4)}",
            "traj_evolve.update_batch_size=64",
            "traj_evolve.micro_batch_size_per_gpu=32",
        ]  # fmt: skip
        report = self._module(
            "examples.quickstart.report", "--env", self.profile.name, "--out", self.out, "--data-dir", self.world,
            "--steps", sizes.rl_steps,
        )  # fmt: skip
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
        sizes, profile = self.sizes, self.profile
        specific = [text.format(world=self.world, held_out=sizes.held_out) for text in profile.overrides]
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
            f"data.val_batch_size={sizes.held_out}",
            f"data.max_prompt_length={profile.max_prompt_length}",
            f"data.max_response_length={profile.max_response_length}",
            f"actor_rollout_ref.model.path={self.start}",
            "actor_rollout_ref.model.use_remove_padding=False",
            "actor_rollout_ref.model.enable_gradient_checkpointing=False",
            "actor_rollout_ref.actor.use_kl_loss=False",
            "actor_rollout_ref.actor.entropy_coeff=0",
            "actor_rollout_ref.actor.optim.lr=5e-4",
            f"actor_rollout_ref.actor.ppo_mini_batch_size={profile.mini_batch}",
            "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=80",
            "actor_rollout_ref.actor.checkpoint.contents=[model,optimizer,extra,hf_model]",
            "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=160",
            "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
            "actor_rollout_ref.rollout.val_kwargs.temperature=1.0",
            f"actor_rollout_ref.rollout.val_kwargs.n={sizes.eval_samples}",
            f"env.seed={self.seed}",
            f"env.max_steps={sizes.max_steps}",
            f"env.rollout.n={sizes.group_size}",
            f"env.history_length={profile.history_length}",
            *specific,
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


def default_out(folder: str, profile: Profile, smoke: bool) -> Path:
    """Where a run goes that is not told: `outputs/FOLDER[-ENV][-smoke]`, ENV unless it is the first profile."""
    first = next(iter(PROFILES))
    parts = [folder, *([] if profile.name == first else [profile.name]), *(["smoke"] if smoke else [])]
    return ROOT / "outputs" / "-".join(parts)


def run_program(pipeline: type[Quickstart], description: str) -> None:
    """Command line of a pipeline: run its phases, print its result."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument(
        "--env", choices=PROFILES, default=next(iter(PROFILES)), help="environment (default %(default)s)"
    )
    parser.add_argument("--smoke", action="store_true", help="every phase, but too short to learn much")
    parser.add_argument(
        "--out", type=Path, help=f"default outputs/{pipeline.folder}, with -ENV and -smoke as they apply"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of tasks, demonstrations, training (default 0)")
    parser.add_argument("--fresh", action="store_true", help="start over instead of continuing")
    args = parser.parse_args()
    profile = PROFILES[args.env]
    sizes = pipeline.sizes_for(profile, args.smoke)
    out = (args.out or default_out(pipeline.folder, profile, args.smoke)).resolve()
    started = time.monotonic()
    try:
        prepare_out(out, {"env": profile.name, "seed": args.seed, **asdict(sizes)}, fresh=args.fresh)
        run = pipeline(out, profile, sizes, args.seed)
        phases = run.phases()
        runner = PhaseRunner(out, len(phases))
        for phase in phases:
            runner.run(phase)
        print(run.result())
    except UserError as error:
        sys.stderr.write(f"error: {error}\n")
        raise SystemExit(2) from None
    print(f"finished in {time.monotonic() - started:.0f} s; everything is in {out}")


def main() -> None:
    """Command line."""
    run_program(Quickstart, "The whole pipeline on generated tasks with a tiny model.")


if __name__ == "__main__":
    main()
