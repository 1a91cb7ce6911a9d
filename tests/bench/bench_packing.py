# SPDX-License-Identifier: Apache-2.0
"""Training tokens per second of a policy update: packed rows against padded ones, where 30 % of the batch is tokens.

``python -m tests.bench.bench_packing [--quick]``. All ways run the same worker on the same rows and differ in the
forward pass only; the gradients of every way are compared with those of the padded rows in the same run.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from tests.bench.table import environment_line, format_seconds, print_table, time_best
from tests.helpers.tiny import make_tiny_model
from verl.protocol import DataProto
from verl.single_controller.base import ClassWithInitArgs
from verl.single_controller.local import LocalWorkerGroup
from verl.trainer.config.model_sections import ModelConfig
from verl.trainer.config.worker_sections import ActorConfig, ActorRolloutRefConfig, RolloutConfig
from verl.utils.selected_logits import selected_logits
from verl.workers.batching import MicroBatching
from verl.workers.forward import RowForward
from verl.workers.fsdp_workers import ActorRolloutRefWorker

PROMPT, RESPONSE, FILL = 384, 128, 0.3
MICRO_ROWS = 8
TOLERANCE = 1e-4
"""Largest difference of a gradient, as a share of that weight's largest gradient."""


class FullWidthForward(RowForward):
    """The straightforward way: whole rows with their padding, an attention mask, positions counted from the mask."""

    def _padded_run(self, input_ids: Tensor, mask: Tensor, index_in_row: Tensor, row: Tensor, column: Tensor) -> Tensor:
        first = mask.to(torch.uint8).argmax(dim=1)
        positions = index_in_row.clamp(min=0)
        return selected_logits(
            self.model, input_ids, row, column + first[row], attention_mask=mask.long(), position_ids=positions
        )


def make_batch(rows: int, vocabulary: int, seed: int = 0) -> DataProto:
    """Rows whose lengths vary by a factor of about four and fill `FILL` of the columns."""
    generator = torch.Generator().manual_seed(seed)
    share = FILL * (0.4 + 1.2 * torch.rand(rows, generator=generator))
    prompts = (share * PROMPT).long().clamp(1, PROMPT)
    responses = (share * RESPONSE).long().clamp(1, RESPONSE)
    prompt_mask = (torch.arange(PROMPT) >= PROMPT - prompts[:, None]).long()
    response_mask = (torch.arange(RESPONSE) < responses[:, None]).long()
    mask = torch.cat([prompt_mask, response_mask], dim=1)
    ids = torch.randint(3, vocabulary, mask.shape, generator=generator) * mask
    return DataProto.from_dict(
        {
            "input_ids": ids,
            "attention_mask": mask,
            "responses": ids[:, PROMPT:],
            "response_mask": response_mask,
            "advantages": torch.randn(rows, 1, generator=generator).expand(rows, RESPONSE) * response_mask,
            "old_log_probs": -6.0 + torch.randn(rows, RESPONSE, generator=generator) * response_mask,
        },
        meta_info={"temperature": 1.0},
    )


def make_worker(model: Path, rows: int, *, packed: bool) -> ActorRolloutRefWorker:
    """A policy whose optimizer leaves the weights alone, so that every repetition does the same work."""
    config = ActorRolloutRefConfig(
        model=ModelConfig(path=str(model), enable_gradient_checkpointing=False, use_remove_padding=packed),
        actor=ActorConfig(
            strategy="fsdp2",
            ppo_mini_batch_size=rows,
            ppo_micro_batch_size_per_gpu=MICRO_ROWS,
            entropy_coeff=0.0,
            grad_clip=1e9,
        ),
        rollout=RolloutConfig(name="hf", log_prob_micro_batch_size_per_gpu=MICRO_ROWS),
    )
    config = replace(config, actor=replace(config.actor, optim=replace(config.actor.optim, lr=0.0, weight_decay=0.0)))
    group = LocalWorkerGroup(ClassWithInitArgs(ActorRolloutRefWorker, config=config, role="actor", device="cpu"))
    group.init_model()
    worker: ActorRolloutRefWorker = group.worker
    return worker


def gradients(worker: ActorRolloutRefWorker, batch: DataProto) -> dict[str, Tensor]:
    """Gradients of one update, caught before the optimizer clears them."""
    caught: dict[str, Tensor] = {}

    def catch(*_: object) -> None:
        caught.update({name: p.grad.to_local().clone() for name, p in worker.actor_model.named_parameters()})

    handle = worker.optimizer.register_step_pre_hook(catch)
    worker.update_actor(batch)
    handle.remove()
    return caught


def largest_share(ours: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Largest difference over all weights, as a share of each weight's largest gradient."""
    return max(
        float((ours[name] - wanted).abs().max() / wanted.abs().max().clamp(min=1e-12))
        for name, wanted in expected.items()
    )


def run(rows: int, repeat: int, sizes: list[tuple[str, dict[str, int]]]) -> list[list[str]]:
    """Rows of the table."""
    table = []
    for name, size in sizes:
        with tempfile.TemporaryDirectory() as folder:
            model = make_tiny_model(Path(folder) / "model", vocab_size=1000, **size)
            batch = make_batch(rows, 300)
            tokens = int(batch.batch["attention_mask"].sum())
            padded, trimmed = (make_worker(model, rows, packed=False) for _ in range(2))
            packed, budget = (make_worker(model, rows, packed=True) for _ in range(2))
        padded.actor.forward = FullWidthForward(padded.actor_model)
        budget.actor.updates.batching = MicroBatching(max_tokens=max(1024, tokens * MICRO_ROWS // rows))
        expected, base = gradients(padded, batch), 0.0
        for way, worker in (
            ("padded to the full width", padded),
            ("use_remove_padding=False", trimmed),
            ("use_remove_padding=True", packed),
            ("use_remove_padding=True, token budget", budget),
        ):
            share = largest_share(gradients(worker, batch), expected)
            if share > TOLERANCE:
                raise AssertionError(f"{name}, {way}: gradients differ by {share:.1e} of their size")
            seconds = time_best(partial(worker.update_actor, batch), repeat)
            base = base or seconds
            table.append(
                [name, way, format_seconds(seconds), f"{tokens / seconds:.0f}", f"{base / seconds:.1f}", f"{share:.0e}"]
            )
    return table


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one small model, few rows")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)
    small = ("policy of 0.6 M weights", {"hidden_size": 128, "num_layers": 3, "intermediate_size": 256})
    large = ("policy of 3 M weights", {"hidden_size": 256, "num_layers": 4, "intermediate_size": 768})
    num_rows = 16 if quick else 32
    table = run(num_rows, 2, [small]) if quick else run(num_rows, 3, [small, large])
    print(f"One update of {num_rows} rows of {PROMPT} + {RESPONSE} columns, {FILL:.0%} of them tokens, one thread.\n")
    headers = ["model", "rows are", "time", "tokens/s", "times padded", "gradient difference"]
    print_table(headers, table)
    print(f"\n{environment_line(('torch', 'transformers'))}")


if __name__ == "__main__":
    main()
