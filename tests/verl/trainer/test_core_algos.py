# SPDX-License-Identifier: Apache-2.0
"""Group statistics, GRPO, vanilla loss and KL terms against golden values, hand-computed cases and edge cases."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from verl.trainer.config.schema import ActorConfig
from verl.trainer.ppo import core_algos
from verl.utils.errors import UserError

GOLDEN = Path(__file__).resolve().parents[4] / "shared" / "compat" / "golden"


def golden(name: str) -> dict[str, Any]:
    path = GOLDEN / name
    if not path.exists():
        pytest.skip(f"shared golden values are not there ({path})")
    return json.loads(path.read_text())


def outcome(scores: list[float], length: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    """Rewards at the last of `length` tokens, one padding column."""
    rewards = torch.zeros(len(scores), length + 1)
    rewards[:, length - 1] = torch.tensor(scores)
    mask = torch.ones(len(scores), length + 1, dtype=torch.int64)
    mask[:, length:] = 0
    return rewards, mask


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("cross", [True, False])
def test_grpo_equals_golden(norm: bool, cross: bool) -> None:
    data = golden("advantages.json")
    expected = torch.tensor(data["advantages"][f"grpo norm={norm} cross_steps={cross}"])
    got, returns = core_algos.compute_grpo_outcome_advantage(
        torch.tensor(data["token_level_rewards"]),
        torch.tensor(data["response_mask"]),
        np.array(data["uid"], dtype=object),
        np.array(data["traj_uid"], dtype=object),
        norm_adv_by_std_in_grpo=norm,
        compute_mean_std_cross_steps=cross,
    )
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(returns, got)
    assert got.dtype == torch.float32


def test_two_of_four_wins() -> None:
    rewards, mask = outcome([1.0, 0.0, 0.0, 1.0])
    with_std, _ = core_algos.compute_grpo_outcome_advantage(rewards, mask, ["g"] * 4, list("abcd"))
    without, _ = core_algos.compute_grpo_outcome_advantage(
        rewards, mask, ["g"] * 4, list("abcd"), norm_adv_by_std_in_grpo=False
    )
    assert with_std[:, 0].tolist() == pytest.approx([0.8660, -0.8660, -0.8660, 0.8660], abs=1e-4)
    assert without[:, 0].tolist() == pytest.approx([0.5, -0.5, -0.5, 0.5])
    assert (with_std[:, -1] == 0).all()


@pytest.mark.parametrize("cross", [True, False])
def test_row_order_does_not_matter(cross: bool) -> None:
    rng = np.random.default_rng(0)
    scores = rng.normal(size=40).astype(np.float32)
    traj = np.array([f"t{i // 2}" for i in range(40)], dtype=object)
    scores[1::2] = scores[::2]  # both turns of a trajectory have the same score
    uid = np.array([f"g{i // 8}" for i in range(40)], dtype=object)
    rewards, mask = outcome(scores.tolist())
    straight, _ = core_algos.compute_grpo_outcome_advantage(
        rewards, mask, uid, traj, compute_mean_std_cross_steps=cross
    )
    order = rng.permutation(40)
    shuffled, _ = core_algos.compute_grpo_outcome_advantage(
        rewards[order], mask[order], uid[order], traj[order], compute_mean_std_cross_steps=cross
    )
    torch.testing.assert_close(shuffled, straight[order], rtol=1e-6, atol=1e-6)


def test_zero_variance_and_singletons() -> None:
    rewards, mask = outcome([5.0, 5.0, 5.0, 7.0])
    uid = ["a", "a", "a", "b"]
    adv, _ = core_algos.compute_grpo_outcome_advantage(rewards, mask, uid, list("wxyz"))
    assert adv[:, 0].tolist() == pytest.approx([0.0, 0.0, 0.0, 7.0], abs=1e-4)
    assert adv[:3].abs().max() == 0.0
    zero, _ = core_algos.compute_grpo_outcome_advantage(rewards, mask, uid, list("wxyz"), singleton="zero")
    assert zero.abs().max() == 0.0


def test_float_noise_stays_small() -> None:
    rewards, mask = outcome([0.1, 0.1, 0.1, 0.1 + 1e-7])
    adv, _ = core_algos.compute_grpo_outcome_advantage(rewards, mask, ["g"] * 4)
    assert torch.isfinite(adv).all() and adv.abs().max() < 0.1


def test_lengths_one_and_nine_show_the_switch() -> None:
    scores = torch.tensor([1.0] + [0.0] * 9)
    uid, traj = ["g"] * 10, ["short"] + ["long"] * 9
    mean, _, count = core_algos.group_stats(scores, uid, traj, cross_steps=True)
    assert mean.tolist() == pytest.approx([0.1] * 10) and count.tolist() == [10] * 10
    mean, std, count = core_algos.group_stats(scores, uid, traj, cross_steps=False)
    assert mean.tolist() == pytest.approx([0.5] * 10) and count.tolist() == [2] * 10
    assert std.tolist() == pytest.approx([0.5**0.5] * 10)


def test_group_stats_of_large_offsets_and_empty_input() -> None:
    mean, std, _ = core_algos.group_stats(torch.tensor([1e6, 1e6 + 1.0]), [0, 0])
    assert mean[0].item() == pytest.approx(1e6 + 0.5) and std[0].item() == pytest.approx(0.5**0.5)
    assert all(x.shape == (0,) for x in core_algos.group_stats(torch.zeros(0), []))
    with pytest.raises(ValueError, match="trajectory"):
        core_algos.group_stats(torch.zeros(2), ["a", "a"], None, cross_steps=False)


@pytest.mark.parametrize("mode", core_algos.LOSS_AGG_MODES)
@pytest.mark.parametrize("high", [0.2, 0.28])
def test_vanilla_loss_equals_golden(mode: str, high: float) -> None:
    data = golden("losses.json")
    log_prob = torch.tensor(data["log_prob"], requires_grad=True)
    args = (torch.tensor(data["old_log_prob"]), log_prob, torch.tensor(data["advantages"]), torch.tensor(data["mask"]))
    got = core_algos.compute_policy_loss(
        *args, cliprange_low=0.2, cliprange_high=high, clip_ratio_c=3.0, loss_agg_mode=mode
    )
    want = data["vanilla"][f"{mode} low=0.2 high={high} c=3"]
    for value, name in zip(got, ("pg_loss", "pg_clipfrac", "ppo_kl", "pg_clipfrac_lower"), strict=True):
        assert value.item() == pytest.approx(want[name], rel=1e-5, abs=1e-6), name
    if mode == "token-mean" and high == 0.2:
        got[0].backward()
        expected = torch.tensor(data["vanilla"]["grad_log_prob token-mean 0.2"])
        torch.testing.assert_close(log_prob.grad, expected, rtol=1e-5, atol=1e-6)


def test_registered_loss_summed_over_micro_batches_is_the_whole() -> None:
    data = golden("losses.json")
    old, new, adv, mask = (torch.tensor(data[k]) for k in ("old_log_prob", "log_prob", "advantages", "mask"))
    whole = core_algos.compute_policy_loss(old, new, adv, mask, cliprange=0.2, loss_agg_mode="token-mean")
    loss_fn = core_algos.get_policy_loss("vanilla")
    tokens, parts, clipped = mask.sum(), [], []
    for rows in (slice(0, 1), slice(1, 4), slice(4, 6)):
        out = loss_fn(
            old[rows], new[rows], adv[rows], mask[rows], ActorConfig(clip_ratio_low=None, clip_ratio_high=None)
        )
        parts.append(core_algos.agg_loss(out.per_token_loss, mask[rows], "token-mean", num_tokens=tokens))
        clipped.append(out.metrics["pg_clipfrac"])
    assert sum(parts).item() == pytest.approx(whole[0].item(), rel=1e-6)
    assert (sum(clipped) / tokens).item() == pytest.approx(whole[1].item(), rel=1e-6)


@pytest.mark.parametrize("mode", core_algos.LOSS_AGG_MODES)
def test_rows_without_tokens_change_nothing(mode: str) -> None:
    loss = torch.tensor([[1.0, 2.0], [3.0, 4.0], [float("nan"), 9.0]])
    mask = torch.tensor([[1, 1], [1, 0], [0, 0]])
    got = core_algos.agg_loss(loss, mask, mode)
    assert got.item() == pytest.approx(core_algos.agg_loss(loss[:2], mask[:2], mode).item())
    assert core_algos.agg_loss(loss[2:], mask[2:], mode).item() == 0.0
    with pytest.raises(ValueError, match="token-mean"):
        core_algos.agg_loss(loss, mask, "mean")


@pytest.mark.parametrize("kind", ["kl", "abs", "mse", "low_var_kl"])
def test_kl_equals_golden(kind: str) -> None:
    data = golden("losses.json")
    new, old = torch.tensor(data["log_prob"]), torch.tensor(data["old_log_prob"])
    got = core_algos.kl_penalty(new, old, kind)
    torch.testing.assert_close(got, torch.tensor(data["kl_penalty"][kind]), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind,slope", [("kl", 1.0), ("abs", 1.0), ("mse", 0.5), ("low_var_kl", 1 - np.exp(-0.5))])
def test_kl_gradients(kind: str, slope: float) -> None:
    new = torch.tensor([[-1.0]], requires_grad=True)
    core_algos.kl_penalty(new, torch.tensor([[-1.5]]), kind).sum().backward()
    assert new.grad is not None and new.grad.item() == pytest.approx(slope, rel=1e-5)


@pytest.mark.parametrize("gap", [200.0, -200.0])
def test_extreme_log_ratios_stay_finite(gap: float) -> None:
    old = torch.tensor([[-201.0, -201.0, -201.0]])
    new = (old + gap).requires_grad_()
    mask = torch.ones(1, 3)
    for kind in core_algos.KL_KINDS:
        value = core_algos.kl_penalty(new, old, kind)
        (grad,) = torch.autograd.grad(value.sum(), new)
        assert torch.isfinite(value).all() and torch.isfinite(grad).all(), kind
    loss = core_algos.compute_policy_loss(old, new, torch.tensor([[1.0, -1.0, 0.0]]), mask, cliprange=0.2)[0]
    (grad,) = torch.autograd.grad(loss, new)
    assert torch.isfinite(loss) and torch.isfinite(grad).all()


def test_adaptive_controller_equals_golden() -> None:
    steps = golden("losses.json")["adaptive_kl init=0.001 target=0.1 horizon=10000"]
    controller = core_algos.AdaptiveKLController(0.001, 0.1, 10000)
    for step in steps:
        controller.update(step["current_kl"], step["n_steps"])
        assert controller.value == pytest.approx(step["value"], rel=1e-9)
    again = core_algos.AdaptiveKLController(0.5, 0.1, 10000)
    again.load_state_dict(controller.state_dict())
    again.update(float("nan"), 10)
    assert again.value == controller.value


def test_unknown_names_list_the_known_ones() -> None:
    with pytest.raises(UserError, match=r"grpoo.*known:.*grpo.*Did you mean 'grpo'"):
        core_algos.get_adv_estimator("grpoo")
    with pytest.raises(UserError, match=r"known:.*vanilla"):
        core_algos.get_policy_loss("clipped")
    with pytest.raises(ValueError, match="already registered"):
        core_algos.register_adv_est("grpo")(lambda batch, config: (batch, batch))
