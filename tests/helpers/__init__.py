# SPDX-License-Identifier: Apache-2.0
"""Small shared builders for tests."""
