# SPDX-License-Identifier: Apache-2.0
"""Launch scripts and the programs behind them."""
