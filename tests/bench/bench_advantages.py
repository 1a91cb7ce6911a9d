# SPDX-License-Identifier: Apache-2.0
"""Step returns, estimators, grouping and batch assembly against straightforward per-row code, results compared.

`python -m tests.bench.bench_advantages [--quick] [--rows 2560 25600] [--tokens 16 512] [--only grpo ...]`

Rows are a synthetic rollout: tasks with 8 episodes each of 40 turns on average, observations that repeat within a task.
The per-row code (tests/helpers/per_row.py) computes the same formula one row after the other and is run once (best of
three where it takes less than half a second); ours is the best of five. "Floor" is what a case cannot do without: one
dict look-up per row for each column of keys it reads, and for estimators reading the rewards and the mask and writing
one (rows, tokens) result.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from agent_system.multi_turn_rollout.episode_buffer import EpisodeBuffer, Seat, TurnRecord
from recipe.gigpo.core_gigpo import build_step_group, compute_gigpo_outcome_advantage
from recipe.hgpo.core_hgpo import compute_hgpo_outcome_advantage
from tests.bench.table import environment_line, format_seconds, print_table, time_best
from tests.helpers import per_row
from verl.protocol import DataProto
from verl.trainer.ppo import batch_ops, core_algos
from verl.trainer.ppo.advantages import to_tokens

GROUP = 8
GAMMA = 0.95
HISTORY = 2


@dataclass
class Rollout:
    """Columns of a synthetic rollout, rows episode by episode."""

    rewards: Tensor
    mask: Tensor
    values: Tensor
    index: np.ndarray
    traj: np.ndarray
    anchors: np.ndarray
    step_rewards: np.ndarray

    @property
    def data(self) -> DataProto:
        return DataProto.from_dict({"m": self.mask}, {"rewards": self.step_rewards, "traj_uid": self.traj})


def observation(task: int, state: int) -> str:
    """About 200 characters, as text games write them; texts of one task share most of their words."""
    things = [f"{name} {(state * 7 + number * 3 + task) % 9 + 1}" for number, name in enumerate(WORDS)]
    seen = ", ".join(f"a {thing}" for thing in things[: 4 + state % 5])
    place = things[state % len(things)]
    return f"You arrive at {place} of house {task}. On the {things[0]}, you see {seen}, and nothing else."


WORDS = ("cabinet", "drawer", "countertop", "garbagecan", "microwave", "sidetable", "shelf", "fridge", "toaster")


def make_rollout(num_rows: int, tokens: int) -> Rollout:
    rng = np.random.default_rng([num_rows, tokens])
    index, traj, anchors, step_rewards, episode = [], [], [], [], []
    for number, turns in enumerate(_turns_of_episodes(num_rows, rng)):
        task, won = f"step1-task{number // GROUP}", bool(rng.random() < 0.5)
        for turn in range(turns):
            index.append(task)
            traj.append(f"{task}-member{number % GROUP}")
            anchors.append(observation(number // GROUP, int(rng.integers(0, 40))))
            step_rewards.append(10.0 if won and turn == turns - 1 else 0.0)
            episode.append(10.0 * won - 0.1 * float(rng.random() < 0.1))
    lengths = torch.from_numpy(rng.integers(1, tokens + 1, num_rows))
    mask = (torch.arange(tokens) < lengths[:, None]).long()
    rewards = torch.zeros(num_rows, tokens)
    rewards[torch.arange(num_rows), lengths - 1] = torch.tensor(episode)
    values = torch.from_numpy(rng.normal(size=(num_rows, tokens)).astype(np.float32)) * mask
    columns = [np.array(column, dtype=object) for column in (index, traj, anchors, step_rewards)]
    return Rollout(rewards, mask, values, *columns)


def _turns_of_episodes(num_rows: int, rng: np.random.Generator) -> list[int]:
    """Turns of each episode, 40 on average, of whole groups and ``num_rows`` together."""
    episodes = GROUP * max(1, num_rows // (40 * GROUP))
    shares = rng.uniform(0.5, 1.5, episodes)
    ends = np.floor(np.cumsum(shares) / shares.sum() * num_rows + 0.5).astype(int)
    return np.diff(ends, prepend=0).tolist()


def fresh(texts: np.ndarray) -> np.ndarray:
    """Copies whose hashes are not cached, as the texts of a new rollout."""
    copies = np.empty(len(texts), dtype=object)
    copies[:] = [text.encode().decode() for text in texts]
    return copies


@dataclass
class Case:
    """One line of the table."""

    name: str
    ours: Callable[..., Any]
    slow: Callable[[], Any]
    floor: float | None = None
    """Seconds."""
    per_call_input: Callable[[], np.ndarray] | None = None
    """Made anew for every call of ``ours``, not timed."""


def key_seconds(*columns: np.ndarray) -> float:
    """One dict look-up per row and column."""
    return sum(time_best(lambda column=column: list(map(dict.fromkeys(column).get, column))) / 2 for column in columns)


def token_seconds(r: Rollout) -> float:
    """Read rewards and mask once, write one result."""
    return time_best(lambda: to_tokens(r.rewards.sum(dim=-1), r.mask))


def statistics_cases(r: Rollout) -> Iterator[Case]:
    """What does not depend on the number of tokens."""
    data = r.data
    traj, rewards, index = r.traj.tolist(), r.step_rewards.tolist(), r.index.tolist()

    def returns() -> Tensor:
        return batch_ops.compute_step_returns(data, GAMMA)

    floor = key_seconds(r.traj)
    yield Case("step returns", returns, lambda: per_row.step_returns(rewards, traj, GAMMA), floor)
    one_pass = "step returns, against one pass"
    yield Case(one_pass, returns, lambda: per_row.step_returns_one_pass(rewards, traj, GAMMA), floor)
    yield Case(
        "exact grouping",
        lambda anchors: build_step_group(anchors, r.index),
        lambda: per_row.exact_groups(fresh(r.anchors).tolist(), index),
        key_seconds(r.index, r.anchors),
        per_call_input=lambda: fresh(r.anchors),
    )


def similarity_case(r: Rollout, threshold: float) -> Case:
    index = r.index.tolist()
    return Case(
        f"similarity grouping, {threshold}",
        lambda anchors: build_step_group(anchors, r.index, True, threshold),
        lambda: per_row.similarity_groups(r.anchors.tolist(), index, threshold),
        per_call_input=lambda: fresh(r.anchors),
    )


def estimator_cases(r: Rollout) -> Iterator[Case]:
    outcome = (r.rewards, r.mask, r.index, r.traj)
    plain = (r.rewards, r.mask, r.index.tolist(), r.traj.tolist())
    returns = batch_ops.compute_step_returns(r.data, GAMMA)
    algos, tokens = core_algos, token_seconds(r)
    uid, traj, anchors = key_seconds(r.index), key_seconds(r.traj), key_seconds(r.anchors)
    keys = {
        "grpo_passk": uid + traj, "reinforce_plus_plus": 0.0, "gae": 0.0, "gigpo": uid + anchors,
        "hgpo": uid + traj + anchors,
    }  # fmt: skip

    def case(name: str, ours: Callable[[], Any], slow: Callable[[], Any]) -> Case:
        return Case(name, ours, slow, tokens + keys.get(name, uid))

    yield case("grpo", lambda: algos.compute_grpo_outcome_advantage(*outcome)[0], lambda: per_row.grpo(*plain))
    yield case(
        "grpo, against lists of floats",
        lambda: algos.compute_grpo_outcome_advantage(*outcome)[0],
        lambda: per_row.grpo_floats(*plain[:3]),
    )
    yield case(
        "grpo_passk",
        lambda: algos.compute_grpo_passk_outcome_advantage(*outcome, compute_mean_std_cross_steps=False)[0],
        lambda: per_row.grpo_passk(*plain),
    )
    yield case("rloo", lambda: algos.compute_rloo_outcome_advantage(*outcome)[0], lambda: per_row.rloo(*plain))
    yield case(
        "reinforce_plus_plus_baseline",
        lambda: algos.compute_reinforce_plus_plus_baseline_outcome_advantage(*outcome)[0],
        lambda: per_row.reinforce_plus_plus_baseline(*plain),
    )
    yield case(
        "reinforce_plus_plus",
        lambda: algos.compute_reinforce_plus_plus_outcome_advantage(r.rewards, r.mask, GAMMA)[0],
        lambda: per_row.reinforce_plus_plus(r.rewards, r.mask, GAMMA)[0],
    )
    yield case(
        "gae",
        lambda: algos.compute_gae_advantage_return(r.rewards, r.values, r.mask, GAMMA, 0.9)[0],
        lambda: per_row.gae(r.rewards, r.values, r.mask, GAMMA, 0.9)[0],
    )
    steps = (r.rewards, returns, r.mask, r.anchors, r.index, r.traj)
    plain_steps = (r.rewards, returns, r.mask, r.anchors.tolist(), *plain[2:])
    yield case("gigpo", lambda: compute_gigpo_outcome_advantage(*steps)[0], lambda: per_row.gigpo(*plain_steps))
    yield case(
        "hgpo",
        lambda: compute_hgpo_outcome_advantage(*steps, HISTORY)[0],
        lambda: per_row.hgpo(*plain_steps, HISTORY),
    )


def assembly_case(num_rows: int, tokens: int) -> Case:
    """A rollout's turns (half of the seats are done after half of the turns) into one batch."""
    num_seats = max(1, num_rows // 40)
    seats = [Seat({}, f"task{number // GROUP}", f"episode{number}", number % GROUP) for number in range(num_seats)]
    buffer = EpisodeBuffer(seats)
    turns: list[dict[str, Any]] = []
    live, left = np.arange(num_seats), num_rows
    while left > 0:
        live = live[:left] if len(turns) != 26 else live[: min(left, max(1, num_seats // 2))]
        turn = _turn(live, len(turns), tokens)
        buffer.add(turn)
        turns.append(
            {
                "seats": live, "tensors": turn.tensors, "anchor_obs": turn.observations,
                "rewards": turn.rewards.tolist(),
                "action": [info["action"] for info in turn.infos], "state_key": turn.state_keys,
                "uid": [seats[seat].uid for seat in live], "traj_uid": [seats[seat].traj_uid for seat in live],
                "step_index": [len(turns)] * len(live),
            }
        )  # fmt: skip
        left -= len(live)
    columns = [name for name in turns[0] if name not in ("seats", "tensors")]

    def ours() -> tuple[dict[str, Tensor], dict[str, np.ndarray]]:
        batch = buffer.to_batch({"success_rate": np.ones(num_seats)}, {})
        assert batch.batch is not None
        return dict(batch.batch), {name: batch.non_tensor_batch[name] for name in columns}

    return Case("batch assembly", ours, lambda: per_row.assemble(turns, columns))


def _turn(live: np.ndarray, number: int, tokens: int) -> TurnRecord:
    rows = len(live)
    width = 2 * tokens
    names = {"prompts": tokens, "responses": tokens, "input_ids": width, "attention_mask": width, "position_ids": width}
    tensors = {
        name: torch.arange(number, number + rows)[:, None].expand(rows, size).contiguous()
        for name, size in names.items()
    }
    info = {"action": "look", "is_action_valid": True, "won": False, "task": {}}
    return TurnRecord(
        seats=live, tensors=tensors, observations=[f"observation {seat}" for seat in live],
        admissible=[["look"]] * rows, state_keys=[f"state {seat}" for seat in live], responses=["look"] * rows,
        rewards=np.full(rows, 0.5, dtype=np.float32), dones=np.zeros(rows, dtype=bool), infos=[info] * rows,
        next_observations=["next"] * rows,
    )  # fmt: skip


def measure(case: Case, repeat: int = 5) -> tuple[float, float]:
    """Seconds of ours (best) and of the per-row code (one call), after comparing their results."""
    make = case.per_call_input
    start = time.perf_counter()
    expected = case.slow()
    slow = time.perf_counter() - start
    if slow < 0.5:
        slow = time_best(case.slow, 3)
    if make is None:
        _require_equal(case.name, case.ours(), expected)
        return time_best(case.ours, repeat), slow
    best = float("inf")
    for _ in range(repeat):
        given = make()
        start = time.perf_counter()
        got = case.ours(given)
        best = min(best, time.perf_counter() - start)
    _require_equal(case.name, got, expected)
    return best, slow


def _require_equal(name: str, got: Any, expected: Any) -> None:
    if isinstance(expected, tuple):
        for part, expected_part in zip(got, expected, strict=True):
            assert part.keys() == expected_part.keys(), name
            for key, value in expected_part.items():
                _require_equal(f"{name} {key}", part[key], value)
    elif isinstance(expected, Tensor):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=2e-4, msg=lambda text: f"{name}: {text}")
    else:
        assert list(got) == list(expected), name


def rows_of_table(num_rows: int, tokens: list[int], threshold: float, only: list[str] | None) -> Iterator[list[str]]:
    def line(case: Case, width: str, repeat: int = 5) -> Iterator[list[str]]:
        if only and not any(case.name.startswith(name) for name in only):
            return
        ours, slow = measure(case, repeat)
        floor = "-" if case.floor is None else format_seconds(case.floor)
        ratio = f"{slow / ours:.0f}x" if slow >= 10 * ours else f"{slow / ours:.1f}x"
        yield [case.name, f"{num_rows:,}", width, format_seconds(slow), format_seconds(ours), ratio, floor]

    rollout = make_rollout(num_rows, tokens[0])
    for case in statistics_cases(rollout):
        yield from line(case, "-")
    yield from line(similarity_case(rollout, threshold), "-", repeat=3)
    for width in tokens:
        for case in estimator_cases(make_rollout(num_rows, width)):
            yield from line(case, str(width))
        yield from line(assembly_case(num_rows, width), str(width), repeat=3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few rows and tokens: a check that everything runs")
    parser.add_argument("--rows", type=int, nargs="+", default=[2560, 25600])
    parser.add_argument("--tokens", type=int, nargs="+", default=[16, 512], help="response tokens per row")
    parser.add_argument("--threshold", type=float, default=0.95, help="of the similarity grouping")
    parser.add_argument("--only", nargs="+", help="lines whose name starts like one of these")
    args = parser.parse_args()
    torch.set_num_threads(1)
    sizes, tokens = ([160], [16]) if args.quick else (args.rows, args.tokens)
    lines = [line for size in sizes for line in rows_of_table(size, tokens, args.threshold, args.only)]
    print_table(["what", "rows", "tokens", "per row", "ours", "ratio", "floor"], lines)
    print(f"\n{environment_line()}; one thread")


if __name__ == "__main__":
    main()
