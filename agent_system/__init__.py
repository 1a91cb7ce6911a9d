# SPDX-License-Identifier: Apache-2.0
"""Everything about acting: environments, memory, the rollout loop, and credit for single steps."""
