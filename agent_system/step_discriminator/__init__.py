# SPDX-License-Identifier: Apache-2.0
"""Which steps of a trajectory mattered: hindsight analysis by replay, and a model that learns to predict it."""

DISCRIMINATOR_FILE = "discriminator.json"
"""Settings in a discriminator's folder; what makes a model folder one."""

__all__ = ["DISCRIMINATOR_FILE"]
