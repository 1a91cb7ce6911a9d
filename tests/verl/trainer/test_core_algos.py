# SPDX-License-Identifier: Apache-2.0
"""Group statistics, estimators, losses, KL terms and resampling: hand-computed cases and edge cases."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from verl.protocol import DataProto
from verl.trainer.config.schema import ActorConfig, AlgorithmConfig, KLCtrlConfig
from verl.trainer.ppo import batch_ops, core_algos
from verl.trainer.ppo.pf_ppo import pf_ppo_weights
from verl.utils.errors import UserError


def outcome(scores: list[float], length: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    """Rewards at the last of `length` tokens, one padding column."""
    rewards = torch.zeros(len(scores), length + 1)
    rewards[:, length - 1] = torch.tensor(scores)
    mask = torch.ones(len(scores), length + 1, dtype=torch.int64)
    mask[:, length:] = 0
    return rewards, mask


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


def random_case(rows: int = 6, width: int = 5) -> dict[str, torch.Tensor]:
    """Log-probabilities on both sides of every clip, advantages of both signs, rows of different lengths."""
    generator = torch.Generator().manual_seed(0)

    def draw() -> torch.Tensor:
        return torch.randn(rows, width, generator=generator)

    lengths = torch.arange(rows) % width + 1
    mask = (torch.arange(width) < lengths[:, None]).long()
    return {"old": draw(), "new": draw(), "advantages": 2 * draw(), "mask": mask, "values": draw(), "returns": draw()}


ACTOR = ActorConfig(clip_ratio_low=0.2, clip_ratio_high=0.28)
MICRO_BATCHES = (slice(0, 1), slice(1, 4), slice(4, 6))


@pytest.mark.parametrize("mode", core_algos.LOSS_AGG_MODES)
@pytest.mark.parametrize("kind", ["vanilla", "gspo"])
def test_policy_loss_summed_over_micro_batches_is_the_whole(kind: str, mode: str) -> None:
    case = random_case()
    columns = [case[name] for name in ("old", "new", "advantages", "mask")]
    functions = {"vanilla": core_algos.compute_policy_loss, "gspo": core_algos.compute_policy_loss_gspo}
    whole = functions[kind](*columns, cliprange_low=0.2, cliprange_high=0.28, loss_agg_mode=mode)
    loss_fn, mask = core_algos.get_policy_loss(kind), case["mask"]
    counts = {"num_tokens": mask.sum(), "num_rows": (mask.sum(-1) > 0).sum()}
    total, sums = torch.zeros(()), dict.fromkeys(("pg_clipfrac", "ppo_kl", "pg_clipfrac_lower"), torch.zeros(()))
    for rows in MICRO_BATCHES:
        out = loss_fn(*(column[rows] for column in columns), ACTOR)
        total = total + core_algos.agg_loss(out.per_token_loss, mask[rows], out.agg_mode or mode, **counts)
        sums = {name: value + out.metrics[name] for name, value in sums.items()}
    assert total.item() == pytest.approx(whole[0].item(), rel=1e-5)
    got = [(value / counts["num_tokens"]).item() for value in sums.values()]
    assert got == pytest.approx([value.item() for value in whole[1:]], rel=1e-5)


@pytest.mark.parametrize("mode", core_algos.LOSS_AGG_MODES)
def test_value_loss_summed_over_micro_batches_is_the_whole(mode: str) -> None:
    case = random_case()
    names = ("new", "returns", "values", "mask")
    loss, clipfrac = core_algos.compute_value_loss(*(case[name] for name in names), 0.5, mode)
    mask = case["mask"]
    counts = {"num_tokens": mask.sum(), "num_rows": (mask.sum(-1) > 0).sum()}
    parts, sums = [], {"vf_clipfrac": 0.0, "vpred_mean": 0.0}
    for rows in MICRO_BATCHES:
        out = core_algos.compute_value_loss_tokens(*(case[name][rows] for name in names), 0.5)
        parts.append(core_algos.agg_loss(out.per_token_loss, mask[rows], mode, **counts).item())
        sums = {name: value + out.metrics[name].item() for name, value in sums.items()}
    assert sum(parts) == pytest.approx(loss.item(), rel=1e-5)
    assert sums["vf_clipfrac"] / int(mask.sum()) == pytest.approx(clipfrac.item(), rel=1e-5)
    assert sums["vpred_mean"] == pytest.approx(case["new"][mask.bool()].sum().item(), rel=1e-4)


def test_value_loss_by_hand() -> None:
    """The clipped prediction counts where it is the worse one; no half."""
    predictions = torch.tensor([[2.0, 0.1, 3.0]], requires_grad=True)
    old, returns, mask = torch.zeros(1, 3), torch.tensor([[0.0, 1.0, 9.0]]), torch.tensor([[1, 1, 0]])
    loss, clipfrac = core_algos.compute_value_loss(predictions, returns, old, mask, cliprange_value=0.5)
    assert loss.item() == pytest.approx((2.0**2 + 0.9**2) / 2) and clipfrac.item() == 0.0
    loss, clipfrac = core_algos.compute_value_loss(predictions, torch.full((1, 3), 2.0), old, mask, cliprange_value=0.5)
    assert loss.item() == pytest.approx((1.5**2 + 1.9**2) / 2) and clipfrac.item() == 0.5
    loss.backward()
    assert predictions.grad is not None and predictions.grad.tolist() == [[0.0, pytest.approx(-1.9), 0.0]]


def test_gspo_clips_whole_rows_and_spreads_their_gradient() -> None:
    old, mask = torch.zeros(2, 3), torch.tensor([[1, 1, 1], [1, 1, 0]])
    new = torch.tensor([[0.3, 0.0, -0.3], [1.0, 1.0, 50.0]], requires_grad=True)
    advantages = torch.tensor([[2.0] * 3, [1.0] * 3])
    loss, clipfrac, kl, lower = core_algos.compute_policy_loss_gspo(
        old, new, advantages, mask, cliprange_low=0.2, cliprange_high=0.2
    )
    # Row 0: mean log-ratio 0, so ratio 1 although its tokens are far off; row 1: e, clipped to 1.2.
    assert loss.item() == pytest.approx((-2.0 - 1.2) / 2)
    assert clipfrac.item() == pytest.approx(2 / 5) and lower.item() == 0.0 and kl.item() == pytest.approx(-2.0 / 5)
    loss.backward()
    assert new.grad is not None
    torch.testing.assert_close(new.grad, torch.tensor([[-1 / 3] * 3, [0.0] * 3]))


def test_clip_higher_lets_good_tokens_go_further() -> None:
    case = (torch.zeros(1, 1), torch.full((1, 1), 0.24).log1p(), torch.ones(1, 1), torch.ones(1, 1))
    narrow = core_algos.compute_policy_loss(*case, cliprange=0.2)
    wide = core_algos.compute_policy_loss(*case, cliprange_low=0.2, cliprange_high=0.28)
    assert narrow[0].item() == pytest.approx(-1.2) and wide[0].item() == pytest.approx(-1.24)
    with pytest.raises(ValueError, match="cliprange"):
        core_algos.compute_policy_loss(*case, cliprange_low=0.2)
    with pytest.raises(ValueError, match="clip_ratio_c"):
        core_algos.compute_policy_loss(*case, cliprange=0.2, clip_ratio_c=1.0)


@pytest.mark.parametrize("mode", core_algos.LOSS_AGG_MODES)
def test_rows_without_tokens_change_nothing(mode: str) -> None:
    loss = torch.tensor([[1.0, 2.0], [3.0, 4.0], [float("nan"), 9.0]])
    mask = torch.tensor([[1, 1], [1, 0], [0, 0]])
    got = core_algos.agg_loss(loss, mask, mode)
    assert got.item() == pytest.approx(core_algos.agg_loss(loss[:2], mask[:2], mode).item())
    assert core_algos.agg_loss(loss[2:], mask[2:], mode).item() == 0.0
    with pytest.raises(ValueError, match="token-mean"):
        core_algos.agg_loss(loss, mask, "mean")


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


def test_controllers_move_and_come_back() -> None:
    controller = core_algos.AdaptiveKLController(0.5, 0.1, 10000)
    controller.update(0.2, 1000)
    assert controller.value == pytest.approx(0.5 * 1.02)
    again = core_algos.AdaptiveKLController(0.5, 0.1, 10000)
    again.load_state_dict(controller.state_dict())
    again.update(float("nan"), 10)
    assert again.value == controller.value
    fixed = core_algos.get_kl_controller(KLCtrlConfig(type="fixed", kl_coef=0.3))
    fixed.update(100.0, 100)
    assert fixed.value == 0.3


def test_other_names_of_the_same_kl_and_rewards_with_it() -> None:
    new, ref = torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.5, -1.0]])
    for one, other in (("kl", "k1"), ("mse", "k2"), ("low_var_kl", "k3")):
        assert torch.equal(core_algos.kl_penalty(new, ref, one), core_algos.kl_penalty(new, ref, kl_penalty=other))
    with pytest.raises(NotImplementedError, match="low_var_kl"):
        core_algos.kl_penalty(new, ref, "full")
    rewards = core_algos.compute_rewards(torch.tensor([[0.0, 1.0]]), new, ref, kl_ratio=0.1)
    torch.testing.assert_close(rewards, torch.tensor([[-0.05, 1.1]]))


def test_groups_of_one_have_no_second_best() -> None:
    rewards, mask = outcome([1.0, 0.0, 2.0])
    with pytest.raises(ValueError, match=r"env\.rollout\.n"):
        core_algos.compute_grpo_passk_outcome_advantage(rewards, mask, ["a", "a", "b"], list("xyz"))
    # One episode of two turns is one entry: also with several rows there is nothing to compare.
    with pytest.raises(ValueError, match=r"env\.rollout\.n"):
        core_algos.compute_grpo_passk_outcome_advantage(
            rewards[:2], mask[:2], ["a", "a"], ["x", "x"], compute_mean_std_cross_steps=False
        )


def test_pass_at_k_rewards_every_turn_of_the_best_episode_by_its_lead() -> None:
    rewards, mask = outcome([3.0, 3.0, 1.0, 1.0, 1.0, 0.0])
    traj = ["a", "a", "b", "b", "b", "c"]
    got, _ = core_algos.compute_grpo_passk_outcome_advantage(
        rewards, mask, ["g"] * 6, traj, norm_adv_by_std_in_grpo=False, compute_mean_std_cross_steps=False
    )
    assert got[:, 0].tolist() == [2.0, 2.0, 0.0, 0.0, 0.0, 0.0]
    rows, _ = core_algos.compute_grpo_passk_outcome_advantage(
        rewards, mask, ["g"] * 6, traj, norm_adv_by_std_in_grpo=False
    )
    assert rows.abs().max() == 0.0  # counting rows, best and second best are turns of one episode


def test_whitening_needs_tokens() -> None:
    rewards, mask = torch.ones(1, 2), torch.tensor([[1, 0]])
    for compute in (
        lambda: core_algos.compute_reinforce_plus_plus_outcome_advantage(rewards, mask, 1.0),
        lambda: core_algos.compute_reinforce_plus_plus_baseline_outcome_advantage(rewards, mask, ["a"]),
        lambda: core_algos.compute_gae_advantage_return(rewards, rewards, mask, 1.0, 1.0),
    ):
        with pytest.raises(ValueError, match="at least two response tokens"):
            compute()


def test_long_responses_and_many_rows() -> None:
    """More positions than a block and more rows than a chunk give what one row at a time gives."""
    rows, width = 3000, 130
    generator = torch.Generator().manual_seed(1)
    rewards = torch.randn(rows, width, generator=generator)
    mask = (torch.arange(width) < torch.randint(1, width + 1, (rows, 1), generator=generator)).long()
    advantages, returns = core_algos.compute_reinforce_plus_plus_outcome_advantage(rewards, mask, 0.97)
    expected = torch.zeros(rows)
    for position in reversed(range(width)):
        expected = rewards[:, position] * mask[:, position] + 0.97 * expected
        torch.testing.assert_close(returns[:, position], expected * mask[:, position], rtol=1e-4, atol=1e-4)
    kept = advantages[mask.bool()]
    assert kept.mean().abs() < 1e-5 and kept.std().item() == pytest.approx(1.0, abs=1e-4)


def test_a_small_spread_around_a_large_mean_is_whitened() -> None:
    rewards, mask = outcome([1000.0, 1000.01, 1000.02, 1000.03], length=1)
    advantages, _ = core_algos.compute_reinforce_plus_plus_outcome_advantage(rewards, mask, 1.0)
    assert advantages[:, 0].tolist() == pytest.approx([-1.162, -0.387, 0.387, 1.162], abs=0.02)


REGISTERED = ("gae", "grpo", "grpo_passk", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "rloo")


@pytest.mark.parametrize("name", REGISTERED)
def test_registered_estimators_read_a_batch(name: str) -> None:
    scores = [1.0, 1.0, 0.0, 3.0, 3.0, 1.0]
    rewards, mask = outcome(scores)
    traj = np.array(["a", "a", "b", "c", "c", "d"], dtype=object)
    uid = np.array(["x", "x", "x", "y", "y", "y"], dtype=object)
    batch = DataProto.from_dict(
        {"token_level_rewards": rewards, "response_mask": mask, "values": rewards / 2}, {"uid": uid, "traj_uid": traj}
    )
    batch_ops.compute_advantage(batch, name, AlgorithmConfig(gamma=0.9, lam=0.8))
    advantages, returns = batch.batch["advantages"], batch.batch["returns"]
    assert advantages.dtype == returns.dtype == torch.float32 and advantages[:, :-1].abs().max() > 0
    wanted: Any = {
        "gae": lambda: core_algos.compute_gae_advantage_return(rewards, rewards / 2, mask, 0.9, 0.8),
        "grpo": lambda: core_algos.compute_grpo_outcome_advantage(rewards, mask, uid, traj),
        "grpo_passk": lambda: core_algos.compute_grpo_passk_outcome_advantage(
            rewards, mask, uid, traj, compute_mean_std_cross_steps=False
        ),
        "reinforce_plus_plus": lambda: core_algos.compute_reinforce_plus_plus_outcome_advantage(rewards, mask, 0.9),
        "reinforce_plus_plus_baseline": lambda: core_algos.compute_reinforce_plus_plus_baseline_outcome_advantage(
            rewards, mask, uid, traj
        ),
        "rloo": lambda: core_algos.compute_rloo_outcome_advantage(rewards, mask, uid, traj),
    }[name]()
    assert torch.equal(advantages, wanted[0]) and torch.equal(returns, wanted[1])
    advantages.neg_()  # as a hook may
    assert torch.equal(batch.batch["returns"], wanted[1])
    advantages.neg_()
    if name in ("grpo", "rloo", "reinforce_plus_plus_baseline"):
        other = DataProto.from_dict({"token_level_rewards": rewards, "response_mask": mask}, batch.non_tensor_batch)
        batch_ops.compute_advantage(other, name, AlgorithmConfig(compute_mean_std_cross_steps=False))
        assert not torch.equal(other.batch["advantages"], advantages)


def test_every_estimator_is_registered_and_remax_is_not() -> None:
    assert set(REGISTERED) <= set(core_algos.ADV_ESTIMATOR_REGISTRY)
    assert core_algos.get_adv_estimator("gae").needs_critic
    with pytest.raises(UserError, match="remax"):
        core_algos.get_adv_estimator("remax")


def test_pf_ppo_weights_by_hand() -> None:
    scores = torch.tensor([-2.0, 0.0, 1.0, 3.0])
    for method, expected in (
        ("pow", [4.0, 0.0, 1.0, 9.0]),
        ("max_min", [1.0, 0.0, 0.0, 1.0]),
        ("max_random", [0.1, 0.1, 0.1, 0.4]),
    ):
        assert pf_ppo_weights(scores, method).tolist() == pytest.approx(expected, abs=2e-8)
        assert float(pf_ppo_weights(scores, method).min()) >= 1e-8
    assert pf_ppo_weights(scores, "pow", 1.0).tolist() == pytest.approx([2.0, 0.0, 1.0, 3.0], abs=2e-8)
    with pytest.raises(ValueError, match="max_random"):
        pf_ppo_weights(scores, "power")
    with pytest.raises(ValueError, match="finite"):
        pf_ppo_weights(torch.tensor([float("nan")]))


def test_pf_ppo_draws_whole_rows_as_often_as_their_weight_says() -> None:
    scores = torch.zeros(400, 2)
    scores[:100, 1], scores[100:200, 0] = 2.0, -1.0
    batch = DataProto.from_dict(
        {"token_level_scores": scores, "row": torch.arange(400)}, {"name": np.arange(400).astype(object)}
    )
    drawn = core_algos.compute_pf_ppo_reweight_data(batch, "pow", 2.0, np.random.default_rng(0))
    rows = drawn.batch["row"]
    assert len(drawn) == 400 and rows.tolist() == drawn.non_tensor_batch["name"].tolist()
    assert torch.equal(drawn.batch["token_level_scores"], scores[rows])
    assert (rows >= 200).sum() == 0 and 280 < int((rows < 100).sum()) < 360  # 4 to 1
    again = core_algos.compute_pf_ppo_reweight_data(batch, "pow", 2.0, np.random.default_rng(0))
    assert torch.equal(again.batch["row"], rows) and batch.batch["row"].tolist() == list(range(400))
    torch.manual_seed(3)
    first = core_algos.compute_pf_ppo_reweight_data(batch).batch["row"]
    torch.manual_seed(3)
    assert torch.equal(core_algos.compute_pf_ppo_reweight_data(batch).batch["row"], first)


def test_what_an_estimator_logs_reaches_the_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    def logs(batch: DataProto, config: AlgorithmConfig) -> Any:
        mask = batch.batch["response_mask"]
        return mask.float(), mask.float(), {"logs/rows": float(len(mask))}

    estimator = core_algos.AdvantageEstimator("test_logs", logs)
    monkeypatch.setitem(core_algos.ADV_ESTIMATOR_REGISTRY, "test_logs", estimator)
    batch = DataProto.from_dict({"response_mask": torch.ones(3, 2)}, {})
    metrics: dict[str, Any] = {"kept": 1.0}
    batch_ops.compute_advantage(batch, "test_logs", AlgorithmConfig(), metrics)
    assert metrics == {"kept": 1.0, "logs/rows": 3.0}
    batch_ops.compute_advantage(batch, "test_logs", AlgorithmConfig())


def test_unknown_names_list_the_known_ones() -> None:
    with pytest.raises(UserError, match=r"grpoo.*known:.*grpo.*Did you mean 'grpo'"):
        core_algos.get_adv_estimator("grpoo")
    with pytest.raises(UserError, match=r"known:.*vanilla"):
        core_algos.get_policy_loss("clipped")
    with pytest.raises(ValueError, match="already registered"):
        core_algos.register_adv_est("grpo")(lambda batch, config: (batch, batch))
