# SPDX-License-Identifier: Apache-2.0
"""Which steps of a trajectory mattered: hindsight analysis by replay, and a model that learns to predict it."""
