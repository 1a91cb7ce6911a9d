# SPDX-License-Identifier: Apache-2.0
"""The probe after every weight sync, with the engine that is always there."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.helpers.tiny import make_tiny_model
from tests.verl.workers.support import make_group, training_batch, worker_config
from verl.workers.rollout import base
from verl.workers.rollout.probe import (
    HEAD,
    UNKNOWN,
    StaleWeightsError,
    first_stale_group,
    layer_groups,
    probe_tokens,
    record_states,
)
from verl.workers.rollout.session import rollout_session

GROUPS = ("model.embed_tokens", "model.layers.0", "model.layers.1", "model.norm")
Weights = Iterable[tuple[str, Tensor]]


def replace_update(monkeypatch: pytest.MonkeyPatch, group: Any, change: Callable[[str, Tensor], Tensor] | None) -> None:
    """Syncs that change weights on their way, or (None) only claim to have happened."""
    engine = group.worker.rollout
    complete = engine.update_weights

    def update(weights: Weights, version: int) -> None:
        if change is None:
            engine.version = version
            return
        complete(((name, change(name, weight)) for name, weight in weights), version)

    monkeypatch.setattr(engine, "update_weights", update)


@pytest.mark.parametrize("actor", ["fsdp", "fsdp2"])
@pytest.mark.parametrize("model", [{}, {"lora_rank": 4}, {"use_remove_padding": True}])
def test_groups_and_states_under_every_wrapping(tiny_model_dir: Path, actor: str, model: dict[str, Any]) -> None:
    group = make_group(worker_config(tiny_model_dir, actor={"strategy": actor}, model=model))
    probe = group.worker.probe
    assert probe.groups == GROUPS
    states = probe.states()
    assert tuple(states) == GROUPS
    assert all(state.shape == (len(probe.tokens), 64) for state in states.values())
    # Ends as usual: the engine agrees, and its states are the policy's.
    with rollout_session(group, 0):
        engine = group.worker.rollout.probe_states(probe.tokens, probe.groups)
    for name, state in states.items():
        assert torch.allclose(engine[name], state, atol=1e-4), name


def test_probe_tokens_cover_the_vocabulary() -> None:
    for size in (300, 32_000, 151_936):
        tokens = probe_tokens(size)
        assert len(set(tokens.tolist())) == len(tokens) and int(tokens.max()) < size
        assert int(tokens.max()) > 0.9 * size and int(tokens.min()) < 0.1 * size


@pytest.mark.parametrize(
    ("tied", "prefix", "part"),
    [
        (True, "model.embed_tokens.", "model.embed_tokens"),
        (True, "model.layers.0.mlp.up_proj.", "model.layers.0"),
        (True, "model.layers.1.input_layernorm.", "model.layers.1"),
        (True, "model.norm.", "model.norm"),
        (False, "lm_head.", "the output head"),
    ],
)
def test_the_error_names_the_first_part_that_differs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tied: bool, prefix: str, part: str
) -> None:
    group = make_group(worker_config(make_tiny_model(tmp_path / "hf", tie_word_embeddings=tied)))
    replace_update(monkeypatch, group, lambda name, weight: weight * 1.5 if name.startswith(prefix) else weight)
    with pytest.raises(StaleWeightsError, match=rf"sync of version 3: .* first part whose output differs is {part}$"):
        group.start_rollout(3)


def test_weights_that_are_not_numbers_differ(tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    group = make_group(worker_config(tiny_model_dir))
    replace_update(
        monkeypatch, group, lambda name, weight: weight * float("nan") if name.startswith("model.layers.1.") else weight
    )
    with pytest.raises(StaleWeightsError, match=r"model\.layers\.1$"):
        group.start_rollout(0)


def test_a_small_change_that_does_not_arrive_is_noticed(tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Far within the tolerance, so only that the engine has not moved at all gives it away.
    config = worker_config(tiny_model_dir, actor={"strategy": "fsdp"}, rollout={"weight_probe_tolerance": 0.5})
    group = make_group(config)
    with rollout_session(group, 0):
        pass
    with rollout_session(group, 0):
        pass
    group.worker.optimizer.param_groups[0]["lr"] = 1e-2
    group.update_actor(training_batch(8, tiny_model_dir))
    engine = group.worker.rollout
    old = [(name, weight) for name, weight in engine.module.state_dict().items()]
    assert all(weight.numel() == 0 for _, weight in old)
    stale = make_group(config)
    kept = {name: weight.clone() for name, weight in stale.worker.actor_model.state_dict().items()}
    complete = engine.update_weights
    monkeypatch.setattr(engine, "update_weights", lambda weights, version: complete(kept.items(), version))
    with pytest.raises(StaleWeightsError, match="did not reach the rollout engine"):
        group.start_rollout(1)


def test_small_steps_that_never_arrive_add_up(tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    group = make_group(worker_config(tiny_model_dir, rollout={"weight_probe_tolerance": 1.0}))
    group.start_rollout(0)
    expected = group.worker.probe.log_probs()
    # Every step is far too small to be noticed alone: a hundredth of the tolerance.
    moved = iter(range(1, 100))
    monkeypatch.setattr(group.worker.probe, "log_probs", lambda: expected + 0.01 * next(moved))
    with pytest.raises(StaleWeightsError, match="did not reach the rollout engine"):
        for version in range(1, 20):
            group.start_rollout(version)
    assert version in (10, 11)


def test_keys_of_the_config(tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for rollout in ({"weight_probe": False}, {"weight_probe_tolerance": 100.0}):
        group = make_group(worker_config(tiny_model_dir, rollout=rollout))
        replace_update(monkeypatch, group, lambda name, weight: weight * 1.5)
        with rollout_session(group, 0):
            pass


def test_ranks_whose_engine_is_in_order_stay_silent(tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    group = make_group(worker_config(tiny_model_dir))
    asked: list[bool] = []
    monkeypatch.setattr(base, "_on_any_rank", lambda flag: asked.append(flag) or True)
    read: list[str] = []
    monkeypatch.setattr(group.worker.probe, "states", lambda: read.append("states") or {})
    group.start_rollout(0)
    # It took part in the collective that another rank needs, and that was all.
    assert asked == [False] and read == ["states"]


def test_first_stale_group() -> None:
    names = ("embed", "layers.0", "layers.1", "norm")
    policy = {name: torch.ones(3, 2) for name in names}
    changed = {**policy, "layers.1": 2 * torch.ones(3, 2), "norm": torch.zeros(3, 2)}
    assert first_stale_group(names, policy, changed, torch.float32) == "layers.1"
    assert first_stale_group(names, policy, policy, torch.float32) == HEAD
    # An engine that scales its embeddings outside of the module shows a difference which the layers do not have.
    assert first_stale_group(names, policy, {**policy, "embed": torch.zeros(3, 2)}, torch.float32) == HEAD
    # Rows that the engine adds to fill a block do not count; parts that it does not show are passed over.
    padded = {"layers.0": torch.cat([policy["layers.0"], torch.zeros(2, 2)]), "norm": torch.zeros(3, 2)}
    assert first_stale_group(names, policy, padded, torch.float32) == "norm"
    assert first_stale_group(names, policy, {}, torch.float32) == UNKNOWN
    close = {name: 1.01 * state for name, state in policy.items()}
    assert first_stale_group(names, policy, close, torch.float32) == "embed"
    assert first_stale_group(names, policy, close, torch.bfloat16) == HEAD


def test_a_layer_s_residual_stream_is_added() -> None:
    class Layer(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x, 10 * x

    model = nn.ModuleDict({"layers": nn.ModuleList([Layer(), Layer()]), "norm": Layer()})
    assert layer_groups(model) == ("layers.0", "layers.1")
    x = torch.ones(4, 2)
    with record_states(model, ("layers.0", "norm", "absent")) as states:
        model["layers"][0](x)  # type: ignore[index]
        model["layers"][0](2 * x)  # type: ignore[index]
        model["norm"](x)
    assert torch.equal(states["layers.0"], 11 * x) and torch.equal(states["norm"], x) and len(states) == 2
    model["layers"][0](3 * x)  # type: ignore[index]
    assert torch.equal(states["layers.0"], 11 * x)
