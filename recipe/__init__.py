# SPDX-License-Identifier: Apache-2.0
"""Algorithms that plug into the trainer by name."""

from verl.utils.absent import explain_absent_modules

explain_absent_modules()
