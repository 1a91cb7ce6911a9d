# SPDX-License-Identifier: Apache-2.0
"""Training programs, their configuration and the algorithms they use."""
