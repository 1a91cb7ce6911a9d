# SPDX-License-Identifier: Apache-2.0
"""The estimators' formulas once more, straightforwardly: one row after the other, groups as lists of 0-d tensors.

Property tests compare the vectorised code with these, and benchmarks measure against them. Sums over rows run in
float64, as ours do, so that results can be compared tightly.
"""

from __future__ import annotations

import difflib
from collections import defaultdict
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

Keys = Sequence[Hashable]


def step_returns(rewards: Sequence[float], traj: Keys, gamma: float) -> Tensor:
    """For each trajectory: find its rows, walk them backwards."""
    result = torch.zeros(len(rewards))
    for uid in dict.fromkeys(traj):
        rows = [row for row in range(len(traj)) if traj[row] == uid]
        running = 0.0
        for row in reversed(rows):
            running = rewards[row] + gamma * running
            result[row] = running
    return result


def step_returns_one_pass(rewards: Sequence[float], traj: Keys, gamma: float) -> Tensor:
    """The same in one walk over all rows, with a dict of running returns."""
    running: dict[Hashable, float] = {}
    result = [0.0] * len(rewards)
    for row in range(len(rewards) - 1, -1, -1):
        result[row] = running[traj[row]] = rewards[row] + gamma * running.get(traj[row], 0.0)
    return torch.tensor(result)


def _entries(scores: Tensor, index: Keys, traj: Keys | None, cross: bool) -> dict[Hashable, list[Tensor]]:
    groups: dict[Hashable, list[Tensor]] = defaultdict(list)
    seen: set[Hashable] = set()
    for row in range(len(scores)):
        if not cross:
            assert traj is not None
            if (index[row], traj[row]) in seen:
                continue
            seen.add((index[row], traj[row]))
        groups[index[row]].append(scores[row])
    return groups


def _mean_std(entries: list[Tensor], alone_mean: float | None = 0.0, unbiased: bool = True) -> tuple[Tensor, Tensor]:
    if len(entries) == 1:
        return entries[0] if alone_mean is None else torch.tensor(alone_mean), torch.tensor(1.0)
    values = torch.stack(entries)
    return values.mean(), values.std(unbiased=unbiased)


def _on_tokens(values: list[Tensor], mask: Tensor) -> Tensor:
    result = torch.zeros(mask.shape)
    for row, value in enumerate(values):
        result[row] = value.float() * mask[row]
    return result


def _normalized(
    scores: Tensor, index: Keys, traj: Keys | None, *, std: bool, cross: bool, alone_mean: float | None = 0.0
) -> list[Tensor]:
    stats = {key: _mean_std(entries, alone_mean) for key, entries in _entries(scores, index, traj, cross).items()}
    values = []
    for row in range(len(scores)):
        mean, deviation = stats[index[row]]
        values.append((scores[row] - mean) / (deviation + 1e-6) if std else scores[row] - mean)
    return values


def grpo(rewards: Tensor, mask: Tensor, index: Keys, traj: Keys, std: bool = True, cross: bool = True) -> Tensor:
    return _on_tokens(_normalized(rewards.sum(-1).double(), index, traj, std=std, cross=cross), mask)


def grpo_floats(rewards: Tensor, mask: Tensor, index: Keys) -> Tensor:
    """GRPO with one list of floats per group: the fastest of the plain loops."""
    scores = rewards.sum(-1).tolist()
    groups: dict[Hashable, list[float]] = defaultdict(list)
    for row, score in enumerate(scores):
        groups[index[row]].append(score)
    stats = {}
    for key, values in groups.items():
        mean = sum(values) / len(values)
        variance = sum((value - mean) ** 2 for value in values) / max(len(values) - 1, 1)
        stats[key] = (mean, variance**0.5) if len(values) > 1 else (0.0, 1.0)
    normalized = [(score - stats[index[row]][0]) / (stats[index[row]][1] + 1e-6) for row, score in enumerate(scores)]
    return torch.tensor(normalized).unsqueeze(-1) * mask


def grpo_passk(rewards: Tensor, mask: Tensor, index: Keys, traj: Keys, std: bool = True) -> Tensor:
    """The best trajectory of each group gets its lead over the second, on all its rows."""
    scores = rewards.sum(-1).double()
    groups: dict[Hashable, dict[Hashable, Tensor]] = defaultdict(dict)
    for row in range(len(scores)):
        groups[index[row]].setdefault(traj[row], scores[row])
    lead: dict[tuple[Hashable, Hashable], Tensor] = {}
    for key, members in groups.items():
        best, second = sorted(members, key=lambda member: -float(members[member]))[:2]
        gain = members[best] - members[second]
        lead[key, best] = gain / (torch.stack(list(members.values())).std() + 1e-6) if std else gain
    return _on_tokens([lead.get((index[row], traj[row]), torch.tensor(0.0)) for row in range(len(scores))], mask)


def rloo(rewards: Tensor, mask: Tensor, index: Keys, traj: Keys, cross: bool = True) -> Tensor:
    scores = rewards.sum(-1).double()
    groups = {
        key: (torch.stack(entries).mean(), len(entries))
        for key, entries in _entries(scores, index, traj, cross).items()
    }
    values = []
    for row in range(len(scores)):
        mean, count = groups[index[row]]
        values.append(scores[row] if count == 1 else (scores[row] - mean) * count / (count - 1))
    return _on_tokens(values, mask)


def _whiten(values: Tensor, mask: Tensor) -> Tensor:
    kept = values[mask.bool()].double()
    return ((values.double() - kept.mean()) * torch.rsqrt(kept.var() + 1e-8)).float()


def reinforce_plus_plus_baseline(rewards: Tensor, mask: Tensor, index: Keys, traj: Keys) -> Tensor:
    tokens = _on_tokens(_normalized(rewards.sum(-1).double(), index, traj, std=False, cross=True), mask)
    return _whiten(tokens, mask) * mask


def token_returns(rewards: Tensor, mask: Tensor, gamma: float) -> Tensor:
    result = torch.zeros(rewards.shape)
    for row in range(len(rewards)):
        reward, kept, running = rewards[row].tolist(), mask[row].tolist(), 0.0
        sums = [0.0] * len(reward)
        for position in range(len(reward) - 1, -1, -1):
            if kept[position]:
                running = sums[position] = reward[position] + gamma * running
        result[row] = torch.tensor(sums)
    return result


def reinforce_plus_plus(rewards: Tensor, mask: Tensor, gamma: float) -> tuple[Tensor, Tensor]:
    returns = token_returns(rewards, mask, gamma)
    return _whiten(returns, mask) * mask, returns


def gae(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    advantages = torch.zeros(rewards.shape)
    for row in range(len(rewards)):
        reward, value, running, following = rewards[row].tolist(), values[row].tolist(), 0.0, 0.0
        sums = [0.0] * len(reward)
        for position in range(len(reward) - 1, -1, -1):
            delta = reward[position] + gamma * following - value[position]
            running = sums[position] = delta + gamma * lam * running
            following = value[position]
        advantages[row] = torch.tensor(sums)
    return _whiten(advantages, mask), advantages + values


def exact_groups(anchors: Sequence[Any], index: Keys) -> list[int]:
    """For each task: its rows by observation."""
    labels = [-1] * len(anchors)
    number = 0
    for task in dict.fromkeys(index):
        clusters: dict[Hashable, int] = {}
        for row in [row for row in range(len(index)) if index[row] == task]:
            if anchors[row] not in clusters:
                clusters[anchors[row]] = number
                number += 1
            labels[row] = clusters[anchors[row]]
    return labels


def similarity_groups(anchors: Sequence[str], index: Keys, threshold: float) -> list[int]:
    """Each row against the first member of every cluster of its task, in order."""
    labels, number = [], 0
    clusters: dict[Hashable, list[tuple[str, int]]] = defaultdict(list)
    for anchor, task in zip(anchors, index):
        for first, label in clusters[task]:
            if difflib.SequenceMatcher(None, anchor, first).ratio() >= threshold:
                labels.append(label)
                break
        else:
            clusters[task].append((anchor, number))
            labels.append(number)
            number += 1
    return labels


def gigpo(
    rewards: Tensor,
    returns: Tensor,
    mask: Tensor,
    anchors: Sequence[Any],
    index: Keys,
    traj: Keys,
    weight: float = 1.0,
    std: bool = False,
) -> Tensor:
    groups = exact_groups(anchors, index)
    episode = _normalized(rewards.sum(-1).double(), index, traj, std=std, cross=True)
    step = _normalized(returns.double(), groups, None, std=std, cross=True, alone_mean=None)
    return _on_tokens([one + weight * other for one, other in zip(episode, step)], mask)


def hgpo(
    rewards: Tensor,
    returns: Tensor,
    mask: Tensor,
    anchors: Sequence[Any],
    index: Keys,
    traj: Keys,
    history: int,
    *,
    std: bool = True,
    alpha: float = 1.0,
    base: bool = False,
) -> Tensor:
    """Every row into the group of each of its histories; then every group's members; then every row's mean."""
    rows_so_far: dict[Hashable, list[int]] = defaultdict(list)
    groups: dict[Hashable, list[int]] = defaultdict(list)
    for row in range(len(traj)):
        rows_so_far[traj[row]].append(row)
        past = rows_so_far[traj[row]]
        for length in range(1, min(history + 1, len(past)) + 1):
            groups[index[row], length, tuple(anchors[past_row] for past_row in past[-length:])].append(row)
    values = returns.double()
    items: list[list[tuple[float, float]]] = [[] for _ in traj]
    for (_, length, _), rows in groups.items():  # type: ignore[misc]
        if len(rows) == 1:
            continue
        mean, deviation = _mean_std([values[row] for row in rows], unbiased=False)
        for row in rows:
            advantage = float((values[row] - mean) / (deviation + 1e-6) if std else values[row] - mean)
            items[row].append(((length + 1) ** alpha, advantage))
    if base:
        for row, value in enumerate(_normalized(rewards.sum(-1).double(), index, traj, std=std, cross=True)):
            items[row].append((1.0, float(value)))
    result = []
    for row_items in items:
        used = [(weight, advantage) for weight, advantage in row_items if advantage != 0]
        total = sum(weight * advantage for weight, advantage in used)
        result.append(torch.tensor(total / (sum(weight for weight, _ in used) + 1e-6) if used else 0.0))
    return _on_tokens(result, mask)


def assemble(
    turns: Sequence[dict[str, Any]], columns: Sequence[str]
) -> tuple[dict[str, Tensor], dict[str, np.ndarray]]:
    """One dict per row, sorted by seat and turn, then stacked column by column.

    Args:
        turns: per turn ``{"seats": (N,), "tensors": {name: (N, ...)}, column: list of N}``.
        columns: names of the columns that are lists.
    """
    rows: list[dict[str, Any]] = []
    for number, turn in enumerate(turns):
        for position, seat in enumerate(turn["seats"]):
            row = {name: tensor[position] for name, tensor in turn["tensors"].items()}
            row |= {name: turn[name][position] for name in columns}
            rows.append({"order": (int(seat), number), **row})
    rows.sort(key=lambda row: row["order"])
    tensors = {name: torch.stack([row[name] for row in rows]) for name in turns[0]["tensors"]}
    return tensors, {name: np.array([row[name] for row in rows], dtype=object) for name in columns}
