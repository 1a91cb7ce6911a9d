# SPDX-License-Identifier: Apache-2.0
"""Stage 2: train the step-credit discriminator on credit analyses.

Programs: `prepare` (credit JSON -> parquet), then `verl.trainer.fsdp_sft_trainer`, `finish` (checkpoint -> folder) and
`evaluate` (held-out report); `run_training_alfworld.sh` runs all four.
"""
