# SPDX-License-Identifier: Apache-2.0
"""Plays episodes with a model behind an OpenAI-compatible chat endpoint and writes them as trajectories."""
