# SPDX-License-Identifier: Apache-2.0
"""TrajectoryCollector: plays groups of episodes and returns one row per turn."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from agent_system.environments.base import EnvironmentManagerBase
from agent_system.multi_turn_rollout.episode_buffer import EpisodeBuffer, Seat, TurnRecord
from agent_system.multi_turn_rollout.report import RolloutTally, rollout_metrics
from agent_system.multi_turn_rollout.result import RolloutResult, merge_results
from agent_system.multi_turn_rollout.seats import TurnSeeds, make_seats
from agent_system.multi_turn_rollout.settings import RolloutConfigLike, RolloutSettings, Sampling
from agent_system.multi_turn_rollout.tokenize import EncodedTurn, PromptEncoder
from agent_system.trajectory import Trajectory
from verl.protocol import DataProto

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = [
    "ActorRolloutGroup",
    "PlayedEpisodes",
    "RolloutResult",
    "TrajectoryCollector",
]

# With `rollout.mode=async`, a generate call returns as soon as this share of the rows under way have ended. Less means
# more calls with smaller prefills, more means that rows wait longer for their environments (0.1 to 0.5 are within 10 %
# of each other in tests.bench.bench_hf_engine).
_SHARE = 0.25

# Columns of the engine's answer that become columns of the batch.
_ENGINE_COLUMNS = ("prompts", "responses", "input_ids", "attention_mask", "position_ids", "rollout_log_probs")


class PendingRows(Protocol):
    """A generate call under way."""

    def result(self) -> list[DataProto]: ...


class ActorRolloutGroup(Protocol):
    """What the collector needs of the policy's worker group."""

    @property
    def world_size(self) -> int: ...

    def submit(self, method_name: str, data: list[DataProto]) -> PendingRows:
        """Start `generate_some` (`verl.workers.rollout.BaseRollout`) without waiting for it, one record a rank."""


@dataclass
class PlayedEpisodes:
    """Episodes before they are made into rows."""

    buffer: EpisodeBuffer
    episodes: list[Trajectory]
    success: dict[str, np.ndarray]
    """Values per success key, as `success_evaluator` returns them."""
    metrics: dict[str, float]


@dataclass
class _Play:
    """What all turns of one `play` share."""

    envs: EnvironmentManagerBase
    actor_rollout_wg: ActorRolloutGroup
    buffer: EpisodeBuffer
    seeds: TurnSeeds
    meta: dict[str, Any]
    keep_rows: bool
    tally: RolloutTally = field(default_factory=RolloutTally)
    asked: dict[int, tuple[str, dict[str, Any]]] = field(default_factory=dict)
    """Observation and info of the seats that have a prompt and no response yet."""
    rank_of: dict[int, int] = field(default_factory=dict)
    """Rank of the seats whose responses are being generated."""


@dataclass(frozen=True)
class _Answers:
    """Responses of some seats; every entry of the others belongs to the same entry of `seats`."""

    seats: np.ndarray
    output: DataProto
    before: list[tuple[str, dict[str, Any]]]
    """Observation and info that the response answers."""


class TrajectoryCollector:
    """Runs the agent loop for one batch of episodes.

    Each turn, only the episodes that are still running are built into prompts, tokenised, generated and stepped. The
    weights of the engine are the caller's business: it opens one rollout session around the call.

    With `rollout.mode=sync` all episodes take a turn together. With `async`, those whose responses are ready act while
    the others are still generating, and join them again with their next prompts. What a row samples does not depend on
    the rows beside it, so the episodes are the same.
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
        generation: int = 0,
        validate: bool = False,
        meta_info: Mapping[str, Any] | None = None,
        tasks: Sequence[Mapping[str, Any]] | None = None,
    ) -> RolloutResult:
        """Play `num_tasks` groups of `group_size` episodes.

        Args:
            step: training step; enters uids and sampling seeds.
            num_tasks: groups; their tasks are drawn from the manager's task order.
            group_size: members of a group, all of the same task.
            generation: number of this generation batch within the step, from 0; the groups of the next one count on,
                and its sampling seeds are others even where a task comes again.
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
        prefix = f"{'v' if validate else 's'}{step}"
        seats = make_seats(chosen, group_size, prefix, first_group=generation * num_tasks)
        played = self.play(
            envs, actor_rollout_wg, seats, step=step, generation=generation, validate=validate, meta_info=meta_info
        )
        batch = played.buffer.to_batch(played.success, {})
        return RolloutResult(batch, played.episodes, played.metrics, played.success)

    @staticmethod
    def merge(parts: Sequence[RolloutResult], uids: Collection[str]) -> RolloutResult:
        """The groups `uids` of several generation batches, see `merge_results`."""
        return merge_results(parts, uids)

    def play(
        self,
        envs: EnvironmentManagerBase,
        actor_rollout_wg: ActorRolloutGroup,
        seats: Sequence[Seat],
        *,
        step: int,
        generation: int = 0,
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
        sampling = self.settings.val_sampling if validate else self.settings.train_sampling
        # Validation must not depend on when it runs: the same weights give the same episodes.
        scope = "validation" if validate else f"step{step}" + (f".{generation}" if generation else "")
        meta = self._meta(sampling, validate, meta_info)
        seeds = TurnSeeds(self.settings.seed, scope, seats)
        play = _Play(envs, actor_rollout_wg, EpisodeBuffer(seats), seeds, meta, keep_rows)
        with play.tally.timer("env"):
            obs, infos = envs.reset({"tasks": [seat.task for seat in seats]})
        prompts = self._ask(play, np.arange(len(seats)), obs, infos)
        answers: _Answers | None = None
        while play.asked or answers is not None:
            call = self._submit(play, prompts) if play.asked else None
            if self.settings.overlap:
                prompts = self._act(play, answers)
                answers = self._collect(play, call)
            else:
                prompts = self._act(play, self._collect(play, call))
        return self._finish(play, sampling, step)

    # ---- one turn

    def _meta(self, sampling: Sampling, validate: bool, extra: Mapping[str, Any] | None) -> dict[str, Any]:
        return {
            **sampling.as_dict(),
            "validate": validate,
            "eos_token_id": self._tokenizer.eos_token_id,
            "pad_token_id": self._tokenizer.pad_token_id,
            "share": _SHARE if self.settings.overlap else 1.0,
            **(extra or {}),
        }

    def _ask(
        self, play: _Play, seats: np.ndarray, obs: Mapping[str, Any], infos: Sequence[dict[str, Any]]
    ) -> DataProto:
        """The prompts of `seats`, which may be none."""
        if not len(seats):
            width = self.settings.max_prompt_length
            none = torch.zeros(0, dtype=torch.int64)
            ids = mask = none.reshape(0, width)
        else:
            with play.tally.timer("tokenize"):
                encoded = self._encode(play, obs["text"], seats)
            ids, mask = encoded.input_ids, encoded.attention_mask
        play.asked.update(zip(seats.tolist(), zip(obs["anchor"], infos)))
        return DataProto.from_dict(
            tensors={
                "row": torch.from_numpy(seats),
                "input_ids": ids,
                "attention_mask": mask,
                "sampling_seed": play.seeds.of(seats, play.buffer.lengths[seats]),
            },
            meta_info=dict(play.meta),
        )

    def _submit(self, play: _Play, prompts: DataProto) -> PendingRows:
        """Hand prompts to the ranks that have the fewest rows under way; all of them go on with what they have."""
        seats = prompts.batch["row"].tolist()  # type: ignore[index]
        ranks = play.actor_rollout_wg.world_size
        load = Counter(play.rank_of.values())
        counts = [0] * ranks
        for _ in seats:
            counts[min(range(ranks), key=lambda rank: load[rank] + counts[rank])] += 1
        ends = np.cumsum(counts).tolist()
        # Neighbours stay together: the common first prompt of a group is computed once for each rank.
        parts = [prompts[end - count : end] for end, count in zip(ends, counts)]
        play.rank_of.update(zip(seats, np.repeat(np.arange(ranks), counts).tolist()))
        with play.tally.timer("generate"):
            return play.actor_rollout_wg.submit("generate_some", parts)

    def _collect(self, play: _Play, call: PendingRows | None) -> _Answers | None:
        """Wait for the call's responses."""
        if call is None:
            return None
        with play.tally.timer("generate"):
            parts = call.result()
        output = DataProto.concat(parts)
        assert output.batch is not None and len(output), "the engine gave no response although prompts are under way"
        output = output[output.batch["row"].argsort()]
        seats = output.batch["row"].numpy()
        play.tally.add_generation(play.buffer.lengths[seats], parts[0].meta_info["generate_s"])
        for seat in seats.tolist():
            del play.rank_of[seat]
        return _Answers(seats, output, [play.asked.pop(seat) for seat in seats.tolist()])

    def _act(self, play: _Play, answers: _Answers | None) -> DataProto:
        """Do what the responses say; the prompts of those that go on."""
        if answers is None:
            return self._ask(play, np.zeros(0, dtype=np.int64), {"text": [], "anchor": []}, [])
        with play.tally.timer("tokenize"):
            texts = self._decode(play, answers.output)
        with play.tally.timer("env"):
            obs, rewards, dones, infos = play.envs.step(texts, answers.seats.tolist())
        play.buffer.add(
            TurnRecord(
                seats=answers.seats,
                tensors=_engine_columns(answers.output) if play.keep_rows else {},
                observations=[anchor for anchor, _ in answers.before],
                admissible=[info["admissible_actions"] for _, info in answers.before],
                state_keys=[info["state_key"] for _, info in answers.before],
                responses=texts,
                rewards=rewards,
                dones=dones,
                infos=infos,
                next_observations=obs["anchor"],
            )
        )
        going_on = np.flatnonzero(~dones & (play.buffer.lengths[answers.seats] < self.settings.max_steps))
        following = {key: [obs[key][row] for row in going_on] for key in ("text", "anchor")}
        return self._ask(play, answers.seats[going_on], following, [infos[row] for row in going_on])

    def _encode(self, play: _Play, messages: Sequence[str], live: np.ndarray) -> EncodedTurn:
        slots = live.tolist()

        def shorten(rows: Sequence[int], turns: Sequence[int]) -> list[str]:
            return [play.envs.build_text_obs([slots[row]], kept)[0] for row, kept in zip(rows, turns)]

        encoded = self._encoder.encode(messages, [play.envs.history_shown(slot) for slot in slots], shorten)
        play.tally.counts["prompts_shortened"] += encoded.num_shortened
        play.tally.counts["history_turns_dropped"] += encoded.num_dropped_turns
        play.tally.counts["prompts_truncated"] += encoded.num_truncated
        return encoded

    def _decode(self, play: _Play, output: DataProto) -> list[str]:
        """Sampled text without special tokens; padding is cut off by the mask, whatever the pad token is."""
        columns = _engine_columns(output)
        responses = columns["responses"]
        lengths = columns["attention_mask"][:, -responses.shape[1] :].sum(dim=1).tolist()
        play.tally.counts["num_tokens"] += sum(lengths)
        if output.batch is not None and "close_draws" in output.batch:
            play.tally.counts["close_draws"] += int(output.batch["close_draws"].sum())
        ids = [row[:length] for row, length in zip(responses.tolist(), lengths)]
        texts: list[str] = self._tokenizer.batch_decode(
            ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return texts

    # ---- after the last turn

    def _finish(self, play: _Play, sampling: Sampling, step: int) -> PlayedEpisodes:
        buffer = play.buffer
        success = play.envs.success_evaluator(
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
        episodes = buffer.trajectories(play.envs.env_name, policy)
        metrics = rollout_metrics(buffer, success, play.tally, self.settings.max_steps)
        return PlayedEpisodes(buffer, episodes, success, metrics)


def _engine_columns(output: DataProto) -> dict[str, torch.Tensor]:
    """The tensors of a generate call that go into the batch."""
    batch = output.batch
    assert batch is not None, "generate_sequences returned no tensors"
    present = set(batch.keys())
    return {name: batch[name] for name in _ENGINE_COLUMNS if name in present}
