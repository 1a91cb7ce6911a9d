# SPDX-License-Identifier: Apache-2.0
"""TrajectoryCollector: plays groups of episodes and returns one row per turn."""

from __future__ import annotations

import hashlib
import logging
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from agent_system.environments.base import EnvironmentManagerBase
from agent_system.multi_turn_rollout.episode_buffer import EpisodeBuffer, Seat, TurnRecord
from agent_system.multi_turn_rollout.settings import RolloutConfigLike, RolloutSettings, Sampling
from agent_system.multi_turn_rollout.tokenize import EncodedTurn, PromptEncoder
from agent_system.trajectory import Trajectory, task_key
from verl.protocol import DataProto, pad_dataproto_to_divisor, unpad_dataproto

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = [
    "ActorRolloutGroup",
    "PlayedEpisodes",
    "RolloutResult",
    "TrajectoryCollector",
    "make_seats",
    "sampling_seed",
]

logger = logging.getLogger(__name__)

# Columns of the engine's answer that become columns of the batch.
_ENGINE_COLUMNS = ("prompts", "responses", "input_ids", "attention_mask", "position_ids", "rollout_log_probs")


class ActorRolloutGroup(Protocol):
    """What the collector needs of the policy's worker group."""

    @property
    def world_size(self) -> int: ...

    def generate_sequences(self, data: DataProto) -> DataProto: ...


@dataclass(frozen=True)
class RolloutResult:
    """One step's episodes."""

    batch: DataProto
    """One row per turn, ordered by episode, then turn."""
    episodes: list[Trajectory]
    metrics: dict[str, float]


@dataclass
class PlayedEpisodes:
    """Episodes before they are made into rows."""

    buffer: EpisodeBuffer
    episodes: list[Trajectory]
    success: dict[str, np.ndarray]
    """Values per success key, as `success_evaluator` returns them."""
    metrics: dict[str, float]


@dataclass
class _Tally:
    """Counters and seconds of one rollout."""

    counts: Counter[str] = field(default_factory=Counter)
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def timer(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start


def sampling_seed(seed: int, scope: str, task: str, member: int, turn: int) -> int:
    """63-bit seed of one generate call of one row: the same wherever and in whatever batch the row is generated."""
    text = f"{seed}|{scope}|{task}|{member}|{turn}"
    digest = hashlib.blake2b(text.encode("utf-8"), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def make_seats(tasks: Sequence[Mapping[str, Any]], group_size: int, prefix: str) -> list[Seat]:
    """`group_size` seats per task, group by group; uids `{prefix}-g{g}` and `{prefix}-g{g}-m{m}`.

    A task that occurs more than once gets members that count on, so that no two of its episodes share a seed.
    """
    seats = []
    seen: Counter[str] = Counter()
    for group, task in enumerate(tasks):
        key = task_key(task)
        for member in range(group_size):
            uid = f"{prefix}-g{group}"
            seats.append(Seat(dict(task), uid, f"{uid}-m{member}", seen[key] * group_size + member))
        seen[key] += 1
    return seats


class TrajectoryCollector:
    """Runs the agent loop for one batch of episodes.

    Each turn, only the episodes that are still running are built into prompts, tokenised, generated and stepped. The
    weights of the engine are the caller's business: it opens one rollout session around the call.
    """

    def __init__(self, config: RolloutConfigLike, tokenizer: PreTrainedTokenizerBase, processor: None = None) -> None:
        """
        Args:
            config: the run's configuration.
            tokenizer: of the policy, with chat template, pad and eos token.
            processor: image processors are not supported; leave it out.
        """
        if processor is not None:
            raise NotImplementedError("image observations are not part of this version")
        self.settings = RolloutSettings.from_config(config)
        self._tokenizer = tokenizer
        self._encoder = PromptEncoder(
            tokenizer,
            self.settings.max_prompt_length,
            self.settings.truncation,
            self.settings.chat_template_kwargs,
        )

    def multi_turn_loop(
        self,
        envs: EnvironmentManagerBase,
        actor_rollout_wg: ActorRolloutGroup,
        *,
        step: int,
        num_tasks: int,
        group_size: int,
        validate: bool = False,
        meta_info: Mapping[str, Any] | None = None,
        tasks: Sequence[Mapping[str, Any]] | None = None,
    ) -> RolloutResult:
        """Play `num_tasks` groups of `group_size` episodes.

        Args:
            step: training step; enters uids and sampling seeds.
            num_tasks: groups; their tasks are drawn from the manager's task order.
            group_size: members of a group, all of the same task.
            validate: sample with `val_kwargs`, uids start with v.
            meta_info: extra entries for the generate calls; wins over the sampling parameters of the config.
            tasks: play these instead of drawing (`num_tasks` of them).

        Returns:
            rows with the columns of the batch contract, the episodes, and metrics `rollout/*`, `episode/*`,
            `timing_s/rollout_*`.
        """
        chosen = envs.draw_tasks(num_tasks) if tasks is None else list(tasks)
        if len(chosen) != num_tasks:
            raise ValueError(f"{len(chosen)} tasks given for num_tasks={num_tasks}")
        seats = make_seats(chosen, group_size, f"{'v' if validate else 's'}{step}")
        played = self.play(envs, actor_rollout_wg, seats, step=step, validate=validate, meta_info=meta_info)
        batch = played.buffer.to_batch(played.success, {})
        return RolloutResult(batch, played.episodes, played.metrics)

    def play(
        self,
        envs: EnvironmentManagerBase,
        actor_rollout_wg: ActorRolloutGroup,
        seats: Sequence[Seat],
        *,
        step: int,
        validate: bool = False,
        meta_info: Mapping[str, Any] | None = None,
        keep_rows: bool = True,
    ) -> PlayedEpisodes:
        """Play one episode per seat; at most `envs.num_slots` of them.

        Args:
            keep_rows: False drops the token tensors as soon as they are decoded (validation needs only episodes).
        """
        if not seats or len(seats) > envs.num_slots:
            raise ValueError(
                f"{len(seats)} episodes for {envs.num_slots} environment slots; 1 to all slots can be used"
            )
        tally = _Tally()
        buffer = EpisodeBuffer(seats)
        sampling = self.settings.val_sampling if validate else self.settings.train_sampling
        # Validation must not depend on when it runs: the same weights give the same episodes.
        scope = "validation" if validate else f"step{step}"
        seeds = _TurnSeeds(self.settings.seed, scope, seats)
        meta = self._meta(sampling, validate, meta_info)

        with tally.timer("env"):
            obs, infos = envs.reset({"tasks": [seat.task for seat in seats]})
        live = np.arange(len(seats))
        for turn in range(self.settings.max_steps):
            with tally.timer("tokenize"):
                encoded = self._encode(envs, obs["text"], live, tally)
            with tally.timer("generate"):
                output = self._generate(actor_rollout_wg, encoded, seeds.of(live, turn), meta)
            with tally.timer("tokenize"):
                texts = self._decode(output)
            with tally.timer("env"):
                next_obs, rewards, dones, next_infos = envs.step(texts, live.tolist())
            buffer.add(
                TurnRecord(
                    seats=live,
                    tensors=_engine_columns(output) if keep_rows else {},
                    observations=obs["anchor"],
                    admissible=[info["admissible_actions"] for info in infos],
                    state_keys=[info["state_key"] for info in infos],
                    responses=texts,
                    rewards=rewards,
                    dones=dones,
                    infos=next_infos,
                    next_observations=next_obs["anchor"],
                )
            )
            running = np.flatnonzero(~dones)
            live = live[running]
            if not live.size:
                break
            obs = {key: None if values is None else [values[i] for i in running] for key, values in next_obs.items()}
            infos = [next_infos[i] for i in running]
        return self._finish(envs, buffer, sampling, step, tally)

    # ---- one turn

    def _meta(self, sampling: Sampling, validate: bool, extra: Mapping[str, Any] | None) -> dict[str, Any]:
        return {
            **sampling.as_dict(),
            "validate": validate,
            "eos_token_id": self._tokenizer.eos_token_id,
            "pad_token_id": self._tokenizer.pad_token_id,
            **(extra or {}),
        }

    def _encode(
        self, envs: EnvironmentManagerBase, messages: Sequence[str], live: np.ndarray, tally: _Tally
    ) -> EncodedTurn:
        slots = live.tolist()

        def shorten(rows: Sequence[int], turns: Sequence[int]) -> list[str]:
            return [envs.build_text_obs([slots[row]], kept)[0] for row, kept in zip(rows, turns)]

        encoded = self._encoder.encode(messages, [envs.history_shown(slot) for slot in slots], shorten)
        tally.counts["prompts_shortened"] += encoded.num_shortened
        tally.counts["history_turns_dropped"] += encoded.num_dropped_turns
        tally.counts["prompts_truncated"] += encoded.num_truncated
        return encoded

    @staticmethod
    def _generate(
        actor_rollout_wg: ActorRolloutGroup, encoded: EncodedTurn, seeds: torch.Tensor, meta: Mapping[str, Any]
    ) -> DataProto:
        request = DataProto.from_dict(
            tensors={
                "input_ids": encoded.input_ids,
                "attention_mask": encoded.attention_mask,
                "position_ids": encoded.position_ids,
                "sampling_seed": seeds,
            },
            meta_info=dict(meta),
        )
        padded, pad_size = pad_dataproto_to_divisor(request, actor_rollout_wg.world_size)
        return unpad_dataproto(actor_rollout_wg.generate_sequences(padded), pad_size)

    def _decode(self, output: DataProto) -> list[str]:
        """Sampled text without special tokens; padding is cut off by the mask, whatever the pad token is."""
        columns = _engine_columns(output)
        responses = columns["responses"]
        lengths = columns["attention_mask"][:, -responses.shape[1] :].sum(dim=1).tolist()
        ids = [row[:length] for row, length in zip(responses.tolist(), lengths)]
        texts: list[str] = self._tokenizer.batch_decode(
            ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return texts

    # ---- after the last turn

    def _finish(
        self, envs: EnvironmentManagerBase, buffer: EpisodeBuffer, sampling: Sampling, step: int, tally: _Tally
    ) -> PlayedEpisodes:
        success = envs.success_evaluator(
            total_infos=buffer.infos,
            total_batch_list=[[{"active_masks": True}] * len(infos) for infos in buffer.infos],
            episode_rewards=buffer.rewards,
            episode_lengths=buffer.lengths,
        )
        if len(success["success_rate"]) != len(buffer.seats):
            raise ValueError(
                f"success_evaluator gave {len(success['success_rate'])} success values for {len(buffer.seats)} episodes"
            )
        policy = {
            "kind": "policy",
            "model": self.settings.model,
            "sampling": sampling.as_dict(),
            "seed": self.settings.seed,
            "step": step,
        }
        episodes = buffer.trajectories(envs.env_name, policy)
        return PlayedEpisodes(buffer, episodes, success, self._metrics(buffer, success, tally))

    @staticmethod
    def _metrics(buffer: EpisodeBuffer, success: Mapping[str, np.ndarray], tally: _Tally) -> dict[str, float]:
        infos = [info for episode in buffer.infos for info in episode]
        rows = len(infos)
        metrics: dict[str, float] = {
            "rollout/num_episodes": float(len(buffer.seats)),
            "rollout/num_rows": float(rows),
            "rollout/num_turns": float(buffer.lengths.max()),
            "episode/truncated_ratio": float(1.0 - buffer.done.mean()),
            "episode/admissible_action_ratio": sum(info["is_admissible"] for info in infos) / rows,
            "episode/malformed_action_ratio": sum(info["is_malformed"] for info in infos) / rows,
        }
        metrics |= {f"episode/{key}": float(values.mean()) for key, values in success.items()}
        for name in ("prompts_shortened", "history_turns_dropped", "prompts_truncated"):
            metrics[f"rollout/{name}"] = float(tally.counts[name])
        metrics |= {f"timing_s/rollout_{name}": seconds for name, seconds in tally.seconds.items()}
        return metrics


class _TurnSeeds:
    """Sampling seeds of the live seats of a turn."""

    def __init__(self, seed: int, scope: str, seats: Sequence[Seat]) -> None:
        self._seed = seed
        self._scope = scope
        self._keys = [(task_key(seat.task), seat.member) for seat in seats]

    def of(self, live: np.ndarray, turn: int) -> torch.Tensor:
        """(N,) int64."""
        keys = [self._keys[seat] for seat in live.tolist()]
        seeds = [sampling_seed(self._seed, self._scope, task, member, turn) for task, member in keys]
        return torch.tensor(seeds, dtype=torch.int64)


def _engine_columns(output: DataProto) -> dict[str, torch.Tensor]:
    """The tensors of a generate call that go into the batch."""
    batch = output.batch
    assert batch is not None, "generate_sequences returned no tensors"
    present = set(batch.keys())
    return {name: batch[name] for name in _ENGINE_COLUMNS if name in present}
