# SPDX-License-Identifier: Apache-2.0
"""The whole pipeline on generated games with a tiny model, on a laptop CPU."""
