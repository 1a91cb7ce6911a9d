# SPDX-License-Identifier: Apache-2.0
"""TRIAL's launch scripts, and its comparison with GRPO on generated tasks."""
