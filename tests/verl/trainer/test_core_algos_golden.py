# SPDX-License-Identifier: Apache-2.0
"""Recorded values of the reference's pure functions: every case of five files, and a check that none is left over."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from agent_system.environments.env_package.alfworld.projection import alfworld_projection
from agent_system.environments.env_package.search import search_projection
from agent_system.environments.env_package.sokoban import sokoban_projection
from agent_system.environments.env_package.webshop.projection import webshop_projection
from agent_system.memory import SearchMemory, SimpleMemory
from recipe.gigpo import core_gigpo
from recipe.hgpo import core_hgpo
from verl.protocol import DataProto
from verl.trainer.ppo import batch_ops, core_algos
from verl.utils import seqlen_balancing
from verl.utils import torch_functional as functional

TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}


class Golden:
    """A file of recorded values that knows which of them were used."""

    def __init__(self, path: Path) -> None:
        self.values: dict[str, Any] = json.loads(path.read_text())
        self._left = set(self._leaves(self.values, ()))

    def _leaves(self, value: Any, path: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
        if isinstance(value, dict):
            for key, item in value.items():
                yield from self._leaves(item, (*path, key))
        else:
            yield path

    def take(self, *path: str) -> Any:
        """The value (or subtree) at `path`, counted as used."""
        value: Any = self.values
        for key in path:
            value = value[key]
        self._left -= {leaf for leaf in self._left if leaf[: len(path)] == path}
        return value

    def tensor(self, *path: str) -> Tensor:
        return torch.tensor(self.take(*path))

    def finish(self) -> None:
        assert not self._left, f"recorded cases that no check has used: {sorted(self._left)}"


@pytest.fixture
def golden(shared_dir: Path) -> Any:
    return lambda name: Golden(shared_dir / "compat" / "golden" / f"{name}.json")


def settings(name: str) -> dict[str, Any]:
    """`"x norm=True gamma=0.9"` -> `{"norm": True, "gamma": 0.9}`; values that are no JSON stay text."""
    found: dict[str, Any] = {}
    for key, _, value in (word.partition("=") for word in name.split() if "=" in word):
        try:
            found[key] = json.loads(value.lower())
        except json.JSONDecodeError:
            found[key] = value
    return found


def equal(got: Tensor, expected: Any, name: str, **tolerance: float) -> None:
    expected = torch.as_tensor(expected)
    assert got.shape == expected.shape, name
    torch.testing.assert_close(got, expected, **(TOLERANCE | tolerance), msg=lambda text: f"{name}: {text}")


def test_advantages(golden: Any) -> None:
    data: Golden = golden("advantages")
    uid, traj, anchor = (np.array(data.take(k), dtype=object) for k in ("uid", "traj_uid", "anchor_obs"))
    rewards, mask = data.tensor("token_level_rewards"), data.tensor("response_mask")
    columns = {"rewards": np.array(data.take("step_env_rewards"), dtype=object), "traj_uid": traj}
    steps = DataProto.from_dict({"responses": mask}, columns)
    step_returns = batch_ops.compute_step_returns(steps, 0.95)
    equal(step_returns, data.take("step_returns_gamma095"), "step returns")
    for compute in (core_gigpo.compute_step_discounted_returns, core_hgpo.compute_step_discounted_returns):
        assert torch.equal(compute(steps, 0.95), step_returns)

    for name in data.values["advantages"]:
        estimator, option = name.replace("(", " ").split()[0], settings(name)
        expected = data.take("advantages", name)
        returns = None
        if estimator == "grpo":
            got, _ = core_algos.compute_grpo_outcome_advantage(
                rewards, mask, uid, traj, norm_adv_by_std_in_grpo=option["norm"],
                compute_mean_std_cross_steps=option["cross_steps"],
            )  # fmt: skip
        elif estimator == "grpo_passk":
            rest = np.flatnonzero(uid != "g2")
            got, _ = core_algos.compute_grpo_passk_outcome_advantage(
                rewards[rest], mask[rest], uid[rest], traj[rest], norm_adv_by_std_in_grpo=option["norm"]
            )
        elif estimator == "rloo":
            got, _ = core_algos.compute_rloo_outcome_advantage(rewards, mask, uid, traj)
        elif estimator == "reinforce_plus_plus_baseline":
            got, _ = core_algos.compute_reinforce_plus_plus_baseline_outcome_advantage(rewards, mask, uid, traj)
        elif estimator == "reinforce_plus_plus":
            got, returns = core_algos.compute_reinforce_plus_plus_outcome_advantage(rewards, mask, option["gamma"])
        elif estimator == "remax":
            got, returns = core_algos.compute_remax_outcome_advantage(rewards, torch.arange(9.0), mask)
        elif estimator == "gae":
            values = torch.tensor(expected["values"])
            got, returns = core_algos.compute_gae_advantage_return(
                rewards, values, mask, option["gamma"], option["lam"]
            )
        elif estimator == "gigpo":
            got, _ = core_gigpo.compute_gigpo_outcome_advantage(
                rewards, step_returns, mask, anchor, uid, traj, step_advantage_w=option["w"], mode=name.split()[1]
            )
        elif estimator == "hgpo":
            got, _ = core_hgpo.compute_hgpo_outcome_advantage(
                rewards, step_returns, mask, anchor, uid, traj, option["history"], mode=name.split()[1],
                length_weight_alpha=option["alpha"], base_group=option["base_group"],
            )  # fmt: skip
        else:
            pytest.fail(f"no check for {name}")
        assert got.dtype == torch.float32
        if returns is None:
            equal(got, expected, name)
        else:
            equal(got, expected["adv"], name)
            equal(returns, expected["ret"], name)

    texts = data.take("similarity_groups", "obs")
    for name in [name for name in data.values["similarity_groups"] if name != "obs"]:
        similar = name != "exact"
        groups = core_gigpo.build_step_group(texts, ["g"] * len(texts), similar, float(name) if similar else 0.95)
        assert groups.tolist() == data.take("similarity_groups", name), name
    data.finish()


def test_losses(golden: Any) -> None:
    data: Golden = golden("losses")
    old, advantages, mask = (data.tensor(name) for name in ("old_log_prob", "advantages", "mask"))
    metrics = ("pg_loss", "pg_clipfrac", "ppo_kl", "pg_clipfrac_lower")
    functions = {"vanilla": core_algos.compute_policy_loss, "gspo": core_algos.compute_policy_loss_gspo}
    for kind, function in functions.items():
        for name in data.values[kind]:
            log_prob = data.tensor("log_prob").requires_grad_()
            option = settings(name) if "low=" in name else {"low": 0.2, "high": 0.2}
            if kind == "gspo" and "low=" not in name:
                option = {"low": 0.0003, "high": 0.0004}
            got = function(
                old, log_prob, advantages, mask, cliprange_low=option["low"], cliprange_high=option["high"],
                clip_ratio_c=option.get("c", 3.0),
                loss_agg_mode=name.split()[0] if "low=" in name and kind == "vanilla" else "token-mean",
            )  # fmt: skip
            expected = data.take(kind, name)
            if name.startswith("grad_log_prob"):
                got[0].backward()
                assert log_prob.grad is not None
                equal(log_prob.grad, expected, f"{kind} {name}", atol=1e-6)
            else:
                assert dict(zip(metrics, (value.item() for value in got))) == pytest.approx(
                    expected, rel=1e-5, abs=1e-6
                ), name

    values = {name: data.tensor("value", name) for name in ("vpreds", "values", "returns")}
    for mode in [name for name in data.values["value"] if name not in values]:
        got = core_algos.compute_value_loss(**values, response_mask=mask, cliprange_value=0.5, loss_agg_mode=mode)
        assert list(map(float, got)) == pytest.approx(data.take("value", mode), rel=1e-5), mode
    for kind in data.values["kl_penalty"]:
        equal(core_algos.kl_penalty(data.tensor("log_prob"), old, kind), data.take("kl_penalty", kind), kind)

    logits, labels = data.tensor("logits", "logits"), data.tensor("logits", "labels")
    equal(functional.logprobs_from_logits(logits, labels), data.take("logits", "logprobs"), "logprobs")
    equal(functional.entropy_from_logits(logits), data.take("logits", "entropy"), "entropy")
    for name in [name for name in data.values if name.startswith("adaptive_kl")]:
        option = settings(name)
        controller = core_algos.AdaptiveKLController(option["init"], option["target"], option["horizon"])
        for step in data.take(name):
            controller.update(step["current_kl"], step["n_steps"])
            assert controller.value == pytest.approx(step["value"], rel=1e-9)

    assert float(functional.masked_mean(advantages, mask)) == pytest.approx(data.take("masked", "mean"), abs=1e-5)
    assert float(functional.masked_var(advantages, mask)) == pytest.approx(data.take("masked", "var"), abs=1e-4)
    whitened = functional.masked_whiten(advantages, mask)
    equal(whitened, data.take("masked", "whiten"), "whiten")
    kept = functional.masked_whiten(advantages, mask, shift_mean=False)
    equal(kept, data.take("masked", "whiten_keep_mean"), "whiten_keep_mean")
    ids = data.tensor("response_mask", "ids")
    for name, ends in (("eos=1", 1), ("eos=[1,2]", [1, 2])):
        assert functional.get_response_mask(ids, ends).tolist() == data.take("response_mask", name)
    _check_schedules(data)
    data.finish()


def _check_schedules(data: Golden) -> None:
    makers = {
        "constant": functional.get_constant_schedule_with_warmup,
        "cosine": functional.get_cosine_schedule_with_warmup,
        "wsd": functional.get_wsd_schedule_with_warmup,
    }
    names = {"warmup": "num_warmup_steps", "total": "num_training_steps", "min": "min_lr_ratio"}
    for name in data.values["schedules"]:
        expected = data.take("schedules", name)
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
        option = {names[key]: value for key, value in settings(name).items()}
        schedule = makers[name.split()[0]](optimizer, **option)
        got = []
        for _ in expected:
            got.append(schedule.get_last_lr()[0])
            optimizer.step()
            schedule.step()
        # The reference's cosine rises again after its last step; ours stays at its end.
        steps = min(len(expected), option.get("num_training_steps", len(expected)) + 1)
        assert got[:steps] == pytest.approx(expected[:steps], abs=1e-6), name


def test_balance(golden: Any) -> None:
    data: Golden = golden("balance")
    lengths = data.take("lens")
    partition = seqlen_balancing.get_seqlen_balanced_partitions
    equal_parts = partition(lengths, k_partitions=4, equal_size=True)
    assert equal_parts == data.take("k4_equal")
    assert partition(lengths, k_partitions=3, equal_size=False) == data.take("k3_unequal")
    assert seqlen_balancing.log_seqlen_unbalance(lengths, equal_parts, "global_seqlen") == data.take("log")
    data.finish()


def test_projections(golden: Any) -> None:
    data: Golden = golden("projections")
    texts = data.take("cases")
    for name, project in (("alfworld", alfworld_projection), ("webshop", webshop_projection)):
        actions, valids = project(texts)
        assert {"actions": actions, "valids": valids} == data.take(name), name
    for name, project in (("search", search_projection), ("sokoban", sokoban_projection)):
        expected = data.take(name)
        actions, valids = project(expected["cases"])
        assert (actions, valids) == (expected["actions"], expected["valids"]), name
    data.finish()


def test_memory(golden: Any) -> None:
    data: Golden = golden("memory")
    simple = SimpleMemory()
    simple.reset(2)
    for turn in range(3):
        simple.store({"text_obs": [f"o{turn}a", f"o{turn}b"], "action": [f"act{turn}a", f"act{turn}b"]})
    search = SearchMemory()
    search.reset(1)
    for query, document in (("q", "doc"), ("r", "doc2")):
        search.store({"search": [f"<search>{query}</search>"], "information": [document]})
    for name in data.values:
        kind, _, length = name.partition("_h")
        texts, counts = (
            simple.fetch(int(length))
            if kind == "simple"
            else search.fetch(int(length), obs_key="information", action_key="search")
        )
        assert [texts, counts] == data.take(name), name
    data.finish()


def test_a_case_left_over_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text('{"a": {"b": 1, "c": [2]}, "d": 3}')
    data = Golden(path)
    data.take("a", "b")
    data.take("d")
    with pytest.raises(AssertionError, match="'a', 'c'"):
        data.finish()
