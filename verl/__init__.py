# SPDX-License-Identifier: Apache-2.0
"""Training stack: data protocol, single controller, workers, trainers. Knows nothing of environments.

Importing this package imports nothing else, so that `--help` stays quick and needs no optional package; `DataProto`
is loaded on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from verl.protocol import DataProto

__all__ = ["DataProto", "__version__"]

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name == "DataProto":
        from verl.protocol import DataProto

        return DataProto
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
