# SPDX-License-Identifier: Apache-2.0
"""One folder per environment: vector env, projection, manager, prompt builder."""
