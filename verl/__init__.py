# SPDX-License-Identifier: Apache-2.0
"""Training stack: data protocol, single controller, workers, trainers. Knows nothing of environments.

Importing this package imports nothing else, so that `--help` stays quick and needs no optional package.
"""

from __future__ import annotations

__all__ = ["__version__"]

__version__ = "0.1.0"
