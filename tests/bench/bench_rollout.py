# SPDX-License-Identifier: Apache-2.0
"""One ALFWorld rollout, many ways: `python -m tests.bench.bench_rollout [--quick] [--engines hf,vllm]`.

With and without shrinking, `rollout.mode` sync and async, fast environments and slow ones, every engine that is
installed: the same generated games, the same tiny policy with random weights, the same sampling seeds. What a random
policy says wins nothing, so the commands come from a scripted explorer (one member of each group only looks around),
and every twentieth token ends a response: episodes end at different turns and responses differ in length, as those of a
trained policy do. The engine runs in a Ray actor, the environments in two more.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import packages_distributions
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from agent_system.environments.env_package.alfworld.envs import AlfworldEnv
from agent_system.environments.env_package.alfworld.experts import Explorer
from agent_system.environments.env_package.alfworld.game import AlfworldGame
from agent_system.environments.env_package.alfworld.generate import generate_games
from agent_system.environments.env_package.alfworld.manager import AlfWorldEnvironmentManager
from agent_system.environments.env_package.alfworld.manifest import load_manifest
from agent_system.environments.env_package.alfworld.projection import alfworld_projection
from agent_system.environments.ray_vector_env import RayVectorEnv
from tests.bench.table import environment_line, print_table
from verl.utils.import_utils import is_installed

STEP = 1
SLOW_STEP_S = 0.01
PROMPT, RESPONSE = 640, 48


@dataclass(frozen=True)
class Size:
    """How much is played."""

    tasks: int
    members: int
    max_steps: int
    repeat: int
    layers: int
    hidden: int


FULL = Size(tasks=6, members=4, max_steps=24, repeat=2, layers=4, hidden=128)
QUICK = Size(tasks=2, members=3, max_steps=14, repeat=1, layers=2, hidden=64)


class SlowEnv(AlfworldEnv):
    """A game whose steps take a while, as those of a remote or a simulated world do."""

    def step(self, action: str) -> tuple[str, float, bool, dict[str, Any]]:
        time.sleep(SLOW_STEP_S)
        return super().step(action)


@dataclass(frozen=True)
class Slots:
    """Makes the slots of one kind; picklable."""

    data_dir: str
    slow: bool

    def __call__(self) -> AlfworldEnv:
        return (SlowEnv if self.slow else AlfworldEnv)(self.data_dir)


class ScriptedManager(AlfWorldEnvironmentManager):
    """Plays each slot's list of commands, whatever the policy says; after the list, it looks around."""

    plans: Sequence[Sequence[str]] = ()

    def step(self, text_actions: Sequence[str], slots: Sequence[int] | None = None) -> Any:
        assert slots is not None and len(slots) == len(text_actions)
        texts = []
        for slot in slots:
            turn, plan = len(self.history(slot)), self.plans[slot]
            texts.append(f"<think></think><action>{plan[turn] if turn < len(plan) else 'look'}</action>")
        return super().step(texts, slots)


class CountingGroup:
    """A worker group that counts the tokens it is made to generate."""

    def __init__(self, group: Any) -> None:
        self.group = group
        self.world_size = group.world_size
        self.tokens = 0

    def submit(self, method_name: str, data: Any) -> Any:
        pending = self.group.submit(method_name, data)
        return SimpleNamespace(result=lambda: self._count(pending.result()))

    def _count(self, parts: Any) -> Any:
        self.tokens += sum(int(part.batch["attention_mask"][:, PROMPT:].sum()) for part in parts)
        return parts


def explore(path: Path, rate: float, seed: int, max_steps: int) -> list[str]:
    """An explorer's commands up to its success or the limit."""
    game = AlfworldGame(path)
    observation, info = game.reset()
    explorer = Explorer(game, np.random.default_rng(seed), rate, max_steps=max_steps)
    commands: list[str] = []
    while not info["won"] and len(commands) < max_steps:
        commands.append(explorer.act(observation, info).action)
        observation, _, _, info = game.step(commands[-1])
    return commands


class World:
    """Games, plans, policy and configuration of one run of this program."""

    def __init__(self, folder: Path, size: Size) -> None:
        from transformers import AutoConfig, GenerationConfig

        from tests.helpers.tiny import make_tiny_model

        self.size = size
        root = generate_games(folder / "games", train=size.tasks, valid_seen=0, valid_unseen=0, seed=5)
        manifest = load_manifest(root, "train")
        self.data_dir = str(manifest.data_dir)
        self.tasks = [{"gamefile": g.path, "sha256": g.sha256, "task_type": g.task_type} for g in manifest.games]
        self.plans = [
            explore(Path(self.data_dir) / task["gamefile"], 0.3 * member, 100 * number + member, size.max_steps)
            if member < size.members - 1
            else []
            for number, task in enumerate(self.tasks)
            for member in range(size.members)
        ]
        texts = self._texts()
        # Heads of 32 numbers: vLLM's attention for the CPU takes no smaller ones.
        heads = size.hidden // 32
        self.model = make_tiny_model(
            folder / "model", hidden_size=size.hidden, num_layers=size.layers, num_heads=heads,
            num_kv_heads=max(1, heads // 2), intermediate_size=4 * size.hidden, vocab_size=1000, texts=texts,
        )  # fmt: skip
        ends = range(2, 2 + AutoConfig.from_pretrained(self.model).vocab_size // 20)
        GenerationConfig(eos_token_id=list(ends), pad_token_id=0).save_pretrained(self.model)

    def _texts(self) -> list[str]:
        texts = []
        for task in self.tasks:
            game = AlfworldGame(Path(self.data_dir) / task["gamefile"])
            observation, info = game.reset()
            texts += [observation, *info["admissible_commands"]]
        return texts

    @contextmanager
    def manager(self, slow: bool) -> Iterator[ScriptedManager]:
        config: Any = SimpleNamespace(
            env=SimpleNamespace(history_length=2, alfworld=SimpleNamespace(prompt_style="compact"))
        )
        envs = RayVectorEnv(Slots(self.data_dir, slow), len(self.plans), 2)
        manager = ScriptedManager(envs, alfworld_projection, config, tasks=self.tasks)
        manager.plans = self.plans
        # Actors start with their first reset, which is not what is timed.
        manager.reset({"tasks": [task for task in self.tasks for _ in range(self.size.members)]})
        try:
            yield manager
        finally:
            manager.close()

    def collector(self, mode: str) -> Any:
        from transformers import AutoTokenizer

        from agent_system.multi_turn_rollout import TrajectoryCollector
        from tests.helpers.rollout_config import rollout_config

        config = rollout_config(mode=mode, max_steps=self.size.max_steps, prompt=PROMPT)
        return TrajectoryCollector(config, AutoTokenizer.from_pretrained(self.model))

    @contextmanager
    def group(self, engine: str) -> Iterator[Any]:
        from tests.verl.workers.support import worker_config
        from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
        from verl.workers.fsdp_workers import ActorRolloutRefWorker
        from verl.workers.rollout.session import rollout_session

        rollout = {
            "name": engine, "prompt_length": PROMPT, "response_length": RESPONSE, "tensor_model_parallel_size": 1,
        }  # fmt: skip
        pool = RayResourcePool([1], use_gpu=False)
        init = RayClassWithInitArgs(
            ActorRolloutRefWorker, worker_config(self.model, rollout=rollout), role="actor_rollout", device="cpu"
        )
        group = RayWorkerGroup(pool, init)
        try:
            group.init_model()
            with rollout_session(group, version=STEP):
                yield group
        finally:
            group.shutdown()
            pool.shutdown()


@dataclass
class Run:
    """The quickest of several equal rollouts."""

    seconds: float
    tokens: int
    live_tokens: int
    responses: Any
    """(rows, R): to be compared between runs of one engine."""
    metrics: dict[str, float]


def collected(world: World, group: Any, manager: ScriptedManager, mode: str) -> Run:
    """Through the collector."""
    collector = world.collector(mode)
    best: Run | None = None
    for _ in range(world.size.repeat):
        counter = CountingGroup(group)
        start = time.perf_counter()
        result = collector.multi_turn_loop(
            manager, counter, step=STEP, num_tasks=world.size.tasks, group_size=world.size.members, tasks=world.tasks
        )
        seconds = time.perf_counter() - start
        live = int(result.batch.batch["attention_mask"][:, PROMPT:].sum())
        if best is None or seconds < best.seconds:
            best = Run(seconds, counter.tokens, live, result.batch.batch["responses"], result.metrics)
    assert best is not None
    return best


def unshrunk(world: World, group: Any, manager: ScriptedManager) -> Run:
    """Every slot at every turn."""
    from transformers import AutoTokenizer

    from agent_system.multi_turn_rollout.seats import make_seats
    from tests.helpers.all_slots import play_all_slots

    seats = make_seats(world.tasks, world.size.members, f"s{STEP}")
    tokenizer = AutoTokenizer.from_pretrained(world.model)
    best: Run | None = None
    for _ in range(world.size.repeat):
        start = time.perf_counter()
        whole = play_all_slots(world.collector("sync"), tokenizer, manager, group, seats, step=STEP)
        seconds = time.perf_counter() - start
        if best is None or seconds < best.seconds:
            best = Run(seconds, whole.tokens, whole.tokens - whole.finished_tokens, whole.columns["responses"], {})
    assert best is not None
    return best


def _cells(engine: str, slow: bool, name: str, run: Run, first: Run) -> list[object]:
    def seconds(key: str) -> str:
        return f"{run.metrics[f'timing_s/rollout_{key}']:.2f}" if run.metrics else "-"

    same = int((run.responses == first.responses).all(dim=1).sum())
    step = f"{1000 * SLOW_STEP_S:.0f} ms" if slow else "fast"
    return [
        engine, step, name, run.tokens, run.tokens - run.live_tokens, f"{run.seconds:.2f}", seconds("env"),
        seconds("tokenize"), seconds("generate"), seconds("engine"), f"{same} of {len(first.responses)}",
    ]  # fmt: skip


def measure(world: World, engine: str) -> list[list[object]]:
    """The rows of one engine."""
    rows = []
    with world.group(engine) as group:
        first: Run | None = None
        for slow in (False, True):
            with world.manager(slow) as manager:
                if first is None:
                    # Once untimed: imports, warm caches.
                    collected(world, group, manager, "sync")
                sync = collected(world, group, manager, "sync")
                first = first or sync
                if not slow:
                    rows.append(_cells(engine, slow, "all slots to the end", unshrunk(world, group, manager), first))
                rows.append(_cells(engine, slow, "live rows, sync", sync, first))
                rows.append(_cells(engine, slow, "live rows, async", collected(world, group, manager, "async"), first))
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print a Markdown table."""
    parser = argparse.ArgumentParser(prog="bench_rollout", description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a few short episodes (under 20 s an engine)")
    parser.add_argument("--engines", default="", help="hf, vllm or both, with a comma; default: all installed")
    options = parser.parse_args(arguments)
    size = QUICK if options.quick else FULL
    installed = ["hf", *(["vllm"] if is_installed("vllm") else [])]
    engines = options.engines.split(",") if options.engines else installed
    os.environ.setdefault("OMP_NUM_THREADS", "1")

    import ray

    started = not ray.is_initialized()
    if started:
        ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False)
    try:
        with tempfile.TemporaryDirectory() as name:
            world = World(Path(name), size)
            rows = [row for engine in engines for row in measure(world, engine)]
            lengths = [len(plan) or size.max_steps for plan in world.plans]
    finally:
        if started:
            ray.shutdown()
    print(
        f"{size.tasks} generated games x {size.members} members, at most {size.max_steps} turns (median "
        f"{int(np.median(lengths))}), at most {RESPONSE} tokens a turn; {size.layers} layers of "
        f"width {size.hidden} on one core. Seconds of the quickest of {size.repeat}.\n"
    )
    print_table(
        [
            "engine", "step of an environment", "rollout", "tokens", "of them for finished episodes", "seconds",
            "waited for environments", "prompts and decoding", "waited for generation", "engine at work", "equal rows",
        ],
        rows,
    )  # fmt: skip
    # The package of the CPU build has a name of its own.
    vllm = packages_distributions()["vllm"][:1] if "vllm" in engines else []
    packages = ("torch", "transformers", "ray", *vllm)
    print(f"\n{environment_line(packages)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
