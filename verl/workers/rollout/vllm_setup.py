# SPDX-License-Identifier: Apache-2.0
"""From an `EngineSpec` to the arguments of ``vllm.LLM``, and what has to be refused before one is built.

Only this module and `vllm_rollout` import vLLM, inside functions.
"""

from __future__ import annotations

import dataclasses
import difflib
import logging
import os
import random
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from packaging.version import Version

from verl.utils.errors import UserError
from verl.workers.model_builder import load_config
from verl.workers.rollout.base import EngineSpec
from verl.workers.rollout.probe import PROBE_LENGTH

__all__ = [
    "build_llm",
    "compilation",
    "engine_arguments",
    "gives_processed_log_probs",
    "prepare_environment",
    "sampling_fields",
]

_PREFIX = "actor_rollout_ref.rollout"
_OLDEST = Version("0.8.5")
# On the CPU layers are prepacked, and only newer versions can exchange the weights of such layers.
_OLDEST_ON_CPU = Version("0.32.0")
# Earlier versions report log-probs of the model's own distribution, whatever the temperature.
_PROCESSED_LOG_PROBS = Version("0.10.2")
_NO_TOKENIZER = Version("0.10.2")
# Smaller heads pass vLLM's checks on the CPU and fail in the first forward pass.
_SMALLEST_HEAD_ON_CPU = 32
_CPU_CACHE_GIB = "1"

# Always ours: the rest of this package is written for these values.
_RESERVED = (
    "model",
    "tokenizer",
    "skip_tokenizer_init",
    "tensor_parallel_size",
    "distributed_executor_backend",
    "pipeline_parallel_size",
    "data_parallel_size",
    "dtype",
    "max_model_len",
    "seed",
    "logprobs_mode",
    "enable_sleep_mode",
)


def prepare_environment(device: torch.device) -> None:
    """Environment variables that vLLM reads when it is imported or started; what the shell sets wins."""
    # The engine has to live in this process: its weights come from here.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    defaults = {"VLLM_LOGGING_LEVEL": "WARNING", "VLLM_NO_USAGE_STATS": "1"}
    if device.type == "cpu":
        # Otherwise the key/value cache of every rank takes a share of the whole machine's memory.
        defaults["VLLM_CPU_KVCACHE_SPACE"] = _CPU_CACHE_GIB
        # Every sync it would warn about parts that have no weights of their own, rotary embeddings and tied heads.
        logging.getLogger("vllm.model_executor.model_loader.reload").setLevel(logging.ERROR)
    for name, value in defaults.items():
        os.environ.setdefault(name, value)


def vllm_version() -> Version:
    """Version of the installed vLLM."""
    import vllm

    return Version(vllm.__version__)


def gives_processed_log_probs() -> bool:
    """Whether log-probs come from the distribution sampled from, temperature and all."""
    return vllm_version() >= _PROCESSED_LOG_PROBS


def sampling_fields(spec: EngineSpec) -> dict[str, Any]:
    """Fields of SamplingParams that hold for every call, from the keys of the config that are set."""
    config = spec.config
    values = {
        "min_p": config.min_p,
        "min_tokens": config.min_tokens,
        "presence_penalty": config.presence_penalty,
        "frequency_penalty": config.frequency_penalty,
        "repetition_penalty": config.repetition_penalty,
        "stop": None if config.stop is None else list(config.stop),
    }
    return {name: value for name, value in values.items() if value is not None}


def check_spec(spec: EngineSpec) -> None:
    """Raise UserError for what the installed vLLM cannot do."""
    from vllm.platforms import current_platform

    version, on_cpu = vllm_version(), spec.device.type == "cpu"
    oldest = _OLDEST_ON_CPU if on_cpu else _OLDEST
    if version < oldest:
        raise UserError(f"{_PREFIX}.name=vllm on {spec.device.type} needs vLLM {oldest} or newer, not {version}")
    built_for = current_platform.device_type
    if built_for != spec.device.type:
        raise UserError(
            f"the installed vLLM {version} was built for {built_for or 'another device'} and the run is on "
            f"{spec.device.type}; set trainer.device, or install the build for {spec.device.type}"
        )
    if on_cpu:
        size = head_size(spec)
        if size < _SMALLEST_HEAD_ON_CPU:
            raise UserError(
                f"vLLM on the CPU needs attention heads of at least {_SMALLEST_HEAD_ON_CPU} numbers, and those of "
                f"{spec.model_path} have {size}; use another model, or set {_PREFIX}.name=hf"
            )


def head_size(spec: EngineSpec) -> int:
    """Numbers per attention head, from the model's configuration."""
    values = load_config(
        spec.model_path, override_config=spec.override_config, trust_remote_code=spec.trust_remote_code
    ).to_dict()
    return int(values.get("head_dim") or values["hidden_size"] // values["num_attention_heads"])


def _engine_argument_names() -> list[str]:
    from vllm import EngineArgs

    return [field.name for field in dataclasses.fields(EngineArgs)]


def engine_arguments(spec: EngineSpec) -> dict[str, Any]:
    """Keyword arguments of ``vllm.LLM`` for every key of the config.

    Raises:
        UserError: a key of ``engine_kwargs.vllm`` is unknown to this vLLM, or not for the user to set.
    """
    config = spec.config
    arguments: dict[str, Any] = {
        "model": spec.model_path,
        "trust_remote_code": spec.trust_remote_code,
        # Stop strings are found in the text; nothing else needs one. (Earlier versions fail without.)
        "skip_tokenizer_init": config.stop is None and vllm_version() >= _NO_TOKENIZER,
        "dtype": str(spec.dtype).removeprefix("torch."),
        # The same on all ranks that share an engine; requests bring their own seeds.
        "seed": config.seed or 0,
        "tensor_parallel_size": config.tensor_model_parallel_size,
        # One engine part in every rank's process, over the process group that the ranks have joined.
        "distributed_executor_backend": "external_launcher",
        "disable_custom_all_reduce": True,
        "gpu_memory_utilization": config.gpu_memory_utilization,
        "max_model_len": max(config.max_model_len or config.max_row_length, PROBE_LENGTH + 1),
        "max_num_seqs": config.max_num_seqs,
        "max_num_batched_tokens": config.max_num_batched_tokens,
        "enforce_eager": config.enforce_eager,
        "enable_chunked_prefill": config.enable_chunked_prefill,
        "enable_prefix_caching": True,
        "enable_sleep_mode": config.free_cache_engine and spec.device.type == "cuda",
        "load_format": "dummy" if config.load_format.startswith("dummy") else config.load_format,
        "disable_log_stats": config.disable_log_stats,
        # Sampling is what the config says, not what the model's folder suggests.
        "generation_config": "vllm",
    }
    overrides = {name: value for name, value in spec.override_config.items() if name != "attn_implementation"}
    if overrides:
        arguments["hf_overrides"] = overrides
    if config.cudagraph_capture_sizes is not None:
        arguments["compilation_config"] = {"cudagraph_capture_sizes": list(config.cudagraph_capture_sizes)}
    if gives_processed_log_probs():
        arguments["logprobs_mode"] = "processed_logprobs"
    return arguments | _user_arguments(config.engine_kwargs.vllm)


def _user_arguments(given: Mapping[str, Any]) -> dict[str, Any]:
    chosen = {name: value for name, value in given.items() if value is not None}
    known = _engine_argument_names() if chosen else []
    for name in chosen:
        key = f"{_PREFIX}.engine_kwargs.vllm.{name}"
        if name in _RESERVED:
            raise UserError(f"{key} is set by this program or by the other keys of {_PREFIX}; remove it")
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]}?" if near else "; set it to null"
            raise UserError(f"{key} is no engine argument of vLLM {vllm_version()}{hint}")
    return chosen


@contextmanager
def _generators_kept(device: torch.device) -> Iterator[None]:
    """Starting an engine seeds every process-wide generator; here they are as before afterwards."""
    python, array = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[] if device.type == "cpu" else [device]):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(array)


@contextmanager
def _local_rank(index: int) -> Iterator[None]:
    """vLLM takes the device's index from the environment, which counts ranks and not visible devices."""
    before = os.environ.get("LOCAL_RANK")
    os.environ["LOCAL_RANK"] = str(index)
    try:
        yield
    finally:
        if before is None:
            del os.environ["LOCAL_RANK"]
        else:
            os.environ["LOCAL_RANK"] = before


def compilation(spec: EngineSpec) -> AbstractContextManager[Any]:
    """Around everything that runs the engine: keeps the CPU engine from compiling under ``enforce_eager``.

    vLLM compiles a helper of its sampler all the same, which takes seconds in every process and a C++ compiler.
    """
    if spec.device.type == "cpu" and spec.config.enforce_eager:
        stance: AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
        return stance
    return nullcontext()


def build_llm(spec: EngineSpec) -> Any:
    """A ``vllm.LLM`` in this process; a collective of the ranks. `prepare_environment` comes first.

    Raises:
        UserError: vLLM refuses the model or the settings.
    """
    from vllm import LLM

    check_spec(spec)
    arguments = engine_arguments(spec)
    if spec.device.type == "cuda":
        # vLLM measures what is free; blocks that torch keeps would count as taken.
        torch.cuda.empty_cache()
    try:
        with _generators_kept(spec.device), _local_rank(spec.device.index or 0), compilation(spec):
            return LLM(**arguments)
    except (ValueError, NotImplementedError) as error:
        reason = " ".join(str(error).split())[:400]
        raise UserError(f"vLLM {vllm_version()} refuses the settings under {_PREFIX} or the model: {reason}") from error
