# SPDX-License-Identifier: Apache-2.0
"""The generation program: rows in and out, samples, seeds, refusals, ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from verl.trainer.config.builder import build_config, key_paths
from verl.trainer.config.generation_sections import GenerationConfig, validate_generation_config
from verl.trainer.config.loading import load_config
from verl.trainer.main_generation import run_generation
from verl.utils.errors import UserError

REPO = Path(__file__).resolve().parents[3]
PROMPTS = ["look", "go to cabinet 1", "take apple 1 from fridge 1", "open fridge 1", "inventory"]


@pytest.fixture(scope="module")
def prompts_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "test.parquet"
    chats = [[{"role": "user", "content": text}] for text in PROMPTS]
    pd.DataFrame({"prompt": chats, "text": PROMPTS, "extra": [{"index": i} for i in range(5)]}).to_parquet(path)
    return path


def arguments(model: Path, prompts: Path, out: Path, *more: str) -> list[str]:
    return [
        f"model.path={model}",
        f"data.path={prompts}",
        f"data.output_path={out}",
        "data.n_samples=2",
        "rollout.name=hf",
        "rollout.response_length=6",
        "rollout.prompt_length=80",
        "rollout.top_p=1.0",
        "trainer.device=cpu",
        "trainer.n_gpus_per_node=1",
        *more,
    ]


def config_of(overrides: list[str]) -> GenerationConfig:
    return build_config(GenerationConfig, load_config("generation", overrides))


def generate(model: Path, prompts: Path, out: Path, *more: str) -> list[list[str]]:
    run_generation(config_of(arguments(model, prompts, out, *more)))
    return [list(cell) for cell in pd.read_parquet(out)["responses"]]


def test_rows_come_back_with_samples_that_depend_on_the_seed_alone(
    tiny_model_dir: Path, prompts_file: Path, tmp_path: Path
) -> None:
    out = tmp_path / "deep" / "out.parquet"
    in_group_before = torch.distributed.is_initialized()
    texts = generate(tiny_model_dir, prompts_file, out)
    frame = pd.read_parquet(out)
    assert list(frame.columns) == ["prompt", "text", "extra", "responses"]
    assert frame["extra"].tolist() == [{"index": i} for i in range(5)]
    assert [len(row) for row in texts] == [2] * 5
    assert any(row[0] != row[1] for row in texts)
    assert generate(tiny_model_dir, prompts_file, tmp_path / "b.parquet", "data.batch_size=2") == texts
    assert generate(tiny_model_dir, prompts_file, tmp_path / "c.parquet", "rollout.seed=1") != texts
    # Plain texts are the same prompts; an old column of that name is replaced.
    assert generate(tiny_model_dir, out, tmp_path / "d.parquet", "data.prompt_key=text") == texts
    assert torch.distributed.is_initialized() == in_group_before


def test_greedy_responses_are_the_models_own(tiny_model_dir: Path, prompts_file: Path, tmp_path: Path) -> None:
    greedy = ("rollout.do_sample=False", "data.n_samples=1", "actor.strategy=fsdp")
    texts = generate(tiny_model_dir, prompts_file, tmp_path / "out.parquet", *greedy)
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(tiny_model_dir),
        AutoTokenizer.from_pretrained(tiny_model_dir),
    )
    for prompt, (text,) in zip(PROMPTS, texts):
        rendered = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
        )
        ids = tokenizer(rendered, add_special_tokens=False, return_tensors="pt")
        want = model.generate(**ids, max_new_tokens=6, do_sample=False)[0, ids["input_ids"].shape[1] :]
        assert text == tokenizer.decode(want, skip_special_tokens=True)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["rollout.name=vllm"], "set rollout.name=hf"),
        (["rollout.n=2"], "set data.n_samples"),
        (["rollout.mode=async"], "rollout.mode=sync"),
        (["rollout.temperature=0"], "data.n_samples=1"),
        (["data.path=/no/such.parquet"], "data.path=/no/such.parquet"),
        (["data.prompt_key=question"], r"no column 'question' \(data.prompt_key\)"),
        (["data.prompt_key=extra"], "row 0, column 'extra': a prompt must be"),
        (["rollout.prompt_length=20"], "row 1 has 25 tokens, more than rollout.prompt_length=20"),
        (["model.path=/no/model"], "model.path=/no/model"),
        (["actor.fsdp_config.fsdp_size=3"], "does not divide the 1 ranks"),
    ],
)
def test_refusals_leave_no_file(
    tiny_model_dir: Path, prompts_file: Path, tmp_path: Path, more: list[str], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        generate(tiny_model_dir, prompts_file, tmp_path / "out.parquet", *more)
    assert list(tmp_path.iterdir()) == []


def test_long_prompts_may_be_cut(tiny_model_dir: Path, prompts_file: Path, tmp_path: Path) -> None:
    cut = ("rollout.prompt_length=20", "data.truncation=left")
    assert len(generate(tiny_model_dir, prompts_file, tmp_path / "out.parquet", *cut)) == 5


def test_defaults_are_the_yamls() -> None:
    tree = load_config("generation")
    assert build_config(GenerationConfig, tree) == GenerationConfig()
    known = set(key_paths(GenerationConfig))

    def walk(node: Any, prefix: str) -> None:
        for key, value in node.items():
            assert f"{prefix}{key}" in known or "kwargs" in prefix
            if hasattr(value, "items"):
                walk(value, f"{prefix}{key}.")

    walk(tree, "")
    with pytest.raises(UserError, match=r"set rollout\.name=hf"):
        validate_generation_config(GenerationConfig())


def test_the_program_reports_in_one_line(tmp_path: Path) -> None:
    def program(*flags: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "verl.trainer.main_generation", *flags]
        environment = {**os.environ, "PYTHONPATH": str(REPO), "CUDA_VISIBLE_DEVICES": ""}
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)

    refused = program("data.n_sample=3")
    assert refused.returncode == 2
    assert refused.stderr == "error: unknown config key data.n_sample; did you mean data.n_samples?\n"


@pytest.mark.slow
def test_two_ranks_give_the_texts_of_one(
    ray_session: None, tiny_model_dir: Path, prompts_file: Path, tmp_path: Path
) -> None:
    one = generate(tiny_model_dir, prompts_file, tmp_path / "one.parquet")
    two = ("trainer.n_gpus_per_node=2", "actor.strategy=fsdp", "data.batch_size=3", "data.n_samples=2")
    assert generate(tiny_model_dir, prompts_file, tmp_path / "two.parquet", *two) == one
