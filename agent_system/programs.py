# SPDX-License-Identifier: Apache-2.0
"""What the command-line programs of this package share; it is the same as in `verl`."""

from __future__ import annotations

from verl.utils.programs import check_output, run_program

__all__ = ["check_output", "run_program"]
