# SPDX-License-Identifier: Apache-2.0
"""Plays episodes with a model behind an OpenAI-compatible chat endpoint.

    python -m examples.prompt_agent.run --env alfworld --base-url http://127.0.0.1:8000/v1 --model NAME \\
        --episodes 100 --out trajectories.jsonl

Prompts, history, projection of the answers and rewards are those of training. The file is what credit analysis reads.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import math
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agent_system.environments.vector_env import EnvironmentFailure
from agent_system.programs import check_output, run_program
from verl.utils.errors import UserError
from verl.utils.fs import atomic_write

if TYPE_CHECKING:
    from agent_system.environments import EnvironmentManagerBase
    from agent_system.multi_turn_rollout.episode_buffer import Seat
    from agent_system.trajectory import Trajectory
    from examples.prompt_agent.client import Endpoint
    from examples.prompt_agent.play import Run
    from examples.prompt_agent.results import EpisodeFile
    from verl.trainer.config.schema import PPOConfig

__all__ = ["build_parser", "main"]


@dataclass(frozen=True)
class _World:
    """One environment as its launch scripts set it."""

    env_name: str
    max_steps: int
    splits: Mapping[str, str | None]
    """Name -> validation set (`eval_dataset`); None for the training tasks, "" where there is one validation set."""


_WORLDS = {
    "alfworld": _World(
        "alfworld/AlfredTWEnv",
        50,
        {"train": None, "valid_seen": "eval_in_distribution", "valid_unseen": "eval_out_of_distribution"},
    ),
    "webshop": _World("Webshop", 15, {"train": None, "val": ""}),
}
_OWN_KEYS = {
    "env.env_name": "--env",
    "env.seed": "--seed",
    "env.rollout.n": "--group-size",
    "env.num_workers": "nothing: episodes are played in this process",
}
_OWN_FIELDS = frozenset({"model", "messages", "stream", "n"})
# Where the data lies and who runs the slots does not change what is played; the tasks' hash says that.
_PLACES = frozenset({"data_dir", "source", "generated"})


def build_parser() -> argparse.ArgumentParser:
    """The command line of this program."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.prompt_agent.run",
        description="Play episodes with a model behind an OpenAI-compatible chat endpoint and write them as "
        "trajectories. The same command continues an interrupted run: episodes that are in the file are not played "
        "again.",
    )
    world = parser.add_argument_group("what is played")
    world.add_argument("--env", required=True, choices=sorted(_WORLDS), help="environment")
    world.add_argument(
        "--split", default="train", help="alfworld: train, valid_seen, valid_unseen; webshop: train, val"
    )
    world.add_argument("--data-dir", type=Path, help="data folder (default: $ALFWORLD_DATA, $WEBSHOP_DATA)")
    world.add_argument("--episodes", type=int, default=50, help="number of episodes (default 50)")
    world.add_argument("--group-size", type=int, default=1, help="episodes of each task (default 1)")
    world.add_argument("--seed", type=int, default=0, help="of the order of tasks and of sampling (default 0)")
    world.add_argument("overrides", nargs="*", metavar="env.KEY=VALUE", help="keys of the environment's configuration")
    model = parser.add_argument_group("who plays")
    model.add_argument("--base-url", required=True, help="address without /chat/completions; usually ends in /v1")
    model.add_argument("--model", required=True, help="the model's name at the endpoint")
    model.add_argument(
        "--api-key-env", default="OPENAI_API_KEY", help="environment variable with the key (default OPENAI_API_KEY)"
    )
    model.add_argument("--temperature", type=float, default=1.0, help="sampling temperature (default 1.0)")
    model.add_argument("--max-tokens", type=int, default=512, help="tokens of an answer (default 512)")
    model.add_argument(
        "--extra-body", default="{}", metavar="JSON", help="further entries of every request; null takes one out"
    )
    wire = parser.add_argument_group("requests")
    wire.add_argument("--concurrency", type=int, default=8, help="episodes at a time, one request each (default 8)")
    wire.add_argument("--max-retries", type=int, default=8, help="tries after the first one of a request (default 8)")
    wire.add_argument("--timeout", type=float, default=120.0, help="seconds for one whole answer (default 120)")
    out = parser.add_argument_group("output")
    out.add_argument("--out", type=Path, required=True, help="trajectory file; FILE.summary.json comes with it")
    out.add_argument("--price-in", type=float, metavar="USD", help="price of a million prompt tokens")
    out.add_argument("--price-out", type=float, metavar="USD", help="price of a million completion tokens")
    out.add_argument("--quiet", action="store_true", help="no progress display")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; returns its exit status."""
    # Intermixed: overrides may stand between the options.
    args = build_parser().parse_intermixed_args(argv)
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    return run_program(
        lambda: _run(args),
        also=(EnvironmentFailure,),
        on_interrupt=f"the finished episodes are in {args.out}; the same command goes on",
    )


def _run(args: argparse.Namespace) -> int:
    _check(args)
    endpoint = _endpoint(args)
    out = check_output(args.out, "--out")
    config = _config(args)
    from examples.prompt_agent.play import Run, plan_seats, run_name
    from examples.prompt_agent.results import EpisodeFile, Prices, summarise, table

    policy = {
        "kind": "prompt_agent",
        "model": args.model,
        "sampling": dict(endpoint.body),
        "seed": args.seed,
    }
    manager = _manager(args, config)
    name = run_name(_identity(args, config, manager, policy))
    seats = plan_seats(manager, args.episodes, args.group_size, name)
    file = EpisodeFile(out, name)
    start, kept = time.monotonic(), len(file.episodes)
    _play(args, config, manager, endpoint, Run(policy, args.seed, config.env.max_steps), file, seats)
    episodes = file.finish(seats)
    prices = None if args.price_in is None else Prices(args.price_in, args.price_out)
    summary = {
        "env_name": manager.env_name,
        "split": manager.split,
        "split_hash": manager.panel_hash,
        "max_steps": config.env.max_steps,
        **summarise(episodes, prices, out),
    }
    atomic_write(out.with_name(f"{out.name}.summary.json"), json.dumps(summary, indent=1, allow_nan=False) + "\n")
    sys.stdout.write(
        f"{table(summary)}{len(file.episodes) - kept} episodes played in {time.monotonic() - start:.0f} s, {kept} were "
        f"there already -> {out}\n"
    )
    return 0


def _check(args: argparse.Namespace) -> None:
    for option in ("episodes", "group_size", "max_tokens", "concurrency"):
        if getattr(args, option) < 1:
            raise UserError(f"--{option.replace('_', '-')} {getattr(args, option)}: must be at least 1.")
    if args.episodes % args.group_size:
        raise UserError(f"--episodes {args.episodes}: must be a multiple of --group-size {args.group_size}.")
    if args.seed < 0:
        raise UserError(f"--seed {args.seed}: must be 0 or more.")
    if not 0 <= args.temperature < math.inf:
        raise UserError(f"--temperature {args.temperature}: must be 0 or more.")
    splits = _WORLDS[args.env].splits
    if args.split not in splits:
        raise UserError(f"--split {args.split}: {args.env} has {', '.join(splits)}.")
    if (args.price_in is None) != (args.price_out is None):
        raise UserError("--price-in and --price-out: give both or none.")
    for option in ("price_in", "price_out"):
        price = getattr(args, option)
        if price is not None and not 0 <= price < math.inf:
            raise UserError(f"--{option.replace('_', '-')} {price}: must be 0 or more.")
    for override in args.overrides:
        key = override.partition("=")[0].lstrip("+~")
        if not key.startswith("env."):
            raise UserError(f"'{override}': only keys of the environment (env.KEY=VALUE) can be set here.")
        if key in _OWN_KEYS:
            raise UserError(f"'{override}': {key} is set with {_OWN_KEYS[key]}.")


def _endpoint(args: argparse.Namespace) -> Endpoint:
    from examples.prompt_agent.client import Endpoint, Retries

    Retries(args.max_retries)
    try:
        extra = json.loads(args.extra_body)
        json.dumps(extra, allow_nan=False)
    except (ValueError, RecursionError) as error:
        raise UserError(f"--extra-body: not JSON ({error}).") from error
    if not isinstance(extra, dict) or _OWN_FIELDS & extra.keys():
        raise UserError(f"--extra-body: give a JSON object without {', '.join(sorted(_OWN_FIELDS))}.")
    return Endpoint(
        base_url=args.base_url,
        model=args.model,
        body={"temperature": args.temperature, "max_tokens": args.max_tokens, **extra},
        api_key=os.environ.get(args.api_key_env, "").strip(),
        key_variable=args.api_key_env,
        timeout_s=args.timeout,
    )


def _config(args: argparse.Namespace) -> PPOConfig:
    """The training configuration with the environment as asked for and one slot."""
    from verl.trainer.config.loading import load_config
    from verl.trainer.config.schema import PPOConfig, build_config

    world = _WORLDS[args.env]
    tree = load_config("ppo_trainer", [f"env.max_steps={world.max_steps}", *args.overrides])
    tree.env.env_name = world.env_name
    tree.env.seed = args.seed
    tree.env.num_workers = 0
    tree.env.rollout.n = 1
    tree.data.train_batch_size = tree.data.val_batch_size = 1
    if args.data_dir is not None:
        tree.env[args.env].data_dir = str(args.data_dir)
    validation_set = world.splits[args.split]
    if validation_set:
        tree.env[args.env].eval_dataset = validation_set
    return build_config(PPOConfig, tree)


def _manager(args: argparse.Namespace, config: PPOConfig) -> EnvironmentManagerBase:
    from agent_system.environments.registry import env_factory

    return env_factory(config.env.env_name)(config, _WORLDS[args.env].splits[args.split] is None)


def _identity(
    args: argparse.Namespace, config: PPOConfig, manager: EnvironmentManagerBase, policy: Mapping[str, Any]
) -> dict[str, Any]:
    """Everything that decides what is played, and how; JSON types."""
    section: dict[str, Any] = asdict(config.env)[args.env]
    return {
        "env_name": manager.env_name,
        "split": manager.split,
        "split_hash": manager.panel_hash,
        "settings": {key: value for key, value in section.items() if key not in _PLACES},
        "max_steps": config.env.max_steps,
        "history_length": config.env.history_length,
        "group_size": args.group_size,
        "policy": dict(policy),
    }


def _play(
    args: argparse.Namespace,
    config: PPOConfig,
    manager: EnvironmentManagerBase,
    endpoint: Endpoint,
    run: Run,
    file: EpisodeFile,
    seats: Sequence[Seat],
) -> None:
    """Play the episodes that the file has not; every one is on disk when it is over."""
    from agent_system.step_discriminator.trajectory_analyzer.progress import progress_bar
    from examples.prompt_agent.client import ChatClient, Retries
    from examples.prompt_agent.play import play

    missing = file.missing(seats)
    lanes = [manager, *(_manager(args, config) for _ in range(min(args.concurrency, len(missing)) - 1))]

    async def session() -> None:
        with progress_bar("episodes", total=len(seats), initial=len(seats) - len(missing), show=not args.quiet) as step:

            def finished(episode: Trajectory) -> None:
                file.add(episode)
                step(1)

            async with ChatClient(endpoint, Retries(args.max_retries), args.concurrency) as client:
                await play(missing, lanes, client, run, finished)

    try:
        asyncio.run(session())
    except UserError as error:
        done = len(seats) - len(file.missing(seats))
        raise UserError(
            f"{error} {done} of {len(seats)} episodes are in {args.out}; the same command plays the others."
        ) from error
    finally:
        for lane in lanes:
            lane.close()


if __name__ == "__main__":
    sys.exit(main())
