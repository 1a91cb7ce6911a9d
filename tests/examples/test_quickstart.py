# SPDX-License-Identifier: Apache-2.0
"""The quickstart: its parts, and the whole of it in the smoke size."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from examples.quickstart.phases import Phase, PhaseRunner
from examples.quickstart.pipeline import Quickstart, default_out, prepare_out
from examples.quickstart.profiles import PROFILES
from examples.quickstart.sft_data import sft_rows
from examples.quickstart.shop_phrases import mine_clicks
from examples.quickstart.tiny_policy import TAGS, make_policy, mine_phrases
from verl.utils.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
TEXTS = [
    "Task: put a mug in shelf.\nCommands:\ngo to shelf 1\ngo to sinkbasin 1\ntake mug 1 from shelf 1\nlook",
    "<think>find the mug</think><action>go to shelf 1</action>",
    "<think>take the mug</think><action>take mug 1 from shelf 1</action>",
] * 3


def test_phrases_are_things_and_what_stands_between_them() -> None:
    phrases = mine_phrases(TEXTS, 100)
    assert {"shelf 1", "mug 1", "mug", "go to ", " from ", "take the "} <= set(phrases)
    assert not any("go to shelf" in phrase or "<" in phrase for phrase in phrases)
    assert mine_phrases(TEXTS, 3) == phrases[:3]


def test_policy_folder_loads_with_the_auto_classes_and_keeps_its_tokens(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    count = make_policy(tmp_path / "policy", TEXTS, vocab_size=300, num_phrases=50, hidden_size=32, mlp_size=64)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "policy")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "policy")
    assert count == sum(parameter.numel() for parameter in model.parameters())
    assert model.get_input_embeddings().num_embeddings == len(tokenizer)
    response = TEXTS[1]
    tokens = tokenizer.tokenize(response)
    assert {"go to ", "shelf 1", *TAGS} <= set(tokens)
    assert tokenizer.decode(tokenizer(response)["input_ids"], skip_special_tokens=True) == response
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False, add_generation_prompt=True)
    assert chat == "<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.pad_token_id != tokenizer.eos_token_id


def test_sft_rows_leave_mistakes_out_as_targets_but_not_as_history(tmp_path: Path) -> None:
    from agent_system.environments.env_package.alfworld.generate import generate_games
    from agent_system.step_discriminator.trajectory_analyzer.collect import CollectOptions, collect
    from agent_system.step_discriminator.trajectory_analyzer.expert_sources import AlfworldExperts

    generate_games(tmp_path / "games", train=6, valid_seen=1, valid_unseen=1, seed=3, max_receptacles=6)
    options = CollectOptions(detour_rate=0.2, error_rate=0.3, seed=1, max_steps=50)
    trajectories = collect(AlfworldExperts(tmp_path / "games"), "train", 6, options)
    rows = sft_rows(trajectories, PROFILES["alfworld"].prompts("compact", 2))
    won = [trajectory for trajectory in trajectories if trajectory.success]
    mistakes = [step.action for trajectory in won for step in trajectory.steps if step.expert_kind == "mistake"]
    assert mistakes
    assert len(rows) == sum(step.expert_kind != "mistake" for trajectory in won for step in trajectory.steps)
    assert any(f">{mistakes[0]}\nNothing happens." in row["prompt"] for row in rows)


def test_a_failing_phase_names_its_log_and_a_finished_one_is_not_repeated(tmp_path: Path) -> None:
    done = tmp_path / "done"
    write = f"import pathlib; p = pathlib.Path({str(done)!r}); p.write_text(p.read_text() + 'x' if p.exists() else 'x')"
    phase = Phase("good", "good", [sys.executable, "-c", write], done)
    PhaseRunner(tmp_path, 1).run(phase)
    PhaseRunner(tmp_path, 1).run(phase)
    assert done.read_text() == "x"
    bad = Phase("bad", "bad", [sys.executable, "-c", "print('the reason'); raise SystemExit(3)"], tmp_path / "never")
    with pytest.raises(UserError, match=r"(?s)'bad' ended with status 3.*bad\.log.*the reason"):
        PhaseRunner(tmp_path, 1).run(bad)
    lazy = Phase("lazy", "lazy", [sys.executable, "-c", ""], tmp_path / "never")
    with pytest.raises(UserError, match="did not write"):
        PhaseRunner(tmp_path, 1).run(lazy)


def test_output_folder_is_neither_mixed_nor_deleted_by_accident(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.txt").write_text("x")
    for fresh in (False, True):
        with pytest.raises(UserError, match="not a quickstart folder"):
            prepare_out(mine, {"seed": 0}, fresh=fresh)
    assert (mine / "thesis.txt").is_file()
    out = tmp_path / "out"
    prepare_out(out, {"seed": 0}, fresh=False)
    prepare_out(out, {"seed": 0}, fresh=False)
    with pytest.raises(UserError, match="--fresh"):
        prepare_out(out, {"seed": 1}, fresh=False)
    prepare_out(out, {"seed": 1}, fresh=True)


@pytest.mark.parametrize("name", PROFILES)
def test_full_size_trains_on_many_tasks_and_evaluates_enough(name: str) -> None:
    full = PROFILES[name].full
    assert full.held_out * full.eval_samples >= 200
    assert full.demonstrations >= 1000


def test_the_pipeline_knows_an_environment_by_its_profile_only(tmp_path: Path) -> None:
    """The same phases for every environment, each naming only its own scripts and settings."""
    runs = {name: Quickstart(tmp_path, p, p.full, 0).phases() for name, p in PROFILES.items()}
    alfworld, webshop = runs["alfworld"], runs["webshop"]
    assert [phase.name for phase in alfworld][1:] == [phase.name for phase in webshop][1:]
    for name, other in (("alfworld", "webshop"), ("webshop", "alfworld")):
        words = " ".join(text for phase in runs[name] for text in phase.command)
        assert f"run_{name}.sh" in words and f"run_credit_analysis_{name}.sh" in words
        assert f"env.{name}." in words and f"env.{other}." not in words and f"_{other}.sh" not in words
        for phase in runs[name]:
            paths = [Path(text) for text in phase.command if text.endswith(".sh")]
            assert all(path.is_file() for path in paths)
    folders = [
        default_out(Quickstart.folder, profile, smoke).name for profile in PROFILES.values() for smoke in (False, True)
    ]
    assert folders == ["quickstart", "quickstart-smoke", "quickstart-webshop", "quickstart-webshop-smoke"]


def test_a_click_is_one_token_on_the_page_and_in_the_response(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    page = "Task: a mug, size 200 ml\nclick[g000000001] red mug $12.49\nsize: click[200 ml] click[< prev]\nActions:"
    texts = [page, "<think>open this one</think><action>click[g000000001]</action>", "<action>search[mug]</action>"] * 3
    phrases = mine_clicks(texts, 100)
    assert {"click[g000000001]", "click[< prev]", " 200 ml", "search[", " $12", ".49", "open this one"} <= set(phrases)
    assert not any("red mug" in phrase for phrase in phrases)
    make_policy(
        tmp_path / "policy", texts, vocab_size=300, num_phrases=50, phrases="clicks", hidden_size=32, mlp_size=64
    )
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "policy")
    assert tokenizer.tokenize(texts[1]) == [
        "<think>",
        "open this one",
        "</think>",
        "<action>",
        phrases_in(texts[1]),
        "</action>",
    ]
    for text in texts:
        assert tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=True) == text


def phrases_in(response: str) -> str:
    return response.partition("<action>")[2].partition("</action>")[0]


@pytest.mark.slow  # about 80 s each: every program of the pipeline, on Ray
@pytest.mark.parametrize("name", PROFILES)
def test_smoke_run_writes_everything(name: str, tmp_path: Path) -> None:
    out = tmp_path / "quick"
    command = ["bash", str(ROOT / "examples" / "quickstart" / "run.sh"), "--env", name, "--smoke", "--out", str(out)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    for name in ("summary.json", "curves.png", "credit_analysis.json", "trajectories.jsonl"):
        assert (out / name).stat().st_size > 0, name
    summary = json.loads((out / "summary.json").read_text())
    assert [row["policy"] for row in summary["policies"]] == ["SFT", "GRPO", "TrajEvolve"]
    assert len({row["num_episodes"] for row in summary["policies"]}) == 1
    for row in summary["policies"]:
        assert f"| {row['policy']} |" in result.stdout
    again = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert again.returncode == 0
    assert again.stderr.count("done before") == 10
