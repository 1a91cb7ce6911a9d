# SPDX-License-Identifier: Apache-2.0
"""Parts of the supervised fine-tuning trainer. Import from the modules; the package itself imports nothing."""
