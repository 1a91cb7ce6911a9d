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
from tests.helpers.tiny import make_tiny_model
from tests.recipe.traj_evolve.support import logged, policy_weights, run_phases, same, without_clocks
from tests.recipe.trial.support import TOKENS, run_trial, trial_trainer
from tests.recipe.trial.test_allocation import reference_weights
from tests.recipe.trial.test_outcome import QWEN3_LIKE
from tests.verl.trainer.toy_run import run_toy, toy_config
from verl.trainer.ppo import rollout_correction
from verl.trainer.ppo.ray_trainer import RayPPOTrainer, StepState
from verl.utils.tokenizer import hf_tokenizer
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
def passes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bool, bool]]:
    """(rows, whether a gradient was recorded, whether there are entropies) of every log-prob pass over a rollout."""
    seen = []
    plain = DataParallelPPOActor.compute_log_prob

    def counted(self: DataParallelPPOActor, data: Any, *args: Any, **kwargs: Any) -> Any:
        log_probs, entropys = plain(self, data, *args, **kwargs)
        if len(data) > 1:  # a single row is the engine's check of its weights
            seen.append((len(data), log_probs.requires_grad, entropys is not None))
        return log_probs, entropys

    monkeypatch.setattr(DataParallelPPOActor, "compute_log_prob", counted)
    return seen


def step_of(trainer: RayPPOTrainer) -> StepState:
    return run_phases(trainer, until="prepare_update")


def test_one_more_pass_without_a_gradient(passes: list[Any], tiny_model_dir: Path, tmp_path: Path) -> None:
    trainer = trial_trainer(tiny_model_dir, tmp_path)
    before = policy_weights(trainer)
    state = step_of(trainer)
    assert passes == [(len(state.batch), False, True), (len(state.batch), False, False)]
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


def check_scores(trainer: RayPPOTrainer, step: StepState) -> None:
    """Rows once more, alone, through the plain model and with the prompt written as text."""
    temperature = trainer.config.actor_rollout_ref.rollout.temperature
    tensors, columns = step.batch.batch, step.batch.non_tensor_batch
    model: Any = trainer.actor_rollout_wg.worker.actor_model
    tokenizer = trainer.tokenizer
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
            logits = model(input_ids=ids[None]).logits[0].float() / temperature
        expected = logits.log_softmax(-1)[:-1].gather(1, ids[1:, None]).squeeze(1)[-len(said) :]
        torch.testing.assert_close(tensors[HINDSIGHT_COLUMN][row][: len(said)], expected, atol=1e-5, rtol=1e-5)


def test_the_pass_is_the_policys_own_scoring_with_the_outcome_shown(state: Any) -> None:
    check_scores(*state)


def test_the_pass_is_at_the_rollouts_temperature(tiny_model_dir: Path, tmp_path: Path) -> None:
    trainer = trial_trainer(tiny_model_dir, tmp_path, "actor_rollout_ref.rollout.temperature=0.7")
    check_scores(trainer, step_of(trainer))


def test_thinking_switched_off_reaches_the_prompts_with_outcomes(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model")
    tokenizer = hf_tokenizer(str(model))
    tokenizer.chat_template = QWEN3_LIKE
    tokenizer.save_pretrained(model)
    trainer = trial_trainer(model, tmp_path / "run", "+data.apply_chat_template_kwargs.enable_thinking=False")
    step = step_of(trainer)
    prompts = trainer.tokenizer.batch_decode(step.batch.batch["prompts"])
    assert all(text.endswith("<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n") for text in prompts)
    check_scores(trainer, step)
    assert step.metrics["trial/outcomes_misplaced"] == 0.0


def test_the_advantages_are_grpos_plus_the_term(state: Any, tiny_model_dir: Path, tmp_path: Path) -> None:
    check_term(state[1], 1.0, tiny_model_dir, tmp_path)


def test_gaps_are_clipped(tiny_model_dir: Path, tmp_path: Path) -> None:
    step = step_of(trial_trainer(tiny_model_dir, tmp_path / "a", "trial.c=0.01"))
    gaps = (step.batch.batch[HINDSIGHT_COLUMN] - step.batch.batch["old_log_probs"]).abs()
    assert (gaps > 0.01).any() and ((gaps < 0.01) & step.batch.batch["response_mask"].bool()).any()
    check_term(step, 0.01, tiny_model_dir, tmp_path / "b")


def check_term(step: StepState, c: float, model: Path, folder: Path) -> None:
    """Multipliers and advantages of a batch, from its columns and the advantages of plain GRPO."""
    plain = step_of(trial_trainer(model, folder, "trial.enable=False")).batch
    tensors, columns = step.batch.batch, step.batch.non_tensor_batch
    assert columns["traj_uid"].tolist() == plain.non_tensor_batch["traj_uid"].tolist()
    assert torch.equal(tensors["old_log_probs"], plain.batch["old_log_probs"])
    gaps = (tensors[HINDSIGHT_COLUMN] - tensors["old_log_probs"]).double()
    mask = tensors["response_mask"]
    order = {uid: number for number, uid in enumerate(dict.fromkeys(columns["traj_uid"]))}
    weights = reference_weights(gaps.tolist(), mask.tolist(), [order[uid] for uid in columns["traj_uid"]], c)
    torch.testing.assert_close(tensors[WEIGHT_COLUMN], torch.tensor(weights))
    term = 0.1 * torch.tensor(weights)[:, None] * gaps.clamp(-c, c) * mask
    torch.testing.assert_close(tensors["advantages"], (plain.batch["advantages"] + term).float())
    assert len({round(weight, 3) for weight in weights}) > 10


def test_the_gaps_of_successes_and_failures_are_told_apart(state: Any) -> None:
    _, step = state
    tensors, columns = step.batch.batch, step.batch.non_tensor_batch
    won = {episode.traj_uid for episode in step.episodes if episode.success}
    gaps: dict[bool, list[float]] = {True: [], False: []}
    for row, uid in enumerate(columns["traj_uid"]):
        said = tensors["response_mask"][row].bool()
        gaps[uid in won] += (tensors[HINDSIGHT_COLUMN] - tensors["old_log_probs"])[row][said].tolist()
    means = {name: step.metrics[f"trial/gap_mean_{name}"] for name in ("success", "failure")}
    assert means == pytest.approx({"success": np.mean(gaps[True]), "failure": np.mean(gaps[False])}, rel=1e-4)
    assert abs(means["success"] - means["failure"]) > 1e-3 * abs(means["success"])


def test_rejected_tokens_do_not_take_part(
    tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def every_second(log_ratio: Any, mask: torch.Tensor, *args: Any) -> torch.Tensor:
        return mask.bool() & (torch.arange(mask.shape[1]) % 2 == 0)

    monkeypatch.setattr(rollout_correction, "kept_tokens", every_second)
    options = ("algorithm.rollout_correction.rollout_rs=token", "trial.beta=1")
    step = step_of(trial_trainer(tiny_model_dir, tmp_path / "a", *options))
    plain = step_of(trial_trainer(tiny_model_dir, tmp_path / "b", *options, "trial.enable=False")).batch
    tensors = step.batch.batch
    kept = tensors["response_mask"].bool() & (torch.arange(4) % 2 == 0)
    added = tensors["advantages"] - plain.batch["advantages"]
    assert added[kept].any() and not added[~kept].any()
    gaps = (tensors[HINDSIGHT_COLUMN] - tensors["old_log_probs"])[kept]
    assert step.metrics["trial/gap_mean"] == pytest.approx(gaps.mean().item(), rel=1e-4)
    ratio = added[kept].abs().mean() / plain.batch["advantages"][kept].abs().mean()
    assert step.metrics["trial/dense_to_grpo_ratio"] == pytest.approx(ratio.item(), rel=1e-4)


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
    trainer = trial_trainer(tiny_model_dir, tmp_path, "trial.allocation=permuted", *extra)
    step = step_of(trainer)
    check_scores(trainer, step)
    tensors, columns = step.batch.batch, step.batch.non_tensor_batch
    tokens = tensors["response_mask"].sum(-1).double()
    same_turn: dict[tuple[str, int], int] = {}
    for row, key in enumerate(zip(columns["traj_uid"], columns["step_index"])):
        first = same_turn.setdefault(key, row)
        torch.testing.assert_close(tensors[HINDSIGHT_COLUMN][row], tensors[HINDSIGHT_COLUMN][first])
        assert tensors[WEIGHT_COLUMN][row] == tensors[WEIGHT_COLUMN][first]
    for uid in set(columns["traj_uid"]):
        rows = [row for (own, _), row in same_turn.items() if own == uid]
        mean = (tensors[WEIGHT_COLUMN][rows] * tokens[rows]).sum() / tokens[rows].sum()
        assert mean.item() == pytest.approx(1.0, abs=1e-6)
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
