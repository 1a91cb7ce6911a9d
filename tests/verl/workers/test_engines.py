# SPDX-License-Identifier: Apache-2.0
"""Engines by name: what is refused, and that nothing needs an engine's package before that engine is chosen."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.version import Version
from torch import Tensor, nn

from tests.verl.workers.support import make_group, worker_config
from verl.trainer.config import validate
from verl.trainer.config.worker_sections import RolloutConfig
from verl.utils.errors import UserError
from verl.utils.import_utils import is_installed
from verl.workers.rollout import engines, vllm_rollout, vllm_setup
from verl.workers.rollout.base import EngineSpec
from verl.workers.rollout.hf_rollout import HFRollout
from verl.workers.rollout.sampling import SamplingParams

ROOT = Path(__file__).resolve().parents[3]
PREFIX = "actor_rollout_ref.rollout"


def vllm_imports() -> Iterator[tuple[str, bool]]:
    """(file, whether the import is inside a function) of every import of vLLM."""
    for package in ("verl", "agent_system", "recipe", "examples"):
        for path in (ROOT / package).rglob("*.py"):
            tree = ast.parse(path.read_text(encoding="utf-8"))
            inside = {
                id(child)
                for node in ast.walk(tree)
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
                for child in ast.walk(node)
            }
            for node in ast.walk(tree):
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
                if any(name == "vllm" or name.startswith("vllm.") for name in names):
                    yield str(path.relative_to(ROOT)), id(node) in inside


def test_vllm_is_imported_by_its_engine_only_and_when_that_runs() -> None:
    found = set(vllm_imports())
    assert {file for file, _ in found} == {
        "verl/workers/rollout/vllm_rollout.py",
        "verl/workers/rollout/vllm_setup.py",
    }
    assert all(inside for _, inside in found)


def test_engine_without_its_package(tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "is_installed", lambda package: False)
    config = worker_config(tiny_model_dir)
    with pytest.raises(UserError) as caught:
        make_group(replace(config, rollout=replace(config.rollout, name="vllm")))
    text = str(caught.value)
    assert f"{PREFIX}.name=vllm" in text and "requirements/install_vllm_cpu.sh" in text and "\n" not in text
    assert f"set {PREFIX}.name=hf" in text


def test_the_table() -> None:
    assert engines.load_engine("hf") is HFRollout
    with pytest.raises(UserError, match="sglang is not part of this package"):
        engines.load_engine("sglang")
    for entry in engines.ENGINES.values():
        assert entry.package is None or is_installed(entry.package) or entry.how_to_install
    assert (ROOT / "requirements" / "install_vllm_cpu.sh").is_file()


def sentence(monkeypatch: pytest.MonkeyPatch, ranks: int = 4, **rollout: Any) -> str | None:
    """First refusal of a vLLM section where vLLM is installed."""
    monkeypatch.setattr(engines, "is_installed", lambda package: True)
    config = RolloutConfig(name="vllm", **rollout)
    return next((text for wrong, text in validate.unsupported_engine(config, PREFIX, ranks) if wrong), None)


def test_settings_of_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    assert sentence(monkeypatch) is None
    # Fields of vLLM's sampling, which the HF engine refuses.
    assert sentence(monkeypatch, min_p=0.1, repetition_penalty=1.1, stop=("x",), stop_token_ids=(3,)) is None
    for rollout, expected in (
        ({"tensor_model_parallel_size": 3}, "does not divide the 4 ranks"),
        ({"enable_chunked_prefill": False, "max_num_batched_tokens": 1000}, "set the former to 1024"),
        ({"cudagraph_capture_sizes": (1, 2)}, f"{PREFIX}.enforce_eager=True; set that to False"),
    ):
        text = sentence(monkeypatch, **rollout)
        assert text is not None and expected in text
    assert sentence(monkeypatch, cudagraph_capture_sizes=(1, 2), enforce_eager=False) is None
    hf = RolloutConfig(name="hf", min_p=0.1)
    assert any(wrong for wrong, _ in validate.unsupported_engine(hf, PREFIX, 1))


def spec_of(device: str, monkeypatch: pytest.MonkeyPatch, version: str = "0.32.0", **rollout: Any) -> EngineSpec:
    """A specification, with vLLM pretended to be of some version."""
    monkeypatch.setattr(vllm_setup, "vllm_version", lambda: Version(version))
    config = RolloutConfig(name="vllm", tensor_model_parallel_size=1, **rollout)
    return EngineSpec(config, "folder", torch.device(device), torch.bfloat16, (2,), 0)


def test_every_engine_key_becomes_an_argument(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {
        "gpu_memory_utilization": 0.7, "max_num_seqs": 33, "max_num_batched_tokens": 4000, "max_model_len": 2000,
        "enforce_eager": False, "enable_chunked_prefill": False, "disable_log_stats": False, "seed": 5,
    }  # fmt: skip
    spec = spec_of("cuda", monkeypatch, **given, cudagraph_capture_sizes=(1, 2), load_format="dummy_dtensor")
    arguments = vllm_setup.engine_arguments(spec)
    assert {name: arguments[name] for name in given} == given
    assert arguments["dtype"] == "bfloat16" and arguments["load_format"] == "dummy"
    assert arguments["compilation_config"] == {"cudagraph_capture_sizes": [1, 2]}
    assert arguments["enable_sleep_mode"] and arguments["logprobs_mode"] == "processed_logprobs"
    plain = vllm_setup.engine_arguments(spec_of("cpu", monkeypatch, load_format="safetensors"))
    assert plain["load_format"] == "safetensors" and not plain["enable_sleep_mode"]
    assert plain["max_model_len"] == 1024 and plain["skip_tokenizer_init"]
    kept = vllm_setup.engine_arguments(spec_of("cuda", monkeypatch, free_cache_engine=False, stop=("x",)))
    assert not kept["enable_sleep_mode"] and not kept["skip_tokenizer_init"]
    old = vllm_setup.engine_arguments(spec_of("cuda", monkeypatch, version="0.8.5"))
    assert "logprobs_mode" not in old and not old["skip_tokenizer_init"]


class FakeLLM:
    """What the engine asks of ``vllm.LLM`` on a GPU; writes down what happens."""

    def __init__(self) -> None:
        self.model = nn.Linear(2, 2)
        self.model.register_buffer("table", torch.ones(3))
        self.model.load_weights = self.load  # type: ignore[assignment,method-assign]
        self.log: list[str] = []
        self.forgets: set[str] = set()

    def load(self, weights: Any) -> set[str]:
        self.log.append("load")
        return {name for name, weight in weights if name not in self.forgets}

    def apply_model(self, function: Any) -> list[Any]:
        return [function(self.model)]

    def sleep(self, level: int) -> None:
        self.log.append(f"sleep {level}")
        self.model.table.zero_()  # type: ignore[operator,union-attr]

    def wake_up(self, tags: list[str]) -> None:
        self.log.append(f"wake {' '.join(tags)}")

    def reset_prefix_cache(self) -> None:
        self.log.append("reset")


def weights_of(llm: FakeLLM) -> dict[str, Tensor]:
    return dict(llm.model.named_parameters())


def test_sleep_and_wake_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = FakeLLM()
    engine = vllm_rollout.VLLMRollout(spec_of("cuda", monkeypatch), llm)
    engine.release_weights()
    engine.release_weights()
    # Weights are dropped, not moved to host memory; what is no weight has to survive.
    assert llm.log == ["sleep 2"]
    engine.update_weights(weights_of(llm).items(), 4)
    assert llm.log[1:] == ["wake weights", "load", "reset"] and engine.version == 4
    assert torch.equal(llm.model.table, torch.ones(3))
    # Room for the cache is taken when the policy's weights have gone.
    engine._check_weights_are_there()
    engine._check_weights_are_there()
    assert llm.log[4:] == ["wake kv_cache"]
    engine.release_weights()
    with pytest.raises(RuntimeError, match="holds no weights"):
        engine._check_weights_are_there()
    llm.forgets = {"bias"}
    with pytest.raises(RuntimeError, match="no new values for bias"):
        engine.update_weights(weights_of(llm).items(), 5)


def test_without_sleep_mode_the_weights_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = FakeLLM()
    engine = vllm_rollout.VLLMRollout(spec_of("cuda", monkeypatch, free_cache_engine=False), llm)
    engine.release_weights()
    engine.update_weights(weights_of(llm).items(), 0)
    engine.release_weights()
    assert llm.log == ["load", "reset"]


def test_which_log_probs_a_version_can_give(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, warm = SamplingParams(), SamplingParams(temperature=0.7)
    for version, rollout, sampling, expected in (
        ("0.10.2", {}, warm, True),
        ("0.10.1", {}, warm, False),
        ("0.8.5", {}, plain, True),
        ("0.8.5", {}, SamplingParams(do_sample=False, temperature=0.3), True),
        ("0.8.5", {"repetition_penalty": 1.2}, plain, False),
        ("0.32.0", {"repetition_penalty": 1.2}, plain, True),
    ):
        engine = vllm_rollout.VLLMRollout(spec_of("cuda", monkeypatch, version, **rollout), FakeLLM())
        assert engine.gives_log_probs(sampling) is expected, (version, rollout)
