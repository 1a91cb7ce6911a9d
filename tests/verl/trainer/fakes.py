# SPDX-License-Identifier: Apache-2.0
"""Stand-ins around the trainer: a policy that is one number, episodes made from a seed, and a recording hook."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import torch

from verl.protocol import DataProto
from verl.single_controller.base import ClassWithInitArgs, Worker, WorkerGroup
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.local import create_local_colocated
from verl.trainer.ppo.recipes import TrainerContext, TrainerHook

PROMPT, RESPONSE, TURNS = 4, 3, 2


def first_tokens(data: DataProto) -> list[int]:
    """Tells the rows of a fake rollout apart."""
    tokens: list[int] = data.batch["input_ids"][:, 0].tolist()
    return tokens


class FakePolicy(Worker):
    """A policy whose only parameter is `weight`; an update adds the advantage-weighted token count to it."""

    log: ClassVar[list[str]] = []

    def __init__(self) -> None:
        super().__init__()
        self.weight = 0.0
        self.columns: list[set[str]] = []
        self.rows: list[list[int]] = []

    @register(Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        self.log.append("init_model")

    @register(Dispatch.ONE_TO_ALL)
    def start_rollout(self, version: int) -> None:
        self.log.append(f"start_rollout {version}")

    @register(Dispatch.ONE_TO_ALL)
    def end_rollout(self) -> None:
        self.log.append("end_rollout")

    @register(Dispatch.DP_COMPUTE_PROTO)
    def compute_log_prob(self, data: DataProto) -> DataProto:
        self.log.append("compute_log_prob")
        shape = data.batch["responses"].shape
        return DataProto.from_dict({"old_log_probs": torch.full(shape, -1.0), "entropys": torch.full(shape, 0.5)})

    @register(Dispatch.DP_COMPUTE_PROTO)
    def compute_ref_log_prob(self, data: DataProto) -> DataProto:
        self.log.append("compute_ref_log_prob")
        return DataProto.from_dict({"ref_log_prob": torch.full(data.batch["responses"].shape, -1.5)})

    @register(Dispatch.DP_COMPUTE_PROTO)
    def update_actor(self, data: DataProto) -> DataProto:
        self.log.append("update_actor")
        self.columns.append(set(data.batch.keys()))
        self.rows.append(first_tokens(data))
        mask = data.batch["response_mask"]
        self.weight += float((data.batch["advantages"].abs() * mask).sum())
        return DataProto(meta_info={"metrics": {"actor/pg_loss": self.weight, "actor/grad_norm": 1.0}})

    @register(Dispatch.ONE_TO_ALL)
    def save_checkpoint(self, local_path: str, global_step: int) -> None:
        self.log.append(f"save_checkpoint {global_step}")
        Path(local_path).mkdir(parents=True)
        (Path(local_path) / "weight").write_text(repr(self.weight))

    @register(Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, local_path: str) -> None:
        self.log.append("load_checkpoint")
        self.weight = float((Path(local_path) / "weight").read_text())


class FakeCritic(Worker):
    """A value model that is one number; an update moves it by the sum of the returns. Writes into the policy's log."""

    def __init__(self) -> None:
        super().__init__()
        self.value = 0.0
        self.columns: list[set[str]] = []
        self.rows: list[list[int]] = []

    @register(Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        FakePolicy.log.append("critic init_model")

    @register(Dispatch.DP_COMPUTE_PROTO)
    def compute_values(self, data: DataProto) -> DataProto:
        FakePolicy.log.append("compute_values")
        mask = data.batch["attention_mask"][:, -RESPONSE:]
        return DataProto.from_dict({"values": (self.value + 0.1 * torch.arange(RESPONSE)) * mask})

    @register(Dispatch.DP_COMPUTE_PROTO)
    def update_critic(self, data: DataProto) -> DataProto:
        FakePolicy.log.append("update_critic")
        self.columns.append(set(data.batch.keys()))
        self.rows.append(first_tokens(data))
        mask = data.batch["response_mask"]
        self.value += 0.01 * float((data.batch["returns"] * mask).sum())
        return DataProto(meta_info={"metrics": {"critic/vf_loss": self.value, "critic/lr": 1e-5}})

    @register(Dispatch.ONE_TO_ALL)
    def save_checkpoint(self, local_path: str, global_step: int) -> None:
        Path(local_path).mkdir(parents=True)
        (Path(local_path) / "value").write_text(repr(self.value))

    @register(Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, local_path: str) -> None:
        self.value = float((Path(local_path) / "value").read_text())


CORE = {"actor_rollout": FakePolicy, "ref": FakePolicy, "critic": FakeCritic}


def fake_worker_groups(roles: Mapping[str, ClassWithInitArgs]) -> dict[str, WorkerGroup]:
    """The hooks' roles as they are; policy, reference and critic replaced by fakes."""
    given = {name: ClassWithInitArgs(CORE[name]) if name in CORE else spec for name, spec in roles.items()}
    return dict(create_local_colocated(given))


@dataclass
class FakeEnvs:
    """A task stream that counts."""

    position: int = 0
    played: list[int] = field(default_factory=list)

    def take(self, count: int) -> list[int]:
        tasks = list(range(self.position, self.position + count))
        self.position += count
        self.played += tasks
        return tasks

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.position = int(state["position"])


class FakeCollector:
    """Episodes of two turns; whether one succeeds depends on its task and member only.

    ``dull``: tasks whose episodes all fail.
    """

    def __init__(self, dull: Callable[[int], bool] = lambda task: False) -> None:
        self.dull = dull

    @staticmethod
    def merge(parts: Sequence[Any], uids: Collection[str]) -> Any:
        rows = [part.batch[np.isin(part.batch.non_tensor_batch["uid"].astype(str), sorted(uids))] for part in parts]
        metrics = {"rollout/num_rows": sum(part.metrics["rollout/num_rows"] for part in parts)}
        episodes = [e for part in parts for e in part.episodes if e.split()[1].rsplit("-", 1)[0] in uids]
        batch = DataProto.concat([part for part in rows if len(part)])
        return SimpleNamespace(batch=batch, episodes=episodes, metrics=metrics)

    def multi_turn_loop(
        self,
        envs: FakeEnvs,
        actor_rollout_wg: Any,
        *,
        step: int,
        num_tasks: int,
        group_size: int,
        generation: int = 0,
    ) -> Any:
        columns: dict[str, list[Any]] = {}
        rows = 0
        for group, task in enumerate(envs.take(num_tasks), start=generation * num_tasks):
            for member in range(group_size):
                won = (task + member) % 2 == 0 and not self.dull(task)
                for turn in range(TURNS):
                    row = {
                        "uid": f"s{step}-g{group}", "traj_uid": f"s{step}-g{group}-m{member}", "step_index": turn,
                        "rewards": 10.0 * (won and turn == TURNS - 1), "episode_rewards": 10.0 * won,
                        "episode_lengths": float(TURNS), "tool_callings": 0.0, "is_action_valid": turn == 0,
                        "success_rate": 0.5,
                    }  # fmt: skip
                    for name, value in row.items():
                        columns.setdefault(name, []).append(value)
                    rows += 1
        mask = torch.ones(rows, PROMPT + RESPONSE, dtype=torch.int64)
        mask[::2, -1] = 0
        ids = torch.arange(rows * (PROMPT + RESPONSE)).reshape(rows, -1) % 50
        tensors = {
            "prompts": ids[:, :PROMPT], "responses": ids[:, PROMPT:], "input_ids": ids, "attention_mask": mask,
            "position_ids": mask.cumsum(-1) - 1, "rollout_log_probs": torch.full((rows, RESPONSE), -1.0),
        }  # fmt: skip
        batch = DataProto.from_dict(tensors, {k: np.array(v, dtype=object) for k, v in columns.items()})
        episodes = [f"episode {uid}" for uid in dict.fromkeys(columns["traj_uid"])]
        return SimpleNamespace(batch=batch, episodes=episodes, metrics={"rollout/num_rows": float(rows)})


class FakeValidator:
    """Counts its calls."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def validate(self, envs: Any, actor_rollout_wg: Any, *, step: int) -> Any:
        self.steps.append(step)
        samples = [(f"task {number}", f"answer {number}@{step}", 1.0) for number in range(9)]
        return SimpleNamespace(metrics={"val/success_rate": 0.5}, samples=samples)


class FakeTokenizer:
    def batch_decode(self, ids: torch.Tensor, skip_special_tokens: bool) -> list[str]:
        return [" ".join(str(token) for token in row) for row in ids.tolist()]


def episode_rewards(batch: DataProto, return_dict: bool = False) -> dict[str, Any]:
    """The episode's reward at each row's last token."""
    mask = batch.batch["attention_mask"][:, -RESPONSE:]
    scores = torch.zeros(mask.shape)
    rewards = torch.as_tensor(batch.non_tensor_batch["episode_rewards"].astype(np.float32))
    scores[torch.arange(len(scores)), mask.sum(-1) - 1] = rewards
    return {"reward_tensor": scores, "reward_extra_info": {}}


class ExtraWorker(Worker):
    """A role that a recipe adds beside the actor."""

    @register(Dispatch.ONE_TO_ALL)
    def ping(self) -> str:
        return "pong"


class RecordingHook(TrainerHook):
    """Writes down every call and which columns it saw."""

    name = "recording"

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.calls: list[str] = []
        self.seen: dict[str, set[str]] = {}
        self.epochs: list[int] = []
        self.num_rows: list[int] = []
        self.uids: list[list[str]] = []
        self.restored: dict[str, Any] = {}

    def worker_roles(self, config: Any) -> dict[str, ClassWithInitArgs]:
        return {"extra": ClassWithInitArgs(ExtraWorker)}

    def _note(self, name: str, ctx: TrainerContext, batch: DataProto | None = None) -> None:
        self.calls.append(f"{ctx.global_step} {name}")
        if batch is not None:
            self.seen.setdefault(name, {*map(str, batch.batch.keys()), *batch.non_tensor_batch})
            ctx.metrics[f"recording/{name}"] = float(len(batch))
            self.num_rows.append(len(batch))

    def init_workers(self, ctx: TrainerContext) -> None:
        self._note("init_workers", ctx)
        assert ctx.worker_groups["extra"].ping() == ["pong"]

    def after_rollout(self, ctx: TrainerContext, batch: DataProto) -> None:
        self._note("after_rollout", ctx, batch)
        assert len(ctx.episodes) == len(set(batch.non_tensor_batch["traj_uid"]))
        with ctx.timer("score_credit"):
            batch.non_tensor_batch["step_credit"] = np.ones(len(batch), dtype=object)

    def after_log_prob(self, ctx: TrainerContext, batch: DataProto) -> None:
        self._note("after_log_prob", ctx, batch)

    def after_reward(self, ctx: TrainerContext, batch: DataProto) -> None:
        self._note("after_reward", ctx, batch)
        assert "step_credit" in batch.non_tensor_batch

    def after_advantage(self, ctx: TrainerContext, batch: DataProto) -> None:
        self._note("after_advantage", ctx, batch)
        self.uids.append(batch.non_tensor_batch["uid"].tolist())

    def epoch_end(self, ctx: TrainerContext, epoch: int) -> None:
        self._note("epoch_end", ctx)
        self.epochs.append(epoch)

    def state_dict(self) -> dict[str, Any]:
        return {"epochs": list(self.epochs)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.epochs = list(state["epochs"])

    def save(self, path: Path) -> None:
        (path / "buffer").write_text(str(len(self.calls)))

    def load(self, path: Path) -> None:
        self.restored["buffer"] = (path / "buffer").read_text()

    def close(self) -> None:
        self.calls.append("close")
