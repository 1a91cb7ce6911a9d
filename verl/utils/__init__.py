# SPDX-License-Identifier: Apache-2.0
"""Helpers of the training stack that know nothing of algorithms or environments."""
