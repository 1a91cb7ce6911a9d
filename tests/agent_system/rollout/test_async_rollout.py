# SPDX-License-Identifier: Apache-2.0
"""`rollout.mode=async` and shrinking batches: the data of the plain loop; generation and environments overlap."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GenerationConfig

from agent_system.environments.vector_env import EnvironmentFailure
from agent_system.multi_turn_rollout import RolloutResult, TrajectoryCollector
from agent_system.multi_turn_rollout.report import OCCUPANCY_TURNS
from agent_system.multi_turn_rollout.seats import make_seats
from tests.helpers.all_slots import play_all_slots
from tests.helpers.fake_actor import FakeActorGroup, choose_command
from tests.helpers.rollout_config import rollout_config
from tests.helpers.tiny import make_tiny_tokenizer
from tests.helpers.toy_env import ToyEnv, ToyManager, TroubleEnv, say, toy_manager
from tests.verl.trainer.toy_run import coded_projection, run_toy, toy_config
from tests.verl.workers.support import make_group, worker_config
from verl.protocol import DataProto
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.workers.fsdp_workers import ActorRolloutRefWorker
from verl.workers.rollout.session import rollout_session


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return make_tiny_tokenizer()


def roll(
    tokenizer: Any, mode: str, tasks: int, group: int, actor: Any = None, manager: Any = None, **changes: Any
) -> RolloutResult:
    collector = TrajectoryCollector(rollout_config(mode=mode, **{"max_steps": 6, **changes}), tokenizer)
    return collector.multi_turn_loop(
        manager or toy_manager(tasks * group),
        actor or FakeActorGroup(tokenizer, choose_command),
        step=1,
        num_tasks=tasks,
        group_size=group,
    )


def assert_same_data(a: RolloutResult, b: RolloutResult) -> None:
    """Rows, their order, and records; engine's log-probs to rounding."""
    assert a.episodes == b.episodes
    for name, column in a.batch.batch.items():
        if column.is_floating_point():
            assert torch.allclose(column, b.batch.batch[name], atol=1e-4), name
        else:
            assert torch.equal(column, b.batch.batch[name]), name
    assert a.batch.non_tensor_batch.keys() == b.batch.non_tensor_batch.keys()
    for name, values in a.batch.non_tensor_batch.items():
        assert (values == b.batch.non_tensor_batch[name]).all(), name


# ---- the loop, with a scripted policy -----------------------------------------------------------------------------


@pytest.mark.parametrize(("tasks", "group", "ranks"), [(2, 3, 1), (3, 4, 2), (1, 5, 1), (1, 1, 3), (5, 1, 1)])
def test_async_gives_the_data_of_sync(tokenizer: Any, tasks: int, group: int, ranks: int) -> None:
    actors = [FakeActorGroup(tokenizer, choose_command, world_size=ranks) for _ in range(2)]
    sync, later = (roll(tokenizer, mode, tasks, group, actor) for mode, actor in zip(("sync", "async"), actors))
    assert_same_data(sync, later)
    seeds = [sorted(s for r in actor.requests for s in r.batch["sampling_seed"].tolist()) for actor in actors]
    assert seeds[0] == seeds[1], "every turn is generated exactly once"
    timeless = [
        {k: v for k, v in r.metrics.items() if not k.startswith("timing_s") and k != "rollout/generate_calls"}
        for r in (sync, later)
    ]
    assert timeless[0] == timeless[1]


def test_environments_step_while_others_generate(tokenizer: Any) -> None:
    actor = FakeActorGroup(tokenizer, choose_command)
    waiting: list[int] = []

    class Manager(ToyManager):
        def step(self, *args: Any, **kwargs: Any) -> Any:
            waiting.append(sum(not answer.fetched for answer in actor.answers))
            return super().step(*args, **kwargs)

    manager = toy_manager(12)
    manager.__class__ = Manager
    result = roll(tokenizer, "async", 3, 4, actor, manager)
    assert len(waiting) == result.metrics["rollout/generate_calls"] > 6
    # Only the last episode of all has nobody to step beside.
    alone = waiting.count(0)
    assert waiting == [1] * (len(waiting) - alone) + [0] * alone and alone < len(waiting) / 3
    waiting.clear()
    roll(tokenizer, "sync", 3, 4, actor, manager)
    assert set(waiting) == {0}


def test_occupancy_and_tokens(tokenizer: Any) -> None:
    result = roll(tokenizer, "async", 3, 4)
    lengths = np.array([len(episode.steps) for episode in result.episodes])
    assert lengths.min() < lengths.max()
    metrics = result.metrics
    reported = {k: v for k, v in metrics.items() if k.startswith("rollout/occupancy/turn_")}
    assert reported == {f"rollout/occupancy/turn_{n}": np.mean(lengths >= n) for n in OCCUPANCY_TURNS if n <= 6}
    assert metrics["rollout/occupancy/mean"] == pytest.approx(lengths.sum() / (12 * lengths.max()))
    assert metrics["rollout/num_tokens"] == int(result.batch.batch["attention_mask"][:, 256:].sum())
    assert {"timing_s/rollout_env", "timing_s/rollout_tokenize", "timing_s/rollout_generate"} <= metrics.keys()


def test_failures_of_either_side_arrive(tokenizer: Any) -> None:
    crash = FakeActorGroup(tokenizer, lambda prompt, seed: say("crash"))
    with pytest.raises(EnvironmentFailure, match=r"slot \d, task toy-"):
        roll(tokenizer, "async", 2, 2, crash, toy_manager(4, factory=TroubleEnv))

    class Broken(FakeActorGroup):
        def submit(self, method_name: str, parts: list[DataProto]) -> Any:
            pending = super().submit(method_name, parts)
            if len(self.answers) == 4:
                pending.result = lambda: 1 // 0  # type: ignore[method-assign, assignment, return-value]
            return pending

    with pytest.raises(ZeroDivisionError):
        roll(tokenizer, "async", 2, 2, Broken(tokenizer, choose_command))


# ---- with a model -------------------------------------------------------------------------------------------------


class Games:
    """TOY played by a random model: any text is a command, so that episodes end at different turns."""

    def __init__(self, model: Path, mode: str = "sync", seed: int = 0) -> None:
        from transformers import AutoTokenizer

        self.tokenizer = AutoTokenizer.from_pretrained(model)
        self.collector = TrajectoryCollector(
            rollout_config(mode=mode, max_steps=6, prompt=160, seed=seed), self.tokenizer
        )

    @staticmethod
    def manager() -> ToyManager:
        manager = toy_manager(12, history_length=0)
        manager.projection_f = coded_projection
        return manager

    def roll(self, group: Any) -> RolloutResult:
        return self.collector.multi_turn_loop(self.manager(), group, step=1, num_tasks=3, group_size=4)


ROLLOUT = {"response_length": 8, "prompt_length": 160}


@pytest.fixture(scope="module")
def model(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with many end tokens, so that responses differ in length."""
    folder = tmp_path_factory.mktemp("terse") / "hf"
    shutil.copytree(tiny_model_dir, folder)
    GenerationConfig(eos_token_id=list(range(2, 60)), pad_token_id=0).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def group(model: Path) -> Any:
    return make_group(worker_config(model, rollout=ROLLOUT))


@pytest.fixture(scope="module")
def sync_result(model: Path, group: Any) -> RolloutResult:
    with rollout_session(group, version=1):
        return Games(model).roll(group)


def test_shrinking_and_async_change_no_training_data(model: Path, group: Any, sync_result: RolloutResult) -> None:
    assert sync_result.metrics["rollout/close_draws"] == 0, "choose another seed: this one leaves a token to rounding"
    lengths = [len(episode.steps) for episode in sync_result.episodes]
    assert min(lengths) < max(lengths)
    tokens = sync_result.batch.batch["attention_mask"][:, 160:].sum(dim=1)
    assert tokens.min() < tokens.max()
    games = Games(model)
    with rollout_session(group, version=2):
        later = Games(model, "async").roll(group)
        manager = games.manager()
        seats = make_seats(manager.draw_tasks(3), 4, "s1")
        whole = play_all_slots(games.collector, games.tokenizer, manager, group, seats, step=1)
    assert_same_data(sync_result, later)
    assert later.metrics["rollout/generate_calls"] > 2 * sync_result.metrics["rollout/generate_calls"]
    for name, column in sync_result.batch.batch.items():
        if column.is_floating_point():
            assert torch.allclose(column, whole.columns[name], atol=1e-4)
        else:
            assert torch.equal(column, whole.columns[name]), name
    assert sync_result.batch.non_tensor_batch["rewards"].tolist() == whole.rewards
    assert whole.finished_tokens > 0
    for result in (sync_result, later):
        assert result.metrics["rollout/num_tokens"] == whole.tokens - whole.finished_tokens


def test_reruns_are_identical_and_members_differ(model: Path, group: Any, sync_result: RolloutResult) -> None:
    with rollout_session(group, version=3):
        again = Games(model).roll(group)
        later = [Games(model, "async").roll(group) for _ in range(2)]
        other = Games(model, seed=1).roll(group)
    assert_same_data(sync_result, again)
    for first, second in ((sync_result, again), later):
        assert torch.equal(first.batch.batch["rollout_log_probs"], second.batch.batch["rollout_log_probs"])
    assert [e.steps for e in other.episodes] != [e.steps for e in again.episodes]
    for start in range(0, 12, 4):
        first = {episode.steps[0].response for episode in again.episodes[start : start + 4]}
        assert len(first) > 1, "members of a group sample with seeds of their own"


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_one_sync_serves_all_turns(model: Path, group: Any, monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    calls: list[str] = []
    engine = group.worker.rollout
    for name in ("update_weights", "release_weights", "advance"):
        original = getattr(engine, name)

        def counted(*args: Any, original: Any = original, name: str = name, **kwargs: Any) -> Any:
            calls.append(name)
            return original(*args, **kwargs)

        monkeypatch.setattr(engine, name, counted)
    with rollout_session(group, version=4):
        result = Games(model, mode).roll(group)
    generations = calls.count("advance")
    assert generations == result.metrics["rollout/generate_calls"] >= result.metrics["rollout/num_turns"] > 2
    assert calls == ["update_weights", *["advance"] * generations, "release_weights"]


def test_training_is_the_same(tiny_model_dir: Path, tmp_path: Path) -> None:
    """Two steps and a validation: every number but seconds."""
    logged = {}
    for mode in ("sync", "async"):
        overrides = ("trainer.total_epochs=2", "trainer.test_freq=2", f"actor_rollout_ref.rollout.mode={mode}")
        lines = run_toy(toy_config(tiny_model_dir, tmp_path / mode, *overrides))[1]
        ignored = ("timing", "perf/", "rollout/generate_calls", "training/rollout_probs_diff")
        logged[mode] = [{k: v for k, v in line.items() if not k.startswith(ignored)} for line in lines]
    assert len(logged["sync"]) == 2 and "val/success_rate" in logged["sync"][1]
    assert logged["sync"] == logged["async"]


class SleepyActor(Worker):
    """Generates for a while; answers as the scripted policy does."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.actor = FakeActorGroup(make_tiny_tokenizer(), choose_command)

    @register(dispatch_mode=Dispatch.DP_COMPUTE)
    def generate_some(self, data: DataProto) -> DataProto:
        answer = self.actor.generate_some(data)
        time.sleep(self.seconds * len(answer))
        answer.meta_info["generate_s"] = self.seconds * len(answer)
        return answer


class SleepyEnv(ToyEnv):
    """Every step takes a while."""

    def step(self, action: str) -> tuple[str, float, bool, dict[str, Any]]:
        time.sleep(0.02)
        return super().step(action)


def ray_group(worker_cls: type[Worker], ranks: int, *args: Any, **kwargs: Any) -> Iterator[Any]:
    from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup

    pool = RayResourcePool([ranks], use_gpu=False, cpus_per_rank=0.5)
    made = RayWorkerGroup(pool, RayClassWithInitArgs(worker_cls, *args, **kwargs))
    yield made
    made.shutdown()
    pool.shutdown()


def test_waiting_is_hidden_on_ray(tokenizer: Any, ray_session: None) -> None:
    """Generation and steps take 20 ms a row each, so either can hide behind the other."""
    for actor in ray_group(SleepyActor, 1, 0.02):
        results = {
            mode: roll(tokenizer, mode, 4, 3, actor, toy_manager(12, factory=SleepyEnv)) for mode in ("sync", "async")
        }
    assert_same_data(results["sync"], results["async"])
    for mode, result in results.items():
        metrics = result.metrics
        took = 0.02 * metrics["rollout/num_rows"]
        assert metrics["timing_s/rollout_engine"] == pytest.approx(took)
        assert metrics["timing_s/rollout_env"] >= took
        if mode == "sync":
            assert metrics["timing_s/rollout_generate"] >= took
        else:
            assert metrics["timing_s/rollout_generate"] < 0.5 * took


@pytest.mark.slow
def test_ranks_and_processes_change_nothing(model: Path, sync_result: RolloutResult, ray_session: None) -> None:
    config = worker_config(model, rollout=ROLLOUT)
    for ranks in (1, 2):
        for actor in ray_group(ActorRolloutRefWorker, ranks, config, role="actor_rollout", device="cpu"):
            actor.init_model()
            for version, mode in enumerate(("sync", "async")):
                with rollout_session(actor, version):
                    assert_same_data(sync_result, Games(model, mode).roll(actor))
