# SPDX-License-Identifier: Apache-2.0
"""Stage 2: credit files to rows, metrics, and the whole way to a discriminator folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from agent_system.step_discriminator.discriminator import DiscriminatorConfig, DiscriminatorScorer
from agent_system.step_discriminator.discriminator_trainer import evaluate, prepare
from agent_system.step_discriminator.discriminator_trainer.finish import finish, newest_checkpoint
from agent_system.step_discriminator.discriminator_trainer.finish import main as finish_program
from agent_system.step_discriminator.discriminator_trainer.metrics import (
    auroc,
    binary_metrics,
    expected_calibration_error,
    majority_credit,
)
from agent_system.step_discriminator.step_prompt import CreditRow, rows_to_tokens
from tests.agent_system.step_discriminator.discriminator_data import (
    TEXTS,
    learnable_episodes,
    make_trajectory,
    write_credit,
)
from tests.helpers.tiny import make_tiny_model
from verl.trainer.config.schema import SFTConfig, build_config, load_config
from verl.trainer.fsdp_sft_trainer import run_sft
from verl.utils.dataset import SFTDataset
from verl.utils.errors import UserError

REPO = Path(__file__).resolve().parents[3]
FOLDER = REPO / "agent_system" / "step_discriminator" / "discriminator_trainer"
SCRIPT = FOLDER / "run_training_alfworld.sh"


def test_auroc_by_hand() -> None:
    score, positive = np.array([0.9, 0.8, 0.4, 0.3]), np.array([True, False, True, False])
    assert auroc(score, positive) == 0.75  # of four pairs, 0.4 against 0.8 is the wrong one
    assert auroc(np.array([0.5, 0.5, 0.1]), np.array([True, False, False])) == 0.75  # a tie counts half
    assert auroc(score, np.ones(4, bool)) is None
    rng = np.random.default_rng(0)
    values, labels = rng.integers(0, 6, 60) / 6, rng.random(60) < 0.4
    pairs = [(a > b) + 0.5 * (a == b) for a in values[labels] for b in values[~labels]]
    assert auroc(values, labels) == pytest.approx(np.mean(pairs), abs=1e-12)


def test_metrics_by_hand() -> None:
    credit, label = np.array([0.9, 0.6, 0.4, 0.2, 0.3]), np.array([1, 0, 0, 0, 1])
    result = binary_metrics(credit, label)
    # predicted redundant: the last three; of these two rightly; the 0.6 is a redundant step missed.
    assert result["accuracy"] == pytest.approx(3 / 5)
    assert result["balanced_accuracy"] == pytest.approx((2 / 3 + 1 / 2) / 2)
    assert result["f1_redundant"] == pytest.approx(2 * 2 / (3 + 3))
    assert result["auroc"] == pytest.approx((3 + 1) / 6)
    assert result["ece"] == pytest.approx((0.1 + 0.6 + 0.4 + 0.2 + 0.7) / 5)
    assert (result["num_steps"], result["redundant_share"]) == (5, 0.6)
    # two rows of one bin: means, not single gaps
    assert expected_calibration_error(np.array([0.72, 0.78]), np.array([1, 0])) == pytest.approx(0.25)
    assert expected_calibration_error(np.array([1.0, 0.0]), np.array([1, 0])) == 0.0
    one_class = binary_metrics(np.array([0.9, 0.8]), np.array([1, 1]))
    assert one_class["balanced_accuracy"] is None and one_class["auroc"] is None and one_class["f1_redundant"] is None
    assert majority_credit(np.array([1, 0, 0])).tolist() == [0, 0, 0]
    assert majority_credit(np.array([1, 0])).tolist() == [1, 1]


def test_trivial_rule() -> None:
    trajectory = make_trajectory(
        ["look", "go", "look", "take", "put"], observations=["room", "room", "desk", "room", "hand", "done"]
    )
    assert prepare.trivial_labels(trajectory) == [0, 1, 0, 1, 1]


def test_split_is_by_task_and_stable() -> None:
    keys = [f"g{i}" for i in range(40)]
    train, val = prepare.split_tasks(keys, 0.25, seed=0)
    assert len(val) == 10 and not train & val and train | val == set(keys)
    assert prepare.split_tasks(reversed(keys * 2), 0.25, seed=0) == (train, val)
    assert prepare.split_tasks(keys, 0.25, seed=1)[1] != val
    assert [len(part) for part in prepare.split_tasks(["a", "b"], 0.01, 0)] == [1, 1]
    with pytest.raises(UserError, match="1 task cannot be split"):
        prepare.split_tasks(["a"], 0.1, 0)


def test_prepare_splits_by_content_not_by_path(tiny_model_dir: Path, tmp_path: Path) -> None:
    trajectories, credits = learnable_episodes(12)
    credit = write_credit(tmp_path / "credit.json", trajectories, credits)
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    result = prepare.prepare(
        [credit, credit], tmp_path / "data", tokenizer, max_length=900, val_share=0.25, balance=True
    )
    parts = {name: pd.read_parquet(tmp_path / "data" / f"{name}.parquet") for name in ("train", "val")}
    assert not set(parts["train"]["task"]) & set(parts["val"]["task"])
    rows = pd.concat(parts.values())
    assert len(rows) == sum(len(row) - 1 for row in credits)  # the same file twice counts once; no last steps
    assert result.report["trajectories"]["duplicate"] == len(trajectories)
    labels = {(t.traj_uid, i): c for t, row in zip(trajectories, credits) for i, c in enumerate(row)}
    for row in rows.itertuples():
        assert row.label == labels[row.traj_uid, row.step_index]
        assert row.response == ("necessary" if row.label else "redundant")
        assert row.prompt[0]["role"] == "user" and row.prompt[0]["content"].endswith(f"Step {row.step_index}")
    weights = parts["train"].groupby("label")["weight"].sum()
    assert weights[0] == pytest.approx(weights[1])
    assert parts["train"]["weight"].mean() == pytest.approx(1.0)
    assert (parts["val"]["weight"] == 1.0).all()
    report = json.loads((tmp_path / "data" / "prepare_report.json").read_text())
    assert report["train"]["rows"] + report["val"]["rows"] == len(rows)
    assert report["train"]["redundant"] == int((parts["train"]["label"] == 0).sum())


def test_online_rows_are_the_files_rows(tiny_model_dir: Path, tmp_path: Path) -> None:
    trajectories, credits = learnable_episodes(4)
    credit = write_credit(tmp_path / "credit.json", trajectories, credits)
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    prepare.prepare([credit], tmp_path, tokenizer, max_length=900, val_share=0.25)
    stored = SFTDataset(tmp_path / "train.parquet", tokenizer, {"max_length": 900, "weight_key": "weight"}).rows
    frame = pd.read_parquet(tmp_path / "train.parquet")
    online = rows_to_tokens(
        [
            CreditRow(row.prompt[0]["content"], row.response, row.traj_uid, row.step_index, row.label)
            for row in frame.itertuples()
        ],
        tokenizer,
        900,
    )
    assert np.array_equal(stored.tokens, online.tokens)
    assert np.array_equal(stored.targets, online.targets)


def test_prepare_counts_what_it_leaves_out(tiny_model_dir: Path, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    trajectories, credits = learnable_episodes(4)
    same_uid = make_trajectory(["look around", "put apple 1"], uid="t0", task="g9")
    lost = make_trajectory(["look around", "go"], uid="lost", success=False)
    single = make_trajectory(["put apple 1"], uid="single")
    long = make_trajectory(["a very long action " * 80, "b"], uid="long")
    wordy = make_trajectory(["go", "put"], uid="wordy", observations=["seen " * 900, "x", "y"])
    more = [same_uid, lost, single, long, wordy]
    credit = write_credit(
        tmp_path / "credit.json", trajectories + more, [*credits, [0, 1], [1, 1], [1], [1, 1], [0, 1]]
    )
    report = prepare.prepare([credit], tmp_path, tokenizer, max_length=900, val_share=0.25).report
    counts = report["trajectories"]
    assert counts == {"used": 10, "shortened": 1, "too_long": 1, "single_step": 1, "failed": 1}
    rows = pd.concat(pd.read_parquet(tmp_path / f"{name}.parquet") for name in ("train", "val"))
    assert {"t0#2", "wordy"} <= set(rows["traj_uid"])
    assert not {"lost", "single", "long"} & set(rows["traj_uid"])


def run_program(name: str, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", f"agent_system.step_discriminator.discriminator_trainer.{name}", *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(REPO), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_missing_input_is_one_line_and_nothing_is_written(tiny_model_dir: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = run_program("prepare", "no.json", "--model", str(tiny_model_dir), "--out", str(out), cwd=tmp_path)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "no.json" in done.stderr
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    broken = tmp_path / "broken.json"
    trajectories, credits = learnable_episodes(3)
    document = json.loads(write_credit(broken, trajectories, credits).read_text())
    del document["trajectories"][2]["steps"][1]["action"]
    broken.write_text(json.dumps(document))
    with pytest.raises(UserError, match=r"broken.json, trajectory 2: steps\[1\].action: is missing"):
        prepare.prepare([broken], out, tokenizer, max_length=900)
    with pytest.raises(UserError, match="no labelled success"):
        prepare.prepare([write_credit(broken, [], [])], out, tokenizer, max_length=900)
    with pytest.raises(UserError, match="raise --max-length"):
        prepare.prepare([write_credit(broken, trajectories, credits)], out, tokenizer, max_length=20)
    assert not out.exists()
    with pytest.raises(UserError, match=r"--data: .*does not exist"):
        evaluate.read_rows(tmp_path / "val.parquet")
    with pytest.raises(UserError, match="holds no global_step_N"):
        newest_checkpoint(tmp_path)


def test_help_needs_no_torch() -> None:
    code = (
        "import runpy, sys\n"
        "for name in ('prepare', 'finish', 'evaluate'):\n"
        "    sys.argv = [name, '--help']\n"
        "    package = 'agent_system.step_discriminator.discriminator_trainer'\n"
        "    try: runpy.run_module(f'{package}.{name}', run_name='__main__')\n"
        "    except SystemExit as end: assert not end.code\n"
        "heavy = {'torch', 'transformers', 'ray', 'pandas', 'alfworld'} & set(sys.modules); assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], cwd=REPO, check=True, capture_output=True, timeout=60)


@pytest.fixture(scope="module")
def start_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("start") / "hf", vocab_size=420, texts=TEXTS * 5)


SFT = ("optim.lr=5e-3", "data.train_batch_size=32", "data.micro_batch_size_per_gpu=16", "trainer.total_epochs=6")


def test_training_end_to_end(start_model: Path, tmp_path: Path) -> None:
    """A rule that can be read off the action is learned, far better than the baselines do."""
    trajectories, credits = learnable_episodes(60)
    credit = write_credit(tmp_path / "credit.json", trajectories, credits)
    tokenizer = AutoTokenizer.from_pretrained(start_model)
    prepare.prepare([credit], tmp_path / "data", tokenizer, max_length=500, val_share=0.2)
    arguments = [
        f"data.train_files={tmp_path / 'data' / 'train.parquet'}",
        f"data.val_files={tmp_path / 'data' / 'val.parquet'}",
        "data.prompt_key=prompt",
        "data.response_key=response",
        "data.weight_key=weight",
        f"model.partial_pretrain={start_model}",
        f"trainer.default_local_dir={tmp_path / 'sft'}",
        "trainer.device=cpu",
        "trainer.logger=[]",
        *SFT,
    ]
    run_sft(build_config(SFTConfig, load_config("sft_trainer", arguments)))
    model_dir = finish(newest_checkpoint(tmp_path / "sft"), tmp_path / "model", max_length=500)
    assert not (model_dir / "resume").exists()
    data = str(tmp_path / "data" / "val.parquet")
    results = evaluate.run(str(model_dir), data, str(tmp_path / "report"), "cpu")
    assert set(results) == {"all", "source expert", "source model", "task type pick"}
    found = results["all"]["discriminator"]
    baseline = results["all"]["always the majority"]
    assert found["auroc"] is not None and found["auroc"] > 0.9
    assert found["accuracy"] is not None and found["accuracy"] > float(baseline["accuracy"] or 0) + 0.1
    saved = json.loads((model_dir / "discriminator.json").read_text())
    assert saved["metrics"]["all"] == found and saved["max_length"] == 500
    assert "unchanged or repeated" in (tmp_path / "report.md").read_text()
    # Scoring whole trajectories gives the numbers of the rows.
    scorer = DiscriminatorScorer(
        AutoModelForCausalLM.from_pretrained(model_dir), tokenizer, DiscriminatorConfig.load(model_dir)
    )
    frame = evaluate.read_rows(data)
    by_row = dict(zip(zip(frame["traj_uid"], frame["step_index"]), evaluate.score_rows(frame, scorer)))
    chosen = [t for t in trajectories if t.traj_uid in set(frame["traj_uid"])]
    for trajectory, values in zip(chosen, scorer.score(chosen)):
        for step, value in enumerate(values[:-1]):
            assert value == pytest.approx(by_row[trajectory.traj_uid, step], abs=1e-5)


def _minimal_credit(path: Path) -> list[bool]:
    """An analysis with both labels: two successes of two tasks in which the last but one is in no minimal success."""
    trajectories, credits = learnable_episodes(2)
    write_credit(path, trajectories, credits)
    document = json.loads(path.read_text())
    labels = []
    for item in document["trajectories"]:
        for step in item["steps"]:
            step["in_minimal"] = step["step_index"] != len(item["steps"]) - 2
        labels += [step["in_minimal"] for step in item["steps"][:-1]]
    document["header"]["options"].update(mode="minimal", label_source="minimal")
    path.write_text(json.dumps(document))
    return labels


def test_label_source_chooses_the_label(start_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "credit.json"
    minimal = _minimal_credit(path)
    tokenizer = AutoTokenizer.from_pretrained(start_model)
    labels = {}
    for source in (None, "single", "minimal"):
        made = prepare.prepare([path], tmp_path / "d", tokenizer, max_length=900, val_share=0.5, label_source=source)
        assert made.report["label_source"] == (source or "minimal")
        frame = pd.concat([pd.read_parquet(tmp_path / "d" / f"{name}.parquet") for name in ("train", "val")])
        labels[source] = frame.sort_values(["traj_uid", "step_index"])["label"].tolist()
    assert labels[None] == labels["minimal"] == list(map(int, minimal)) != labels["single"]


def test_label_sources_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    _minimal_credit(tmp_path / "minimal.json")
    single = write_credit(tmp_path / "single.json", *learnable_episodes(2))
    with pytest.raises(UserError, match=r"different labels \(minimal, single\); choose with --label-source"):
        prepare.read_episodes([tmp_path / "minimal.json", single])
    episodes, _, source = prepare.read_episodes([tmp_path / "minimal.json", single], "single")
    assert source == "single" and len(episodes) == 4
    with pytest.raises(UserError, match=r"single.json, trajectory 0: has no minimal labels; analyse with --mode min"):
        prepare.read_episodes([single], "minimal")


def test_finish_takes_the_length_the_rows_were_made_for(
    start_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    credit = write_credit(tmp_path / "credit.json", *learnable_episodes(2))
    prepare.prepare([credit], tmp_path / "data", AutoTokenizer.from_pretrained(start_model), max_length=321)
    run = tmp_path / "sft"
    run.mkdir()
    (run / "global_step_1").symlink_to(start_model)
    arguments = ["--sft", str(run), "--out", str(tmp_path / "model")]
    cases = {
        "--data (or --max-length) is missing": [],
        "--max-length 500: prepare made the rows": ["--data", str(tmp_path / "data"), "--max-length", "500"],
        "cannot read": ["--data", str(tmp_path / "nowhere")],
    }
    for message, options in cases.items():
        assert finish_program([*arguments, *options]) == 2
        assert message in capsys.readouterr().err and not (tmp_path / "model").exists()
    assert finish_program([*arguments, "--data", str(tmp_path / "data")]) == 0
    assert DiscriminatorConfig.load(tmp_path / "model").max_length == 321


def test_finish_replaces_only_discriminators(start_model: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.txt").write_text("mine")
    with pytest.raises(UserError, match="is no discriminator"):
        finish(start_model, other, max_length=500)
    assert (other / "thesis.txt").read_text() == "mine"
    target = tmp_path / "model"
    for threshold in (0.5, 0.4):
        finish(start_model, target, max_length=500, threshold=threshold)
        assert DiscriminatorConfig.load(target).threshold == threshold
    with pytest.raises(UserError, match="holds no model"):
        finish(tmp_path, tmp_path / "new", max_length=500)
    assert not (tmp_path / "new").exists()


def test_script_help_and_wrong_arguments(tmp_path: Path) -> None:
    shown = subprocess.run(["bash", str(SCRIPT), "-h"], cwd=tmp_path, capture_output=True, text=True, timeout=20)
    assert shown.returncode == 0 and "OUT_DIR" in shown.stdout
    for arguments, message in (([], "no credit analysis given"), (["what"], "'what' is neither")):
        wrong = subprocess.run(
            ["bash", str(SCRIPT), *arguments], cwd=tmp_path, capture_output=True, text=True, timeout=20
        )
        assert wrong.returncode == 2 and message in wrong.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_script_from_another_folder(start_model: Path, tmp_path: Path) -> None:
    trajectories, credits = learnable_episodes(12)
    write_credit(tmp_path / "credit.json", trajectories, credits)
    done = subprocess.run(
        ["bash", str(SCRIPT), "credit.json", f"MODEL={start_model}", "OUT_DIR=out", "MAX_LENGTH=500", "NPROC=2"]
        + ["DEVICE=cpu", "BALANCE=1", "trainer.logger=[]", *SFT, "trainer.total_epochs=1"],
        cwd=tmp_path,
        env={**os.environ, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert DiscriminatorConfig.load(tmp_path / "out" / "model").max_length == 500
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"data", "model", "report.json", "report.md", "sft"}
    assert "discriminator" in done.stdout


UNEVEN = """
import sys, torch
from transformers import AutoTokenizer
from agent_system.step_discriminator.discriminator import DiscriminatorConfig, DiscriminatorScorer
from tests.agent_system.step_discriminator.discriminator_data import learnable_episodes
from verl.utils.distributed import initialize_process_group
from verl.workers.model_builder import build_model
rank, _ = initialize_process_group(torch.device("cpu"))
model = build_model(sys.argv[1], strategy="fsdp2", device=torch.device("cpu"), trainable=False)
scorer = DiscriminatorScorer(
    model, AutoTokenizer.from_pretrained(sys.argv[1]), DiscriminatorConfig(batch_trajectories=1),
    group=torch.distributed.group.WORLD,
)
mine = learnable_episodes(2)[0][: 3 if rank == 0 else 0]
torch.save(scorer.score(mine), f"{sys.argv[2]}/rank{rank}.pt")
torch.distributed.destroy_process_group()
"""


@pytest.mark.slow
def test_ranks_with_different_numbers_of_episodes(start_model: Path, tmp_path: Path) -> None:
    """Rank 0 scores three episodes, rank 1 none; nobody waits for ever."""
    script = tmp_path / "uneven.py"
    script.write_text(UNEVEN)
    subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", str(script)]
        + [str(start_model), str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        check=True,
        capture_output=True,
        timeout=200,
    )
    got = torch.load(tmp_path / "rank0.pt", weights_only=False)
    model = AutoModelForCausalLM.from_pretrained(start_model)
    scorer = DiscriminatorScorer(model, AutoTokenizer.from_pretrained(start_model), DiscriminatorConfig())
    for left, right in zip(got, scorer.score(learnable_episodes(2)[0][:3]), strict=True):
        np.testing.assert_allclose(left, right, atol=1e-5)
    assert torch.load(tmp_path / "rank1.pt", weights_only=False) == []
