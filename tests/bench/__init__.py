# SPDX-License-Identifier: Apache-2.0
"""Benchmarks: programs that print a Markdown table of ratios measured in one run."""
