# SPDX-License-Identifier: Apache-2.0
"""Hydra config of TRIAL."""
