# SPDX-License-Identifier: Apache-2.0
"""What the rollout reads of the configuration (the attribute paths are the config's key paths)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, Protocol

__all__ = ["RolloutConfigLike", "RolloutSettings", "Sampling", "Truncation"]

Truncation = Literal["error", "left", "right", "middle"]


class _SamplingSection(Protocol):
    @property
    def do_sample(self) -> bool: ...
    @property
    def temperature(self) -> float: ...
    @property
    def top_p(self) -> float: ...
    @property
    def top_k(self) -> int: ...


class _ValSection(_SamplingSection, Protocol):
    @property
    def n(self) -> int: ...


class _EngineSection(_SamplingSection, Protocol):
    @property
    def mode(self) -> str: ...
    @property
    def val_kwargs(self) -> _ValSection: ...
    @property
    def seed(self) -> int | None: ...


class _ModelSection(Protocol):
    @property
    def path(self) -> str: ...


class _PolicySection(Protocol):
    @property
    def model(self) -> _ModelSection: ...
    @property
    def rollout(self) -> _EngineSection: ...


class _DataSection(Protocol):
    @property
    def max_prompt_length(self) -> int: ...
    @property
    def truncation(self) -> Truncation: ...
    @property
    def apply_chat_template_kwargs(self) -> Mapping[str, Any]: ...


class _EnvSection(Protocol):
    @property
    def max_steps(self) -> int: ...
    @property
    def seed(self) -> int: ...


class RolloutConfigLike(Protocol):
    """The sections that the collector and the validator read."""

    @property
    def env(self) -> _EnvSection: ...
    @property
    def data(self) -> _DataSection: ...
    @property
    def actor_rollout_ref(self) -> _PolicySection: ...


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters of one generate call."""

    do_sample: bool = True
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1

    @classmethod
    def of(cls, section: _SamplingSection) -> Sampling:
        """From a config section; greedy decoding has one form whatever the section says besides."""
        if not section.do_sample:
            return cls(do_sample=False, temperature=0.0, top_p=1.0, top_k=-1)
        return cls(True, float(section.temperature), float(section.top_p), int(section.top_k))

    def as_dict(self) -> dict[str, Any]:
        """JSON types, under the config's names."""
        return asdict(self)


@dataclass(frozen=True)
class RolloutSettings:
    """The collector's settings."""

    max_steps: int
    """Turns per episode."""
    max_prompt_length: int
    """P, tokens."""
    seed: int
    """Seed of all sampling: `actor_rollout_ref.rollout.seed`, else `env.seed`."""
    model: str = ""
    truncation: Truncation = "error"
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    train_sampling: Sampling = field(default_factory=Sampling)
    val_sampling: Sampling = field(default_factory=Sampling)
    val_n: int = 1
    """Episodes per validation task."""
    overlap: bool = False
    """`rollout.mode=async`: environments step while other rows generate."""

    @classmethod
    def from_config(cls, config: RolloutConfigLike) -> RolloutSettings:
        """Read once from the run's configuration."""
        engine = config.actor_rollout_ref.rollout
        return cls(
            max_steps=config.env.max_steps,
            max_prompt_length=config.data.max_prompt_length,
            seed=config.env.seed if engine.seed is None else engine.seed,
            model=str(config.actor_rollout_ref.model.path),
            truncation=config.data.truncation,
            chat_template_kwargs=dict(config.data.apply_chat_template_kwargs),
            train_sampling=Sampling.of(engine),
            val_sampling=Sampling.of(engine.val_kwargs),
            val_n=engine.val_kwargs.n,
            overlap=engine.mode == "async",
        )
