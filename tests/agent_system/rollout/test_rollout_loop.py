# SPDX-License-Identifier: Apache-2.0
"""The agent loop on TOY with a scripted policy: columns, live rows only, seeds, prompt limits, bad model text."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from agent_system.environments.check import MALFORMED_TEXTS
from agent_system.environments.ray_vector_env import RayVectorEnv
from agent_system.multi_turn_rollout import RolloutResult, TrajectoryCollector
from agent_system.multi_turn_rollout.seats import make_seats, sampling_seed
from agent_system.trajectory import load_trajectories, save_trajectories
from tests.helpers.fake_actor import FakeActorGroup, Policy, choose_command
from tests.helpers.rollout_config import rollout_config
from tests.helpers.tiny import make_tiny_tokenizer
from tests.helpers.toy_env import TOY_TASKS, ToyEnv, say, toy_manager
from verl.utils.errors import UserError

TENSORS = {"prompts", "responses", "input_ids", "attention_mask", "position_ids", "rollout_log_probs"}
COLUMNS = {
    "uid", "traj_uid", "index", "data_source", "anchor_obs", "rewards", "active_masks", "is_action_valid",
    "episode_rewards", "episode_lengths", "tool_callings", "success_rate",
    "step_index", "action", "state_key", "num_admissible", "episode_success", "episode_truncated",
}  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return make_tiny_tokenizer()


def roll(
    tokenizer: Any,
    policy: Policy = choose_command,
    *,
    tasks: int = 2,
    group: int = 3,
    world_size: int = 1,
    manager: Any = None,
    step: int = 1,
    **changes: Any,
) -> tuple[RolloutResult, FakeActorGroup]:
    collector = TrajectoryCollector(rollout_config(**changes), tokenizer)
    actor = FakeActorGroup(tokenizer, policy, world_size=world_size)
    envs = manager or toy_manager(tasks * group)
    return collector.multi_turn_loop(envs, actor, step=step, num_tasks=tasks, group_size=group), actor


def test_all_columns_are_there_with_the_right_shapes(tokenizer: Any) -> None:
    result, _ = roll(tokenizer, max_steps=6)
    batch, rows = result.batch, len(result.batch)
    assert set(batch.batch.keys()) == TENSORS
    assert set(batch.non_tensor_batch) == COLUMNS
    tensors = batch.batch
    assert tensors["prompts"].shape == (rows, 256) and tensors["responses"].shape == (rows, 48)
    for name in TENSORS - {"rollout_log_probs"}:
        assert tensors[name].dtype == torch.int64
    assert torch.equal(tensors["input_ids"], torch.cat([tensors["prompts"], tensors["responses"]], dim=1))
    mask = tensors["attention_mask"]
    assert torch.equal(tensors["position_ids"], (mask.cumsum(1) - 1).clamp(min=0))
    assert (mask[:, :256].diff(dim=1) >= 0).all(), "prompts are padded on the left"
    assert (mask[:, 256:].diff(dim=1) <= 0).all(), "responses are padded on the right"
    columns = batch.non_tensor_batch
    assert columns["is_action_valid"].dtype == bool
    assert all(columns[name].dtype == object for name in COLUMNS - {"is_action_valid"})
    assert columns["active_masks"].all()


def test_rows_follow_the_episodes(tokenizer: Any) -> None:
    result, actor = roll(tokenizer, tasks=3, group=4, max_steps=6)
    columns = result.batch.non_tensor_batch
    assert [e.traj_uid for e in result.episodes] == [f"s1-g{g}-m{m}" for g in range(3) for m in range(4)]
    row = 0
    for number, episode in enumerate(result.episodes):
        total = sum(step.reward for step in episode.steps)
        assert episode.episode_reward == total == 10.0 * episode.success
        for step in episode.steps:
            assert columns["traj_uid"][row] == episode.traj_uid and columns["uid"][row] == episode.uid
            assert columns["index"][row] == number and columns["step_index"][row] == step.step_index
            assert columns["anchor_obs"][row] == step.observation and columns["state_key"][row] == step.state_key
            assert columns["action"][row] == step.action and columns["rewards"][row] == step.reward
            assert columns["episode_rewards"][row] == total
            assert columns["episode_lengths"][row] == len(episode.steps)
            assert columns["episode_success"][row] == episode.success
            assert columns["num_admissible"][row] == len(step.admissible_actions)
            ids = result.batch.batch["responses"][row][result.batch.batch["attention_mask"][row, 256:].bool()]
            assert ids.tolist() in actor.sampled, "the rows hold the sampled ids"
            assert tokenizer.decode(ids, skip_special_tokens=True) == step.response
            row += 1
        assert episode.truncated == (not episode.steps[-1].done)
        assert episode.success == (episode.final_observation == "You are in the vault.")
    assert row == len(result.batch)
    success = np.mean([episode.success for episode in result.episodes])
    assert 0 < success < 1
    assert columns["success_rate"].astype(float) == pytest.approx(np.full(row, success))
    assert result.metrics["episode/success_rate"] == pytest.approx(success)


def test_members_share_task_and_first_observation(tokenizer: Any) -> None:
    result, _ = roll(tokenizer, tasks=3, group=4)
    for start in range(0, 12, 4):
        members = result.episodes[start : start + 4]
        assert len({episode.uid for episode in members}) == 1
        assert len({str(episode.task) for episode in members}) == 1
        assert len({episode.steps[0].observation for episode in members}) == 1
    assert len({str(episode.task) for episode in result.episodes}) == 3
    first_answers = {episode.steps[0].response for episode in result.episodes}
    assert len(first_answers) > 3, "members of a group sample differently"


def test_only_live_rows_are_generated(tokenizer: Any) -> None:
    result, actor = roll(tokenizer, tasks=3, group=4, max_steps=6)
    alive = [sum(len(episode.steps) > turn for episode in result.episodes) for turn in range(6)]
    assert [len(request) for request in actor.requests] == [count for count in alive if count]
    assert alive[0] == 12 > alive[-1]
    assert result.metrics["rollout/num_rows"] == len(result.batch) == sum(alive)


def test_rows_are_spread_over_the_ranks(tokenizer: Any) -> None:
    """Any number of rows: the fake group checks that no rank gets two more than another."""
    one, alone = roll(tokenizer, tasks=1, group=3, max_steps=6)
    four, actor = roll(tokenizer, tasks=1, group=3, max_steps=6, world_size=4)
    assert [len(request) for request in actor.requests] == [len(request) for request in alone.requests]
    assert one.episodes == four.episodes and len(one.batch) == len(four.batch)


def same_rows(a: RolloutResult, b: RolloutResult) -> bool:
    tensors = all(torch.equal(a.batch.batch[name], b.batch.batch[name]) for name in TENSORS)
    columns = all((a.batch.non_tensor_batch[n] == b.batch.non_tensor_batch[n]).all() for n in COLUMNS)
    return tensors and columns and a.episodes == b.episodes


def test_shrinking_equals_playing_every_episode_alone(tokenizer: Any) -> None:
    together, _ = roll(tokenizer, tasks=2, group=3, max_steps=6)
    collector = TrajectoryCollector(rollout_config(max_steps=6), tokenizer)
    manager = toy_manager(1)
    seats = make_seats(toy_manager(6).draw_tasks(2), 3, "s1")
    alone = []
    for seat in seats:
        actor = FakeActorGroup(tokenizer, choose_command)
        alone += collector.play(manager, actor, [seat], step=1).episodes
    assert alone == together.episodes


def test_repeat_is_equal_and_another_step_or_seed_is_not(tokenizer: Any) -> None:
    first, _ = roll(tokenizer)
    assert same_rows(first, roll(tokenizer)[0])
    responses = [[s.response for s in e.steps] for e in first.episodes]
    for changed, _ in (roll(tokenizer, step=2), roll(tokenizer, seed=1)):
        assert [[s.response for s in e.steps] for e in changed.episodes] != responses


@pytest.mark.parametrize("num_workers", [1, 3])
def test_env_actors_do_not_change_the_result(tokenizer: Any, ray_session: Any, num_workers: int) -> None:
    envs = RayVectorEnv(ToyEnv, 6, num_workers)
    manager = toy_manager(6, envs=envs)
    try:
        assert same_rows(roll(tokenizer, manager=manager)[0], roll(tokenizer)[0])
    finally:
        manager.close()


def test_a_task_that_comes_twice_gets_other_seeds(tokenizer: Any) -> None:
    manager = toy_manager(4, tasks=TOY_TASKS[:1])
    result, _ = roll(tokenizer, manager=manager, tasks=2, group=2, max_steps=6)
    paths = [tuple(step.response for step in episode.steps) for episode in result.episodes]
    assert len(set(paths)) == 4


def test_sampling_seed_is_63_bit_and_depends_on_every_part() -> None:
    base = (0, "step1", "task", 0, 0)
    changed = [(1, *base[1:]), (0, "step2", *base[2:]), (0, "step1", "t", 0, 0), (*base[:3], 1, 0), (*base[:4], 1)]
    seeds = {sampling_seed(*parts) for parts in [base, *changed]}
    assert len(seeds) == 6 and all(0 <= seed < 2**63 for seed in seeds)
    assert sampling_seed(*base) == 1636556583493077488


def test_history_is_dropped_before_anything_else(tokenizer: Any) -> None:
    def lost(prompt: str, seed: int) -> str:
        return say("nothing " * 6)

    result, _ = roll(tokenizer, lost, tasks=1, group=2, max_steps=4, prompt=150)
    free, _ = roll(tokenizer, lost, tasks=1, group=2, max_steps=4, prompt=1000)
    widths = free.batch.batch["attention_mask"][:, :1000].sum(dim=1)
    assert widths.max() > 150
    assert result.metrics["rollout/prompts_shortened"] == int((widths > 150).sum()) > 0
    assert result.metrics["rollout/history_turns_dropped"] >= result.metrics["rollout/prompts_shortened"]
    assert result.metrics["rollout/prompts_truncated"] == 0
    assert free.metrics["rollout/prompts_shortened"] == 0
    for ids, mask in zip(result.batch.batch["prompts"], result.batch.batch["attention_mask"]):
        text = tokenizer.decode(ids[mask[:150].bool()])
        assert text.startswith("<|im_start|>user\nFind the ") and text.endswith("<|im_end|>\n<|im_start|>assistant\n")
        assert "open the green door" in text
    assert [e.steps for e in result.episodes] == [e.steps for e in free.episodes]


def test_truncation_acts_only_when_nothing_else_helps(tokenizer: Any) -> None:
    with pytest.raises(UserError, match=r"data.max_prompt_length is 40.*data.truncation"):
        roll(tokenizer, prompt=40)
    result, _ = roll(tokenizer, prompt=40, truncation="middle", max_steps=2)
    assert result.metrics["rollout/prompts_truncated"] == result.metrics["rollout/num_rows"]
    texts = tokenizer.batch_decode(result.batch.batch["prompts"])
    assert all(text.startswith("<|im_start|>user") and text.endswith("assistant\n") for text in texts)


@pytest.mark.parametrize("text", MALFORMED_TEXTS)
def test_any_model_text_is_survived(tokenizer: Any, text: str, tmp_path: Path) -> None:
    sayable = text.encode("utf-8", "replace").decode()
    result, _ = roll(tokenizer, lambda prompt, seed: sayable, tasks=1, group=2, max_steps=3)
    assert len(result.batch) == 6 and not any(episode.success for episode in result.episodes)
    assert all(episode.truncated for episode in result.episodes)
    save_trajectories(tmp_path / "t.jsonl", result.episodes)
    assert load_trajectories(tmp_path / "t.jsonl")[0] == result.episodes


def test_counters_of_bad_actions(tokenizer: Any) -> None:
    answers = ["</action><think></think><action>look", say("fly"), say("go back"), "look"]
    result, _ = roll(tokenizer, lambda prompt, seed: answers.pop(0), tasks=1, group=1, max_steps=4)
    assert result.batch.non_tensor_batch["is_action_valid"].tolist() == [True, True, True, False]
    assert result.metrics["episode/malformed_action_ratio"] == 0.25
    assert result.metrics["episode/admissible_action_ratio"] == 0.0


def test_too_many_episodes_for_the_slots(tokenizer: Any) -> None:
    with pytest.raises(ValueError, match="6 episodes for 5 environment slots"):
        roll(tokenizer, manager=toy_manager(5))


def test_a_tokenizer_without_pad_or_template_is_refused(tokenizer: Any) -> None:
    for change in ({"pad_token": None}, {"chat_template": None}):
        other = make_tiny_tokenizer()
        for name, value in change.items():
            setattr(other, name, value)
        with pytest.raises(UserError, match=next(iter(change))):
            TrajectoryCollector(rollout_config(), other)


PROGRAM = """
import sys
from agent_system.multi_turn_rollout import TrajectoryCollector
from tests.helpers.fake_actor import FakeActorGroup, choose_command
from tests.helpers.rollout_config import rollout_config
from tests.helpers.tiny import make_tiny_tokenizer
from tests.helpers.toy_env import toy_manager
tokenizer = make_tiny_tokenizer()
result = TrajectoryCollector(rollout_config(), tokenizer).multi_turn_loop(
    toy_manager(6), FakeActorGroup(tokenizer, choose_command), step=1, num_tasks=2, group_size=3)
sys.stdout.write("\\n".join(episode.to_line() for episode in result.episodes))
"""


def test_two_processes_give_equal_episodes(tokenizer: Any) -> None:
    root = Path(__file__).parents[3]
    programs = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM],
            stdout=subprocess.PIPE,
            cwd=root,
            env={"PYTHONHASHSEED": seed, "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"},
        )
        for seed in ("1", "2")
    ]
    outputs = [program.communicate(timeout=300)[0] for program in programs]
    assert [program.returncode for program in programs] == [0, 0]
    assert outputs[0] == outputs[1] and outputs[0].count(b"\n") == 5
    assert outputs[0].decode() == "\n".join(episode.to_line() for episode in roll(tokenizer)[0].episodes)
