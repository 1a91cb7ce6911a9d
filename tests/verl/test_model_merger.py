# SPDX-License-Identifier: Apache-2.0
"""Checkpoint files of several ranks -> Hugging Face folder: equal weights and logits, and what is refused."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, AutoTokenizer

from tests.verl.sharded_checkpoints import CASES, GROUPS_OF_TWO, Case, write_checkpoints
from verl.model_merger import compare_weights, main, merge_checkpoint
from verl.utils.errors import UserError

IDS = torch.arange(3, 15)[None]


@pytest.fixture(scope="module")
def checkpoints(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("sharded")
    write_checkpoints(tiny_model_dir, out, 2, CASES)
    return out


def logits(folder: Path, value_head: bool = False) -> torch.Tensor:
    auto_class = AutoModelForTokenClassification if value_head else AutoModelForCausalLM
    with torch.no_grad():
        return auto_class.from_pretrained(folder)(input_ids=IDS).logits


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_merged_folder_is_the_exported_one(
    checkpoints: Path, tiny_model_dir: Path, tmp_path: Path, case: Case, capsys: pytest.CaptureFixture[str]
) -> None:
    source, target = checkpoints / case.name, tmp_path / "merged"
    arguments = ["--backend", "fsdp", "--local_dir", str(source)]
    assert main(["merge", *arguments, "--target_dir", str(target)]) == 0
    exported = source / "huggingface"
    got = logits(target, case.value_head)
    torch.testing.assert_close(got, logits(exported, case.value_head), atol=0.0, rtol=0.0)
    assert not torch.equal(got, logits(tiny_model_dir, case.value_head))
    assert main(["test", *arguments, "--test_hf_dir", str(exported)]) == 0
    assert "weights are equal" in capsys.readouterr().out
    assert main(["test", *arguments, "--test_hf_dir", str(tiny_model_dir)]) == 2
    assert "differ" in capsys.readouterr().err
    assert AutoTokenizer.from_pretrained(target)("look")["input_ids"]
    if case.lora:
        base = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
        with torch.no_grad():
            adapted = PeftModel.from_pretrained(base, target / "lora_adapter")(input_ids=IDS).logits
        torch.testing.assert_close(adapted, got, atol=1e-5, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "cases"), [(3, CASES), (4, GROUPS_OF_TWO)], ids=["uneven", "groups"])
def test_other_numbers_of_ranks(tiny_model_dir: Path, tmp_path: Path, ranks: int, cases: tuple[Case, ...]) -> None:
    """Three ranks share no dimension of the model equally; four make two groups with copies of each shard."""
    write_checkpoints(tiny_model_dir, tmp_path, ranks, cases)
    for case in cases:
        merge_checkpoint(tmp_path / case.name, tmp_path / "merged" / case.name)
        assert compare_weights(tmp_path / case.name, tmp_path / case.name / "huggingface") >= 27
        assert compare_weights(tmp_path / case.name, tmp_path / "merged" / case.name) >= 27


def test_dtype_and_moved_base(checkpoints: Path, tiny_model_dir: Path, tmp_path: Path) -> None:
    merge_checkpoint(checkpoints / "fsdp2", tmp_path / "half", dtype="bf16")
    half = AutoModelForCausalLM.from_pretrained(tmp_path / "half", dtype="auto")
    assert {weight.dtype for weight in half.parameters()} == {torch.bfloat16}
    assert compare_weights(checkpoints / "fsdp2", tmp_path / "half") == 27
    moved = tmp_path / "moved"
    shutil.copytree(checkpoints / "fsdp_lora", moved)
    config = moved / "lora_adapter" / "adapter_config.json"
    config.write_text(config.read_text().replace(str(tiny_model_dir), "/gone/base"))
    with pytest.raises(UserError, match="/gone/base"):
        merge_checkpoint(moved, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    merge_checkpoint(moved, tmp_path / "out", hf_model_path=str(tiny_model_dir))
    assert compare_weights(moved, tmp_path / "out", hf_model_path=str(tiny_model_dir)) > 20


def _copy(checkpoints: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "global_step_1" / "actor"
    shutil.copytree(checkpoints / "fsdp2", folder, ignore=shutil.ignore_patterns("huggingface"))
    return folder


def test_broken_folders_are_named(checkpoints: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = _copy(checkpoints, tmp_path)
    target = tmp_path / "out"

    def refused(source: Path) -> str:
        assert main(["merge", "--local_dir", str(source), "--target_dir", str(target)]) == 2
        assert not target.exists()
        error = capsys.readouterr().err
        assert error.startswith("error: ") and error.count("\n") == 1
        return error

    assert f"give {folder}" in refused(folder.parent)
    assert "no such folder" in refused(tmp_path / "nowhere")
    assert "nothing to merge" in refused(checkpoints / "fsdp2" / "huggingface")
    last = folder / "model_world_size_2_rank_1.pt"
    whole = last.read_bytes()
    last.write_bytes(whole[: len(whole) // 2])
    assert "is damaged" in refused(folder)
    shutil.copy(checkpoints / "fsdp2_value" / last.name, last)
    assert "different models" in refused(folder)
    last.unlink()
    assert "model_world_size_2_rank_1.pt missing of 2 files" in refused(folder)
    (folder / "model_world_size_4_rank_0.pt").write_bytes(b"")
    assert "runs with 2, 4 ranks" in refused(folder)


def test_a_full_target_is_left_alone(checkpoints: Path, tmp_path: Path) -> None:
    target = tmp_path / "out"
    target.mkdir()
    merge_checkpoint(checkpoints / "fsdp2", target)
    (target / "notes").write_text("mine")
    with pytest.raises(UserError, match="is not empty"):
        merge_checkpoint(checkpoints / "fsdp2", target)
    assert (target / "notes").read_text() == "mine"
