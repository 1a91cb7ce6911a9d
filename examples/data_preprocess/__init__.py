# SPDX-License-Identifier: Apache-2.0
"""Programs that make data files."""
