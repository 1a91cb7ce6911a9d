# SPDX-License-Identifier: Apache-2.0
"""Prompts of the discriminator, and scores from a shared prefix."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from agent_system.step_discriminator.discriminator import (
    DiscriminatorConfig,
    DiscriminatorScorer,
    credit_from_log_probs,
)
from agent_system.step_discriminator.shared_prefix import build_tree, common_prefix_length
from agent_system.step_discriminator.step_prompt import (
    LABELS,
    EpisodeText,
    build_prompts,
    credit_rows,
    rows_to_tokens,
    step_prompt,
)
from tests.agent_system.step_discriminator.discriminator_data import TEXTS, make_trajectory
from tests.helpers.tiny import make_tiny_model
from verl.utils.errors import UserError

ACTIONS = ("go to cabinet 1", "look", "open cabinet 1", "take apple 1", "go to fridge 1", "put apple 1")


@pytest.fixture(scope="module", params=["one_token_labels", "many_token_labels"])
def model_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path) -> Path:
    """A tokenizer that knows the label words as one token each, and one that spells them."""
    if request.param == "many_token_labels":
        return tiny_model_dir
    path = make_tiny_model(tmp_path_factory.mktemp("labels") / "hf", vocab_size=420, texts=TEXTS * 5)
    ids = AutoTokenizer.from_pretrained(path)(list(LABELS), add_special_tokens=False)["input_ids"]
    assert [len(item) for item in ids] == [1, 1]
    return path


def load(path: Path, attention: str = "sdpa") -> tuple[Any, Any]:
    return AutoModelForCausalLM.from_pretrained(path, attn_implementation=attention), AutoTokenizer.from_pretrained(
        path
    )


def episodes() -> list[Any]:
    """Lengths 1, 2, 6 and 12: past ten the index has two digits."""
    return [
        make_trajectory(ACTIONS[:1], uid="a"),
        make_trajectory(ACTIONS[:2], uid="b"),
        make_trajectory(ACTIONS, uid="c"),
        make_trajectory(ACTIONS * 2, uid="d"),
    ]


def scored_one_by_one(model: Any, tokenizer: Any, trajectory: Any, max_length: int = 4096) -> np.ndarray:
    """P(necessary) of all steps but the last by a separate full forward pass per step and label."""
    prompts = build_prompts(EpisodeText.from_trajectory(trajectory), tokenizer, max_length)
    values = np.empty((len(prompts.texts), 2))
    for step, prompt in enumerate(prompts.token_ids):
        for column, label in enumerate(LABELS):
            answer = tokenizer(label, add_special_tokens=False)["input_ids"]
            ids = torch.tensor([[*prompt, *answer]])
            with torch.no_grad():
                log_probs = model(input_ids=ids).logits[0].log_softmax(-1)
            values[step, column] = sum(float(log_probs[len(prompt) - 1 + k, token]) for k, token in enumerate(answer))
    p = np.exp(values)
    credit = p[:, 1] / p.sum(axis=1)
    credit[-1] = 1.0
    return credit


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_shared_prefix_equals_one_by_one(model_dir: Path, attention: str) -> None:
    model, tokenizer = load(model_dir, attention)
    want = [scored_one_by_one(model, tokenizer, trajectory) for trajectory in episodes()]
    for config in (
        DiscriminatorConfig(),
        DiscriminatorConfig(batch_trajectories=1),
        DiscriminatorConfig(batch_tokens=900),
        DiscriminatorConfig(shared_prefix=False),
    ):
        scorer = DiscriminatorScorer(model, tokenizer, config)
        got = scorer.score(episodes())
        for left, right in zip(got, want):
            assert left.dtype == np.float32 and left.shape == right.shape
            np.testing.assert_allclose(left, right, atol=1e-5)
        if config.shared_prefix:
            assert scorer.stats.forward_tokens < scorer.stats.separate_tokens / 2
    assert np.ptp(np.concatenate([credit[:-1] for credit in want])) > 1e-3


def test_scores_do_not_depend_on_the_company(model_dir: Path) -> None:
    model, tokenizer = load(model_dir)
    scorer = DiscriminatorScorer(model, tokenizer, DiscriminatorConfig())
    together = scorer.score(episodes())
    alone = [scorer.score([trajectory])[0] for trajectory in reversed(episodes())][::-1]
    for left, right in zip(together, alone):
        np.testing.assert_allclose(left, right, atol=1e-6)
    assert scorer.score([]) == []


def test_last_step_is_asked_only_on_request(tiny_model_dir: Path) -> None:
    model, tokenizer = load(tiny_model_dir)
    default = DiscriminatorScorer(model, tokenizer, DiscriminatorConfig()).score(episodes()[2:3])[0]
    asked = DiscriminatorScorer(model, tokenizer, DiscriminatorConfig(last_step_necessary=False)).score(episodes()[2:3])
    assert default[-1] == 1.0 and asked[0][-1] < 0.999
    np.testing.assert_allclose(default[:-1], asked[0][:-1], atol=1e-6)


def test_models_without_mask_support_are_scored_row_by_row(tiny_model_dir: Path) -> None:
    model, tokenizer = load(tiny_model_dir)
    want = DiscriminatorScorer(model, tokenizer, DiscriminatorConfig()).score(episodes())
    model.config.layer_types = ["full_attention", "sliding_attention"]
    scorer = DiscriminatorScorer(model, tokenizer, DiscriminatorConfig())
    assert not scorer._trees
    model.config.layer_types = ["full_attention"] * 2
    for left, right in zip(scorer.score(episodes()), want):
        np.testing.assert_allclose(left, right, atol=1e-5)


def test_scoring_leaves_the_model_as_it_was(tiny_model_dir: Path) -> None:
    model, tokenizer = load(tiny_model_dir)
    model.train()
    DiscriminatorScorer(model, tokenizer, DiscriminatorConfig()).score(episodes())
    assert model.training and all(p.grad is None for p in model.parameters())
    assert not model.lm_head._forward_pre_hooks


@contextmanager
def process_group() -> Iterator[None]:
    from verl.utils.distributed import initialize_process_group

    initialize_process_group(torch.device("cpu"))
    yield
    torch.distributed.destroy_process_group()


def test_a_sharded_model_gives_the_same_scores(tiny_model_dir: Path) -> None:
    from verl.workers.model_builder import build_model

    model, tokenizer = load(tiny_model_dir)
    want = DiscriminatorScorer(model, tokenizer, DiscriminatorConfig()).score(episodes())
    with process_group():
        sharded = build_model(str(tiny_model_dir), strategy="fsdp2", device=torch.device("cpu"), trainable=False)
        scorer = DiscriminatorScorer(sharded, tokenizer, DiscriminatorConfig(), group=torch.distributed.group.WORLD)
        for left, right in zip(scorer.score(episodes()), want):
            np.testing.assert_allclose(left, right, atol=1e-6)


def test_tree_layout() -> None:
    tree = build_tree([[1, 2, 3, 4], [1, 2, 5]], [[7, 8], [9]])
    assert tree.token_ids.tolist() == [1, 2, 3, 4, 7, 5, 7]
    assert tree.positions.tolist() == [0, 1, 2, 3, 4, 2, 3]
    assert list(zip(tree.query, tree.target, tree.prompt, tree.continuation)) == [
        (3, 7, 0, 0),
        (4, 8, 0, 0),
        (3, 9, 0, 1),
        (5, 7, 1, 0),
        (6, 8, 1, 0),
        (5, 9, 1, 1),
    ]
    seen = [np.flatnonzero(row).tolist() for row in tree.attention()]
    assert seen == [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 3, 4], [0, 1, 5], [0, 1, 5, 6]]
    assert common_prefix_length([[1, 2], [1, 2, 3]]) == 1  # every prompt keeps a token of its own
    assert common_prefix_length([[1, 2, 3]]) == 2


def test_credit_is_the_share_of_necessary() -> None:
    log_probs = np.log(np.array([[0.1, 0.3], [0.2, 0.2]]))
    np.testing.assert_allclose(credit_from_log_probs(log_probs), [0.75, 0.5], atol=1e-6)
    np.testing.assert_allclose(credit_from_log_probs(np.array([[-5000.0, -1.0], [-1.0, -5000.0]])), [1.0, 0.0])


def test_prompt_shows_task_texts_and_last_the_step() -> None:
    episode = EpisodeText.from_trajectory(make_trajectory(ACTIONS))
    prompts = [step_prompt(episode, i) for i in range(6)]
    for i, prompt in enumerate(prompts):
        assert prompt.endswith(f"\nJudge: {ACTIONS[i]}\nStep {i}")
        assert "put an apple in the fridge." in prompt
        for text in (*episode.observations, *episode.actions):
            assert text in prompt
    assert len({prompt.rsplit("\n", 2)[0] for prompt in prompts}) == 1


def test_prompt_never_contains_credit(tiny_model_dir: Path) -> None:
    """Rewards, success, credit, expert notes and state keys change nothing in it."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    trajectory = make_trajectory(ACTIONS)
    other = replace(
        trajectory,
        success=False,
        episode_reward=-3.0,
        truncated=True,
        policy={"kind": "secret"},
        steps=tuple(
            replace(
                step,
                reward=7.0,
                done=not step.done,
                is_action_valid=False,
                expert_kind="detour",
                state_key="secret",
                response="redundant",
                admissible_actions=("necessary",),
            )
            for step in trajectory.steps
        ),
    )
    texts = [build_prompts(EpisodeText.from_trajectory(item), tokenizer, 4096).texts for item in (trajectory, other)]
    assert texts[0] == texts[1]
    zeros, ones = ([value] * 6 for value in (0, 1))
    episode = EpisodeText.from_trajectory(trajectory)
    prompts = build_prompts(episode, tokenizer, 4096)
    rows = [credit_rows("t", episode, credits, prompts) for credits in (zeros, ones)]
    assert [row.prompt for row in rows[0]] == [row.prompt for row in rows[1]]
    assert [row.response for row in rows[0]] == ["redundant"] * 5
    assert [row.response for row in rows[1]] == ["necessary"] * 5


def test_shortening_takes_the_longest_observations_and_nothing_else(tiny_model_dir: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    seen = ["short.", "a long text " * 30, "go on.", "an even longer text " * 30, "x.", "y.", "end."]
    trajectory = make_trajectory(ACTIONS, observations=seen)
    episode = EpisodeText.from_trajectory(trajectory)
    full = build_prompts(episode, tokenizer, 4096)
    assert full.fits and not full.shortened
    limit = 700
    cut = build_prompts(episode, tokenizer, limit)
    assert cut.fits and cut.shortened
    room = max(len(tokenizer(label, add_special_tokens=False)["input_ids"]) for label in LABELS) + 1
    longest = max(map(len, cut.token_ids)) + room
    assert limit - 12 < longest <= limit
    context = cut.texts[0].rsplit("\n", 2)[0]
    for i, text in enumerate(cut.texts):
        assert text == f"{context}\nJudge: {ACTIONS[i]}\nStep {i}"
    for kept in ("put an apple in the fridge.", *ACTIONS, "short.", "go on.", "x.", "y.", "end."):
        assert kept in context
    lengths = [len(line) for line in context.split("\n") if line.endswith("...")]
    assert len(lengths) == 2 and abs(lengths[0] - lengths[1]) <= 1
    rows = credit_rows("t", episode, [0] * 6, cut)
    assert int(rows_to_tokens(rows, tokenizer, limit).lengths.max()) <= limit


def test_what_cannot_fit_is_counted_and_necessary(tiny_model_dir: Path) -> None:
    model, tokenizer = load(tiny_model_dir)
    scorer = DiscriminatorScorer(model, tokenizer, DiscriminatorConfig(max_length=120))
    credit = scorer.score(episodes()[2:3])[0]
    assert credit.tolist() == [1.0] * 6
    assert (scorer.stats.too_long, scorer.stats.forwards) == (1, 0)
    prompts = build_prompts(EpisodeText.from_trajectory(episodes()[2]), tokenizer, 120)
    assert not prompts.fits and all(action in prompts.texts[0] for action in ACTIONS)


def test_shortened_episodes_are_scored_like_one_by_one(tiny_model_dir: Path) -> None:
    model, tokenizer = load(tiny_model_dir)
    trajectory = make_trajectory(ACTIONS, observations=["a long text " * 9] * 7)
    limit = 600
    scorer = DiscriminatorScorer(model, tokenizer, DiscriminatorConfig(max_length=limit))
    got = scorer.score([trajectory])[0]
    assert scorer.stats.shortened == 1
    np.testing.assert_allclose(got, scored_one_by_one(model, tokenizer, trajectory, limit), atol=1e-5)


def test_settings_travel_with_the_folder(tiny_model_dir: Path, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    DiscriminatorConfig(max_length=77, threshold=0.25).save(tmp_path, tokenizer, {"all": {"auroc": 0.9}})
    loaded = DiscriminatorConfig.load(tmp_path, batch_trajectories=3)
    assert (loaded.max_length, loaded.threshold, loaded.batch_trajectories) == (77, 0.25, 3)
    file = tmp_path / "discriminator.json"
    text = file.read_text()
    file.write_text(text.replace('"template_version": 1', '"template_version": 99'))
    with pytest.raises(UserError, match="template 99"):
        DiscriminatorConfig.load(tmp_path)
    file.write_text(text.replace('"redundant"', '"useless"'))
    with pytest.raises(UserError, match="useless"):
        DiscriminatorConfig.load(tmp_path)
    file.unlink()
    with pytest.raises(UserError, match="is no discriminator"):
        DiscriminatorConfig.load(tmp_path)
