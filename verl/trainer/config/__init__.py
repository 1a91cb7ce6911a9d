# SPDX-License-Identifier: Apache-2.0
"""YAML files of the training programs and their typed, checked form (see `schema`).

Hydra imports this package to find the YAML files, so nothing is imported here.
"""
