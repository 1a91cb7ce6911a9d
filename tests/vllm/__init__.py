# SPDX-License-Identifier: Apache-2.0
"""Tests with a real vLLM on the CPU: `bash tests/run.sh --vllm` makes the environment they need."""
