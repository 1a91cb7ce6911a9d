# SPDX-License-Identifier: Apache-2.0
"""YAML of the recipe."""
