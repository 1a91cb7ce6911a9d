# SPDX-License-Identifier: Apache-2.0
"""The recipe inside the trainer, on TOY: what is GRPO to the last bit, what the pass sees, and when it runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from recipe.trial.allocation import add_term, clamp_term, dense_term
from recipe.trial.hook import HINDSIGHT_COLUMN, WEIGHT_COLUMN
from tests.recipe.traj_evolve.support import logged, policy_weights, run_phases, same, without_clocks
from tests.recipe.trial.support import TOKENS, run_trial, trial_trainer
from tests.recipe.trial.test_allocation import reference_weights
from tests.verl.trainer.toy_run import run_toy, toy_config
from verl.trainer.ppo.ray_trainer import RayPPOTrainer, StepState
from verl.workers.actor.dp_actor import DataParallelPPOActor

Run = tuple[list[dict[str, Any]], dict[str, torch.Tensor]]
STEPS = "trainer.total_epochs=2"
METRICS = {
    f"trial/{name}"
    for name in (
        "gap_mean", "gap_mean_success", "gap_mean_failure", "gap_abs_mean", "weight_max", "weight_min",
        "weight_entropy", "dense_to_grpo_ratio",
    )
}  # fmt: skip


@pytest.fixture(scope="module")
def grpo(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Two steps of the core's own program."""
    trainer, lines = run_toy(toy_config(tiny_model_dir, tmp_path_factory.mktemp("grpo"), STEPS, TOKENS))
    return without_clocks(lines), policy_weights(trainer)


@pytest.mark.parametrize(
    "overrides",
    [
        ("trial.enable=False",),
        ("trial.view=identical",),
        ("trial.view=identical", "trial.allocation=permuted", "trial.clamp_by_grpo=True", "trial.beta=3"),
        ("trial.beta=0",),
    ],
    ids=["off", "identical", "identical_permuted", "beta_0"],
)
def test_bit_equal_to_grpo(grpo: Run, tiny_model_dir: Path, tmp_path: Path, overrides: tuple[str, ...]) -> None:
    trainer, lines = run_trial(tiny_model_dir, tmp_path, STEPS, *overrides)
    assert without_clocks(lines, "trial/") == grpo[0]
    assert same(policy_weights(trainer), grpo[1])
    for line in lines:
        if overrides[0] == "trial.enable=False":
            assert not any(name.startswith("trial/") for name in line)
        else:
            # The equality is not that of a hook that did nothing.
            assert set(line) >= METRICS and line["trial/dense_to_grpo_ratio"] == 0.0
            assert (line["trial/gap_abs_mean"] > 0.0) == (overrides == ("trial.beta=0",))


@pytest.mark.parametrize("allocation", ["relative", "uniform", "permuted"])
def test_the_term_is_another_update(grpo: Run, tiny_model_dir: Path, tmp_path: Path, allocation: str) -> None:
    trainer, lines = run_trial(tiny_model_dir, tmp_path, STEPS, f"trial.allocation={allocation}")
    assert not same(policy_weights(trainer), grpo[1])
    for line in lines:
        assert set(line) >= METRICS and line["trial/dense_to_grpo_ratio"] > 0.0
        assert line["timing_s/hindsight_log_prob"] > 0.0
        assert (line["trial/weight_min"] == line["trial/weight_max"] == 1.0) == (allocation == "uniform")
    # The rollout of the first step comes before any update.
    assert lines[0]["episode/reward/mean"] == grpo[0][0]["episode/reward/mean"]


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bool]]:
    """(rows, whether a gradient was recorded) of every log-prob pass over a rollout."""
    seen = []
    plain = DataParallelPPOActor.compute_log_prob

    def counted(self: DataParallelPPOActor, data: Any, *args: Any, **kwargs: Any) -> Any:
        log_probs, entropys = plain(self, data, *args, **kwargs)
        if len(data) > 1:  # a single row is the engine's check of its weights
            seen.append((len(data), log_probs.requires_grad))
        return log_probs, entropys

    monkeypatch.setattr(DataParallelPPOActor, "compute_log_prob", counted)
    return seen


def step_of(trainer: RayPPOTrainer) -> StepState:
    return run_phases(trainer, until="prepare_update")


def test_one_more_pass_without_a_gradient(passes: list[Any], tiny_model_dir: Path, tmp_path: Path) -> None:
    trainer = trial_trainer(tiny_model_dir, tmp_path)
    before = policy_weights(trainer)
    state = step_of(trainer)
    assert passes == [(len(state.batch), False)] * 2
    worker: Any = trainer.actor_rollout_wg.worker
    assert all(parameter.grad is None for parameter in worker.actor_model.parameters())
    assert same(policy_weights(trainer), before)
    assert state.timing["hindsight_log_prob"] <= state.timing.get("after_log_prob", np.inf)
    tensors = state.batch.batch
    assert not tensors[HINDSIGHT_COLUMN].requires_grad and not tensors["advantages"].requires_grad


@pytest.mark.parametrize("off", ["trial.enable=False", "trial.view=identical"])
def test_the_controls_need_no_pass(passes: list[Any], tiny_model_dir: Path, tmp_path: Path, off: str) -> None:
    trainer = trial_trainer(tiny_model_dir, tmp_path, off)
    step_of(trainer)
    assert len(passes) == 1


def test_validation_has_no_pass(passes: list[Any], tiny_model_dir: Path, tmp_path: Path) -> None:
    trainer = trial_trainer(tiny_model_dir, tmp_path, "trainer.val_only=True", "trainer.val_before_train=True")
    trainer.fit()
    assert passes == []
    (line,) = logged(tmp_path)
    assert "val/success_rate" in line and not any("trial" in name or "hindsight" in name for name in line)


@pytest.fixture(scope="module")
def state(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RayPPOTrainer, StepState]]:
    trainer = trial_trainer(tiny_model_dir, tmp_path_factory.mktemp("state"))
    yield trainer, step_of(trainer)


def test_the_pass_is_the_policys_own_scoring_with_the_outcome_shown(state: Any) -> None:
    """Every row once more, alone, through the plain model and with the prompt written as text."""
    trainer, step = state
    tensors, columns = step.batch.batch, step.batch.non_tensor_batch
    model, tokenizer = trainer.actor_rollout_wg.worker.actor_model, trainer.tokenizer
    episodes = {episode.traj_uid: episode for episode in step.episodes}
    assert len({len(episode.steps) for episode in step.episodes}) > 1
    width = tensors["responses"].shape[1]
    for row in range(0, len(step.batch), 5):
        episode, turn = episodes[columns["traj_uid"][row]], int(columns["step_index"][row])
        mask = tensors["attention_mask"][row].bool()
        prompt = tokenizer.decode(tensors["input_ids"][row, :-width][mask[:-width]], skip_special_tokens=False)
        if turn + 1 < len(episode.steps):
            shown = f"\n\nThis turn leads to:\n{episode.steps[turn + 1].observation}"
        else:
            end = "the task is solved" if episode.success else "the task is not solved, and no turns are left"
            shown = f"\n\nThis turn leads to: {end}.\n{episode.final_observation}"
        text = prompt.replace("<|im_end|>", shown + "<|im_end|>")
        assert text != prompt
        said = tensors["responses"][row][mask[-width:]]
        ids = torch.cat([torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"]), said])
        with torch.no_grad():
            logits = model(input_ids=ids[None]).logits[0].float()
        expected = logits.log_softmax(-1)[:-1].gather(1, ids[1:, None]).squeeze(1)[-len(said) :]
        torch.testing.assert_close(tensors[HINDSIGHT_COLUMN][row][: len(said)], expected, atol=1e-5, rtol=1e-5)


def test_the_advantages_are_grpos_plus_the_term(state: Any, grpo: Run, tiny_model_dir: Path, tmp_path: Path) -> None:
    _, step = state
    plain = step_of(trial_trainer(tiny_model_dir, tmp_path, "trial.enable=False")).batch
    tensors, columns = step.batch.batch, step.batch.non_tensor_batch
    assert columns["traj_uid"].tolist() == plain.non_tensor_batch["traj_uid"].tolist()
    assert torch.equal(tensors["old_log_probs"], plain.batch["old_log_probs"])
    gaps = (tensors[HINDSIGHT_COLUMN] - tensors["old_log_probs"]).double()
    mask = tensors["response_mask"]
    order = {uid: number for number, uid in enumerate(dict.fromkeys(columns["traj_uid"]))}
    weights = reference_weights(gaps.tolist(), mask.tolist(), [order[uid] for uid in columns["traj_uid"]], 1.0)
    torch.testing.assert_close(tensors[WEIGHT_COLUMN], torch.tensor(weights))
    term = 0.1 * torch.tensor(weights)[:, None] * gaps.clamp(-1, 1) * mask
    torch.testing.assert_close(tensors["advantages"], (plain.batch["advantages"] + term).float())
    assert len({round(weight, 3) for weight in weights}) > 10


def test_the_term_can_be_kept_below_grpos(state: Any, tiny_model_dir: Path, tmp_path: Path) -> None:
    heavy = ("trial.beta=100", "trial.clamp_by_grpo=True")
    step = step_of(trial_trainer(tiny_model_dir, tmp_path / "a", *heavy))
    assert step.metrics["trial/dense_to_grpo_ratio"] == pytest.approx(1.0)
    plain = step_of(trial_trainer(tiny_model_dir, tmp_path / "b", "trial.enable=False")).batch.batch["advantages"]
    tensors = step.batch.batch
    clipped = (tensors[HINDSIGHT_COLUMN] - tensors["old_log_probs"]).clamp(-1, 1)
    term = dense_term(clipped, tensors[WEIGHT_COLUMN].double(), 100.0) * tensors["response_mask"]
    clamped = clamp_term(term, plain, tensors["response_mask"].bool())
    torch.testing.assert_close(tensors["advantages"], add_term(plain, clamped), atol=1e-4, rtol=1e-4)


def test_special_tokens_can_be_left_out(state: Any, tiny_model_dir: Path, tmp_path: Path) -> None:
    # Long answers of an untrained policy now and then hold a special token.
    long = "data.max_response_length=32"
    options = (long, "trial.mask_special_tokens=True")
    trainer = trial_trainer(tiny_model_dir, tmp_path / "a", *options)
    tensors = step_of(trainer).batch.batch
    plain = step_of(trial_trainer(tiny_model_dir, tmp_path / "b", long, "trial.enable=False")).batch.batch
    special = torch.isin(tensors["responses"], torch.tensor(trainer.tokenizer.all_special_ids))
    special &= tensors["response_mask"].bool()
    assert special.any()
    changed = tensors["advantages"] != plain["advantages"]
    assert not changed[special].any() and changed[~special & tensors["response_mask"].bool()].any()


def test_long_outcomes_are_shortened_and_counted(state: Any, tiny_model_dir: Path, tmp_path: Path) -> None:
    step = step_of(trial_trainer(tiny_model_dir, tmp_path, "trial.max_outcome_length=3"))
    assert step.metrics["trial/outcomes_shortened"] == len(step.batch)
    assert state[1].metrics["trial/outcomes_shortened"] == 0.0


@pytest.mark.parametrize(
    "extra",
    [
        ("algorithm.filter_groups.enable=True",),
        ("trainer.adjust_before_advantage=True", "actor_rollout_ref.actor.use_dynamic_bsz=False",
         "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=64",
         "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=64"),
    ],
    ids=["dynamic_sampling", "duplicated_rows"],
)  # fmt: skip
def test_rows_find_their_outcome_whatever_became_of_the_rollout(
    tiny_model_dir: Path, tmp_path: Path, extra: tuple[str, ...]
) -> None:
    step = step_of(trial_trainer(tiny_model_dir, tmp_path, *extra))
    tensors, columns = step.batch.batch, step.batch.non_tensor_batch
    tokens = tensors["response_mask"].sum(-1).double()
    for uid in set(columns["traj_uid"]):
        rows = torch.from_numpy(columns["traj_uid"] == uid)
        mean = (tensors[WEIGHT_COLUMN][rows] * tokens[rows]).sum() / tokens[rows].sum()
        assert mean.item() == pytest.approx(1.0, abs=1e-6)
    same_turn: dict[tuple[str, int], int] = {}
    for row, key in enumerate(zip(columns["traj_uid"], columns["step_index"])):
        first = same_turn.setdefault(key, row)
        torch.testing.assert_close(tensors[HINDSIGHT_COLUMN][row], tensors[HINDSIGHT_COLUMN][first])
    assert (len(same_turn) < len(step.batch)) == ("trainer.adjust_before_advantage=True" in extra)


def test_the_permutation_follows_its_seed(state: Any, tiny_model_dir: Path, tmp_path: Path) -> None:
    def weights(name: str, *given: str) -> torch.Tensor:
        trainer = trial_trainer(tiny_model_dir, tmp_path / name, "trial.allocation=permuted", *given)
        result: torch.Tensor = step_of(trainer).batch.batch[WEIGHT_COLUMN]
        return result

    # TOY's env.seed is 0.
    own = weights("a")
    assert torch.equal(own, weights("b", "trial.seed=0"))
    assert not torch.equal(own, weights("c", "trial.seed=1"))
    assert not torch.equal(own, state[1].batch.batch[WEIGHT_COLUMN])
