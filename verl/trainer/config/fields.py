# SPDX-License-Identifier: Apache-2.0
"""Types used by the config sections: numbers with a range, checked by `builder.build_config`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

__all__ = [
    "NULL_MEANS_DEFAULT",
    "Dtype",
    "Fraction",
    "NonNegativeFloat",
    "NonNegativeInt",
    "PositiveFloat",
    "PositiveFraction",
    "PositiveInt",
    "Range",
    "RootConfig",
]


@dataclass(frozen=True)
class Range:
    """Bounds of a number; `None` = unbounded, `strict` excludes the lower bound itself."""

    low: float | None = None
    high: float | None = None
    strict: bool = False

    def accepts(self, value: float) -> bool:
        """Whether `value` lies within the bounds."""
        if self.low is not None and (value < self.low or (self.strict and value == self.low)):
            return False
        return self.high is None or value <= self.high

    def __str__(self) -> str:
        parts = []
        if self.low is not None:
            parts.append(f"{'above' if self.strict else 'at least'} {self.low:g}")
        if self.high is not None:
            parts.append(f"at most {self.high:g}")
        return " and ".join(parts)


PositiveInt = Annotated[int, Range(low=1)]
NonNegativeInt = Annotated[int, Range(low=0)]
PositiveFloat = Annotated[float, Range(low=0, strict=True)]
NonNegativeFloat = Annotated[float, Range(low=0)]
Fraction = Annotated[float, Range(low=0, high=1)]
PositiveFraction = Annotated[float, Range(low=0, high=1, strict=True)]
Dtype = Literal["float32", "fp32", "bfloat16", "bf16", "float16", "fp16"]

NULL_MEANS_DEFAULT = {"null_means_default": True}
"""Field metadata: a null in the YAML stands for the field's default, so that code reads a value, never None.

The keys concerned are absent from the reference's YAML and added by its users with `+`, which Hydra accepts on a
null only.
"""


@dataclass(frozen=True)
class RootConfig:
    """Base of a whole config: one that has a YAML file of its own and takes sections of recipes."""

    config_name: ClassVar[str]
    """Name of the YAML file beside this module, without its suffix."""

    extra: dict[str, Any] = field(default_factory=dict)
    """Sections of recipes by name: dataclass instances made by `build_config(extra_sections=...)`."""

    def normalized(self) -> RootConfig:
        """The config with old or shorthand keys turned into the ones that code reads; `build_config` calls it."""
        return self
