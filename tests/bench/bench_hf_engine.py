# SPDX-License-Identifier: Apache-2.0
"""What the Hugging Face engine gains by what: `python -m tests.bench.bench_hf_engine [--quick] [--compile]`.

Groups of equal first prompts against prompts that differ, float32 against bfloat16, the loop that rows may join at any
token against the one that waits for all, and `torch.compile` of the layers' perceptrons (of the whole model it fails:
the cache is written in place). One thread, random weights.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from tests.bench.table import environment_line, format_seconds, print_table, time_best
from verl.protocol import DataProto
from verl.trainer.config.worker_sections import RolloutConfig
from verl.workers.rollout.hf_rollout import HFRollout

PROMPT, RESPONSE, GROUPS, MEMBERS, TURNS = 256, 32, 4, 8, 4


def prompts(vocab: int, *, shared: bool) -> DataProto:
    """Groups of members: with the same prompt, or each with one of its own; all of full length."""
    generator = torch.Generator().manual_seed(0)
    count = GROUPS if shared else GROUPS * MEMBERS
    ids = torch.randint(3, vocab, (count, PROMPT), generator=generator).repeat_interleave(MEMBERS if shared else 1, 0)
    seeds = torch.arange(len(ids), dtype=torch.int64) * 7919
    return DataProto.from_dict({"input_ids": ids, "attention_mask": torch.ones_like(ids), "sampling_seed": seeds})


def engine(folder: Path, dtype: torch.dtype, *, ends: Sequence[int] = ()) -> HFRollout:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    return HFRollout(model, RolloutConfig(response_length=RESPONSE), eos_token_ids=ends, pad_token_id=0)


def turns(rollout: HFRollout, rows: DataProto, share: float) -> int:
    """Every row takes some turns, its prompt always the same; decode steps that it took."""
    steps = 0
    forward = rollout._forward

    def counted(ids: Any, *args: Any) -> Any:
        nonlocal steps
        steps += ids.shape[1] == 1
        return forward(ids, *args)

    rollout._forward = counted  # type: ignore[method-assign]
    left = torch.full((len(rows),), TURNS)
    waiting = torch.arange(len(rows))
    under_way = 0
    while len(waiting) or under_way:
        request = rows[waiting]
        request.batch["row"] = waiting  # type: ignore[index]
        request.batch["sampling_seed"] = request.batch["sampling_seed"] + left[waiting]  # type: ignore[index]
        request.meta_info["share"] = share
        ended = rollout.generate_some(request).batch["row"]  # type: ignore[index]
        under_way += len(waiting) - len(ended)
        left[ended] -= 1
        waiting = ended[left[ended] > 0]
    rollout._forward = forward  # type: ignore[method-assign]
    return steps


def measure(folder: Path, repeat: int, with_compile: bool) -> Iterator[list[object]]:
    """Rows of the table: what, seconds, against what, ratio."""
    plain = engine(folder, torch.float32)
    vocab: int = plain.module.config.vocab_size
    apart, shared = prompts(vocab, shared=False), prompts(vocab, shared=True)

    def best(rollout: HFRollout, rows: DataProto) -> float:
        rollout.generate_sequences(rows)
        return time_best(lambda: rollout.generate_sequences(rows), repeat)

    def row(name: str, seconds: float, base: float) -> list[object]:
        return [name, format_seconds(seconds), f"{base / seconds:.2f}x"]

    base = best(plain, apart)
    size = f"{GROUPS * MEMBERS} prompts of {PROMPT} tokens, {RESPONSE} tokens each"
    yield row(f"{size}, float32", base, base)
    yield row(f"the same in {GROUPS} groups of {MEMBERS} equal prompts", best(plain, shared), base)
    yield row("bfloat16", best(engine(folder, torch.bfloat16), apart), base)
    if with_compile:
        compiled = engine(folder, torch.float32)
        for layer in compiled.module.model.layers:
            layer.mlp.forward = torch.compile(layer.mlp.forward, dynamic=True)
        yield row("torch.compile of the perceptrons, after compiling", best(compiled, apart), base)
    talker = engine(folder, torch.float32, ends=range(2, 2 + vocab // 15))
    seconds, steps = {}, {}
    for share in (1.0, 0.5, 0.25, 0.1):
        seconds[share] = time_best(lambda share=share: turns(talker, apart, share), repeat)  # type: ignore[misc]
        steps[share] = turns(talker, apart, share)
        yield row(
            f"{TURNS} turns, about 15 tokens each, next prompts join when {share:.0%} of the rows have ended "
            f"({steps[share]} decode steps)",
            seconds[share],
            seconds[1.0],
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print a Markdown table."""
    parser = argparse.ArgumentParser(prog="bench_hf_engine", description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a smaller model, one call each (under 20 s)")
    parser.add_argument("--compile", action="store_true", help="also torch.compile (half a minute more)")
    options = parser.parse_args(arguments)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)

    from tests.helpers.tiny import make_tiny_model

    hidden, repeat = (64, 1) if options.quick else (256, 5)
    with tempfile.TemporaryDirectory() as name:
        folder = make_tiny_model(
            Path(name) / "model", hidden_size=hidden, num_layers=4, num_heads=hidden // 32,
            num_kv_heads=hidden // 64, intermediate_size=4 * hidden, vocab_size=500,
        )  # fmt: skip
        rows = list(measure(folder, repeat, options.compile))
    print(f"4 layers of width {hidden}; seconds of the quickest of {repeat}, against the first row of each kind.\n")
    print_table(["Hugging Face engine", "time", "faster"], rows)
    print(f"\n{environment_line(('torch', 'transformers'))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
