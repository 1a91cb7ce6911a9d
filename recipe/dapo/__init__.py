# SPDX-License-Identifier: Apache-2.0
"""DAPO (arXiv 2503.14476): GRPO with dynamic sampling and clip-higher, which are options of the core.

The package holds only the names that DAPO's launch scripts use: a program and its config. With an environment,
`examples/dapo_trainer` is the shorter way.
"""
