# SPDX-License-Identifier: Apache-2.0
"""Roles that hold models: actor, reference policy, rollout engine, critic."""
