# SPDX-License-Identifier: Apache-2.0
"""Algorithms that plug into the trainer by name."""
