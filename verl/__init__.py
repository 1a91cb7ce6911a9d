# SPDX-License-Identifier: Apache-2.0
"""Training stack: data protocol, single controller, workers, trainers. Knows nothing of environments.

Importing this package loads no other library, so that `--help` stays quick and needs no optional package; `DataProto`
is loaded on first use. Imports of verl's modules that are left out say why they fail (`verl.utils.absent`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from verl.utils.absent import explain_absent_modules

if TYPE_CHECKING:
    from verl.protocol import DataProto

__all__ = ["DataProto", "__version__"]

__version__ = "0.1.0"

explain_absent_modules()


def __getattr__(name: str) -> Any:
    if name == "DataProto":
        from verl.protocol import DataProto

        return DataProto
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
