# SPDX-License-Identifier: Apache-2.0
"""File operations under the module name that scripts import them by. Remote paths are refused."""

from __future__ import annotations

from verl.utils.fs import copy, exists, makedirs

__all__ = ["copy", "exists", "makedirs"]
