# SPDX-License-Identifier: Apache-2.0
"""The fine-tuning trainer: loss against a plain loop, micro-batches, ranks, resume, checkpoints, the program."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from verl.trainer.config.schema import SFTConfig, build_config, load_config
from verl.trainer.fsdp_sft_trainer import FSDPSFTTrainer, run_sft
from verl.trainer.sft.checkpoint import RESUME_FOLDER, last_checkpoint
from verl.trainer.sft.optim import split_for_muon
from verl.trainer.sft.step import accumulate_gradients
from verl.utils.dataset.token_rows import TokenRows
from verl.utils.errors import UserError

REPO = Path(__file__).resolve().parents[3]
WORDS = ("go to cabinet 1", "open fridge 1", "take apple 1", "look", "examine mug 1", "inventory")


@pytest.fixture(scope="module")
def data_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """23 rows of different lengths, with weights."""
    rng = np.random.default_rng(0)
    prompts = [" ".join(rng.choice(WORDS, rng.integers(1, 6))) for _ in range(23)]
    path = tmp_path_factory.mktemp("sft") / "rows.parquet"
    answers = [prompt.split(" ")[0] for prompt in prompts]
    pd.DataFrame({"prompt": prompts, "response": answers, "w": rng.uniform(0.5, 2, 23)}).to_parquet(path)
    return path


def overrides(model: Path, data: Path, out: Path, *more: str) -> list[str]:
    """Program arguments of a short CPU run."""
    return [
        f"data.train_files={data}",
        f"data.val_files={data}",
        "data.prompt_key=prompt",
        "data.response_key=response",
        "data.train_batch_size=8",
        "data.micro_batch_size_per_gpu=4",
        f"model.partial_pretrain={model}",
        "optim.lr=1e-3",
        f"trainer.default_local_dir={out}",
        "trainer.device=cpu",
        "trainer.total_epochs=2",
        "trainer.logger=[]",
        *more,
    ]


def config_of(arguments: list[str]) -> SFTConfig:
    return build_config(SFTConfig, load_config("sft_trainer", arguments))


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """Stored weights; a tied output head may be stored or not."""
    found = load_file(folder / "model.safetensors")
    head = found.pop("lm_head.weight", None)
    assert head is None or torch.equal(head, found["model.embed_tokens.weight"])
    return found


def largest_difference(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> float:
    assert left.keys() == right.keys()
    return max(float((left[name] - right[name]).abs().max()) for name in left)


def test_gradient_equals_a_plain_loop_for_every_micro_batch_size(tiny_model_dir: Path) -> None:
    rows = TokenRows.from_ids([[5, 6, 7], [8], [9, 10, 11, 12]], [[20, 2], [21, 22, 2], [23, 2]], [1.0, 0.5, 2.0])
    plain = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    total, count = torch.zeros(()), 0.0
    for i in range(3):
        ids = torch.from_numpy(rows.row(i).astype(np.int64)).unsqueeze(0)
        log_probs = plain(input_ids=ids).logits[0].log_softmax(-1)
        for position in rows.row_targets(i).nonzero()[0]:
            total = total - rows.weights[i] * log_probs[position - 1, ids[0, position]]
            count += float(rows.weights[i])
    loss = total / count
    loss.backward()
    for micro in (1, 2, 4):
        model = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
        stats = accumulate_gradients(
            model, rows, np.arange(3), micro_batch_size=micro, pad_token_id=0, device=torch.device("cpu")
        )
        assert stats.loss == pytest.approx(float(loss.detach()), abs=1e-5)
        assert (stats.num_tokens, stats.num_targets) == (15, 7)
        for (name, want), got in zip(plain.named_parameters(), model.parameters()):
            torch.testing.assert_close(got.grad, want.grad, atol=1e-5, rtol=1e-4, msg=name)


@pytest.fixture(scope="module")
def straight(tiny_model_dir: Path, data_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a finished run of four steps, with a checkpoint after two."""
    out = tmp_path_factory.mktemp("straight")
    run_sft(config_of(overrides(tiny_model_dir, data_file, out, "data.weight_key=w", "trainer.save_freq=2")))
    return out


def test_run_leaves_checkpoints_and_metrics(straight: Path, tiny_model_dir: Path) -> None:
    assert sorted(path.name for path in straight.iterdir()) == [
        "global_step_2",
        "global_step_4",
        "latest_checkpointed_iteration.txt",
        "metrics.jsonl",
    ]
    assert last_checkpoint(straight) == straight / "global_step_4"
    lines = [json.loads(line) for line in (straight / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert ["val/loss" in line for line in lines] == [False, True, False, True]
    assert lines[3]["val/loss"] < lines[1]["val/loss"]
    assert largest_difference(weights(straight / "global_step_4"), weights(tiny_model_dir)) > 1e-4


def test_checkpoint_loads_and_gives_the_logged_loss(straight: Path, data_file: Path) -> None:
    folder = straight / "global_step_4"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    frame = pd.read_parquet(data_file)
    total, count = 0.0, 0.0
    for prompt, response, weight in frame.itertuples(index=False):
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
        )
        context = tokenizer(text, add_special_tokens=False)["input_ids"]
        answer = [*tokenizer(response, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([context + answer])).logits[0, len(context) - 1 : -1]
        chosen = logits.log_softmax(-1)[torch.arange(len(answer)), torch.tensor(answer)]
        total, count = total - weight * float(chosen.sum()), count + weight * len(answer)
    last = json.loads((straight / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["val/loss"] == pytest.approx(total / count, abs=1e-5)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_resume_equals_the_straight_run(tiny_model_dir: Path, data_file: Path, tmp_path: Path, optimizer: str) -> None:
    arguments = (f"optim.name={optimizer}", "trainer.total_epochs=3", "trainer.save_freq=3", "optim.weight_decay=0.1")
    whole, rest = tmp_path / "whole", tmp_path / "rest"
    run_sft(config_of(overrides(tiny_model_dir, data_file, whole, *arguments)))
    resume = f"trainer.resume_path={whole / 'global_step_3'}"
    run_sft(config_of(overrides(tiny_model_dir, data_file, rest, *arguments, resume)))
    assert not (rest / "global_step_3").exists()
    assert largest_difference(weights(whole / "global_step_6"), weights(rest / "global_step_6")) == 0.0
    steps = [json.loads(line) for line in (rest / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in steps] == [4, 5, 6]


def test_resume_refuses_other_rows_and_other_folders(straight: Path, tiny_model_dir: Path, data_file: Path) -> None:
    again = overrides(tiny_model_dir, data_file, straight, f"trainer.resume_path={straight}", "trainer.seed=7")
    with pytest.raises(UserError, match="written with seed=1, this run has 7"):
        run_sft(config_of(again))
    again[-2:] = [f"trainer.resume_path={tiny_model_dir}"]
    with pytest.raises(UserError, match="is no checkpoint of this trainer"):
        run_sft(config_of(again))


@pytest.mark.parametrize(
    "more",
    [
        ("data.micro_batch_size_per_gpu=1",),
        ("data.micro_batch_size_per_gpu=3", "use_remove_padding=True"),
        ("data.micro_batch_size_per_gpu=100", "model.strategy=fsdp", "model.enable_gradient_checkpointing=True"),
        ("model.strategy=fsdp", "use_remove_padding=True", "data.balance_dp_token=True"),
        ("model.fsdp_config.wrap_policy.min_num_params=5000", "model.fsdp_config.cpu_offload=True"),
    ],
    ids=lambda more: more[0].partition(".")[2] + "+" * (len(more) - 1),
)
def test_how_a_batch_is_run_changes_nothing(
    straight: Path, tiny_model_dir: Path, data_file: Path, tmp_path: Path, more: tuple[str, ...]
) -> None:
    """Rows per forward, packing, sharding, checkpointing of activations: all end at the same weights."""
    run_sft(config_of(overrides(tiny_model_dir, data_file, tmp_path, "data.weight_key=w", *more)))
    assert largest_difference(weights(straight / "global_step_4"), weights(tmp_path / "global_step_4")) < 2e-5


def test_prompt_tokens_count_as_much_as_asked(tiny_model_dir: Path) -> None:
    """With weight 1 on the prompt the loss is the mean over all tokens but a row's first, packed or padded."""
    rows = TokenRows.from_ids([[5, 6, 7], [8, 9]], [[20, 2], [21, 22, 2]])
    ids = [torch.from_numpy(rows.row(i).astype(np.int64)) for i in range(2)]
    plain = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    with torch.no_grad():
        nll = [-plain(input_ids=row[None]).logits[0, :-1].log_softmax(-1)[torch.arange(4), row[1:]] for row in ids]
    for packed in (False, True):
        attention = "packed_sdpa" if packed else "sdpa"
        model = AutoModelForCausalLM.from_pretrained(tiny_model_dir, attn_implementation=attention)
        stats = accumulate_gradients(
            model, rows, np.arange(2), micro_batch_size=2, pad_token_id=0, device=torch.device("cpu"),
            prompt_loss_weight=1.0, packed=packed,
        )  # fmt: skip
        assert stats.loss == pytest.approx(float(torch.cat(nll).mean()), abs=1e-5)
        assert stats.num_positions == 10


@pytest.mark.parametrize("strategy", ["fsdp2", "fsdp"])
def test_lora_run_resumes_and_exports(tiny_model_dir: Path, data_file: Path, tmp_path: Path, strategy: str) -> None:
    """Only adapters train; the folder is the merged model, `lora_adapter` gives it on the base; resume is exact."""
    lora = ("model.lora_rank=4", "model.lora_alpha=8", f"model.strategy={strategy}", "trainer.save_freq=2")
    whole, rest = tmp_path / "whole", tmp_path / "rest"
    run_sft(config_of(overrides(tiny_model_dir, data_file, whole, *lora)))
    resume = f"trainer.resume_path={whole / 'global_step_2'}"
    run_sft(config_of(overrides(tiny_model_dir, data_file, rest, *lora, resume)))
    assert largest_difference(weights(whole / "global_step_4"), weights(rest / "global_step_4")) == 0.0
    final = whole / "global_step_4"
    trained = largest_difference(weights(final), weights(tiny_model_dir))
    assert trained > 1e-4
    base = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    adapted = PeftModel.from_pretrained(base, final / "lora_adapter")
    ids = torch.arange(12)[None]
    with torch.no_grad():
        merged = AutoModelForCausalLM.from_pretrained(final)(input_ids=ids).logits
        torch.testing.assert_close(adapted(input_ids=ids).logits, merged, atol=1e-5, rtol=1e-4)
    embedding = "model.embed_tokens.weight"
    assert torch.equal(weights(final)[embedding], weights(tiny_model_dir)[embedding])
    other = overrides(tiny_model_dir, data_file, rest, *lora, resume, "model.lora_rank=2")
    with pytest.raises(UserError, match="written with lora_rank=4, this run has 2"):
        run_sft(config_of(other))


def test_conversations_are_trained(tiny_model_dir: Path, tmp_path: Path) -> None:
    turns = [
        [{"role": "user", "content": f"look {i}"}, {"role": "assistant", "content": "a room"}] * (1 + i % 3)
        for i in range(6)
    ]
    path = tmp_path / "chats.parquet"
    pd.DataFrame({"chat": turns}).to_parquet(path)
    more = ("data.multiturn.enable=True", "data.multiturn.messages_key=chat", "trainer.total_epochs=6")
    run_sft(config_of(overrides(tiny_model_dir, path, tmp_path / "out", *more)))
    losses = [json.loads(line)["val/loss"] for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert losses[-1] < losses[0] - 0.5


def torchrun(arguments: list[str], ranks: int = 2) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    return subprocess.run(
        [*command, "-m", "verl.trainer.fsdp_sft_trainer", *arguments],
        cwd=REPO,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=240,
    )


@pytest.mark.parametrize(
    ("strategy", "optimizer"),
    [
        ("fsdp", "adamw"),
        pytest.param("fsdp2", "adamw", marks=pytest.mark.slow),
        pytest.param("fsdp2", "muon", marks=pytest.mark.slow),
    ],
)
def test_two_ranks_equal_one(
    tiny_model_dir: Path, data_file: Path, tmp_path: Path, strategy: str, optimizer: str
) -> None:
    """Also with 23 rows in validation, which two ranks of four cannot share evenly; one rank resumes what two began."""
    one, two, resumed = tmp_path / "one", tmp_path / "two", tmp_path / "resumed"
    more = ("data.weight_key=w", f"optim.name={optimizer}", f"model.strategy={strategy}", "trainer.total_epochs=2")
    run_sft(config_of(overrides(tiny_model_dir, data_file, one, *more)))
    done = torchrun(overrides(tiny_model_dir, data_file, two, *more, "trainer.save_freq=2"))
    assert done.returncode == 0, done.stderr[-3000:]
    # Muon orthogonalises in bfloat16, so the last bits of a gradient show more.
    bound = 2e-5 if optimizer == "adamw" else 5e-3
    final = weights(one / "global_step_4")
    assert largest_difference(final, weights(two / "global_step_4")) < bound
    losses = [json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])["val/loss"] for run in (one, two)]
    assert losses[0] == pytest.approx(losses[1], abs=5 * bound)
    resume = f"trainer.resume_path={two / 'global_step_2'}"
    run_sft(config_of(overrides(tiny_model_dir, data_file, resumed, *more, resume)))
    assert largest_difference(final, weights(resumed / "global_step_4")) < bound


@pytest.mark.slow
def test_two_ranks_resume_to_the_same_bits(tiny_model_dir: Path, data_file: Path, tmp_path: Path) -> None:
    """FSDP1 with adapters over two ranks, packed, in batches that they cannot share equally."""
    sizes = ("data.train_batch_size=7", "use_remove_padding=True", "trainer.save_freq=3")
    more = ("model.strategy=fsdp", "model.lora_rank=4", *sizes)
    whole, rest = tmp_path / "whole", tmp_path / "rest"
    for out, extra in ((whole, []), (rest, [f"trainer.resume_path={whole / 'global_step_3'}"])):
        done = torchrun(overrides(tiny_model_dir, data_file, out, *more, *extra))
        assert done.returncode == 0, done.stderr[-3000:]
    assert largest_difference(weights(whole / "global_step_6"), weights(rest / "global_step_6")) == 0.0


def program(out: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "verl.trainer.fsdp_sft_trainer", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(REPO), "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(command, cwd=out, env=environment, capture_output=True, text=True, timeout=240, check=False)


@pytest.mark.slow
def test_program_runs_alone(tiny_model_dir: Path, data_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = program(tmp_path, *overrides(tiny_model_dir, data_file, out, "trainer.total_training_steps=1"))
    assert done.returncode == 0, done.stderr[-3000:]
    assert last_checkpoint(out) == out / "global_step_1"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


def test_program_reports_a_missing_file_in_one_line(tiny_model_dir: Path, tmp_path: Path) -> None:
    more = ("data.micro_batch_size=8",)
    missing = program(tmp_path, *overrides(tiny_model_dir, tmp_path / "no.parquet", tmp_path / "none", *more))
    assert missing.returncode == 2
    assert "Traceback" not in missing.stderr
    assert "data.train_files" in missing.stderr and "no.parquet does not exist" in missing.stderr
    assert "read by no part of this version: data.micro_batch_size" in missing.stdout + missing.stderr
    assert list(tmp_path.iterdir()) == []


def test_help_needs_no_torch() -> None:
    code = (
        "import runpy, sys; sys.argv = ['x', '--help']\n"
        "try: runpy.run_module('verl.trainer.fsdp_sft_trainer', run_name='__main__')\n"
        "except SystemExit as end: assert not end.code\n"
        "heavy = {'torch', 'transformers', 'ray', 'pandas'} & set(sys.modules); assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], cwd=REPO, check=True, capture_output=True, timeout=60)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["model.use_liger=True"], "use_liger"),
        (["ulysses_sequence_parallel_size=2"], "ulysses_sequence_parallel_size"),
        (["model.lora_rank=4", "model.target_modules=[nothing]"], "model.target_modules="),
        (["data.multiturn.enable=True"], "data.multiturn.messages_key"),
        (["optim.name=muon", "model.strategy=fsdp"], "model.strategy=fsdp2"),
        (["model.partial_pretrain=/no/such/model"], "model.partial_pretrain=/no/such/model"),
    ],
)
def test_what_is_not_built_is_refused(
    tiny_model_dir: Path, data_file: Path, tmp_path: Path, arguments: list[str], message: str
) -> None:
    out = tmp_path / "out"
    with pytest.raises(UserError, match=message):
        run_sft(config_of(overrides(tiny_model_dir, data_file, out, *arguments)))
    assert not out.exists()


def test_a_step_that_is_not_finite_changes_nothing(tiny_model_dir: Path, data_file: Path, tmp_path: Path) -> None:
    trainer = FSDPSFTTrainer(config_of(overrides(tiny_model_dir, data_file, tmp_path)))
    try:
        before = {name: p.detach().full_tensor().clone() for name, p in trainer.model.named_parameters()}  # type: ignore[attr-defined]
        trainer.train_rows = replace(trainer.train_rows, weights=trainer.train_rows.weights * np.float32(np.inf))
        metrics = trainer.training_step()
        assert metrics["train/skipped"] == 1.0
        for name, p in trainer.model.named_parameters():
            assert torch.equal(p.detach().full_tensor(), before[name]), name  # type: ignore[attr-defined]
    finally:
        torch.distributed.destroy_process_group()


def test_muon_takes_hidden_matrices_only(tiny_model_dir: Path) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    matrices, rest = split_for_muon(model)
    names = {id(p): name for name, p in model.named_parameters()}
    assert len(matrices) == 2 * 7 and all("_proj.weight" in names[id(p)] for p in matrices)
    assert any("embed_tokens" in names[id(p)] for p in rest)
    assert len(matrices) + len(rest) == len(names)


def test_checkpoint_folder_is_a_model_plus_one_folder(straight: Path) -> None:
    names = {path.name for path in (straight / "global_step_4").iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", RESUME_FOLDER} <= names
    assert json.loads((straight / "global_step_4" / "config.json").read_text())["architectures"] == ["Qwen2ForCausalLM"]
