# SPDX-License-Identifier: Apache-2.0
"""Names and reductions of the metrics logged with every training step.

``critic/*``, ``response_length/*`` and ``prompt_length/*`` are over rows (turns); ``episode/*`` has one value per
trajectory. Wall times are ``timing_s/*`` in seconds and ``timing_per_token_ms/*`` in milliseconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verl.protocol import DataProto
from verl.trainer.ppo.columns import tensors_of
from verl.trainer.ppo.validation_metrics import bootstrap_metric, calc_maj_val, process_validation_metrics

__all__ = [
    "bootstrap_metric",
    "calc_maj_val",
    "compute_data_metrics",
    "compute_episode_metrics",
    "compute_rollout_probs_diff",
    "compute_throughout_metrics",
    "compute_throughput_metrics",
    "compute_timing_metrics",
    "process_validation_metrics",
    "reduce_metrics",
]

# Phases timed per response token; every other timed phase is per token of the whole batch.
_RESPONSE_PHASES = ("gen",)
_ALL_TOKEN_PHASES = ("old_log_prob", "ref", "values", "adv", "update_critic", "update_actor")


def reduce_metrics(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Reduce lists of per-rank or per-mini-batch values: ``max`` in the name -> max, ``min`` -> min, else mean."""
    reduced: dict[str, Any] = {}
    for name, value in metrics.items():
        if isinstance(value, list | tuple | np.ndarray):
            array = np.asarray(value, dtype=np.float64)
            reduce = np.max if "max" in name else np.min if "min" in name else np.mean
            reduced[name] = float(reduce(array)) if array.size else float("nan")
        else:
            reduced[name] = value
    return reduced


def _spread(name: str, values: Tensor) -> dict[str, float]:
    """Mean, max and min; NaN-free zeros when there is nothing to measure."""
    values = values.float()
    if values.numel() == 0:
        values = torch.zeros(1)
    return {
        f"{name}/mean": values.mean().item(),
        f"{name}/max": values.max().item(),
        f"{name}/min": values.min().item(),
    }


def _compute_response_info(batch: DataProto) -> dict[str, Tensor]:
    """``prompt_length`` and ``response_length`` in tokens, ``(B,)`` each, and ``response_mask`` ``(B, R)``."""
    tensors = tensors_of(batch)
    width = tensors["responses"].shape[-1]
    prompt_mask, response_mask = tensors["attention_mask"][:, :-width], tensors["attention_mask"][:, -width:]
    return {
        "response_mask": response_mask,
        "prompt_length": prompt_mask.sum(dim=-1),
        "response_length": response_mask.sum(dim=-1),
    }


def _first_rows(traj_uid: np.ndarray) -> np.ndarray:
    seen: dict[Any, int] = {}
    for row, uid in enumerate(traj_uid):
        seen.setdefault(uid, row)
    return np.fromiter(seen.values(), dtype=np.int64)


def compute_episode_metrics(data: DataProto) -> dict[str, float]:
    """``episode/{reward,length}/{mean,max,min}``, tool calls and success rates, one value per trajectory."""
    columns = data.non_tensor_batch
    rows = _first_rows(columns["traj_uid"])
    metrics: dict[str, float] = {"episode/count": float(len(rows))}
    for column, name in (("episode_rewards", "reward"), ("episode_lengths", "length")):
        metrics |= _spread(f"episode/{name}", torch.from_numpy(columns[column][rows].astype(np.float32)))
    if "tool_callings" in columns:
        metrics["episode/tool_call_count/mean"] = float(columns["tool_callings"][rows].astype(np.float32).mean())
    for name, values in columns.items():
        if "success_rate" in name or name == "webshop_task_score (not success_rate)":
            metrics[f"episode/{name}"] = float(values[rows].astype(np.float64).mean())
    return metrics


def compute_data_metrics(batch: DataProto, use_critic: bool = False) -> dict[str, float]:
    """Score, reward, advantage, length and episode metrics of a step's real rows (without padding rows)."""
    tensors = tensors_of(batch)
    mask = tensors["response_mask"].bool()
    info = _compute_response_info(batch)
    prompt, response = info["prompt_length"], info["response_length"]
    response_width = tensors["responses"].shape[-1]
    prompt_width = tensors["attention_mask"].shape[-1] - response_width
    metrics = _spread("critic/score", tensors["token_level_scores"].sum(dim=-1))
    metrics |= _spread("critic/rewards", tensors["token_level_rewards"].sum(dim=-1))
    metrics |= _spread("critic/advantages", tensors["advantages"][mask])
    metrics |= _spread("critic/returns", tensors["returns"][mask])
    if use_critic:
        values, returns = tensors["values"][mask], tensors["returns"][mask]
        metrics |= _spread("critic/values", values)
        if len(returns) > 1:
            explained = 1.0 - (returns - values).var() / (returns.var() + 1e-5)
            metrics["critic/vf_explained_var"] = explained.item()
    metrics |= _spread("response_length", response)
    metrics["response_length/clip_ratio"] = (response == response_width).float().mean().item()
    metrics |= _spread("prompt_length", prompt)
    metrics["prompt_length/clip_ratio"] = (prompt == prompt_width).float().mean().item()
    return metrics | compute_episode_metrics(batch)


def compute_rollout_probs_diff(data: DataProto) -> dict[str, float]:
    """How far the engine's probabilities are from the actor's: ``training/rollout_probs_diff_{max,mean,std}``."""
    tensors = tensors_of(data)
    mask = tensors["response_mask"].bool()
    rollout, actor = tensors["rollout_log_probs"][mask], tensors["old_log_probs"][mask]
    diff = (rollout.exp() - actor.exp()).abs().float()
    if diff.numel() == 0:
        diff = torch.zeros(1)
    return {
        "training/rollout_probs_diff_max": diff.max().item(),
        "training/rollout_probs_diff_mean": diff.mean().item(),
        "training/rollout_probs_diff_std": diff.std(unbiased=False).item(),
    }


def compute_timing_metrics(batch: DataProto, timing_raw: Mapping[str, float]) -> dict[str, float]:
    """``timing_s/*`` of every phase and ``timing_per_token_ms/*`` of the phases that scale with tokens."""
    info = _compute_response_info(batch)
    response_tokens = max(int(info["response_length"].sum()), 1)
    all_tokens = response_tokens + int(info["prompt_length"].sum())
    metrics = {f"timing_s/{name}": seconds for name, seconds in timing_raw.items()}
    for name, seconds in timing_raw.items():
        if name in _RESPONSE_PHASES:
            metrics[f"timing_per_token_ms/{name}"] = 1000.0 * seconds / response_tokens
        elif name in _ALL_TOKEN_PHASES:
            metrics[f"timing_per_token_ms/{name}"] = 1000.0 * seconds / all_tokens
    return metrics


def compute_throughput_metrics(batch: DataProto, timing_raw: Mapping[str, float], n_gpus: int) -> dict[str, float]:
    """Tokens of the step, seconds of the step, and tokens per second and rank."""
    tokens = int(tensors_of(batch)["attention_mask"].sum())
    seconds = timing_raw["step"]
    return {
        "perf/total_num_tokens": float(tokens),
        "perf/time_per_step": seconds,
        "perf/throughput": tokens / max(seconds * n_gpus, 1e-9),
    }


compute_throughout_metrics = compute_throughput_metrics  # the reference's spelling, which recipes import
